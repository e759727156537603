// The selector: thresholds and the reasons for them.
// Touches only base/.
#include "collective/select.h"

#include <algorithm>

namespace farandole::collective {

namespace {

constexpr std::size_t kDoublingBytes = 256 << 10;  // of all contributions together: as much as a few packets hold
constexpr int kManyHosts = 32;                     // with more, not every pair of hosts has a link
constexpr std::size_t kRingSegment = 16 << 10;     // below it, a ring's 2(N-1) steps cost more than its bytes
constexpr std::size_t kOneHopBytes = 128 << 10;    // of the contributions that each member reads
constexpr std::size_t kSmallestChunk = 8 << 10;
constexpr std::size_t kChunksUnderWay = 4;

}  // namespace

Choice choose(Algorithm forced, std::size_t bytes, int parties) {
  if (forced != Algorithm::automatic) return {forced, "set by the user"};
  auto count = static_cast<std::size_t>(parties);
  if (bytes <= kDoublingBytes / count) return {Algorithm::doubling, "small: fewest steps"};
  if (parties <= kManyHosts) return {Algorithm::direct, "large: two steps, fewest bytes, same bits"};
  if (bytes / count < kRingSegment) return {Algorithm::tree, "too small to cut into a segment per host"};
  return {Algorithm::ring, "large and many hosts: links to two neighbours only"};
}

bool local_one_hop(std::size_t bytes, int members, std::size_t slot_bytes) {
  return bytes <= slot_bytes && bytes <= kOneHopBytes / static_cast<std::size_t>(members);
}

std::size_t local_chunk(std::size_t slice, std::size_t slot_bytes) {
  std::size_t chunk = std::max((slice / kChunksUnderWay + 63) / 64 * 64, kSmallestChunk);
  return std::min(chunk, slot_bytes);
}

}  // namespace farandole::collective
