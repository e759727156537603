// Arena: shared memory that local peers may map, allocated in blocks. After a fork the child has its own copy of every
// allocated block, as of all its other memory. Touches the operating system.
#pragma once

#include <bitset>
#include <cstddef>

#include "os/memory.h"

namespace farandole::os {

// Safe from any thread.
class Arena {
 public:
  Arena();  // throws Failure
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const SharedMemory& memory() const { return memory_; }
  bool owns(const std::byte* block) const { return block >= memory_.data() && block < memory_.data() + kBytes; }
  // Page-aligned memory whose pages exist. Null when there is no room in the arena, or no memory in the system.
  std::byte* allocate(std::size_t bytes);
  void release(const std::byte* block, std::size_t bytes);
  bool idle() const;  // no block is allocated
  // No more allocations after this: closes the file and frees what is not allocated.
  void close();

 private:
  friend struct ForkHandlers;

  // A block is a run of units.
  static constexpr std::size_t kUnit = 1 << 20;
  static constexpr std::size_t kUnits = 256;
  static constexpr std::size_t kBytes = kUnit * kUnits;
  // At most this many free units keep their pages.
  static constexpr std::size_t kMaxIdle = 64;

  std::size_t find_free(std::size_t units) const;
  bool populate(std::size_t first, std::size_t units);
  void depopulate(std::size_t first, std::size_t units);
  void copy_for_child();

  SharedMemory memory_;
  std::bitset<kUnits> allocated_;
  std::bitset<kUnits> populated_;
};

}  // namespace farandole::os
