// The engine as other threads use it: links, start, submission, waiting, leaving.
// Touches every room below it.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>

#include "os/clock.h"
#include "os/fork.h"

namespace farandole {
namespace {

constexpr std::size_t kInlineBytes = 64 << 10;  // for requests up to this size the submitter itself drives
constexpr std::int64_t kMaxWaitMs = 100;        // milliseconds until a call returns to its binding

}  // namespace

Engine::Engine(Options options, os::Descriptor record)
    : options_(std::move(options)),
      tuning_(options_.tuning),
      fork_depth_(os::fork_depth()),
      waker_(std::make_shared<cuda::Waker>([this] { driver_.notify(); })),
      results_(std::make_shared<Results>([this](const os::SharedMemory& memory) {
        share(memory.file().duplicate(), memory.data(), memory.bytes(), link::RegionUse::results);
      })),
      recorder_(std::move(record), options_.rank, options_.size, options_.generation),
      commands_(options_, handles_, recorder_, this),
      nonce_(static_cast<std::uint64_t>(os::now_ns()) * 0x9e3779b97f4a7c15ull ^ reinterpret_cast<std::uintptr_t>(this)),
      status_page_(options_.generation, options_.rank, nonce_),
      transfers_(*this),
      groups_(*this, commands_, transfers_, local_peers_),
      driver_(*this, poller_, status_page_, local_peers_, counters_[Counter::wake_ups],
              std::count(options_.hosts.begin(), options_.hosts.end(),
                         options_.hosts[static_cast<std::size_t>(options_.rank)]) > os::usable_cores(),
              options_.tuning.spin_ns) {
  link::MessengerOptions links;
  links.generation = options_.generation;
  links.engine = static_cast<Services*>(this);
  for (int rank = 0; rank < options_.size; ++rank)
    links.streams.push_back(options_.on_my_host(rank) ? 1 : options_.tcp_streams);
  messenger_ = std::make_unique<link::Messenger>(options_.rank, options_.size, poller_,
                                                 static_cast<link::Listener&>(*this), std::move(links));
  messenger_->request_link = [this](int peer) { events_.push({EventKind::link_wanted, peer, Level::info, ""}); };
  poller_.add(driver_.descriptor().get(), kWakeupKey);
  groups_.create_everyone();
}

Engine::~Engine() { leave(0); }

bool Engine::forked() const { return os::fork_depth() != fork_depth_; }

Error Engine::add_link(int peer, os::Descriptor stream, link::StreamKind kind) {
  if (peer < 0 || peer >= options_.size || peer == options_.rank)
    return {Code::invalid_argument, "cannot add a link to rank " + std::to_string(peer) + ": ranks are 0 to " +
                                        std::to_string(options_.size - 1)};
  commands_.add_link({peer, std::move(stream), kind});
  driver_.wake();
  return {};
}

Error Engine::start(std::int64_t timeout_ms) {
  driver_.start();
  std::unique_lock lock(started_mutex_);
  auto slice = std::chrono::milliseconds(std::min(timeout_ms, kMaxWaitMs));
  if (started_changed_.wait_for(lock, slice, [&] { return started_; })) return start_error_;
  lock.unlock();
  if (timeout_ms > 0) return {Code::in_progress, "", -1};
  std::lock_guard driver(driver_.mutex());
  std::string missing;
  for (int rank : missing_local_peers()) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  return {Code::timed_out, "the ranks of this host did not exchange their shared memory in time; missing ranks: " +
                               missing + ". Check that they have started, or raise the start timeout."};
}

Error Engine::submit(std::vector<OperationPtr> operations, bool bundle, bool prompt) {
  const Commands::Submitted submitted = commands_.submit(operations, bundle);
  if (!submitted.queued || prompt) return submitted.error;
  if (submitted.bytes <= kInlineBytes) {
    if (Driver::Lock lock(driver_, std::try_to_lock); lock) {
      driver_.drive();
      return {};
    }
  }
  driver_.wake();
  return {};
}

namespace {

// Called for the user, who has then seen the end.
bool is_done(Operation& operation) {
  const bool done = operation.done.load(std::memory_order_acquire) != 0;
  if (done) operation.seen.store(true, std::memory_order_relaxed);
  return done;
}

}  // namespace

bool Engine::poll(const OperationPtr& operation) {
  if (is_done(*operation)) return true;
  if (!bypasses_negotiation(*operation)) commands_.await(*operation);
  if (Driver::Lock lock(driver_, std::try_to_lock); lock) {
    if (!driver_.drive()) driver_.pause(Driver::Thread::user);
  } else {
    driver_.wake();
  }
  return is_done(*operation);
}

bool Engine::wait(const OperationPtr& operation, std::int64_t timeout_ms, bool passive) {
  if (is_done(*operation)) return true;
  if (!bypasses_negotiation(*operation)) commands_.await(*operation);
  const std::int64_t began = os::now_ns();
  const std::int64_t end = began + std::min(timeout_ms, kMaxWaitMs) * 1'000'000;
  const std::int64_t now = driver_.wait(*operation, began, end, passive);
  counters_.add(Counter::waited_ns, now - began);
  if (is_done(*operation)) return true;
  if (!passive && timeout_ms >= kMaxWaitMs) operation->slow.store(true, std::memory_order_relaxed);
  return false;
}

bool Engine::leave(std::int64_t linger_ms) {
  if (forked()) return true;
  if (driver_.running()) {
    commands_.leave();
    driver_.notify();
    {
      std::unique_lock lock(started_mutex_);
      const auto flushed = [&] { return flushed_; };
      if (!started_changed_.wait_for(lock, std::chrono::milliseconds(kMaxWaitMs), flushed) && linger_ms > kMaxWaitMs) {
        return false;
      }
    }
    driver_.stop();
  }
  std::lock_guard driver(driver_.mutex());
  if (messenger_ == nullptr) return true;
  if (!leaving_) begin_leaving();
  waker_->close();
  // The object may outlive the engine, for results that are still in use; everything else ends here.
  groups_.clear();
  if (std::shared_ptr<collective::Nccl> shared = nccl()) {
    std::lock_guard lock(gpus_mutex_);
    nccl_ = nullptr;
  }  // here it waits for the communicators, for a limited time
  local_peers_.clear();
  peer_wakeups_.clear();
  regions_ = {};
  processes_.clear();
  messenger_.reset();
  trace_.stop();
  events_.close();
  handles_.close();
  results_->close();
  commands_.forget_sharings();
  return true;
}

void Engine::revoke_from_outside(const Error& error) {
  commands_.revoke(error);
  driver_.wake();
}

std::int64_t Engine::counter(int which) {
  if (which < 0 || which >= kCounters) return -1;
  return counters_[static_cast<Counter>(which)].load(std::memory_order_relaxed);
}

void Engine::use_gpus(std::shared_ptr<cuda::Gpus> gpus, collective::NcclOptions nccl) {
  std::lock_guard lock(gpus_mutex_);
  if (gpus_ != nullptr) return;
  nccl.generation = options_.generation;
  nccl_ = std::make_shared<collective::Nccl>(std::move(nccl), gpus, waker_);
  gpus_ = std::move(gpus);
}

std::shared_ptr<collective::Nccl> Engine::nccl() {
  std::lock_guard lock(gpus_mutex_);
  return nccl_;
}

cuda::MomentPtr Engine::mark(int device, cuda::Stream stream) {
  std::unique_lock lock(gpus_mutex_);
  if (gpus_ == nullptr) throw Failure(Code::invalid_argument, "use_gpus comes before operations on device memory");
  const std::shared_ptr<cuda::Gpu> gpu = gpus_->at(device);
  lock.unlock();
  return gpu->mark(stream);
}

Tuning Engine::tuned() {
  std::lock_guard driver(driver_.mutex());
  return tuning_;
}

void Engine::set_trace(bool on, bool mark_plans) {
  std::lock_guard driver(driver_.mutex());
  if (on)
    trace_.start(os::now_ns(), os::epoch_us(), mark_plans);
  else
    trace_.stop();
}

void Engine::log(Level level, std::string text) { events_.push({EventKind::log, -1, level, std::move(text)}); }

void Engine::finish(Operation& operation, const Error& error) {
  // A lost peer is the root cause of errors that follow from it.
  operation.error = error.failed() && revoked_.failed() ? revoked_ : error;
  if (error.failed()) operation.owned.get_deleter().retire();
  recorder_.done(operation.record, operation.error.code, 0, driver_.now());
  commands_.finished(operation, driver_.now());
  handles_.finish(operation);
}

void Engine::restart_unnamed_numbers(std::uint32_t id) {
  commands_.restart_unnamed_numbers(static_cast<std::int32_t>(id));
}

void Engine::tune(const Tuning& tuning, std::uint64_t sequence) {
  tuning_ = tuning;
  driver_.set_spin(tuning.spin_ns);
  messenger_->limit_streams(0, sequence, tuning.streams);
}

void Engine::revoke(const Error& error) {
  if (revoked_.failed() || leaving_) return;
  revoked_ = error;
  revoking_ = true;
}

}  // namespace farandole
