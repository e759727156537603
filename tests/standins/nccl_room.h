// The memory that the ranks of one communicator of the stand-in for NCCL share, and how they move data through it.
// Touches memory files of this and of other processes.
#pragma once

#include <fcntl.h>
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "cuda_objects.h"

namespace standin {

constexpr int kMaxRanks = 16;
constexpr std::size_t kSlotBytes = 64 << 10;

// One message from a rank to another. `full`: 1 from the write to the read.
struct Mailbox {
  std::atomic<std::uint32_t> full;
  std::atomic<std::uint32_t> bytes;
  std::byte data[kSlotBytes];
};

// The memory that all ranks of a communicator map.
struct Room {
  std::atomic<std::int32_t> size;  // 0 until the first rank has joined
  std::atomic<std::int32_t> arrived;
  std::atomic<std::uint32_t> entered, left;  // counted over all barriers
  std::byte slots[kMaxRanks][kSlotBytes];
  Mailbox boxes[kMaxRanks][kMaxRanks];
};

// The content of an ncclUniqueId. As in NCCL, the process that made it has to run until all ranks have joined.
struct Key {
  std::int32_t process;
  std::int32_t file;
  std::uint64_t magic;
};
constexpr std::uint64_t kMagic = 0x7374616e64696e21;

inline Key make_key() { return {::getpid(), make_file(sizeof(Room)), kMagic}; }

inline Room* open_room(const Key& key) {
  if (key.magic != kMagic) return nullptr;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", key.process, key.file);
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  void* memory = file < 0 ? nullptr : map_file(file, sizeof(Room));
  if (file >= 0) ::close(file);
  return static_cast<Room*>(memory);
}

// Waits until `ready()`. Returns false if `ended()` is true first.
template <class Ready, class Ended>
bool wait_until(Ready ready, Ended ended) {
  for (int turn = 0; !ready(); ++turn) {
    if (ended()) return false;
    if (turn < 64)
      ::sched_yield();
    else
      ::usleep(50);  // sleep: between two checks
  }
  return true;
}

// Waits until all ranks have called it. Calls are counted, so that a rank may already be in the next barrier.
template <class Ended>
bool barrier(Room& room, std::uint32_t& round, int size, Ended ended) {
  ++round;
  room.entered.fetch_add(1);
  return wait_until([&] { return room.entered.load() >= round * static_cast<std::uint32_t>(size); }, ended);
}

}  // namespace standin
