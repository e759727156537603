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
constexpr std::size_t kSlot = 64 << 10;

// One message from a rank to another; `full` counts 0, 1, 0, ...
struct Mailbox {
  std::atomic<std::uint32_t> full;
  std::atomic<std::uint32_t> bytes;
  std::byte data[kSlot];
};

struct Room {
  std::atomic<std::int32_t> size;  // 0 until the first rank has come
  std::atomic<std::int32_t> arrived;
  std::atomic<std::uint32_t> entered, left;  // of barriers
  std::byte slots[kMaxRanks][kSlot];
  Mailbox boxes[kMaxRanks][kMaxRanks];
};

// What ncclUniqueId has in it: the process that made it has to live until all ranks have come, as in NCCL.
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

// A wait that ends early, with false, when `ended` says so.
template <class Ready, class Ended>
bool wait_until(Ready ready, Ended ended) {
  for (int turn = 0; !ready(); ++turn) {
    if (ended()) return false;
    if (turn < 64)
      ::sched_yield();
    else
      ::usleep(50);  // sleep: between two looks
  }
  return true;
}

// All ranks have come here. Rounds are counted, so a rank that is already in the next one does not disturb.
template <class Ended>
bool barrier(Room& room, std::uint32_t& round, int size, Ended ended) {
  ++round;
  room.entered.fetch_add(1);
  return wait_until([&] { return room.entered.load() >= round * static_cast<std::uint32_t>(size); }, ended);
}

}  // namespace standin
