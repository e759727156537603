// The engine as other threads use it: links, start, submission, waiting, leaving.
// Touches every room below it.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "base/failpoint.h"
#include "os/clock.h"
#include "os/fork.h"

namespace farandole {
namespace {

constexpr std::size_t kInlineBytes = 64 << 10;  // for requests up to this size the submitter itself drives
constexpr std::int64_t kMaxWaitMs = 100;        // milliseconds until a call returns to its binding

std::string unnamed_prefix(Kind kind) {
  constexpr const char* names[] = {"allreduce", "allgather", "broadcast",    "alltoall", "reducescatter", "barrier",
                                   "join",      "add_group", "remove_group", "send",     "receive",       "tune"};
  return std::string(names[static_cast<int>(kind)]) + ".noname.";
}

bool point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

constexpr std::int64_t kCheckCoresEvery = 100'000;     // between two checks whether another rank uses this core
constexpr std::int64_t kNameTakenFor = 1'000'000'000;  // nanoseconds for which the last operation's name stays taken

}  // namespace

bool bypasses_negotiation(const Operation& operation) {
  Kind kind = operation.request.kind;
  return point_to_point(kind) || ((kind == Kind::add_group || kind == Kind::remove_group) && operation.tag != 0);
}

Engine::Engine(Options options)
    : options_(std::move(options)),
      tuning_(options_.tuning),
      spin_ns_(options_.tuning.spin_ns),
      fork_depth_(os::fork_depth()),
      results_(std::make_shared<Results>([this](const os::SharedMemory& memory) {
        share(memory.file().duplicate(), memory.data(), memory.bytes(), link::RegionUse::results);
      })),
      nonce_(static_cast<std::uint64_t>(os::now_ns()) * 0x9e3779b97f4a7c15ull ^ reinterpret_cast<std::uintptr_t>(this)),
      status_page_(options_.generation, options_.rank, nonce_) {
  const int here = options_.hosts[static_cast<std::size_t>(options_.rank)];
  oversubscribed_ = std::count(options_.hosts.begin(), options_.hosts.end(), here) > os::usable_cores();
  link::MessengerOptions links;
  links.generation = options_.generation;
  links.engine = static_cast<Services*>(this);
  for (int host : options_.hosts) links.streams.push_back(host == here ? 1 : options_.tcp_streams);
  messenger_ = std::make_unique<link::Messenger>(options_.rank, options_.size, poller_,
                                                 static_cast<link::Listener&>(*this), std::move(links));
  messenger_->request_link = [this](int peer) { events_.push({EventKind::link_wanted, peer, Level::info, ""}); };
  poller_.add(wakeup_.descriptor().get(), kWakeupKey);
  std::vector<int> everyone(static_cast<std::size_t>(options_.size));
  for (int rank = 0; rank < options_.size; ++rank) everyone[static_cast<std::size_t>(rank)] = rank;
  create_group(0, Topology::make(std::move(everyone), options_.hosts, options_.rank));
}

Engine::~Engine() { leave(0); }

bool Engine::forked() const { return os::fork_depth() != fork_depth_; }

Error Engine::add_link(int peer, os::Descriptor stream, link::StreamKind kind) {
  if (peer < 0 || peer >= options_.size || peer == options_.rank)
    return {Code::invalid_argument, "cannot add a link to rank " + std::to_string(peer) + ": ranks are 0 to " +
                                        std::to_string(options_.size - 1)};
  {
    std::lock_guard lock(commands_.mutex);
    commands_.links.push_back({peer, std::move(stream), kind});
    commands_.pending.store(true, std::memory_order_release);
  }
  wake();
  return {};
}

Error Engine::start(std::int64_t timeout_ms) {
  if (!thread_.joinable()) {
    running_.store(true, std::memory_order_release);
    thread_ = os::start_thread("farandole", [this] { thread_main(); });
  }
  std::unique_lock lock(started_mutex_);
  auto slice = std::chrono::milliseconds(std::min(timeout_ms, kMaxWaitMs));
  if (started_changed_.wait_for(lock, slice, [&] { return started_; })) return start_error_;
  lock.unlock();
  if (timeout_ms > 0) return {Code::in_progress, "", -1};
  std::lock_guard driver(driver_mutex_);
  std::string missing;
  for (int rank : missing_local_peers()) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  return {Code::timed_out, "the ranks of this host did not exchange their shared memory in time; missing ranks: " +
                               missing + ". Check that they have started, or raise the start timeout."};
}

Error Engine::check(const Operation& operation) const {
  auto members = commands_.members.find(operation.group);
  if (members == commands_.members.end())
    return {Code::invalid_argument, "process set " + std::to_string(operation.group) + " does not exist"};
  const std::vector<int>& ranks = members->second;
  if (!std::binary_search(ranks.begin(), ranks.end(), options_.rank))
    return {Code::invalid_argument,
            "rank " + std::to_string(options_.rank) + " is not in process set " + std::to_string(operation.group)};
  if (point_to_point(operation.request.kind)) {
    bool anybody = operation.request.kind == Kind::receive && operation.peer == kAnySource;
    if (!anybody && !std::binary_search(ranks.begin(), ranks.end(), operation.peer))
      return {Code::invalid_argument,
              "rank " + std::to_string(operation.peer) + " is not in process set " + std::to_string(operation.group)};
    return {};
  }
  if (bypasses_negotiation(operation)) {
    if (operation.request.kind == Kind::remove_group) {
      if (operation.request.splits.size() == 1 && operation.request.splits[0] >= kFirstMemberGroup) return {};
      return {Code::invalid_argument,
              "only a process set that its members have created can be left or aborted by one member"};
    }
    if (operation.tag >= kFirstMemberGroup && operation.tag < kLastMemberGroup) return {};
    return {Code::invalid_argument, "a process set that its members create needs an ID from " +
                                        std::to_string(kFirstMemberGroup) + " to " +
                                        std::to_string(kLastMemberGroup - 1)};
  }
  if (operation.request.kind == Kind::tune) {
    Tuning tuning;
    bool measuring = false;
    if (operation.group != 0 || options_.rank != 0)
      return {Code::invalid_argument, "only rank 0 can change the tuning; it applies to all ranks"};
    return Tuning::read(operation.request.splits, tuning, measuring);
  }
  // Other errors must be equal on all ranks (docs: Horovod's contract). The coordinator finds them again and sends them
  // to all.
  Error error = negotiate::validate_alone(operation.request, ranks);
  if (error.code == Code::invalid_argument) return error;
  if (!operation.request.unnamed && name_taken(operation))
    return {Code::invalid_argument,
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
            "currently being processed: " +
                operation.request.name + ". Wait for the first one, or give this one another name."};
  return {};
}

// Whether the name belongs to a pending operation, or to the last one that ended and whose end the user has not seen:
// whether two operations of one name collide must not depend on how fast the first one was.
bool Engine::name_taken(const Operation& operation) const {
  const std::string& name = operation.request.name;
  auto names = commands_.names.find(operation.group);
  if (names != commands_.names.end() && names->second.count(name) != 0) return true;
  const auto& last = commands_.last;
  const std::int64_t handle = last.handle.load(std::memory_order_relaxed);
  if (handle == 0 || last.group != operation.group || last.name.empty() || last.name.value() != name) return false;
  if (os::now_ns() - last.at > kNameTakenFor) return false;
  OperationPtr first = handles_.find(handle);  // null: it was released
  return first != nullptr && !first->seen.load(std::memory_order_relaxed);
}

Error Engine::submit(std::vector<OperationPtr> operations, bool bundle, bool prompt) {
  std::size_t bytes = 0;
  {
    std::lock_guard lock(commands_.mutex);
    if (commands_.ended.failed()) {
      // The outcomes say what happened and which rank caused it.
      std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
      for (const OperationPtr& operation : operations) {
        operation->handle = handle++;
        operation->error = commands_.ended;
        handles_.insert(operation);
        handles_.finish(*operation);
      }
      return {};
    }
    std::unordered_set<std::string_view> together;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      Error error = check(*operations[i]);
      bool again = operations.size() > 1 && !operations[i]->request.unnamed &&
                   !together.insert(operations[i]->request.name).second;
      if (again && !error.failed() && !bypasses_negotiation(*operations[i]))
        error = {Code::invalid_argument, "two tensors of one group have the same name " + operations[i]->request.name};
      if (error.failed()) return error;
    }
    const std::size_t before = commands_.submitted.size();
    try {
      bytes = enter(operations, bundle);
    } catch (...) {  // out of memory: undo everything
      commands_.submitted.resize(before);
      for (const OperationPtr& operation : operations) withdraw(*operation);
      throw;
    }
    commands_.pending.store(true, std::memory_order_release);
  }
  if (prompt) return {};
  if (bytes <= kInlineBytes) {
    if (DriverLock driver(*this, std::try_to_lock); driver) {
      drive();
      return {};
    }
  }
  wake();
  return {};
}

// Registers the operations, with the commands' mutex held. Returns their size in bytes.
std::size_t Engine::enter(const std::vector<OperationPtr>& operations, bool bundle) {
  std::size_t bytes = 0;
  std::int64_t now = os::now_ns();
  std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
  for (const OperationPtr& operation : operations) {
    negotiate::Request& request = operation->request;
    operation->submitted_ns = now;
    bytes += request.bytes();
    if (!bypasses_negotiation(*operation)) {
      if (request.unnamed) {
        std::uint64_t& count = commands_.unnamed[{operation->group, request.kind}];
        request.name = unnamed_prefix(request.kind) + std::to_string(count + 1);
        ++count;
      }
      operation->handle = handle;  // from here on withdraw() can undo it
      commands_.names[operation->group].insert(request.name);
      if (bundle) {
        request.bundle = operations.front()->request.name;
        request.bundle_size = static_cast<std::uint32_t>(operations.size());
      }
    }
    operation->handle = handle++;
    handles_.insert(operation);
    FARANDOLE_FAILPOINT(static_cast<Services*>(this), request.kind, "submit");
    commands_.submitted.push_back(operation);
  }
  return bytes;
}

void Engine::withdraw(const Operation& operation) {
  if (operation.handle == 0) return;  // it was not registered yet
  handles_.release(operation.handle);
  if (bypasses_negotiation(operation)) return;
  auto names = commands_.names.find(operation.group);
  if (names != commands_.names.end()) names->second.erase(operation.request.name);
  if (operation.request.unnamed) --commands_.unnamed.at({operation.group, operation.request.kind});
}

bool Engine::poll(const OperationPtr& operation) {
  if (is_done(*operation)) return true;
  await(*operation);
  if (DriverLock driver(*this, std::try_to_lock); driver) {
    if (!drive()) pause(DriverThread::user);
  } else {
    wake();
  }
  return is_done(*operation);
}

// Called for the user, who has then seen the end.
bool Engine::is_done(Operation& operation) {
  const bool done = operation.done.load(std::memory_order_acquire) != 0;
  if (done) operation.seen.store(true, std::memory_order_relaxed);
  return done;
}

void Engine::await(const Operation& operation) {
  if (bypasses_negotiation(operation)) return;
  std::lock_guard lock(commands_.mutex);
  commands_.awaited.emplace_back(operation.group, operation.handle);
  commands_.pending.store(true, std::memory_order_release);
}

bool Engine::wait(const OperationPtr& operation, std::int64_t timeout_ms, bool aside) {
  const std::atomic<std::uint32_t>& done = operation->done;
  if (is_done(*operation)) return true;
  await(*operation);
  std::int64_t now = os::now_ns();
  const std::int64_t began = now;
  std::int64_t end = now + std::min(timeout_ms, kMaxWaitMs) * 1'000'000;
  const bool slow = operation->slow.load(std::memory_order_relaxed);
  const std::int64_t patience = spin_ns_.load(std::memory_order_relaxed);
  const std::int64_t little = std::min(kShortSpin, patience);
  if (aside) {
    wake();
  } else if (DriverLock driver(*this, std::try_to_lock); driver) {
    std::int64_t moved_at = now;
    while (done.load(std::memory_order_acquire) == 0 && now < end) {
      bool moved = drive();
      now = now_;
      if (moved) {
        moved_at = now;
        continue;
      }
      if (now - moved_at > (slow || waits_for_network() ? little : patience)) break;
      pause(DriverThread::user);
    }
  } else {
    wake();
  }
  if (done.load(std::memory_order_acquire) == 0 && now < end) {
    const int waiting = aside ? 0 : 1;
    waiters_.fetch_add(waiting, std::memory_order_relaxed);
    operation->sleepers.fetch_add(1, std::memory_order_seq_cst);
    os::futex_wait(&done, 0, end - now);
    operation->sleepers.fetch_sub(1, std::memory_order_relaxed);
    waiters_.fetch_sub(waiting, std::memory_order_relaxed);
    now = os::now_ns();
  }
  counters_[static_cast<int>(Counter::waited_ns)].fetch_add(now - began, std::memory_order_relaxed);
  if (is_done(*operation)) return true;
  if (!aside && timeout_ms >= kMaxWaitMs) operation->slow.store(true, std::memory_order_relaxed);
  return false;
}

bool Engine::leave(std::int64_t linger_ms) {
  if (forked()) return true;
  if (running_.load(std::memory_order_acquire)) {
    {
      std::lock_guard lock(commands_.mutex);
      commands_.leave = true;
      commands_.pending.store(true, std::memory_order_release);
    }
    wakeup_.notify();
    {
      std::unique_lock lock(started_mutex_);
      const auto flushed = [&] { return flushed_; };
      if (!started_changed_.wait_for(lock, std::chrono::milliseconds(kMaxWaitMs), flushed) && linger_ms > kMaxWaitMs) {
        return false;
      }
    }
    running_.store(false, std::memory_order_release);
    wakeup_.notify();
    thread_.join();
  }
  std::lock_guard driver(driver_mutex_);
  if (messenger_ == nullptr) return true;
  if (!leaving_) begin_leaving();
  // The object may outlive the engine, for results that are still in use; everything else ends here.
  groups_.clear();
  early_segments_.clear();
  local_peers_.clear();
  peer_wakeups_.clear();
  regions_ = {};
  processes_.clear();
  messenger_.reset();
  trace_.stop();
  events_.close();
  handles_.close();
  results_->close();
  std::lock_guard lock(commands_.mutex);
  commands_.sharings.clear();
  return true;
}

void Engine::revoke_from_outside(const Error& error) {
  {
    std::lock_guard lock(commands_.mutex);
    if (!commands_.revoke.failed()) commands_.revoke = error;
    commands_.pending.store(true, std::memory_order_release);
  }
  wake();
}

std::int64_t Engine::counter(int which) {
  return which >= 0 && which < kCounters ? counters_[static_cast<std::size_t>(which)].load(std::memory_order_relaxed)
                                         : -1;
}

Tuning Engine::tuned() {
  std::lock_guard driver(driver_mutex_);
  return tuning_;
}

void Engine::set_trace(bool on, bool mark_plans) {
  std::lock_guard driver(driver_mutex_);
  if (on)
    trace_.start(os::now_ns(), os::epoch_us(), mark_plans);
  else
    trace_.stop();
}

// Wakes the engine's thread only when nobody drives: a driver checks the commands before it stops.
void Engine::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed)) wakeup_.notify();
}

// Between two checks that found nothing.
void Engine::pause(DriverThread thread) {
  if (!oversubscribed_ && now_ - checked_cores_at_ > kCheckCoresEvery) check_shared_cores(thread);
  if (oversubscribed_ || shares_core_)
    std::this_thread::yield();
  else
    os::relax();
}

// A scheduler may place a woken thread on the core of its waker, and leave both there while a third thread keeps the
// other core busy. Then each would spin while the other cannot run. So the engine's own thread moves to a core without
// a rank; a user's thread only yields, because its affinity is the user's choice.
void Engine::check_shared_cores(DriverThread thread) {
  checked_cores_at_ = now_;
  const int core = os::current_core();
  status_page_.set_core(core);
  bool shared = false;
  std::vector<int> taken{core};
  for (const auto& [rank, local_peer] : local_peers_) {
    taken.push_back(local_peer->core());
    shared = shared || taken.back() == core;
  }
  shares_core_ = shared && (thread == DriverThread::user || !os::avoid_cores(taken));
}

void Engine::log(Level level, std::string text) { events_.push({EventKind::log, -1, level, std::move(text)}); }

void Engine::finish(Operation& operation, const Error& error) {
  // A lost peer is the root cause of errors that follow from it.
  operation.error = error.failed() && revoked_.failed() ? revoked_ : error;
  if (error.failed()) operation.owned.get_deleter().retire();
  if (!bypasses_negotiation(operation)) {
    std::lock_guard lock(commands_.mutex);
    auto names = commands_.names.find(operation.group);  // none: the group was removed
    commands_.last.name =
        names == commands_.names.end() ? Commands::Names::node_type() : names->second.extract(operation.request.name);
    commands_.last.group = operation.group;
    commands_.last.at = now_;
    commands_.last.handle.store(operation.handle, std::memory_order_relaxed);
  } else {
    commands_.last.handle.store(0, std::memory_order_relaxed);
  }
  handles_.finish(operation);
}

void Engine::restart_unnamed_numbers(std::uint32_t id) {
  std::lock_guard lock(commands_.mutex);
  std::erase_if(commands_.unnamed,
                [&](const auto& entry) { return entry.first.first == static_cast<std::int32_t>(id); });
}

void Engine::tune(const Tuning& tuning, std::uint64_t sequence) {
  tuning_ = tuning;
  spin_ns_.store(tuning.spin_ns, std::memory_order_relaxed);
  messenger_->limit_streams(0, sequence, tuning.streams);
}

void Engine::revoke(const Error& error) {
  if (revoked_.failed() || leaving_) return;
  revoked_ = error;
  revoking_ = true;
}

}  // namespace farandole
