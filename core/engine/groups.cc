// Process sets: creating and removing them, and what peers send for them.
// Touches os/, link/, negotiate/ and the parts of engine/ that it includes.
#include "engine/groups.h"

#include <algorithm>
#include <numeric>

#include "os/clock.h"

namespace farandole {
namespace {

constexpr std::size_t kLongestReason = 4096;  // bytes of the reason for an end

std::string group_text(std::uint32_t id) { return "process set " + std::to_string(id); }

}  // namespace

Group* Groups::find(std::uint32_t id) const {
  const auto found = mine_.find(id);
  return found == mine_.end() ? nullptr : found->second.get();
}

const Topology* Groups::topology(std::uint32_t id) const {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : &found->second;
}

// As with control frames: if the process set is unknown, this rank has removed it, or will create it.
bool Groups::may_send(int peer, std::uint32_t id) const {
  const Topology* known = topology(id);
  if (known == nullptr) return id < kLastMemberGroup;
  return known->me >= 0 && known->member_of(peer) >= 0;
}

void Groups::create_everyone() {
  const Options& options = services_.options();
  std::vector<int> everyone(static_cast<std::size_t>(options.size));
  std::iota(everyone.begin(), everyone.end(), 0);
  create(0, Topology::make(std::move(everyone), options.hosts, options.rank));
}

void Groups::create(std::uint32_t id, Topology topology) {
  commands_.add_group(static_cast<std::int32_t>(id), topology.ranks);
  if (topology.me >= 0) services_.recorder().group(id, topology.ranks);
  all_[id] = topology;
  if (topology.me < 0) return early_.forget(id);
  Group& group = *mine_.emplace(id, std::make_unique<Group>(services_, id, std::move(topology))).first->second;
  take_early(group);
  for (auto& [rank, progress] : left_) {  // it left before the group was created
    int member = group.topology().member_of(rank);
    if (member >= 0) group.member_left(member, progress[id]);
  }
  if (group.rings() == nullptr) return;
  for (int member : group.topology().my_host()) {
    int rank = group.topology().ranks[static_cast<std::size_t>(member)];
    if (rank != services_.options().rank && services_.messenger().has(rank)) send_segment(group, rank);
  }
  if (id != 0) group.rings()->close_file();  // that of the first group is sent with each new link
}

// Handles what faster members have sent for a group before it was created here.
void Groups::take_early(Group& group) {
  const std::uint32_t id = group.id();
  try {
    for (auto& [peer, message] : early_.take_requests(id)) on_requests(peer, std::move(message));
    for (auto& [peer, file] : early_.take_segments(id)) attach_segment(group, peer, std::move(file));
    for (const auto& [peer, error] : early_.take_ends(id))
      if (group_with(id, peer, "an end") != nullptr) group.close(error);
  } catch (const Failure& failure) {
    if (failure.error().code != Code::peer_lost) throw;
    services_.revoke(failure.error());  // a peer's fault, not that of the thread that creates the group
  }
}

std::vector<Topology> Groups::read_sets(const std::vector<std::int64_t>& sets) const {
  std::vector<Topology> topologies;
  for (std::size_t at = 0; at < sets.size();) {
    auto count = static_cast<std::size_t>(sets[at++]);
    if (count == 0 || count > sets.size() - at)
      throw Failure(Code::invalid_argument, "a process set needs at least one rank");
    std::set<int> ranks;
    for (std::size_t i = 0; i < count; ++i) {
      std::int64_t rank = sets[at++];
      if (rank < 0 || rank >= services_.options().size)
        throw Failure(Code::invalid_argument, "a process set names rank " + std::to_string(rank) +
                                                  ", but the job has " + std::to_string(services_.options().size) +
                                                  " ranks");
      if (!ranks.insert(static_cast<int>(rank)).second)
        throw Failure(Code::invalid_argument, "a process set names rank " + std::to_string(rank) + " twice");
    }
    topologies.push_back(
        Topology::make({ranks.begin(), ranks.end()}, services_.options().hosts, services_.options().rank));
  }
  return topologies;
}

std::int64_t Groups::add(const std::vector<std::int64_t>& sets) {
  std::vector<Topology> topologies;
  for (Topology& topology : read_sets(sets)) {
    auto same = [&](const Topology& other) { return other.ranks == topology.ranks; };
    bool known = std::any_of(topologies.begin(), topologies.end(), same) ||
                 std::any_of(all_.begin(), all_.end(),
                             [&](const auto& entry) { return entry.first < kFirstMemberGroup && same(entry.second); });
    if (known) throw Failure(Code::invalid_argument, "a process set with these ranks already exists");
    topologies.push_back(std::move(topology));
  }
  std::int64_t first = next_;
  for (Topology& topology : topologies) {
    services_.messenger().limit_streams(next_, 0, services_.tuning().streams);
    create(next_++, std::move(topology));
  }
  return first;
}

void Groups::remove(std::uint32_t id) {
  if (id == 0 || all_.erase(id) == 0)
    throw Failure(Code::invalid_argument,
                  "process set " + std::to_string(id) + " does not exist, so it cannot be removed");
  commands_.remove_group(static_cast<std::int32_t>(id));
  if (auto group = mine_.find(id); group != mine_.end()) {
    group->second->close({Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
    removed_.push_back(id);
  }
  services_.messenger().forget_group(id);
  commands_.forget_names(static_cast<std::int32_t>(id));
}

void Groups::erase_removed() {
  for (std::uint32_t id : removed_) mine_.erase(id);
  removed_.clear();
}

void Groups::clear() {
  mine_.clear();
  early_.forget_segments();
}

void Groups::send_segments(int peer) {
  for (const auto& [id, group] : mine_) send_segment(*group, peer);
}

void Groups::send_segment(Group& group, int peer) {
  int member = group.topology().member_of(peer);
  if (group.rings() == nullptr || member < 0 ||
      group.topology().host_of[static_cast<std::size_t>(member)] !=
          group.topology().host_of[static_cast<std::size_t>(group.topology().me)])
    return;
  std::vector<os::Descriptor> file;
  file.push_back(group.rings()->memory().file().duplicate());
  services_.send_control(peer, Control::segment, control::encode(control::Segment{group.id()}), std::move(file));
}

Group* Groups::group_with(std::uint32_t id, int peer, const char* what) const {
  if (id >= kLastMemberGroup) throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id));
  auto known = all_.find(id);
  if (known == all_.end()) return nullptr;  // a group that was just removed is in mine_ until the pass ends
  if (known->second.me < 0 || known->second.member_of(peer) < 0)
    throw control::violation(peer, std::string("sent ") + what + " for " + group_text(id) +
                                       ", in which it and this rank are not both members");
  auto found = mine_.find(id);
  return found == mine_.end() ? nullptr : found->second.get();
}

void Groups::on_segment(int peer, const control::Segment& segment, os::Descriptor file) {
  if (local_peers_.count(peer) == 0) throw control::violation(peer, "sent shared memory before its hello message");
  if (Group* group = group_with(segment.group, peer, "memory")) return attach_segment(*group, peer, std::move(file));
  if (!may_be_created(segment.group)) return;  // it was removed here meanwhile
  early_.keep_segment(peer, segment.group, std::move(file), static_cast<int>(local_peers_.size()));
}

void Groups::attach_segment(Group& group, int peer, os::Descriptor file) {
  const Topology& topology = group.topology();
  const int member = topology.member_of(peer);
  if (member < 0 || group.rings() == nullptr || local_peers_.count(peer) == 0 ||
      group.rings()->attached(topology.local_of[static_cast<std::size_t>(member)]))
    throw control::violation(peer, "sent memory for " + group_text(group.id()) + ", which does not need it");
  control::with_file_of(peer, [&] {
    group.rings()->attach(topology.local_of[static_cast<std::size_t>(member)], std::move(file),
                          local_peers_.at(peer).get());
  });
}

void Groups::on_requests(int peer, negotiate::Requests message) {
  if (Group* group = group_with(message.group, peer, "requests"))
    group->on_requests(group->topology().member_of(peer), message.epoch, std::move(message.requests), os::now_ns());
  else if (may_be_created(message.group))
    early_.keep_requests(peer, std::move(message));
}

void Groups::on_answer(int peer, negotiate::Answer message) {
  Group* group = group_with(message.group, peer, "an answer");
  if (group == nullptr && !may_be_created(message.group)) return;  // it was removed here meanwhile
  if (group == nullptr || group->topology().ranks[0] != peer || peer == services_.options().rank)
    throw control::violation(
        peer, "answered requests of " + group_text(message.group) + ", of which it is not the first rank");
  group->on_buckets(std::move(message.buckets), message.last);
}

void Groups::on_plan_state(int peer, const control::PlanState& state) {
  Group* group = group_with(state.group, peer, "a plan state");
  if (group == nullptr && !may_be_created(state.group)) return;
  if (group == nullptr) throw control::violation(peer, "sent a plan state for a process set that was never created");
  group->on_plan_state(group->topology().member_of(peer), state.bits);
}

void Groups::on_abandon(int peer, const control::Abandon& abandon) {
  const Error error{Code::revoked, abandon.why.substr(0, kLongestReason), peer};
  if (Group* group = group_with(abandon.group, peer, "an end")) {
    group->close(error);
    transfers_.end(static_cast<std::int32_t>(abandon.group), error);
  } else if (may_be_created(abandon.group)) {
    early_.keep_end(peer, abandon.group, error);
  }
}

void Groups::on_leaving(int peer, control::Leaving leaving) {
  if (!left_.try_emplace(peer, std::move(leaving.groups)).second)
    throw control::violation(peer, "sent a second leaving message");
}

void Groups::on_left(int peer) {
  std::map<std::uint32_t, Progress>& progress = left_[peer];
  for (const auto& [id, group] : mine_) {
    int member = group->topology().member_of(peer);
    if (member >= 0) group->member_left(member, progress[id]);
  }
}

}  // namespace farandole
