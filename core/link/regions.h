// Regions: memory that a rank shares with its local peers, which may read and write it in place.
// Touches os/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "os/memory.h"

namespace farandole::link {

// What a region holds: tensors that the caller has shared, or the engine's own results.
enum class RegionUse { tensors, results };

// The address of shared memory, valid on every local peer.
struct RegionAddress {
  std::uint64_t region = 0;  // number of the owner's region, from 1; 0: in no region
  std::uint64_t offset = 0;
};

class Regions {
 public:
  void add(std::uint64_t id, std::byte* data, std::size_t bytes, RegionUse use) { own_[id] = {data, bytes, use}; }
  void remove(std::uint64_t id) { own_.erase(id); }
  void attach(int owner, std::uint64_t id, os::SharedMemory memory, RegionUse use) {
    memory.close_file();
    peers_[{owner, id}] = {std::make_shared<os::SharedMemory>(std::move(memory)), use};
  }
  // Whether the owner may share this much more. Each region takes a mapping, of which a process may have about 65,000;
  // all of an owner's regions together may not exceed the limit's memory.
  bool can_attach(int owner, std::size_t bytes) const;
  bool attached(int owner, std::uint64_t id) const { return peers_.count({owner, id}) != 0; }
  void detach(int owner, std::uint64_t id) { peers_.erase({owner, id}); }

  // The region of this rank and this use that holds all of this memory; region 0 when there is none.
  RegionAddress find(const std::byte* data, std::size_t bytes, RegionUse use) const;
  // The peer's region of this use that holds this memory; null when it has not arrived here or is too short. The
  // pointer keeps the mapping alive after the owner has stopped sharing it, because an operation that failed on the
  // owner may still run here.
  std::shared_ptr<const os::SharedMemory> find_peer(int owner, const RegionAddress& address, std::size_t bytes,
                                                    RegionUse use) const;

 private:
  struct Region {
    std::byte* data;
    std::size_t bytes;
    RegionUse use;
  };
  std::map<std::uint64_t, Region> own_;
  struct PeerRegion {
    std::shared_ptr<const os::SharedMemory> memory;
    RegionUse use;
  };
  std::map<std::pair<int, std::uint64_t>, PeerRegion> peers_;
};

}  // namespace farandole::link
