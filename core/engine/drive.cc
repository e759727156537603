// One pass over everything that can make progress; new links; revocation and leaving.
// Touches every room below it.
#include <algorithm>

#include "base/failpoint.h"
#include "engine/engine.h"

namespace farandole {
namespace {

constexpr std::int64_t kPollEvery = 50'000;  // for sockets on which nothing is expected, mostly to notice lost peers

}  // namespace

// Bytes need longer through the network than a thread needs to wake up. Meanwhile the kernel, which moves them, and the
// other ranks of this host need the cores.
bool Engine::waits_for_network() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
    return entry.second->topology().host_count() > 1 && entry.second->busy();
  });
}

bool Engine::busy() const {
  if (!transfers_.empty()) return true;
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) { return entry.second->busy(); });
}

bool Engine::has_news() {
  FARANDOLE_FAILPOINT(static_cast<Services*>(this), Kind::allreduce, "sleep");
  bool news = commands_.pending();
  for (const auto& [id, group] : groups_) news = group->must_divert() || news;
  return news;
}

bool Engine::pass(std::int64_t now) {
  bool moved = take_commands(now);
  bool frames = !transfers_.empty() || leaving_ || !started_;
  for (const auto& [id, group] : groups_) frames = frames || group->expects_frames();
  if (frames || now - polled_at_ > kPollEvery) moved = poll_sockets() || moved;
  for (const auto& [id, group] : groups_) {
    moved = group->advance(now) || moved;
    group->check_stalls(now);
  }
  if (!transfers_.empty()) moved = transfers_.advance() || moved;
  moved = messenger_->flush() || moved;
  groups_.erase_removed();
  if (revoking_) {
    execute_revocation();
    moved = true;
  }
  const link::Traffic& traffic = messenger_->traffic();
  counters_.set(Counter::sent, static_cast<std::int64_t>(traffic.sent));
  counters_.set(Counter::received, static_cast<std::int64_t>(traffic.received));
  counters_.set(Counter::frames, static_cast<std::int64_t>(traffic.frames));
  if (!started_ || (leaving_ && !flushed_)) note_milestones();
  return moved;
}

bool Engine::poll_sockets() {
  polled_at_ = driver_.now();
  poller_.wait(0, ready_);
  for (const os::Event& event : ready_) {
    if (event.key == kWakeupKey) {
      driver_.drain();
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
  if (!commands_.pending()) return false;
  Commands::Taken taken = commands_.take(taken_);
  for (Commands::NewLink& link : taken.links) attach_link(link);
  for (Commands::Sharing& sharing : taken.sharings) send_sharing(sharing);
  // After a failure here the operations are still in taken_, where the revocation finds them.
  for (OperationPtr& operation : taken_) {
    begin(operation, now);
    operation.reset();
  }
  const bool submitted = !taken_.empty();
  taken_.clear();
  for (const auto& [id, handle] : taken.awaited)
    if (Group* group = groups_.find(static_cast<std::uint32_t>(id))) group->awaited(handle);
  if (taken.revoke.failed()) {
    poll_sockets();  // a peer may have sent the exact reason
    revoke(taken.revoke);
  }
  if (taken.leave && !leaving_) begin_leaving();
  return submitted || !taken.links.empty();
}

void Engine::begin(const OperationPtr& operation, std::int64_t now) {
  const auto id = static_cast<std::uint32_t>(operation->group);
  Group* group = groups_.find(id);
  if (revoked_.failed())
    finish(*operation, revoked_);
  else if (group == nullptr)
    finish(*operation, {Code::invalid_argument, "process set " + std::to_string(operation->group) + " was removed"});
  else if (id >= kFirstMemberGroup && group->closed().failed())
    finish(*operation, group->closed());
  else if (operation->request.kind == Kind::send || operation->request.kind == Kind::receive)
    transfers_.begin(operation);
  else if (bypasses_negotiation(*operation))
    groups_.change_member_group(*operation);
  else
    group->submit(operation, now);
}

void Engine::attach_link(Commands::NewLink& link) {
  try {
    messenger_->add(link.peer, std::move(link.stream), link.kind);
    if (link.kind != link::StreamKind::local || !options_.on_my_host(link.peer)) return;
    std::vector<os::Descriptor> descriptors;
    descriptors.push_back(status_page_.memory().file().duplicate());
    os::PeerWakeup& wakeup = peer_wakeups_[link.peer];
    poller_.add(wakeup.descriptor().get(), kPeerWakeupKey + static_cast<std::uint64_t>(link.peer));
    descriptors.push_back(wakeup.take_sender());
    send_control(link.peer, Control::hello, control::encode(control::Hello{options_.generation, options_.rank, nonce_}),
                 std::move(descriptors));
    groups_.send_segments(link.peer);
    os::Descriptor process = os::watch_process(messenger_->local_pid(link.peer));
    if (process) {
      poller_.add(process.get(), kProcessKey + static_cast<std::uint64_t>(link.peer));
      processes_[link.peer] = std::move(process);
    }
  } catch (const Failure& failure) {
    revoke(failure.error());
  }
}

void Engine::fail(Error error) {
  if (!revoked_.failed() && !leaving_) {
    revoked_ = std::move(error);
    revoking_ = true;
  }
  try {
    if (revoking_) execute_revocation();
  } catch (const std::exception&) {
    revoking_ = true;  // the next pass ends the rest
  }
  commands_.look_again();  // they may not have been read completely
}

void Engine::execute_revocation() {
  revoking_ = false;
  commands_.end(revoked_);
  try {  // first of all, because a thread that is woken below may end the process
    send_revocation();
  } catch (const std::exception&) {
    // Mostly out of memory. The peers will see that this rank's links end.
  }
  const std::shared_ptr<collective::Nccl> shared = nccl();
  if (shared != nullptr) shared->end(revoked_);  // before the groups, which wait until it has let go of their tensors
  for (const auto& [id, group] : groups_) group->close(revoked_);
  if (shared != nullptr && shared->hangs())
    log(Level::error, "an abort of NCCL does not return: GPU tensors of operations that failed may still change");
  transfers_.end(revoked_);
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
  commands_.take_unfinished(lost, waiting);
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
  commands_.end(error);
  control::Leaving leaving;
  for (const auto& [id, group] : groups_) leaving.groups[id] = group->progress();
  const control::Bytes message = control::encode(leaving);
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && messenger_->has(peer)) send_control(peer, Control::leaving, message);
  for (const auto& [id, group] : groups_) group->close(error);
  transfers_.end(error);
  messenger_->leave();
  messenger_->flush();
}

std::vector<int> Engine::missing_local_peers() const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank)
    if (rank != options_.rank && options_.on_my_host(rank) && local_peers_.count(rank) == 0) missing.push_back(rank);
  return missing;
}

// Tells the thread in start() or leave() about the state that it waits for.
void Engine::note_milestones() {
  bool started = missing_local_peers().empty() && groups_.everyone().ready();
  bool flushed = leaving_ && messenger_->flushed();
  if (!started && !flushed) return;
  if (started && groups_.everyone().rings() != nullptr) groups_.everyone().rings()->close_file();
  std::lock_guard lock(started_mutex_);
  started_ = started_ || started;
  flushed_ = flushed_ || flushed;
  started_changed_.notify_all();
}

std::int64_t Engine::next_deadline() const {
  std::int64_t next = kNever;
  for (const auto& [id, group] : groups_) next = std::min(next, group->deadline());
  return next;
}

}  // namespace farandole
