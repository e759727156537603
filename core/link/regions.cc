// Finding memory in the regions. There are few regions, and a large collective searches them once.
// Touches os/.
#include "link/regions.h"

namespace farandole::link {

RegionAddress Regions::find(const std::byte* data, std::size_t bytes, RegionUse use) const {
  for (const auto& [id, region] : own_) {
    if (region.use != use || data < region.data || data >= region.data + region.bytes) continue;
    const auto offset = static_cast<std::size_t>(data - region.data);
    if (bytes <= region.bytes - offset) return {id, offset};
  }
  return {};
}

bool Regions::can_attach(int owner, std::size_t bytes) const {
  constexpr std::size_t kMaxRegions = 4096;
  const std::size_t limit = os::machine_memory();
  std::size_t regions = 0, all = 0;
  for (auto region = peers_.lower_bound({owner, 0}); region != peers_.end() && region->first.first == owner; ++region) {
    ++regions;
    all += region->second.memory->bytes();
  }
  return regions < kMaxRegions && bytes <= limit && all <= limit - bytes;
}

std::shared_ptr<const os::SharedMemory> Regions::find_peer(int owner, const RegionAddress& address, std::size_t bytes,
                                                           RegionUse use) const {
  const auto found = peers_.find({owner, address.region});
  if (found == peers_.end() || found->second.use != use) return nullptr;
  const std::size_t all = found->second.memory->bytes();
  return address.offset > all || bytes > all - address.offset ? nullptr : found->second.memory;
}

}  // namespace farandole::link
