// Early frames: the limits for what is kept, and taking it out again.
// Touches base/, os/, negotiate/ and engine/control.h.
#include "engine/early_frames.h"

#include <algorithm>
#include <iterator>

namespace farandole {
namespace {

// Files hold descriptors, ends hold their reason.
constexpr std::size_t kMaxEarly = 4096;

template <class Kept>
std::size_t count_of(const Kept& kept, int peer) {
  return static_cast<std::size_t>(
      std::count_if(kept.begin(), kept.end(), [&](const auto& entry) { return entry.first.second == peer; }));
}

// Per peer. Half of the descriptors that this process may have are for all local peers together.
std::size_t max_segments(int local_peers) {
  constexpr std::size_t kLeast = 64;
  return std::clamp(os::max_descriptors() / 2 / static_cast<std::size_t>(local_peers), kLeast, kMaxEarly);
}

template <class Kept>
auto take_from(Kept& kept, std::uint32_t group) {
  std::vector<std::pair<int, typename Kept::mapped_type>> taken;
  for (auto at = kept.lower_bound({group, 0}); at != kept.end() && at->first.first == group; at = kept.erase(at))
    taken.emplace_back(at->first.second, std::move(at->second));
  return taken;
}

}  // namespace

void EarlyFrames::keep_requests(int peer, negotiate::Requests message) {
  negotiate::PendingLoad& load = loads_[peer];
  for (const negotiate::Request& request : message.requests) load.add(request);
  if (load.over_limit())
    throw control::violation(
        peer, "sent more requests at once than any program does, for process sets that this rank does not have yet");
  requests_.emplace_back(peer, std::move(message));
}

void EarlyFrames::keep_segment(int peer, std::uint32_t group, os::Descriptor file, int local_peers) {
  const std::size_t most = max_segments(local_peers);
  if (count_of(segments_, peer) >= most)
    throw control::violation(
        peer, "sent memory for more than " + std::to_string(most) + " process sets that this rank does not have yet");
  if (!segments_.try_emplace({group, peer}, std::move(file)).second)
    throw control::violation(peer, "sent memory twice for process set " + std::to_string(group));
}

void EarlyFrames::keep_end(int peer, std::uint32_t group, const Error& error) {
  if (count_of(ends_, peer) >= kMaxEarly)
    throw control::violation(peer, "ended more than " + std::to_string(kMaxEarly) + " unknown process sets");
  ends_.try_emplace({group, peer}, error);
}

std::vector<std::pair<int, negotiate::Requests>> EarlyFrames::take_requests(std::uint32_t group) {
  const auto taken_from = std::stable_partition(requests_.begin(), requests_.end(),
                                                [&](const auto& early) { return early.second.group != group; });
  std::vector<std::pair<int, negotiate::Requests>> taken(std::make_move_iterator(taken_from),
                                                         std::make_move_iterator(requests_.end()));
  requests_.erase(taken_from, requests_.end());
  for (const auto& [peer, message] : taken)
    for (const negotiate::Request& request : message.requests) loads_[peer].add(request, -1);
  return taken;
}

std::vector<std::pair<int, os::Descriptor>> EarlyFrames::take_segments(std::uint32_t group) {
  return take_from(segments_, group);
}

std::vector<std::pair<int, Error>> EarlyFrames::take_ends(std::uint32_t group) { return take_from(ends_, group); }

void EarlyFrames::forget(std::uint32_t group) {
  take_requests(group);
  take_segments(group);
  take_ends(group);
}

}  // namespace farandole
