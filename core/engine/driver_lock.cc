// The driver lock: taking it, and releasing it so that no event is missed and no thread is locked out.
// Touches every room below it.
#include <new>

#include "base/failpoint.h"
#include "engine/engine.h"
#include "os/clock.h"

namespace farandole {

Engine::DriverLock::DriverLock(Engine& engine) : engine_(engine), lock_(engine.driver_mutex_) { take(); }

Engine::DriverLock::DriverLock(Engine& engine, std::try_to_lock_t)
    : engine_(engine), lock_(engine.driver_mutex_, std::defer_lock) {
  if (!engine.running_.load(std::memory_order_acquire) || !lock_.try_lock()) return;
  if (engine.running_.load(std::memory_order_acquire))
    take();
  else
    lock_.unlock();  // leave() came first
}

void Engine::DriverLock::take() {
  engine_.asleep_.store(false, std::memory_order_relaxed);
  engine_.status_page_.set_core(os::current_core());
  engine_.status_page_.announce_awake();
}

bool Engine::DriverLock::prepare_release() {
  prepared_ = true;
  return engine_.prepare_sleep();
}

Engine::DriverLock::~DriverLock() {
  if (!lock_.owns_lock()) return;
  const bool more = !prepared_ && (engine_.prepare_sleep() ||
                                   engine_.next_deadline() < engine_.sleeping_until_.load(std::memory_order_relaxed));
  lock_.unlock();
  if (more) engine_.wakeup_.notify();
}

// From here on other threads must wake the engine's thread. What happened before they knew is checked once more.
bool Engine::prepare_sleep() {
  return guarded([this] { return check_before_sleep(); });
}

bool Engine::check_before_sleep() {
  bool waiting = busy();
  asleep_.store(true, std::memory_order_relaxed);
  status_page_.announce_sleep(waiting ? link::Sleep::waiting : link::Sleep::idle);
  FARANDOLE_FAILPOINT(static_cast<Services*>(this), Kind::allreduce, "settle");
  bool more = commands_.pending.load(std::memory_order_relaxed);
  for (const auto& [id, group] : groups_) more = group->must_divert() || more;
  return (waiting || more) && drive();
}

bool Engine::drive() {
  return guarded([this] { return pass(); });
}

template <class Body>
bool Engine::guarded(Body body) {
  try {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const Failure& failure) {
      fail_engine(failure.error());
    } catch (const std::exception& exception) {
      fail_engine({Code::internal, exception.what(), -1});
    }
  } catch (const std::bad_alloc&) {
    fail_engine({Code::no_memory, "out of memory", -1});
  }
  return true;
}

void Engine::fail_engine(Error error) {
  if (!revoked_.failed() && !leaving_) {
    revoked_ = std::move(error);
    revoking_ = true;
  }
  try {
    if (revoking_) execute_revocation();
  } catch (const std::exception&) {
    revoking_ = true;  // the next pass ends the rest
  }
  commands_.pending.store(true, std::memory_order_release);  // it may not have been read completely
}

}  // namespace farandole
