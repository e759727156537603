// The driver's seat: one pass over everything that can go on, and what links and groups report during it.
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
      std::lock_guard seat(seat_);
      take_seat();
      std::int64_t moved_at = os::now_ns();
      while (drive() || (busy() && now_ - moved_at < patience())) {
        if (moved_)
          moved_at = now_;
        else
          pause(Whose::ours);
        if (!running_.load(std::memory_order_acquire)) break;
      }
      if (!running_.load(std::memory_order_acquire)) return;
      if (settle()) continue;
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

bool Engine::drive() {
  try {
    return pass();
  } catch (const Failure& failure) {
    give_up(failure.error());
  } catch (const std::bad_alloc&) {
    give_up({Code::no_memory, "out of memory", -1});
  } catch (const std::exception& exception) {
    give_up({Code::internal, exception.what(), -1});
  }
  return true;
}

void Engine::give_up(const Error& error) {
  revoke(error);
  try {
    if (revoking_) execute_revocation();
  } catch (const std::exception&) {
    revoking_ = true;  // the next pass ends what is left
  }
  inbox_.full.store(true, std::memory_order_release);  // it may not have been read to its end
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
    else if (operation->group >= kFirstFounded && group->second->closed().failed())
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
    wire::Writer writer;
    writer.u32(options_.generation);
    writer.i32(options_.rank);
    writer.u64(nonce_);
    std::vector<os::Descriptor> descriptors;
    descriptors.push_back(board_.memory().file().duplicate());
    descriptors.push_back(bell_.descriptor().duplicate());
    messenger_->control(link.peer, static_cast<std::uint32_t>(Control::hello), writer.take(), std::move(descriptors));
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

void Engine::send_segment(Group& group, int peer) {
  int member = group.topology().member_of(peer);
  if (group.rings() == nullptr || member < 0 ||
      group.topology().host_of[static_cast<std::size_t>(member)] !=
          group.topology().host_of[static_cast<std::size_t>(group.topology().me)])
    return;
  wire::Writer writer;
  writer.u32(group.id());
  std::vector<os::Descriptor> file;
  file.push_back(group.rings()->memory().file().duplicate());
  messenger_->control(peer, static_cast<std::uint32_t>(Control::segment), writer.take(), std::move(file));
}

void Engine::create_group(std::uint32_t id, Topology topology) {
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.members[static_cast<std::int32_t>(id)] = topology.ranks;
  }
  all_groups_[id] = topology;
  if (topology.me < 0) return;
  Group& group = *groups_.emplace(id, std::make_unique<Group>(static_cast<Services&>(*this), id, std::move(topology)))
                      .first->second;
  std::vector<EarlyRequests> early = std::move(early_requests_);
  early_requests_.clear();
  for (EarlyRequests& requests : early) {
    if (requests.group == id)
      group.on_requests(group.topology().member_of(requests.peer), requests.epoch, std::move(requests.requests),
                        os::now_ns());
    else
      early_requests_.push_back(std::move(requests));
  }
  for (auto& [rank, progress] : left_) {  // before the group was made here
    int member = group.topology().member_of(rank);
    if (member >= 0) group.member_left(member, progress[id]);
  }
  if (group.rings() == nullptr) return;
  for (int member : group.topology().my_host()) {
    int rank = group.topology().ranks[static_cast<std::size_t>(member)];
    if (rank == options_.rank) continue;
    if (messenger_->has(rank)) send_segment(group, rank);
    auto segment = early_segments_.find({id, rank});
    if (segment == early_segments_.end()) continue;
    attach_segment(group, rank, std::move(segment->second));
    early_segments_.erase(segment);
  }
  if (id != 0) group.rings()->close_file();  // of the first group it goes out with each new link
}

void Engine::attach_segment(Group& group, int peer, os::Descriptor file) {
  int member = group.topology().member_of(peer);
  auto neighbour = neighbours_.find(peer);
  if (member < 0 || group.rings() == nullptr || neighbour == neighbours_.end())
    throw Failure(Code::internal,
                  "rank " + std::to_string(peer) + " sent memory for a group it shares with nobody here");
  group.rings()->attach(group.topology().local_of[static_cast<std::size_t>(member)], std::move(file),
                        neighbour->second.get());
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
  auto group = groups_.find(id);
  if (group == groups_.end()) return;
  group->second->close({Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
  removed_.push_back(id);
}

void Engine::on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  wire::Reader reader(payload);
  std::int64_t now = os::now_ns();
  try {
    switch (static_cast<Control>(type)) {
      case Control::hello:
        on_hello(peer, reader, std::move(descriptors));
        break;
      case Control::segment:
        if (descriptors.size() == 1) on_segment(peer, reader.u32(), std::move(descriptors[0]));
        break;
      case Control::requests:
        on_requests(peer, reader, now);
        break;
      case Control::buckets:
        on_buckets(peer, reader);
        break;
      case Control::word: {
        Group* group = group_with(reader.u32(), peer);
        std::uint64_t bits = reader.u64();
        if (group != nullptr && reader.ok()) group->on_word(group->topology().member_of(peer), bits);
        break;
      }
      case Control::leaving:
        on_leaving(peer, reader);
        break;
      case Control::abandon:
        on_abandon(peer, reader);
        break;
      case Control::share:
        on_share(peer, reader, std::move(descriptors));
        break;
      case Control::unshare:
        regions_.detach(peer, reader.u64());
        break;
      case Control::revoke: {
        Error error{static_cast<Code>(reader.i32()), "", reader.i32()};
        error.message = reader.text();
        if (reader.ok()) revoke(error);
        break;
      }
      default:
        reader.fail();
    }
  } catch (const Failure& failure) {
    return revoke(failure.error());
  }
  if (!reader.ok())
    revoke({Code::peer_lost, "rank " + std::to_string(peer) + " sent a message that cannot be read", peer});
}

Group* Engine::group_with(std::uint32_t id, int peer) {
  auto found = groups_.find(id);
  if (found == groups_.end() || found->second->topology().member_of(peer) < 0) return nullptr;
  return found->second.get();
}

void Engine::on_requests(int peer, wire::Reader& reader, std::int64_t now) {
  std::uint32_t id = reader.u32();
  std::uint32_t epoch = reader.u32();
  std::uint32_t count = reader.count(16);
  std::vector<negotiate::Request> requests;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) requests.push_back(negotiate::decode_request(reader));
  if (!reader.ok()) return;
  if (Group* group = group_with(id, peer))
    group->on_requests(group->topology().member_of(peer), epoch, std::move(requests), now);
  else if (awaits_founding(id))
    early_requests_.push_back({id, peer, epoch, std::move(requests)});  // its group is being made here
}

void Engine::on_buckets(int peer, wire::Reader& reader) {
  Group* group = group_with(reader.u32(), peer);
  std::uint32_t count = reader.count(16);
  std::vector<negotiate::Bucket> buckets;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) buckets.push_back(negotiate::decode_bucket(reader));
  if (reader.ok() && group != nullptr) group->on_buckets(std::move(buckets));
}

void Engine::on_hello(int peer, wire::Reader& reader, std::vector<os::Descriptor> descriptors) {
  std::uint32_t generation = reader.u32();
  int rank = reader.i32();
  std::uint64_t nonce = reader.u64();
  if (!reader.ok() || descriptors.size() != 2 || rank != peer) return reader.fail();
  neighbours_[peer] =
      std::make_unique<link::Neighbour>(std::move(descriptors[0]), std::move(descriptors[1]), generation, rank, nonce);
}

void Engine::on_segment(int peer, std::uint32_t id, os::Descriptor file) {
  if (Group* group = group_with(id, peer))
    attach_segment(*group, peer, std::move(file));
  else if (awaits_founding(id))
    early_segments_[{id, peer}] = std::move(file);
}

void Engine::on_leaving(int peer, wire::Reader& reader) {
  std::map<std::uint32_t, Group::Progress> progress;
  std::uint32_t count = reader.count(20);
  for (std::uint32_t i = 0; i < count; ++i) {
    Group::Progress& group = progress[reader.u32()];
    group.agreed = reader.u64();
    group.completed = reader.u64();
  }
  if (reader.ok()) left_[peer] = std::move(progress);
}

void Engine::on_left(int peer) {
  if (revoked_.failed()) return;
  std::map<std::uint32_t, Group::Progress>& progress = left_[peer];
  for (const auto& [id, group] : groups_) {
    int member = group->topology().member_of(peer);
    if (member >= 0) group->member_left(member, progress[id]);
  }
}

void Engine::on_lost(int peer, const Error& why) {
  if (left_.count(peer) != 0) return;
  Error error = why;
  if (error.rank < 0) error.rank = peer;
  revoke(error);
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
  messenger_->fail_all(revoked_);
  if (!started_) {
    std::lock_guard lock(started_mutex_);
    start_error_ = revoked_;
    started_ = true;
    started_changed_.notify_all();
  }
}

void Engine::tell_revocation() {
  // To the others our lack of memory is the loss of a rank, which they may survive.
  const bool mine = revoked_.code == Code::no_memory && revoked_.rank < 0;
  wire::Writer writer;
  writer.i32(static_cast<std::int32_t>(mine ? Code::revoked : revoked_.code));
  writer.i32(mine ? options_.rank : revoked_.rank);
  writer.text(mine ? "rank " + std::to_string(options_.rank) + " " + revoked_.message : revoked_.message);
  std::vector<std::byte> message = writer.take();
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && peer != revoked_.rank && messenger_->has(peer))
      messenger_->control(peer, static_cast<std::uint32_t>(Control::revoke), message);
  messenger_->flush();
}

void Engine::begin_leaving() {
  leaving_ = true;
  Error error = revoked_.failed() ? revoked_ : Error{Code::shut_down, "Farandole has been shut down", -1};
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.ended = error;
  }
  wire::Writer writer;
  writer.u32(static_cast<std::uint32_t>(groups_.size()));
  for (const auto& [id, group] : groups_) {
    writer.u32(id);
    writer.u64(group->progress().agreed);
    writer.u64(group->progress().completed);
  }
  std::vector<std::byte> message = writer.take();
  for (int peer = 0; peer < options_.size; ++peer)
    if (peer != options_.rank && messenger_->has(peer))
      messenger_->control(peer, static_cast<std::uint32_t>(Control::leaving), message);
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
