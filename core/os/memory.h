// Memory shared between processes: an unnamed, fully allocated, sealed memory file that one rank writes and others
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
  // A new file: allocated in full, so that no later access can fail; sealed against resizing and, after this mapping,
  // against more writable mappings (F_SEAL_FUTURE_WRITE where the kernel has it). Zero-filled, MADV_DONTFORK. Throws
  // Failure(no_memory) with what to do (ulimit, size of /dev/shm, memory limit of the container).
  static SharedMemory create(std::size_t bytes);
  // A new file without allocated pages, sealed against resizing, for its owner and those who call `open_shared`. Forked
  // children inherit the mapping.
  static SharedMemory reserve(std::size_t bytes);
  // Another process's file, mapped read-only. Throws Failure(precondition) when its size is not `bytes` or it could
  // still shrink.
  static SharedMemory open_read_only(Descriptor file, std::size_t bytes);
  // A file that another process has created for this one to write. Throws as `open_read_only` does.
  static SharedMemory open_writable(Descriptor file, std::size_t bytes);
  // A file in which a local peer keeps its tensors or results, mapped for reading and writing. Throws
  // Failure(precondition) when its size is not `bytes` or it is not memory. `sealed` may be false only for files that
  // the peer's user created: a process that can shrink such a file can kill this process with SIGBUS.
  static SharedMemory open_shared(Descriptor file, std::size_t bytes, bool sealed);
  ~SharedMemory();
  SharedMemory(SharedMemory&&) noexcept;
  SharedMemory& operator=(SharedMemory&&) noexcept;

  // Allocates a part of it, so that no later access there can fail. Returns an errno, 0 on success.
  int populate(std::size_t offset, std::size_t bytes) const;
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

// Whether an allocation of this size is allowed: always when it is small, else only when the machine has that much
// available. Refusing early is better than being killed by the kernel.
bool can_allocate(std::size_t bytes);
// All memory of the machine, in use or not.
std::size_t machine_memory();
// No allocation may be larger, whatever the machine has. Tests with a hostile peer that chooses sizes set it.
inline std::size_t max_allocation = std::numeric_limits<std::size_t>::max();

// Asks for huge pages for the whole huge pages inside this memory. Memory that is used once then costs one page fault
// per 2 MiB instead of one per 4 KiB.
inline constexpr std::size_t kHugePage = 2 << 20;
void prefer_huge_pages(void* memory, std::size_t bytes);
// Turns memory that is in use already into huge pages, where whole ones fit.
void collapse_into_huge_pages(void* memory, std::size_t bytes);

}  // namespace farandole::os
