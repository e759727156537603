// Memory shared between processes: a nameless, fully allocated, sealed memory file that one rank writes and others
// read. Touches the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "os/descriptor.h"

namespace farandole::os {

class SharedMemory {
 public:
  SharedMemory() = default;
  // A new file, allocated in full (so that no later access can fail), sealed against resizing and, after this mapping,
  // against further writable mappings (F_SEAL_FUTURE_WRITE where the kernel has it). Zero-filled; MADV_DONTFORK.
  // Throws Failure(no_memory) with what to do (ulimit, /dev/shm size, memory limit of the container).
  static SharedMemory create(std::size_t bytes);
  // A new file of which nothing is allocated, sealed against resizing, for its owner and those who `join` it. Children
  // of a fork have it too.
  static SharedMemory reserve(std::size_t bytes);
  // Somebody else's file, read-only. Throws Failure(precondition) when its size is not `bytes` or it could still
  // shrink.
  static SharedMemory open(Descriptor file, std::size_t bytes);
  // A file that somebody else has made for this process to write. Throws as `open` does.
  static SharedMemory write(Descriptor file, std::size_t bytes);
  // A file in which a neighbour keeps its tensors or its results, to be read and written. Throws Failure(precondition)
  // when its size is not `bytes`, or it is no memory. Only what nobody else has made need not be `sealed`: whoever has
  // such a file can shrink it, and make us die of SIGBUS.
  static SharedMemory join(Descriptor file, std::size_t bytes, bool sealed);
  ~SharedMemory();
  SharedMemory(SharedMemory&&) noexcept;
  SharedMemory& operator=(SharedMemory&&) noexcept;

  // Allocates a part of it, so that no access there can fail later; what the system says, 0 when it is done.
  int fill(std::size_t offset, std::size_t bytes) const;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  const Descriptor& file() const { return file_; }  // kept by the creator until everyone has it
  void close_file() { file_.reset(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static SharedMemory adopt(Descriptor file, std::size_t bytes, bool writable, bool sealed = true);

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Descriptor file_;
};

// Whether one allocation can have that much: a small one always, a large one when the machine has as much available.
// Who asks for more is refused before the kernel kills somebody for it.
bool fits(std::size_t bytes);
// All that the machine has, in use or not.
std::size_t machine_bytes();
// No allocation is larger, however much the machine has: for tests in which a hostile peer chooses the size.
inline std::size_t largest_allocation = std::numeric_limits<std::size_t>::max();

// Whole pages of it become huge ones where the kernel grants that on request: what is used once and given back costs
// a fault per 2 MiB instead of one per 4 KiB.
inline constexpr std::size_t kHugePage = 2 << 20;
void prefer_huge_pages(void* memory, std::size_t bytes);
// The whole huge pages in memory that is in use already.
void collapse_into_huge_pages(void* memory, std::size_t bytes);

}  // namespace farandole::os
