// The engine as other threads see it: links, start, submission, waiting, leaving.
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

constexpr std::size_t kInlineBytes = 64 << 10;  // submissions up to here are begun by the submitter itself
constexpr std::int64_t kLongestWait = 100;      // milliseconds until a call comes back to its binding

std::string unnamed_prefix(Kind kind) {
  constexpr const char* names[] = {"allreduce", "allgather", "broadcast",    "alltoall", "reducescatter", "barrier",
                                   "join",      "add_group", "remove_group", "send",     "receive",       "tune"};
  return std::string(names[static_cast<int>(kind)]) + ".noname.";
}

bool point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

constexpr std::int64_t kLookAtCores = 100'000;        // between two looks at who shares this core
constexpr std::int64_t kNameLingers = 1'000'000'000;  // nanoseconds that the last one's name stays taken

}  // namespace

bool beside(const Operation& operation) {
  Kind kind = operation.request.kind;
  return point_to_point(kind) || ((kind == Kind::add_group || kind == Kind::remove_group) && operation.tag != 0);
}

Engine::Engine(Options options)
    : options_(std::move(options)),
      tuning_(options_.tuning),
      spin_ns_(options_.tuning.spin_ns),
      fork_depth_(os::fork_depth()),
      results_(std::make_shared<Results>([this](const os::SharedMemory& memory) {
        share(memory.file().duplicate(), memory.data(), memory.bytes(), link::Use::results);
      })),
      nonce_(static_cast<std::uint64_t>(os::now_ns()) * 0x9e3779b97f4a7c15ull ^ reinterpret_cast<std::uintptr_t>(this)),
      board_(options_.generation, options_.rank, nonce_) {
  const int here = options_.hosts[static_cast<std::size_t>(options_.rank)];
  crowded_ = std::count(options_.hosts.begin(), options_.hosts.end(), here) > os::usable_cores();
  link::MessengerOptions links;
  links.generation = options_.generation;
  links.engine = static_cast<Services*>(this);
  for (int host : options_.hosts) links.streams.push_back(host == here ? 1 : options_.tcp_streams);
  messenger_ = std::make_unique<link::Messenger>(options_.rank, options_.size, poller_,
                                                 static_cast<link::Listener&>(*this), std::move(links));
  messenger_->wanted = [this](int peer) { events_.push({EventKind::link_wanted, peer, Level::info, ""}); };
  poller_.add(bell_.descriptor().get(), kBellKey);
  std::vector<int> everyone(static_cast<std::size_t>(options_.size));
  for (int rank = 0; rank < options_.size; ++rank) everyone[static_cast<std::size_t>(rank)] = rank;
  create_group(0, Topology::make(std::move(everyone), options_.hosts, options_.rank));
}

Engine::~Engine() { leave(0); }

bool Engine::forked() const { return os::fork_depth() != fork_depth_; }

Error Engine::add_link(int peer, os::Descriptor stream, link::StreamKind kind) {
  if (peer < 0 || peer >= options_.size || peer == options_.rank)
    return {Code::invalid_argument, "there is no rank " + std::to_string(peer) + " to link with"};
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.links.push_back({peer, std::move(stream), kind});
    inbox_.full.store(true, std::memory_order_release);
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
  auto slice = std::chrono::milliseconds(std::min(timeout_ms, kLongestWait));
  if (started_changed_.wait_for(lock, slice, [&] { return started_; })) return start_error_;
  lock.unlock();
  if (timeout_ms > 0) return {Code::in_progress, "", -1};
  std::lock_guard seat(seat_);
  std::string missing;
  for (int rank : neighbours_missing()) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  return {Code::timed_out, "ranks on this host have not exchanged their memory in time; missing: " + missing};
}

Error Engine::check(const Operation& operation) const {
  auto members = inbox_.members.find(operation.group);
  if (members == inbox_.members.end())
    return {Code::invalid_argument, "there is no process set " + std::to_string(operation.group)};
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
  if (beside(operation)) {
    if (operation.request.kind == Kind::remove_group) {
      if (operation.request.splits.size() == 1 && operation.request.splits[0] >= kFirstFounded) return {};
      return {Code::invalid_argument, "this way only a group that its members have made can be removed"};
    }
    if (operation.tag >= kFirstFounded && operation.tag < kLastFounded) return {};
    return {Code::invalid_argument, "a group that its members make has a number from " + std::to_string(kFirstFounded) +
                                        " to " + std::to_string(kLastFounded - 1)};
  }
  if (operation.request.kind == Kind::tune) {
    Tuning tuning;
    bool measuring = false;
    if (operation.group != 0 || options_.rank != 0)
      return {Code::invalid_argument, "only rank 0 tunes, and for everyone"};
    return Tuning::read(operation.request.splits, tuning, measuring);
  }
  // Errors of other codes are the contract's on all ranks: the coordinator finds them again and tells everybody.
  Error error = negotiate::validate_alone(operation.request, ranks);
  if (error.code == Code::invalid_argument) return error;
  if (!operation.request.unnamed && name_taken(operation))
    return {Code::invalid_argument,
            "Requested to allreduce, allgather, or broadcast a tensor whose name is already pending: " +
                operation.request.name + ". Wait for the first one, or give the second another name."};
  return {};
}

// By an operation that is under way, or by the last one that ended while nobody has looked at it: whether two of a name
// meet must not depend on how quick the first one was.
bool Engine::name_taken(const Operation& operation) const {
  const std::string& name = operation.request.name;
  auto names = inbox_.names.find(operation.group);
  if (names != inbox_.names.end() && names->second.count(name) != 0) return true;
  const auto& last = inbox_.last;
  const std::int64_t handle = last.handle.load(std::memory_order_relaxed);
  if (handle == 0 || last.group != operation.group || last.name.empty() || last.name.value() != name) return false;
  if (os::now_ns() - last.at > kNameLingers) return false;
  OperationPtr first = handles_.find(handle);  // none: it was released
  return first != nullptr && !first->seen.load(std::memory_order_relaxed);
}

Error Engine::submit(std::vector<OperationPtr> operations, bool bundle, bool prompt) {
  std::size_t bytes = 0;
  {
    std::lock_guard lock(inbox_.mutex);
    if (inbox_.ended.failed()) {
      // Their outcomes say what happened and whom to blame.
      std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
      for (const OperationPtr& operation : operations) {
        operation->handle = handle++;
        operation->error = inbox_.ended;
        handles_.insert(operation);
        handles_.finish(*operation);
      }
      return {};
    }
    std::unordered_set<std::string_view> together;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      Error error = check(*operations[i]);
      bool again = !operations[i]->request.unnamed && !together.insert(operations[i]->request.name).second;
      if (again && !error.failed() && !beside(*operations[i]))
        error = {Code::invalid_argument, "two tensors of one group are both named " + operations[i]->request.name};
      if (error.failed()) return error;
    }
    const std::size_t before = inbox_.submitted.size();
    try {
      bytes = enter(operations, bundle);
    } catch (...) {  // no memory: as if nothing had been asked
      inbox_.submitted.resize(before);
      for (const OperationPtr& operation : operations) take_back(*operation);
      throw;
    }
    inbox_.full.store(true, std::memory_order_release);
  }
  if (prompt) return {};
  if (bytes <= kInlineBytes) {
    if (Seat seat(*this, std::try_to_lock); seat) {
      drive();
      return {};
    }
  }
  wake();
  return {};
}

// Into the inbox, with its mutex held. How many bytes they have.
std::size_t Engine::enter(const std::vector<OperationPtr>& operations, bool bundle) {
  std::size_t bytes = 0;
  std::int64_t now = os::now_ns();
  std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
  for (const OperationPtr& operation : operations) {
    negotiate::Request& request = operation->request;
    operation->submitted_ns = now;
    bytes += request.bytes();
    if (!beside(*operation)) {
      if (request.unnamed) {
        std::uint64_t& count = inbox_.unnamed[{operation->group, request.kind}];
        request.name = unnamed_prefix(request.kind) + std::to_string(count + 1);
        ++count;
      }
      operation->handle = handle;  // from here on take_back() undoes what there is of it
      inbox_.names[operation->group].insert(request.name);
      if (bundle) {
        request.bundle = operations.front()->request.name;
        request.bundle_size = static_cast<std::uint32_t>(operations.size());
      }
    }
    operation->handle = handle++;
    handles_.insert(operation);
    FARANDOLE_FAILPOINT(static_cast<Services*>(this), request.kind, "submit");
    inbox_.submitted.push_back(operation);
  }
  return bytes;
}

void Engine::take_back(const Operation& operation) {
  if (operation.handle == 0) return;  // it was not its turn yet
  handles_.release(operation.handle);
  if (beside(operation)) return;
  auto names = inbox_.names.find(operation.group);
  if (names != inbox_.names.end()) names->second.erase(operation.request.name);
  if (operation.request.unnamed) --inbox_.unnamed.at({operation.group, operation.request.kind});
}

bool Engine::poll(const OperationPtr& operation) {
  if (is_done(*operation)) return true;
  await(*operation);
  if (Seat seat(*this, std::try_to_lock); seat) {
    if (!drive()) pause(Whose::users);
  } else {
    wake();
  }
  return is_done(*operation);
}

// Asked by the user, who then knows.
bool Engine::is_done(Operation& operation) {
  const bool done = operation.done.load(std::memory_order_acquire) != 0;
  if (done) operation.seen.store(true, std::memory_order_relaxed);
  return done;
}

void Engine::await(const Operation& operation) {
  if (beside(operation)) return;
  std::lock_guard lock(inbox_.mutex);
  inbox_.awaited.emplace_back(operation.group, operation.handle);
  inbox_.full.store(true, std::memory_order_release);
}

bool Engine::wait(const OperationPtr& operation, std::int64_t timeout_ms, bool aside) {
  const std::atomic<std::uint32_t>& done = operation->done;
  if (is_done(*operation)) return true;
  await(*operation);
  std::int64_t now = os::now_ns();
  const std::int64_t began = now;
  std::int64_t end = now + std::min(timeout_ms, kLongestWait) * 1'000'000;
  const bool slow = operation->slow.load(std::memory_order_relaxed);
  const std::int64_t patience = spin_ns_.load(std::memory_order_relaxed);
  const std::int64_t little = std::min(kShortSpin, patience);
  if (aside) {
    wake();
  } else if (Seat seat(*this, std::try_to_lock); seat) {
    std::int64_t moved_at = now;
    while (done.load(std::memory_order_acquire) == 0 && now < end) {
      bool moved = drive();
      now = now_;
      if (moved) {
        moved_at = now;
        continue;
      }
      if (now - moved_at > (slow || waits_for_a_wire() ? little : patience)) break;
      pause(Whose::users);
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
  if (!aside && timeout_ms >= kLongestWait) operation->slow.store(true, std::memory_order_relaxed);
  return false;
}

void Engine::leave(std::int64_t linger_ms) {
  if (forked()) return;
  if (running_.load(std::memory_order_acquire)) {
    {
      std::lock_guard lock(inbox_.mutex);
      inbox_.leave = true;
      inbox_.full.store(true, std::memory_order_release);
    }
    bell_.ring();
    {
      std::unique_lock lock(started_mutex_);
      started_changed_.wait_for(lock, std::chrono::milliseconds(std::max<std::int64_t>(linger_ms, 100)),
                                [&] { return flushed_; });
    }
    running_.store(false, std::memory_order_release);
    bell_.ring();
    thread_.join();
  }
  std::lock_guard seat(seat_);
  if (messenger_ == nullptr) return;
  if (!leaving_) begin_leaving();
  // The object may live on for results that are still in use; nothing else of it does.
  groups_.clear();
  early_segments_.clear();
  neighbours_.clear();
  far_bells_.clear();
  regions_ = {};
  processes_.clear();
  messenger_.reset();
  trace_.stop();
  events_.close();
  handles_.close();
  results_->close();
  std::lock_guard lock(inbox_.mutex);
  inbox_.sharings.clear();
}

void Engine::revoke_from_outside(const Error& error) {
  {
    std::lock_guard lock(inbox_.mutex);
    if (!inbox_.revoke.failed()) inbox_.revoke = error;
    inbox_.full.store(true, std::memory_order_release);
  }
  wake();
}

std::int64_t Engine::counter(int which) {
  return which >= 0 && which < kCounters ? counters_[static_cast<std::size_t>(which)].load(std::memory_order_relaxed)
                                         : -1;
}

Tuning Engine::tuned() {
  std::lock_guard seat(seat_);
  return tuning_;
}

void Engine::set_trace(bool on, bool mark_plans) {
  std::lock_guard seat(seat_);
  if (on)
    trace_.start(os::now_ns(), os::epoch_us(), mark_plans);
  else
    trace_.stop();
}

// Rings only when nobody drives: a driver looks at the inbox before it leaves the seat.
void Engine::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed)) bell_.ring();
}

// Between two looks that found nothing.
void Engine::pause(Whose thread) {
  if (!crowded_ && now_ - looked_at_cores_ > kLookAtCores) look_at_cores(thread);
  if (crowded_ || sharing_)
    std::this_thread::yield();
  else
    os::relax();
}

// Schedulers put who was woken on the core of who woke it, and leave both there while a third keeps the other core
// busy. Then each would look in vain for what the other cannot do meanwhile: our own thread goes where no rank is; one
// of the user's yields, because where it may run is the user's to say.
void Engine::look_at_cores(Whose thread) {
  looked_at_cores_ = now_;
  const int core = os::current_core();
  board_.on_core(core);
  bool shared = false;
  std::vector<int> taken{core};
  for (const auto& [rank, neighbour] : neighbours_) {
    taken.push_back(neighbour->core());
    shared = shared || taken.back() == core;
  }
  sharing_ = shared && (thread == Whose::users || !os::leave_cores(taken));
}

void Engine::log(Level level, std::string text) { events_.push({EventKind::log, -1, level, std::move(text)}); }

void Engine::finish(Operation& operation, const Error& error) {
  // A loss explains whatever else went wrong because of it.
  operation.error = error.failed() && revoked_.failed() ? revoked_ : error;
  if (error.failed()) operation.owned.get_deleter().retire();
  if (!beside(operation)) {
    std::lock_guard lock(inbox_.mutex);
    auto names = inbox_.names.find(operation.group);  // none: the group was removed
    inbox_.last.name =
        names == inbox_.names.end() ? Inbox::Names::node_type() : names->second.extract(operation.request.name);
    inbox_.last.group = operation.group;
    inbox_.last.at = now_;
    inbox_.last.handle.store(operation.handle, std::memory_order_relaxed);
  } else {
    inbox_.last.handle.store(0, std::memory_order_relaxed);
  }
  handles_.finish(operation);
}

void Engine::count_unnamed_anew(std::uint32_t id) {
  std::lock_guard lock(inbox_.mutex);
  std::erase_if(inbox_.unnamed, [&](const auto& entry) { return entry.first.first == static_cast<std::int32_t>(id); });
}

void Engine::tune(const Tuning& tuning, std::uint64_t sequence) {
  tuning_ = tuning;
  spin_ns_.store(tuning.spin_ns, std::memory_order_relaxed);
  messenger_->spread(0, sequence, tuning.streams);
}

void Engine::revoke(const Error& error) {
  if (revoked_.failed() || leaving_) return;
  revoked_ = error;
  revoking_ = true;
}

}  // namespace farandole
