// The driver's seat: taking it, and leaving it so that nothing is lost and nobody is locked out.
// Touches every room below it.
#include <new>

#include "base/failpoint.h"
#include "engine/engine.h"
#include "os/clock.h"

namespace farandole {

Engine::Seat::Seat(Engine& engine) : engine_(engine), lock_(engine.seat_) { take(); }

Engine::Seat::Seat(Engine& engine, std::try_to_lock_t) : engine_(engine), lock_(engine.seat_, std::defer_lock) {
  if (!engine.running_.load(std::memory_order_acquire) || !lock_.try_lock()) return;
  if (engine.running_.load(std::memory_order_acquire))
    take();
  else
    lock_.unlock();  // leave() has come first
}

void Engine::Seat::take() {
  engine_.asleep_.store(false, std::memory_order_relaxed);
  engine_.board_.on_core(os::current_core());
  engine_.board_.awake();
}

bool Engine::Seat::settle() {
  settled_ = true;
  return engine_.settle();
}

Engine::Seat::~Seat() {
  if (!lock_.owns_lock()) return;
  const bool more = !settled_ && (engine_.settle() ||
                                  engine_.next_deadline() < engine_.sleeping_until_.load(std::memory_order_relaxed));
  lock_.unlock();
  if (more) engine_.bell_.ring();
}

// From here on others ring; so what happened before they knew is looked at once more.
bool Engine::settle() {
  return guarded([this] { return look_once_more(); });
}

bool Engine::look_once_more() {
  bool waiting = busy();
  asleep_.store(true, std::memory_order_relaxed);
  board_.sleep_soon(waiting ? link::Sleep::waiting : link::Sleep::idle);
  FARANDOLE_FAILPOINT(static_cast<Services*>(this), Kind::allreduce, "settle");
  bool more = inbox_.full.load(std::memory_order_relaxed);
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
      give_up(failure.error());
    } catch (const std::exception& exception) {
      give_up({Code::internal, exception.what(), -1});
    }
  } catch (const std::bad_alloc&) {
    give_up({Code::no_memory, "out of memory", -1});
  }
  return true;
}

void Engine::give_up(Error error) {
  if (!revoked_.failed() && !leaving_) {
    revoked_ = std::move(error);
    revoking_ = true;
  }
  try {
    if (revoking_) execute_revocation();
  } catch (const std::exception&) {
    revoking_ = true;  // the next pass ends what is left
  }
  inbox_.full.store(true, std::memory_order_release);  // it may not have been read to its end
}

}  // namespace farandole
