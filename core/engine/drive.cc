// The driver: one pass over everything that can make progress; revocation and leaving.
// Touches every room below it.
#include <algorithm>
#include <new>

#include "base/failpoint.h"
#include "engine/engine.h"
#include "os/clock.h"

namespace farandole {
namespace {

constexpr std::int64_t kPollEvery = 50'000;  // for sockets on which nothing is expected, mostly to notice lost peers

}  // namespace

void Engine::thread_main() {
  std::vector<os::Event> woken;
  for (;;) {
    {
      DriverLock driver(*this);
      std::int64_t moved_at = os::now_ns();
      while (drive() || (busy() && now_ - moved_at < spin_time())) {
        if (moved_)
          moved_at = now_;
        else
          pause(DriverThread::engine);
        if (!running_.load(std::memory_order_acquire)) break;
      }
      if (!running_.load(std::memory_order_acquire)) return driver.release_now();
      if (driver.prepare_release()) continue;
      sleeping_until_.store(next_deadline(), std::memory_order_relaxed);
    }
    std::int64_t until = sleeping_until_.load(std::memory_order_relaxed);
    std::int64_t left = until == Group::kNever ? -1 : std::max<std::int64_t>(0, until - os::now_ns());
    poller_.wait(left < 0 ? -1 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 60'000)), woken);
    counters_[static_cast<int>(Counter::wake_ups)].fetch_add(1, std::memory_order_relaxed);
  }
}

// While the user's threads compute, the engine's thread spins for a shorter time than a thread that waits.
std::int64_t Engine::spin_time() const {
  bool awaited = waiters_.load(std::memory_order_relaxed) > 0;
  return awaited && !waits_for_network() ? tuning_.spin_ns : std::min(tuning_.spin_ns, kShortSpin);
}

// Bytes need longer through the network than a thread needs to wake up. Meanwhile the kernel, which moves them, and the
// other ranks of this host need the cores.
bool Engine::waits_for_network() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second->topology().host_count() > 1 && entry.second->busy();
  });
}

bool Engine::busy() const {
  if (!transfers_.empty() || !any_source_.empty()) return true;
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) { return entry.second->busy(); });
}

bool Engine::pass() {
  std::int64_t now = now_ = os::now_ns();
  moved_ = take_commands(now);
  bool frames = !transfers_.empty() || !any_source_.empty() || leaving_ || !started_;
  for (const auto& [id, group] : groups_) frames = frames || group->expects_frames();
  if (frames || now - polled_at_ > kPollEvery) moved_ = poll_sockets() || moved_;
  for (const auto& [id, group] : groups_) {
    moved_ = group->advance(now) || moved_;
    group->check_stalls(now);
  }
  if (!any_source_.empty()) moved_ = match_any_source() || moved_;
  if (!transfers_.empty()) moved_ = check_transfers() || moved_;
  moved_ = messenger_->flush() || moved_;
  for (std::uint32_t id : removed_) groups_.erase(id);
  removed_.clear();
  if (revoking_) {
    execute_revocation();
    moved_ = true;
  }
  const link::Traffic& traffic = messenger_->traffic();
  counters_[static_cast<int>(Counter::sent)].store(static_cast<std::int64_t>(traffic.sent), std::memory_order_relaxed);
  counters_[static_cast<int>(Counter::received)].store(static_cast<std::int64_t>(traffic.received),
                                                       std::memory_order_relaxed);
  counters_[static_cast<int>(Counter::frames)].store(static_cast<std::int64_t>(traffic.frames),
                                                     std::memory_order_relaxed);
  if (!started_ || (leaving_ && !flushed_)) note_milestones();
  return moved_;
}

bool Engine::poll_sockets() {
  polled_at_ = now_;
  poller_.wait(0, ready_);
  for (const os::Event& event : ready_) {
    if (event.key == kWakeupKey) {
      wakeup_.drain();
    } else if (event.key >= kPeerWakeupKey) {
      peer_wakeups_.at(static_cast<int>(event.key - kPeerWakeupKey)).drain();
    } else if (event.key >= kProcessKey) {
      int peer = static_cast<int>(event.key - kProcessKey);
      auto found = processes_.find(peer);
      if (found == processes_.end()) continue;
      poller_.remove(found->second.get());
      processes_.erase(found);
      messenger_->peer_died(peer, {Code::peer_lost, "rank " + std::to_string(peer) + " has died", peer});
    } else {
      messenger_->ready(event);
    }
  }
  return !ready_.empty();
}

bool Engine::take_commands(std::int64_t now) {
  if (!commands_.pending.load(std::memory_order_acquire)) return false;
  std::vector<std::pair<std::int32_t, std::int64_t>> awaited;
  std::vector<Commands::NewLink> links;
  std::vector<Commands::Sharing> sharings;
  Error revoke_error;
  bool leave = false;
  {
    std::lock_guard lock(commands_.mutex);
    commands_.pending.store(false, std::memory_order_relaxed);
    taken_.swap(commands_.submitted);
    awaited.swap(commands_.awaited);
    links.swap(commands_.links);
    sharings.swap(commands_.sharings);
    revoke_error = commands_.revoke;
    leave = commands_.leave;
  }
  for (Commands::NewLink& link : links) attach_link(link);
  for (Commands::Sharing& sharing : sharings) send_sharing(sharing);
  // After a failure here the operations are still in taken_, where the revocation finds them.
  for (OperationPtr& operation : taken_) {
    auto group = groups_.find(static_cast<std::uint32_t>(operation->group));
    if (revoked_.failed())
      finish(*operation, revoked_);
    else if (group == groups_.end())
      finish(*operation, {Code::invalid_argument, "process set " + std::to_string(operation->group) + " was removed"});
    else if (static_cast<std::uint32_t>(operation->group) >= kFirstMemberGroup && group->second->closed().failed())
      finish(*operation, group->second->closed());
    else if (operation->request.kind == Kind::send || operation->request.kind == Kind::receive)
      begin_transfer(operation);
    else if (bypasses_negotiation(*operation))
      change_member_group(*operation);
    else
      group->second->submit(operation, now);
    operation.reset();
  }
  const bool submitted = !taken_.empty();
  taken_.clear();
  for (const auto& [id, handle] : awaited) {
    auto group = groups_.find(static_cast<std::uint32_t>(id));
    if (group != groups_.end()) group->second->awaited(handle);
  }
  if (revoke_error.failed()) {
    poll_sockets();  // a peer may have sent the exact reason
    revoke(revoke_error);
  }
  if (leave && !leaving_) begin_leaving();
  return submitted || !links.empty();
}

void Engine::attach_link(Commands::NewLink& link) {
  try {
    bool same_host =
        options_.hosts[static_cast<std::size_t>(link.peer)] == options_.hosts[static_cast<std::size_t>(options_.rank)];
    messenger_->add(link.peer, std::move(link.stream), link.kind);
    if (link.kind != link::StreamKind::local || !same_host) return;
    std::vector<os::Descriptor> descriptors;
    descriptors.push_back(status_page_.memory().file().duplicate());
    os::PeerWakeup& wakeup = peer_wakeups_[link.peer];
    poller_.add(wakeup.descriptor().get(), kPeerWakeupKey + static_cast<std::uint64_t>(link.peer));
    descriptors.push_back(wakeup.take_sender());
    send_control(link.peer, Control::hello, control::encode(control::Hello{options_.generation, options_.rank, nonce_}),
                 std::move(descriptors));
    for (const auto& [id, group] : groups_) send_segment(*group, link.peer);
    os::Descriptor process = os::watch_process(messenger_->local_pid(link.peer));
    if (process) {
      poller_.add(process.get(), kProcessKey + static_cast<std::uint64_t>(link.peer));
      processes_[link.peer] = std::move(process);
    }
  } catch (const Failure& failure) {
    revoke(failure.error());
  }
}

void Engine::send_control(int peer, Control type, control::Bytes message, std::vector<os::Descriptor> descriptors) {
  messenger_->control(peer, static_cast<std::uint32_t>(type), std::move(message), std::move(descriptors));
}

void Engine::send_segment(Group& group, int peer) {
  int member = group.topology().member_of(peer);
  if (group.rings() == nullptr || member < 0 ||
      group.topology().host_of[static_cast<std::size_t>(member)] !=
          group.topology().host_of[static_cast<std::size_t>(group.topology().me)])
    return;
  std::vector<os::Descriptor> file;
  file.push_back(group.rings()->memory().file().duplicate());
  send_control(peer, Control::segment, control::encode(control::Segment{group.id()}), std::move(file));
}

void Engine::create_group(std::uint32_t id, Topology topology) {
  {
    std::lock_guard lock(commands_.mutex);
    commands_.members[static_cast<std::int32_t>(id)] = topology.ranks;
  }
  all_groups_[id] = topology;
  if (topology.me < 0) return forget_early(id);
  Group& group = *groups_.emplace(id, std::make_unique<Group>(static_cast<Services&>(*this), id, std::move(topology)))
                      .first->second;
  take_early(group);
  for (auto& [rank, progress] : left_) {  // it left before the group was created
    int member = group.topology().member_of(rank);
    if (member >= 0) group.member_left(member, progress[id]);
  }
  if (group.rings() == nullptr) return;
  for (int member : group.topology().my_host()) {
    int rank = group.topology().ranks[static_cast<std::size_t>(member)];
    if (rank != options_.rank && messenger_->has(rank)) send_segment(group, rank);
  }
  if (id != 0) group.rings()->close_file();  // that of the first group is sent with each new link
}

std::vector<Topology> Engine::read_sets(const std::vector<std::int64_t>& sets) const {
  std::vector<Topology> topologies;
  for (std::size_t at = 0; at < sets.size();) {
    auto count = static_cast<std::size_t>(sets[at++]);
    if (count == 0 || count > sets.size() - at)
      throw Failure(Code::invalid_argument, "a process set needs at least one rank");
    std::set<int> ranks;
    for (std::size_t i = 0; i < count; ++i) {
      std::int64_t rank = sets[at++];
      if (rank < 0 || rank >= options_.size)
        throw Failure(Code::invalid_argument, "a process set names rank " + std::to_string(rank) +
                                                  ", but the job has " + std::to_string(options_.size) + " ranks");
      if (!ranks.insert(static_cast<int>(rank)).second)
        throw Failure(Code::invalid_argument, "a process set names rank " + std::to_string(rank) + " twice");
    }
    topologies.push_back(Topology::make({ranks.begin(), ranks.end()}, options_.hosts, options_.rank));
  }
  return topologies;
}

std::int64_t Engine::add_groups(const std::vector<std::int64_t>& sets) {
  std::vector<Topology> topologies;
  for (Topology& topology : read_sets(sets)) {
    auto same = [&](const Topology& other) { return other.ranks == topology.ranks; };
    bool known = std::any_of(topologies.begin(), topologies.end(), same) ||
                 std::any_of(all_groups_.begin(), all_groups_.end(),
                             [&](const auto& entry) { return entry.first < kFirstMemberGroup && same(entry.second); });
    if (known) throw Failure(Code::invalid_argument, "a process set with these ranks already exists");
    topologies.push_back(std::move(topology));
  }
  std::int64_t first = next_group_;
  for (Topology& topology : topologies) {
    messenger_->limit_streams(next_group_, 0, tuning_.streams);
    create_group(next_group_++, std::move(topology));
  }
  return first;
}

void Engine::remove_group(std::uint32_t id) {
  if (id == 0 || all_groups_.erase(id) == 0)
    throw Failure(Code::invalid_argument,
                  "process set " + std::to_string(id) + " does not exist, so it cannot be removed");
  {
    std::lock_guard lock(commands_.mutex);
    commands_.members.erase(static_cast<std::int32_t>(id));
  }
  if (auto group = groups_.find(id); group != groups_.end()) {
    group->second->close({Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
    removed_.push_back(id);
  }
  messenger_->forget_group(id);
  restart_unnamed_numbers(id);
  std::lock_guard lock(commands_.mutex);
  commands_.names.erase(static_cast<std::int32_t>(id));
}

void Engine::execute_revocation() {
  revoking_ = false;
  {
    std::lock_guard lock(commands_.mutex);
    commands_.ended = revoked_;
  }
  try {  // first of all, because a thread that is woken below may end the process
    send_revocation();
  } catch (const std::exception&) {
    // Mostly out of memory. The peers will see that this rank's links end.
  }
  for (const auto& [id, group] : groups_) group->close(revoked_);
  end_transfers(revoked_);
  for (const OperationPtr& operation : taken_)
    if (operation != nullptr && operation->done.load(std::memory_order_relaxed) == 0) finish(*operation, revoked_);
  taken_.clear();
  finish_lost();
  messenger_->fail_all(revoked_);
  if (!started_) {
    std::lock_guard lock(started_mutex_);
    start_error_ = revoked_;
    started_ = true;
    started_changed_.notify_all();
  }
}

// An operation that was moved when memory ran out may be in no list any more, but its waiters have its handle. Called
// only when no collective and no transfer runs that could use its memory.
void Engine::finish_lost() {
  std::vector<OperationPtr> waiting, lost;
  {
    std::lock_guard lock(commands_.mutex);  // later submissions fail at once
    lost = handles_.unfinished();
    waiting.swap(commands_.submitted);
  }
  for (const OperationPtr& operation : lost)
    if (operation->done.load(std::memory_order_relaxed) == 0) finish(*operation, revoked_);
  for (const OperationPtr& operation : waiting)  // those whose handles were released
    if (operation->done.load(std::memory_order_relaxed) == 0) finish(*operation, revoked_);
}

void Engine::send_revocation() {
  // To the other ranks, this rank's lack of memory is the loss of a peer, which they may survive.
  const bool mine = revoked_.code == Code::no_memory && revoked_.rank < 0;
  control::Revocation sent{revoked_};
  if (mine)
    sent.error = {Code::revoked, "rank " + std::to_string(options_.rank) + " " + revoked_.message, options_.rank};
  const control::Bytes message = control::encode(sent);
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && peer != revoked_.rank && messenger_->has(peer))
      send_control(peer, Control::revoke, message);
  messenger_->flush();
}

void Engine::begin_leaving() {
  leaving_ = true;
  Error error = revoked_.failed()
                    ? revoked_
                    : Error{Code::shut_down, "Horovod has been shut down. This rank has left the job", -1};
  {
    std::lock_guard lock(commands_.mutex);
    commands_.ended = error;
  }
  control::Leaving leaving;
  for (const auto& [id, group] : groups_) leaving.groups[id] = group->progress();
  const control::Bytes message = control::encode(leaving);
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && messenger_->has(peer)) send_control(peer, Control::leaving, message);
  for (const auto& [id, group] : groups_) group->close(error);
  end_transfers(error);
  messenger_->leave();
  messenger_->flush();
}

std::vector<int> Engine::missing_local_peers() const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank)
    if (rank != options_.rank &&
        options_.hosts[static_cast<std::size_t>(rank)] == options_.hosts[static_cast<std::size_t>(options_.rank)] &&
        local_peers_.count(rank) == 0)
      missing.push_back(rank);
  return missing;
}

// Tells the thread in start() or leave() about the state that it waits for.
void Engine::note_milestones() {
  bool started = missing_local_peers().empty() && groups_.at(0)->ready();
  bool flushed = leaving_ && messenger_->flushed();
  if (!started && !flushed) return;
  if (started && groups_.at(0)->rings() != nullptr) groups_.at(0)->rings()->close_file();
  std::lock_guard lock(started_mutex_);
  started_ = started_ || started;
  flushed_ = flushed_ || flushed;
  started_changed_.notify_all();
}

std::int64_t Engine::next_deadline() const {
  std::int64_t next = Group::kNever;
  for (const auto& [id, group] : groups_) next = std::min(next, group->deadline());
  return next;
}

}  // namespace farandole
