// Arena: memory that neighbours may map, lent in blocks. What is on loan when the process forks, the child has for
// itself, as it has all its other memory. Touches the operating system.
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
  // Aligned to a page, and in memory that is there; null when there is no room, or no memory.
  std::byte* lend(std::size_t bytes);
  void take_back(const std::byte* block, std::size_t bytes);
  bool idle() const;  // nothing is on loan
  // Nothing will be lent any more: the file goes, and what is not on loan.
  void close();

 private:
  friend struct Forks;

  // Blocks are runs of units.
  static constexpr std::size_t kUnit = 1 << 20;
  static constexpr std::size_t kUnits = 256;
  static constexpr std::size_t kBytes = kUnit * kUnits;
  // What lies idle and is not given back to the system.
  static constexpr std::size_t kKept = 64;

  std::size_t find(std::size_t units) const;
  bool fill(std::size_t first, std::size_t units);
  void empty(std::size_t first, std::size_t units);
  void leave_to_child();

  SharedMemory memory_;
  std::bitset<kUnits> lent_;
  std::bitset<kUnits> filled_;
};

}  // namespace farandole::os
