// Regions: memory that a rank shares with its neighbours on the host, who may read and write it where it lies.
// Touches os/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "os/memory.h"

namespace farandole::link {

// What a region is for: tensors that the caller has shared, or the engine's own results.
enum class Use { tensors, results };

// Where memory lies, in words that every neighbour understands.
struct Place {
  std::uint64_t region = 0;  // of its owner, counted from 1; 0: in none
  std::uint64_t offset = 0;
};

class Regions {
 public:
  void add(std::uint64_t id, std::byte* data, std::size_t bytes, Use use) { mine_[id] = {data, bytes, use}; }
  void remove(std::uint64_t id) { mine_.erase(id); }
  void attach(int owner, std::uint64_t id, os::SharedMemory memory, Use use) {
    memory.close_file();
    theirs_[{owner, id}] = {std::make_shared<os::SharedMemory>(std::move(memory)), use};
  }
  // Whether the owner may share so much more: a mapping each, of which a process has some 65,000, and no more than the
  // machine has.
  bool takes(int owner, std::size_t bytes) const;
  bool knows(int owner, std::uint64_t id) const { return theirs_.count({owner, id}) != 0; }
  void detach(int owner, std::uint64_t id) { theirs_.erase({owner, id}); }

  // Of memory of mine; in no region unless it lies in one of that use as a whole.
  Place find(const std::byte* data, std::size_t bytes, Use use) const;
  // The neighbour's region of that use with this memory; null when it has not arrived here, or does not reach so far.
  // Whoever holds it may use it, also when its owner is through with it: an operation that failed there may still run
  // here.
  std::shared_ptr<const os::SharedMemory> with(int owner, const Place& place, std::size_t bytes, Use use) const;

 private:
  struct Region {
    std::byte* data;
    std::size_t bytes;
    Use use;
  };
  std::map<std::uint64_t, Region> mine_;
  struct Theirs {
    std::shared_ptr<const os::SharedMemory> memory;
    Use use;
  };
  std::map<std::pair<int, std::uint64_t>, Theirs> theirs_;
};

}  // namespace farandole::link
