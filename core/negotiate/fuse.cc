// Fusion: which ready tensors share one collective.
// Pure. Touches base/.
#include <algorithm>
#include <iterator>

#include "negotiate/coordinator.h"

namespace farandole::negotiate {
namespace {

bool fusable(const Bucket& bucket) {
  return !bucket.error.failed() &&
         (bucket.kind == Kind::allreduce || bucket.kind == Kind::reducescatter || bucket.kind == Kind::allgather);
}

constexpr std::size_t kMaxDescription = 8 << 20;  // the limit for the description of a bucket's tensors

std::size_t described(const Bucket& single) {
  std::size_t bytes = 0;
  for (const Item& item : single.items)
    bytes += item.name.size() + sizeof(std::int64_t) * (item.shape.size() + item.first_dims.size() + 4);
  return bytes;
}

// Nothing may be moved across one of these.
bool fences(const Bucket& bucket) {
  return bucket.kind == Kind::barrier || bucket.kind == Kind::join || bucket.kind == Kind::add_group ||
         bucket.kind == Kind::remove_group || bucket.kind == Kind::tune;
}

bool match(const Bucket& a, const Bucket& b) {
  if (!fusable(b) || a.kind != b.kind || a.device != b.device || a.joined != b.joined) return false;
  if (a.items.front().dtype != b.items.front().dtype) return false;
  if (a.kind == Kind::allgather) return true;
  return a.op == b.op && a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

std::vector<Bucket> fuse(std::vector<Bucket> singles, const CoordinatorOptions& options) {
  const std::size_t threshold = options.fusion_threshold;
  if (threshold == 0) return singles;
  std::vector<std::size_t> bytes;
  bytes.reserve(singles.size());
  for (const Bucket& single : singles) bytes.push_back(single.bytes());

  std::vector<Bucket> buckets;
  std::vector<bool> taken(singles.size(), false);
  for (std::size_t first = 0; first < singles.size(); ++first) {
    if (taken[first]) continue;
    Bucket bucket = std::move(singles[first]);
    std::size_t fused = bytes[first], skipped = 0, words = described(bucket);
    const bool open = fusable(bucket) && fused <= threshold;
    for (std::size_t next = first + 1; open && next < singles.size(); ++next) {
      if (taken[next]) continue;
      if (fences(singles[next])) break;
      if (bytes[next] <= threshold - fused && match(bucket, singles[next])) {
        if ((words += described(singles[next])) > kMaxDescription) break;
        fused += bytes[next];
        taken[next] = true;
        std::move(singles[next].items.begin(), singles[next].items.end(), std::back_inserter(bucket.items));
      } else {
        if (bytes[next] > threshold || skipped + bytes[next] > threshold) break;
        skipped += bytes[next];
      }
      if (fused + skipped > threshold) break;
    }
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

}  // namespace farandole::negotiate
