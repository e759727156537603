// Control frames of other ranks: each is decoded, must be allowed in this state, and is acted on. Whatever else comes
// ends the generation and names its sender. Touches every room below it.
#include <algorithm>

#include "engine/engine.h"
#include "negotiate/messages.h"
#include "os/clock.h"
#include "os/descriptor.h"

namespace farandole {
namespace {

// What a quicker peer may send for groups that are not made here yet: files, which hold descriptors, and ends.
constexpr std::size_t kMostEarly = 4096;
constexpr std::size_t kLongestReason = 4096;  // bytes of what it says of an end

template <class Early>
std::size_t count_of(const std::map<std::pair<std::uint32_t, int>, Early>& early, int peer) {
  return static_cast<std::size_t>(
      std::count_if(early.begin(), early.end(), [&](const auto& entry) { return entry.first.second == peer; }));
}

std::string group_text(std::uint32_t id) { return "process set " + std::to_string(id); }

template <class Message>
Message read(int peer, std::span<const std::byte> payload, const char* what) {
  Message message;
  if (!decode(payload, message)) throw control::violation(peer, std::string("sent ") + what + " that cannot be read");
  return message;
}

// A file that cannot be what the peer says it is.
template <class Body>
void with_file_of(int peer, Body body) {
  try {
    body();
  } catch (const Failure& failure) {
    if (failure.error().code != Code::precondition || failure.error().rank >= 0) throw;
    throw control::violation(peer, "sent memory that cannot be used (" + failure.error().message + ")");
  }
}

}  // namespace

void Engine::on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  if (revoked_.failed()) return;  // nothing of this generation counts any more
  try {
    if (type == 0 || type > kControls) throw control::violation(peer, "sent a control frame of an unknown type");
    const auto known = static_cast<Control>(type);
    if (descriptors.size() != control::descriptors_with(known))
      throw control::violation(peer, "sent a control frame with " + std::to_string(descriptors.size()) +
                                         " file descriptors instead of " +
                                         std::to_string(control::descriptors_with(known)));
    hear(peer, known, payload, std::move(descriptors));
  } catch (const Failure& failure) {
    revoke(failure.error());
  }
}

void Engine::hear(int peer, Control type, std::span<const std::byte> payload, std::vector<os::Descriptor> descriptors) {
  switch (type) {
    case Control::hello:
      return on_hello(peer, read<control::Hello>(peer, payload, "a greeting"), std::move(descriptors));
    case Control::segment:
      return on_segment(peer, read<control::Segment>(peer, payload, "memory"), std::move(descriptors[0]));
    case Control::requests:
      return on_requests(peer, read<negotiate::Requests>(peer, payload, "requests"));
    case Control::buckets:
      return on_answer(peer, read<negotiate::Answer>(peer, payload, "an answer"));
    case Control::word:
      return on_word(peer, read<control::Word>(peer, payload, "a plan's word"));
    case Control::leaving:
      return on_leaving(peer, read<control::Leaving>(peer, payload, "a farewell"));
    case Control::revoke:
      return on_revoke(peer, read<control::Revocation>(peer, payload, "a revocation").error);
    case Control::abandon:
      return on_abandon(peer, read<control::Abandon>(peer, payload, "the end of a process set"));
    case Control::share:
      return on_share(peer, read<control::Share>(peer, payload, "shared memory"), std::move(descriptors[0]));
    case Control::unshare:
      return on_unshare(peer, read<control::Unshare>(peer, payload, "the end of shared memory"));
  }
}

Group* Engine::group_with(std::uint32_t id, int peer, const char* what) {
  if (id >= kLastFounded) throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id));
  auto known = all_groups_.find(id);
  if (known == all_groups_.end()) return nullptr;  // one that was just removed is in groups_ until the pass ends
  if (known->second.me < 0 || known->second.member_of(peer) < 0)
    throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id) +
                                       ", in which it and this rank are not both members");
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.get();
}

bool Engine::neighbour(int peer) const {
  return options_.hosts[static_cast<std::size_t>(peer)] == options_.hosts[static_cast<std::size_t>(options_.rank)];
}

// Once: the rings hold on to what came with the first one.
void Engine::on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors) {
  if (neighbours_.count(peer) != 0) throw control::violation(peer, "greeted a second time");
  if (!neighbour(peer)) throw control::violation(peer, "on another host, greeted as a neighbour");
  if (hello.rank != peer || hello.generation != options_.generation)
    throw control::violation(peer, "greeted as rank " + std::to_string(hello.rank) + " of generation " +
                                       std::to_string(hello.generation) + " instead of generation " +
                                       std::to_string(options_.generation));
  with_file_of(peer, [&] {
    neighbours_[peer] = std::make_unique<link::Neighbour>(std::move(descriptors[0]), std::move(descriptors[1]),
                                                          hello.generation, hello.rank, hello.nonce);
  });
}

void Engine::on_segment(int peer, const control::Segment& segment, os::Descriptor file) {
  if (neighbours_.count(peer) == 0) throw control::violation(peer, "sent memory before its greeting");
  if (Group* group = group_with(segment.group, peer, "memory")) return attach_segment(*group, peer, std::move(file));
  if (!awaits_founding(segment.group)) return;  // it was removed here meanwhile
  const std::size_t most = most_early_segments();
  if (count_of(early_segments_, peer) >= most)
    throw control::violation(
        peer, "sent memory for more than " + std::to_string(most) + " process sets that this rank does not have yet");
  if (!early_segments_.try_emplace({segment.group, peer}, std::move(file)).second)
    throw control::violation(peer, "sent memory twice for " + group_text(segment.group));
}

// Of one peer: half of the descriptors that this process can have are for all neighbours together.
std::size_t Engine::most_early_segments() const {
  constexpr std::size_t kLeast = 64;
  return std::clamp(os::most_descriptors() / 2 / neighbours_.size(), kLeast, kMostEarly);
}

void Engine::attach_segment(Group& group, int peer, os::Descriptor file) {
  const Topology& topology = group.topology();
  const int member = topology.member_of(peer);
  if (member < 0 || group.rings() == nullptr || neighbours_.count(peer) == 0 ||
      group.rings()->attached(topology.local_of[static_cast<std::size_t>(member)]))
    throw control::violation(peer, "sent memory for " + group_text(group.id()) + ", which needs none of it");
  with_file_of(peer, [&] {
    group.rings()->attach(topology.local_of[static_cast<std::size_t>(member)], std::move(file),
                          neighbours_.at(peer).get());
  });
}

void Engine::on_requests(int peer, negotiate::Requests message) {
  if (Group* group = group_with(message.group, peer, "requests"))
    group->on_requests(group->topology().member_of(peer), message.epoch, std::move(message.requests), os::now_ns());
  else if (awaits_founding(message.group))
    keep_early(peer, std::move(message));
}

void Engine::keep_early(int peer, negotiate::Requests message) {
  negotiate::Load& load = early_loads_[peer];
  for (const negotiate::Request& request : message.requests) load.add(request);
  if (load.too_much())
    throw control::violation(
        peer, "asked for more at once than any program does, of process sets that this rank does not have yet");
  early_requests_.emplace_back(peer, std::move(message));
}

// What quicker members have sent for a group before it was made here.
void Engine::take_early(Group& group) {
  const std::uint32_t id = group.id();
  try {
    std::vector<std::pair<int, negotiate::Requests>> early = std::move(early_requests_);
    early_requests_.clear();
    early_loads_.clear();
    for (auto& [peer, message] : early) {
      if (message.group == id)
        on_requests(peer, std::move(message));
      else
        keep_early(peer, std::move(message));
    }
    for (auto segment = early_segments_.lower_bound({id, 0});
         segment != early_segments_.end() && segment->first.first == id; segment = early_segments_.erase(segment))
      attach_segment(group, segment->first.second, std::move(segment->second));
    for (const auto& [who, error] : early_abandoned_)
      if (who.first == id && group_with(id, who.second, "an end") != nullptr) group.close(error);
    forget_early(id);
  } catch (const Failure& failure) {
    if (failure.error().code != Code::peer_lost) throw;
    revoke(failure.error());  // a peer's fault, not that of who makes the group
  }
}

void Engine::forget_early(std::uint32_t id) {
  std::erase_if(early_requests_, [&](const auto& early) {
    if (early.second.group != id) return false;
    for (const negotiate::Request& request : early.second.requests) early_loads_[early.first].add(request, -1);
    return true;
  });
  std::erase_if(early_segments_, [&](const auto& entry) { return entry.first.first == id; });
  std::erase_if(early_abandoned_, [&](const auto& entry) { return entry.first.first == id; });
}

void Engine::on_answer(int peer, negotiate::Answer message) {
  Group* group = group_with(message.group, peer, "an answer");
  if (group == nullptr && !awaits_founding(message.group)) return;  // it was removed here meanwhile
  if (group == nullptr || group->topology().ranks[0] != peer || peer == options_.rank)
    throw control::violation(
        peer, "answered requests of " + group_text(message.group) + ", of which it is not the first rank");
  group->on_buckets(std::move(message.buckets), message.last);
}

void Engine::on_word(int peer, const control::Word& word) {
  Group* group = group_with(word.group, peer, "a plan's word");
  if (group == nullptr && !awaits_founding(word.group)) return;
  if (group == nullptr) throw control::violation(peer, "follows a plan of a process set that was never made");
  group->on_word(group->topology().member_of(peer), word.bits);
}

void Engine::on_leaving(int peer, control::Leaving leaving) {
  if (!left_.try_emplace(peer, std::move(leaving.groups)).second) throw control::violation(peer, "said farewell twice");
}

// Whom it blames need not be of this job: the launcher may name a rank by another generation's number.
void Engine::on_revoke(int, const Error& error) { revoke(error); }

void Engine::on_abandon(int peer, const control::Abandon& abandon) {
  const Error error{Code::revoked, abandon.why.substr(0, kLongestReason), peer};
  if (Group* group = group_with(abandon.group, peer, "an end")) {
    group->close(error);
    end_transfers(static_cast<std::int32_t>(abandon.group), error);
  } else if (awaits_founding(abandon.group)) {
    if (count_of(early_abandoned_, peer) >= kMostEarly)
      throw control::violation(peer, "ended more than " + std::to_string(kMostEarly) + " unknown process sets");
    early_abandoned_.try_emplace({abandon.group, peer}, error);
  }
}

// Without it collectives go the way of memory that nobody shares.
void Engine::on_share(int peer, const control::Share& share, os::Descriptor file) {
  if (neighbours_.count(peer) == 0) throw control::violation(peer, "shared memory before its greeting");
  if (regions_.knows(peer, share.region)) throw control::violation(peer, "shared the same memory twice");
  const auto use = share.results ? link::Use::results : link::Use::tensors;
  try {
    if (!regions_.takes(peer, share.bytes))
      throw Failure(Code::no_memory, "it has shared more than the machine has, or more pieces than any program does");
    // Files of results are engines', which seal them; those of tensors can be torch's, which does not.
    regions_.attach(peer, share.region, os::SharedMemory::join(std::move(file), share.bytes, share.results), use);
  } catch (const Failure& failure) {
    log(Level::warning, "memory of rank " + std::to_string(peer) + " is not used in place: " + failure.error().message);
  }
}

void Engine::on_unshare(int peer, const control::Unshare& unshare) { regions_.detach(peer, unshare.region); }

void Engine::on_left(int peer) {
  if (revoked_.failed()) return;
  std::map<std::uint32_t, Progress>& progress = left_[peer];
  for (const auto& [id, group] : groups_) {
    int member = group->topology().member_of(peer);
    if (member >= 0) group->member_left(member, progress[id]);
  }
}

// Who has said how far it came has left, also when its link ends before its last frame.
void Engine::on_lost(int peer, const Error& why) {
  if (left_.count(peer) != 0) return on_left(peer);
  Error error = why;
  if (error.rank < 0) error.rank = peer;
  revoke(error);
}

}  // namespace farandole
