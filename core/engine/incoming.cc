// Control frames of other ranks. Each is decoded, checked against the current state, and handled. An invalid one ends
// the generation and names its sender. Touches every room below it.
#include <algorithm>

#include "engine/engine.h"
#include "negotiate/messages.h"
#include "os/clock.h"
#include "os/descriptor.h"

namespace farandole {
namespace {

// Limits for what a faster peer sends for groups that are not created here yet: files, which hold descriptors, and
// ends.
constexpr std::size_t kMaxEarly = 4096;
constexpr std::size_t kLongestReason = 4096;  // bytes of the reason for an end

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

// Errors of a file that cannot be what the peer announced are the peer's violation.
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
  if (revoked_.failed()) return;  // the generation has ended
  try {
    if (type == 0 || type > kControls) throw control::violation(peer, "sent a control frame of an unknown type");
    const auto known = static_cast<Control>(type);
    if (descriptors.size() != control::descriptors_with(known))
      throw control::violation(peer, "sent a control frame with " + std::to_string(descriptors.size()) +
                                         " file descriptors instead of " +
                                         std::to_string(control::descriptors_with(known)));
    handle_control(peer, known, payload, std::move(descriptors));
  } catch (const Failure& failure) {
    revoke(failure.error());
  }
}

void Engine::handle_control(int peer, Control type, std::span<const std::byte> payload,
                            std::vector<os::Descriptor> descriptors) {
  switch (type) {
    case Control::hello:
      return on_hello(peer, read<control::Hello>(peer, payload, "a hello message"), std::move(descriptors));
    case Control::segment:
      return on_segment(peer, read<control::Segment>(peer, payload, "memory"), std::move(descriptors[0]));
    case Control::requests:
      return on_requests(peer, read<negotiate::Requests>(peer, payload, "requests"));
    case Control::buckets:
      return on_answer(peer, read<negotiate::Answer>(peer, payload, "an answer"));
    case Control::plan_state:
      return on_plan_state(peer, read<control::PlanState>(peer, payload, "a plan state"));
    case Control::leaving:
      return on_leaving(peer, read<control::Leaving>(peer, payload, "a leaving message"));
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
  if (id >= kLastMemberGroup) throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id));
  auto known = all_groups_.find(id);
  if (known == all_groups_.end()) return nullptr;  // a group that was just removed is in groups_ until the pass ends
  if (known->second.me < 0 || known->second.member_of(peer) < 0)
    throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id) +
                                       ", in which it and this rank are not both members");
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.get();
}

bool Engine::is_local(int peer) const {
  return options_.hosts[static_cast<std::size_t>(peer)] == options_.hosts[static_cast<std::size_t>(options_.rank)];
}

// Once per peer: the rings keep a pointer to the first one's page.
void Engine::on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors) {
  if (local_peers_.count(peer) != 0) throw control::violation(peer, "sent a second hello message");
  if (!is_local(peer)) throw control::violation(peer, "sent a hello message from another host");
  if (hello.rank != peer || hello.generation != options_.generation)
    throw control::violation(peer, "sent a hello message of rank " + std::to_string(hello.rank) + " and generation " +
                                       std::to_string(hello.generation) + "; expected its own rank and generation " +
                                       std::to_string(options_.generation));
  with_file_of(peer, [&] {
    local_peers_[peer] = std::make_unique<link::LocalPeer>(std::move(descriptors[0]), std::move(descriptors[1]),
                                                           hello.generation, hello.rank, hello.nonce);
  });
}

void Engine::on_segment(int peer, const control::Segment& segment, os::Descriptor file) {
  if (local_peers_.count(peer) == 0) throw control::violation(peer, "sent shared memory before its hello message");
  if (Group* group = group_with(segment.group, peer, "memory")) return attach_segment(*group, peer, std::move(file));
  if (!may_be_created(segment.group)) return;  // it was removed here meanwhile
  const std::size_t most = max_early_segments();
  if (count_of(early_segments_, peer) >= most)
    throw control::violation(
        peer, "sent memory for more than " + std::to_string(most) + " process sets that this rank does not have yet");
  if (!early_segments_.try_emplace({segment.group, peer}, std::move(file)).second)
    throw control::violation(peer, "sent memory twice for " + group_text(segment.group));
}

// Per peer. Half of the descriptors that this process may have are for all local peers together.
std::size_t Engine::max_early_segments() const {
  constexpr std::size_t kLeast = 64;
  return std::clamp(os::max_descriptors() / 2 / local_peers_.size(), kLeast, kMaxEarly);
}

void Engine::attach_segment(Group& group, int peer, os::Descriptor file) {
  const Topology& topology = group.topology();
  const int member = topology.member_of(peer);
  if (member < 0 || group.rings() == nullptr || local_peers_.count(peer) == 0 ||
      group.rings()->attached(topology.local_of[static_cast<std::size_t>(member)]))
    throw control::violation(peer, "sent memory for " + group_text(group.id()) + ", which does not need it");
  with_file_of(peer, [&] {
    group.rings()->attach(topology.local_of[static_cast<std::size_t>(member)], std::move(file),
                          local_peers_.at(peer).get());
  });
}

void Engine::on_requests(int peer, negotiate::Requests message) {
  if (Group* group = group_with(message.group, peer, "requests"))
    group->on_requests(group->topology().member_of(peer), message.epoch, std::move(message.requests), os::now_ns());
  else if (may_be_created(message.group))
    keep_early(peer, std::move(message));
}

void Engine::keep_early(int peer, negotiate::Requests message) {
  negotiate::PendingLoad& load = early_loads_[peer];
  for (const negotiate::Request& request : message.requests) load.add(request);
  if (load.over_limit())
    throw control::violation(
        peer, "sent more requests at once than any program does, for process sets that this rank does not have yet");
  early_requests_.emplace_back(peer, std::move(message));
}

// Handles what faster members have sent for a group before it was created here.
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
    revoke(failure.error());  // a peer's fault, not that of the thread that creates the group
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
  if (group == nullptr && !may_be_created(message.group)) return;  // it was removed here meanwhile
  if (group == nullptr || group->topology().ranks[0] != peer || peer == options_.rank)
    throw control::violation(
        peer, "answered requests of " + group_text(message.group) + ", of which it is not the first rank");
  group->on_buckets(std::move(message.buckets), message.last);
}

void Engine::on_plan_state(int peer, const control::PlanState& state) {
  Group* group = group_with(state.group, peer, "a plan state");
  if (group == nullptr && !may_be_created(state.group)) return;
  if (group == nullptr) throw control::violation(peer, "sent a plan state for a process set that was never created");
  group->on_plan_state(group->topology().member_of(peer), state.bits);
}

void Engine::on_leaving(int peer, control::Leaving leaving) {
  if (!left_.try_emplace(peer, std::move(leaving.groups)).second)
    throw control::violation(peer, "sent a second leaving message");
}

// The rank that it names may not be in this job: the launcher may name a rank by its number in another generation.
void Engine::on_revoke(int, const Error& error) { revoke(error); }

void Engine::on_abandon(int peer, const control::Abandon& abandon) {
  const Error error{Code::revoked, abandon.why.substr(0, kLongestReason), peer};
  if (Group* group = group_with(abandon.group, peer, "an end")) {
    group->close(error);
    end_transfers(static_cast<std::int32_t>(abandon.group), error);
  } else if (may_be_created(abandon.group)) {
    if (count_of(early_abandoned_, peer) >= kMaxEarly)
      throw control::violation(peer, "ended more than " + std::to_string(kMaxEarly) + " unknown process sets");
    early_abandoned_.try_emplace({abandon.group, peer}, error);
  }
}

// When this fails, collectives copy through the rings instead.
void Engine::on_share(int peer, const control::Share& share, os::Descriptor file) {
  if (local_peers_.count(peer) == 0) throw control::violation(peer, "shared memory before its hello message");
  if (regions_.attached(peer, share.region)) throw control::violation(peer, "shared the same memory twice");
  const auto use = share.results ? link::RegionUse::results : link::RegionUse::tensors;
  try {
    if (!regions_.can_attach(peer, share.bytes))
      throw Failure(Code::no_memory, "it has shared more than the machine has, or more than 4096 regions");
    // Engines seal their files of results. Files of tensors can be torch's, which are not sealed.
    regions_.attach(peer, share.region, os::SharedMemory::open_shared(std::move(file), share.bytes, share.results),
                    use);
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

// A rank that has sent its progress has left, also when its link ends before its frame `leave`.
void Engine::on_lost(int peer, const Error& why) {
  if (left_.count(peer) != 0) return on_left(peer);
  Error error = why;
  if (error.rank < 0) error.rank = peer;
  revoke(error);
}

}  // namespace farandole
