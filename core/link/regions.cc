// Regions: finding memory in them. They are few, and looked for once per large collective.
// Touches os/.
#include "link/regions.h"

namespace farandole::link {

Place Regions::find(const std::byte* data, std::size_t bytes, Use use) const {
  for (const auto& [id, region] : mine_) {
    if (region.use != use || data < region.data || data >= region.data + region.bytes) continue;
    const auto offset = static_cast<std::size_t>(data - region.data);
    if (bytes <= region.bytes - offset) return {id, offset};
  }
  return {};
}

bool Regions::takes(int owner, std::size_t bytes) const {
  constexpr std::size_t kMost = 4096;
  const std::size_t machine = os::machine_bytes();
  std::size_t regions = 0, all = 0;
  for (auto region = theirs_.lower_bound({owner, 0}); region != theirs_.end() && region->first.first == owner;
       ++region) {
    ++regions;
    all += region->second.memory->bytes();
  }
  return regions < kMost && bytes <= machine && all <= machine - bytes;
}

std::shared_ptr<const os::SharedMemory> Regions::with(int owner, const Place& place, std::size_t bytes, Use use) const {
  const auto found = theirs_.find({owner, place.region});
  if (found == theirs_.end() || found->second.use != use) return nullptr;
  const std::size_t all = found->second.memory->bytes();
  return place.offset > all || bytes > all - place.offset ? nullptr : found->second.memory;
}

}  // namespace farandole::link
