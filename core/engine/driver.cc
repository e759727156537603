// The driver lock: taking it, and releasing it so that no event is missed and no thread is locked out. Spinning and
// sleeping.
// Touches base/, os/ and link/status_page.h.
#include "engine/driver.h"

#include <algorithm>
#include <new>
#include <vector>

#include "engine/services.h"
#include "os/clock.h"
#include "os/fork.h"

namespace farandole {
namespace {

constexpr std::int64_t kCheckCoresEvery = 100'000;  // between two checks whether another rank uses this core

}  // namespace

Driver::Driver(Driven& driven, const os::Poller& poller, link::StatusPage& status_page, const LocalPeers& local_peers,
               std::atomic<std::int64_t>& wake_ups, bool oversubscribed, std::int64_t spin_ns)
    : driven_(driven),
      poller_(poller),
      status_page_(status_page),
      local_peers_(local_peers),
      wake_ups_(wake_ups),
      oversubscribed_(oversubscribed),
      spin_ns_(spin_ns) {}

void Driver::start() {
  if (thread_.joinable()) return;
  running_.store(true, std::memory_order_release);
  thread_ = os::start_thread("farandole", [this] { thread_main(); });
}

void Driver::stop() {
  running_.store(false, std::memory_order_release);
  wakeup_.notify();
  thread_.join();
}

void Driver::thread_main() {
  std::vector<os::Event> woken;
  for (;;) {
    {
      Lock lock(*this);
      std::int64_t moved_at = os::now_ns();
      for (;;) {
        const bool moved = drive();
        if (!moved && !(driven_.busy() && now_ - moved_at < spin_time())) break;
        if (moved)
          moved_at = now_;
        else
          pause(Thread::engine);
        if (!running()) break;
      }
      if (!running()) return lock.release_now();
      if (lock.prepare_release()) continue;
      sleeping_until_.store(driven_.next_deadline(), std::memory_order_relaxed);
    }
    std::int64_t until = sleeping_until_.load(std::memory_order_relaxed);
    std::int64_t left = until == kNever ? -1 : std::max<std::int64_t>(0, until - os::now_ns());
    poller_.wait(left < 0 ? -1 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 60'000)), woken);
    wake_ups_.fetch_add(1, std::memory_order_relaxed);
  }
}

// While the user's threads compute, the engine's thread spins for a shorter time than a thread that waits.
std::int64_t Driver::spin_time() const {
  const std::int64_t spin_ns = spin_ns_.load(std::memory_order_relaxed);
  const bool awaited = waiters_.load(std::memory_order_relaxed) > 0;
  return awaited && !driven_.waits_for_network() ? spin_ns : std::min(spin_ns, kShortSpin);
}

Driver::Lock::Lock(Driver& driver) : driver_(driver), lock_(driver.mutex_) { take(); }

Driver::Lock::Lock(Driver& driver, std::try_to_lock_t) : driver_(driver), lock_(driver.mutex_, std::defer_lock) {
  if (!driver.running() || !lock_.try_lock()) return;
  if (driver.running())
    take();
  else
    lock_.unlock();  // stop() came first
}

void Driver::Lock::take() {
  driver_.asleep_.store(false, std::memory_order_relaxed);
  driver_.status_page_.set_core(os::current_core());
  driver_.status_page_.announce_awake();
}

bool Driver::Lock::prepare_release() {
  prepared_ = true;
  return driver_.prepare_sleep();
}

Driver::Lock::~Lock() {
  if (!lock_.owns_lock()) return;
  const bool more =
      !prepared_ && (driver_.prepare_sleep() ||
                     driver_.driven_.next_deadline() < driver_.sleeping_until_.load(std::memory_order_relaxed));
  lock_.unlock();
  if (more) driver_.wakeup_.notify();
}

// From here on other threads must wake the engine's thread. What happened before they knew is checked once more.
bool Driver::prepare_sleep() {
  return guarded([this] { return check_before_sleep(); });
}

bool Driver::check_before_sleep() {
  const bool waiting = driven_.busy();
  asleep_.store(true, std::memory_order_relaxed);
  status_page_.announce_sleep(waiting ? link::Sleep::waiting : link::Sleep::idle);
  const bool news = driven_.has_news();
  return (waiting || news) && drive();
}

bool Driver::drive() {
  return guarded([this] {
    now_ = os::now_ns();
    return driven_.pass(now_);
  });
}

template <class Body>
bool Driver::guarded(Body body) {
  try {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const Failure& failure) {
      driven_.fail(failure.error());
    } catch (const std::exception& exception) {
      driven_.fail({Code::internal, exception.what(), -1});
    }
  } catch (const std::bad_alloc&) {
    driven_.fail({Code::no_memory, "out of memory", -1});
  }
  return true;
}

std::int64_t Driver::wait(Operation& operation, std::int64_t now, std::int64_t end, bool passive) {
  const std::atomic<std::uint32_t>& done = operation.done;
  const bool slow = operation.slow.load(std::memory_order_relaxed);
  const std::int64_t patience = spin_ns_.load(std::memory_order_relaxed);
  const std::int64_t little = std::min(kShortSpin, patience);
  if (passive) {
    wake();
  } else if (Lock lock(*this, std::try_to_lock); lock) {
    std::int64_t moved_at = now;
    while (done.load(std::memory_order_acquire) == 0 && now < end) {
      bool moved = drive();
      now = now_;
      if (moved) {
        moved_at = now;
        continue;
      }
      if (now - moved_at > (slow || driven_.waits_for_network() ? little : patience)) break;
      pause(Thread::user);
    }
  } else {
    wake();
  }
  if (done.load(std::memory_order_acquire) != 0 || now >= end) return now;
  const int waiting = passive ? 0 : 1;
  waiters_.fetch_add(waiting, std::memory_order_relaxed);
  operation.sleepers.fetch_add(1, std::memory_order_seq_cst);
  os::futex_wait(&done, 0, end - now);
  operation.sleepers.fetch_sub(1, std::memory_order_relaxed);
  waiters_.fetch_sub(waiting, std::memory_order_relaxed);
  return os::now_ns();
}

// A driver checks the commands before it stops.
void Driver::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_relaxed)) wakeup_.notify();
}

void Driver::pause(Thread thread) {
  if (!oversubscribed_ && now_ - checked_cores_at_ > kCheckCoresEvery) check_shared_cores(thread);
  if (oversubscribed_ || shares_core_)
    std::this_thread::yield();
  else
    os::relax();
}

// A scheduler may place a woken thread on the core of its waker, and leave both there while a third thread keeps the
// other core busy. Then each would spin while the other cannot run. So the engine's own thread moves to a core without
// a rank; a user's thread only yields, because its affinity is the user's choice.
void Driver::check_shared_cores(Thread thread) {
  checked_cores_at_ = now_;
  const int core = os::current_core();
  status_page_.set_core(core);
  bool shared = false;
  std::vector<int> taken{core};
  for (const auto& [rank, local_peer] : local_peers_) {
    taken.push_back(local_peer->core());
    shared = shared || taken.back() == core;
  }
  shares_core_ = shared && (thread == Thread::user || !os::avoid_cores(taken));
}

}  // namespace farandole
