// What a driver does: one pass over everything that can go on, and what a revocation and leaving are.
// Touches every room below it.
#include <algorithm>
#include <new>

#include "base/failpoint.h"
#include "engine/engine.h"
#include "os/clock.h"

namespace farandole {
namespace {

constexpr std::int64_t kLookEvery = 50'000;  // at sockets that are not expected to bring anything: deaths, mostly

}  // namespace

void Engine::thread_main() {
  std::vector<os::Event> woken;
  for (;;) {
    {
      Seat seat(*this);
      std::int64_t moved_at = os::now_ns();
      while (drive() || (busy() && now_ - moved_at < patience())) {
        if (moved_)
          moved_at = now_;
        else
          pause(Whose::ours);
        if (!running_.load(std::memory_order_acquire)) break;
      }
      if (!running_.load(std::memory_order_acquire)) return seat.leave_unsettled();
      if (seat.settle()) continue;
      sleeping_until_.store(next_deadline(), std::memory_order_relaxed);
    }
    std::int64_t until = sleeping_until_.load(std::memory_order_relaxed);
    std::int64_t left = until == Group::kNever ? -1 : std::max<std::int64_t>(0, until - os::now_ns());
    poller_.wait(left < 0 ? -1 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 60'000)), woken);
    counters_[static_cast<int>(Counter::wake_ups)].fetch_add(1, std::memory_order_relaxed);
  }
}

// While the user's threads compute, this thread looks for a shorter while than when one of them waits for it.
std::int64_t Engine::patience() const {
  bool awaited = waiters_.load(std::memory_order_relaxed) > 0;
  return awaited && !waits_for_a_wire() ? tuning_.spin_ns : std::min(tuning_.spin_ns, kShortSpin);
}

// Bytes take longer to cross a wire than a thread to wake up, and the kernel, which carries them, and the other ranks
// of this host need the cores meanwhile.
bool Engine::waits_for_a_wire() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second->topology().host_count() > 1 && entry.second->busy();
  });
}

bool Engine::busy() const {
  if (!transfers_.empty() || !unsourced_.empty()) return true;
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) { return entry.second->busy(); });
}

bool Engine::pass() {
  std::int64_t now = now_ = os::now_ns();
  moved_ = take_inbox(now);
  bool frames = !transfers_.empty() || !unsourced_.empty() || leaving_ || !started_;
  for (const auto& [id, group] : groups_) frames = frames || group->expects_frames();
  if (frames || now - looked_at_ > kLookEvery) moved_ = look_at_sockets() || moved_;
  for (const auto& [id, group] : groups_) {
    moved_ = group->advance(now) || moved_;
    group->check_stalls(now);
  }
  if (!unsourced_.empty()) moved_ = find_sources() || moved_;
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

bool Engine::look_at_sockets() {
  looked_at_ = now_;
  poller_.wait(0, ready_);
  for (const os::Event& event : ready_) {
    if (event.key == kBellKey) {
      bell_.answer();
    } else if (event.key >= kFarBellKey) {
      far_bells_.at(static_cast<int>(event.key - kFarBellKey)).answer();
    } else if (event.key >= kProcessKey) {
      int peer = static_cast<int>(event.key - kProcessKey);
      auto found = processes_.find(peer);
      if (found == processes_.end()) continue;
      poller_.remove(found->second.get());
      processes_.erase(found);
      messenger_->bury(peer, {Code::peer_lost, "rank " + std::to_string(peer) + " has died", peer});
    } else {
      messenger_->ready(event);
    }
  }
  return !ready_.empty();
}

bool Engine::take_inbox(std::int64_t now) {
  if (!inbox_.full.load(std::memory_order_acquire)) return false;
  std::vector<std::pair<std::int32_t, std::int64_t>> awaited;
  std::vector<Inbox::NewLink> links;
  std::vector<Inbox::Sharing> sharings;
  Error revoke_error;
  bool leave = false;
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.full.store(false, std::memory_order_relaxed);
    taken_.swap(inbox_.submitted);
    awaited.swap(inbox_.awaited);
    links.swap(inbox_.links);
    sharings.swap(inbox_.sharings);
    revoke_error = inbox_.revoke;
    leave = inbox_.leave;
  }
  for (Inbox::NewLink& link : links) welcome(link);
  for (Inbox::Sharing& sharing : sharings) spread(sharing);
  // What fails on the way stays in taken_, where the revocation that follows finds it.
  for (OperationPtr& operation : taken_) {
    auto group = groups_.find(static_cast<std::uint32_t>(operation->group));
    if (revoked_.failed())
      finish(*operation, revoked_);
    else if (group == groups_.end())
      finish(*operation, {Code::invalid_argument, "process set " + std::to_string(operation->group) + " was removed"});
    else if (static_cast<std::uint32_t>(operation->group) >= kFirstFounded && group->second->closed().failed())
      finish(*operation, group->second->closed());
    else if (operation->request.kind == Kind::send || operation->request.kind == Kind::receive)
      begin_transfer(operation);
    else if (beside(*operation))
      change_founded(*operation);
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
    look_at_sockets();  // a peer may have said more exactly what happened
    revoke(revoke_error);
  }
  if (leave && !leaving_) begin_leaving();
  return submitted || !links.empty();
}

void Engine::welcome(Inbox::NewLink& link) {
  try {
    bool same_host =
        options_.hosts[static_cast<std::size_t>(link.peer)] == options_.hosts[static_cast<std::size_t>(options_.rank)];
    messenger_->add(link.peer, std::move(link.stream), link.kind);
    if (link.kind != link::StreamKind::local || !same_host) return;
    std::vector<os::Descriptor> descriptors;
    descriptors.push_back(board_.memory().file().duplicate());
    os::Farbell& bell = far_bells_[link.peer];
    poller_.add(bell.descriptor().get(), kFarBellKey + static_cast<std::uint64_t>(link.peer));
    descriptors.push_back(bell.give_rope());
    tell(link.peer, Control::hello, control::encode(control::Hello{options_.generation, options_.rank, nonce_}),
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

void Engine::tell(int peer, Control type, control::Bytes message, std::vector<os::Descriptor> descriptors) {
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
  tell(peer, Control::segment, control::encode(control::Segment{group.id()}), std::move(file));
}

void Engine::create_group(std::uint32_t id, Topology topology) {
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.members[static_cast<std::int32_t>(id)] = topology.ranks;
  }
  all_groups_[id] = topology;
  if (topology.me < 0) return forget_early(id);
  Group& group = *groups_.emplace(id, std::make_unique<Group>(static_cast<Services&>(*this), id, std::move(topology)))
                      .first->second;
  take_early(group);
  for (auto& [rank, progress] : left_) {  // before the group was made here
    int member = group.topology().member_of(rank);
    if (member >= 0) group.member_left(member, progress[id]);
  }
  if (group.rings() == nullptr) return;
  for (int member : group.topology().my_host()) {
    int rank = group.topology().ranks[static_cast<std::size_t>(member)];
    if (rank != options_.rank && messenger_->has(rank)) send_segment(group, rank);
  }
  if (id != 0) group.rings()->close_file();  // of the first group it goes out with each new link
}

std::vector<Topology> Engine::read_sets(const std::vector<std::int64_t>& sets) const {
  std::vector<Topology> topologies;
  for (std::size_t at = 0; at < sets.size();) {
    auto count = static_cast<std::size_t>(sets[at++]);
    if (count == 0 || count > sets.size() - at) throw Failure(Code::invalid_argument, "a process set needs ranks");
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
                             [&](const auto& entry) { return entry.first < kFirstFounded && same(entry.second); });
    if (known) throw Failure(Code::invalid_argument, "a process set with these ranks already exists");
    topologies.push_back(std::move(topology));
  }
  std::int64_t first = next_group_;
  for (Topology& topology : topologies) {
    messenger_->spread(next_group_, 0, tuning_.streams);
    create_group(next_group_++, std::move(topology));
  }
  return first;
}

void Engine::remove_group(std::uint32_t id) {
  if (id == 0 || all_groups_.erase(id) == 0)
    throw Failure(Code::invalid_argument, "there is no process set " + std::to_string(id) + " to remove");
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.members.erase(static_cast<std::int32_t>(id));
  }
  if (auto group = groups_.find(id); group != groups_.end()) {
    group->second->close({Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
    removed_.push_back(id);
  }
  messenger_->forget(id);
  count_unnamed_anew(id);
  std::lock_guard lock(inbox_.mutex);
  inbox_.names.erase(static_cast<std::int32_t>(id));
}

void Engine::execute_revocation() {
  revoking_ = false;
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.ended = revoked_;
  }
  try {  // first: a thread that is woken below may end the process
    tell_revocation();
  } catch (const std::exception&) {
    // Out of memory, mostly. The peers will see this rank's links end.
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

// Whoever moved an operation when there was no memory may have dropped it; its waiters still have its handle. Only when
// no collective and no transfer is left, whose memory it might be.
void Engine::finish_lost() {
  std::vector<OperationPtr> waiting, lost;
  {
    std::lock_guard lock(inbox_.mutex);  // who submits from now on finds that everything has ended
    lost = handles_.unfinished();
    waiting.swap(inbox_.submitted);
  }
  for (const OperationPtr& operation : lost)
    if (operation->done.load(std::memory_order_relaxed) == 0) finish(*operation, revoked_);
  for (const OperationPtr& operation : waiting)  // those whose handles have been given back
    if (operation->done.load(std::memory_order_relaxed) == 0) finish(*operation, revoked_);
}

void Engine::tell_revocation() {
  // To the others our lack of memory is the loss of a rank, which they may survive.
  const bool mine = revoked_.code == Code::no_memory && revoked_.rank < 0;
  control::Revocation told{revoked_};
  if (mine)
    told.error = {Code::revoked, "rank " + std::to_string(options_.rank) + " " + revoked_.message, options_.rank};
  const control::Bytes message = control::encode(told);
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && peer != revoked_.rank && messenger_->has(peer)) tell(peer, Control::revoke, message);
  messenger_->flush();
}

void Engine::begin_leaving() {
  leaving_ = true;
  Error error = revoked_.failed() ? revoked_ : Error{Code::shut_down, "Farandole has been shut down", -1};
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.ended = error;
  }
  control::Leaving leaving;
  for (const auto& [id, group] : groups_) leaving.groups[id] = group->progress();
  const control::Bytes message = control::encode(leaving);
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && messenger_->has(peer)) tell(peer, Control::leaving, message);
  for (const auto& [id, group] : groups_) group->close(error);
  end_transfers(error);
  messenger_->leave();
  messenger_->flush();
}

std::vector<int> Engine::neighbours_missing() const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank)
    if (rank != options_.rank &&
        options_.hosts[static_cast<std::size_t>(rank)] == options_.hosts[static_cast<std::size_t>(options_.rank)] &&
        neighbours_.count(rank) == 0)
      missing.push_back(rank);
  return missing;
}

// Tells the thread in start() or leave() what it waits for.
void Engine::note_milestones() {
  bool started = neighbours_missing().empty() && groups_.at(0)->ready();
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
