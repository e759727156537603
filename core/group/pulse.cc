// The thread behind a pulse.
// Touches os/ alone.
#include "group/pulse.h"

#include <utility>

#include "os/clock.h"

namespace farandole {

Pulse::Pulse(os::Descriptor mine, os::Descriptor theirs, std::int64_t beat_ms)
    : mine_(os::SharedMemory::write(std::move(mine), kBytes)), beat_ms_(beat_ms) {
  if (theirs) theirs_ = os::SharedMemory::open(std::move(theirs), kBytes);
  mine_.close_file();
  theirs_.close_file();
  if (theirs_) seen_ = word(theirs_)->load(std::memory_order_acquire);
  thread_ = os::start_thread("farandole-pulse", [this] { run(); });
}

Pulse::~Pulse() {
  stop_.store(1, std::memory_order_release);
  os::futex_wake_all(&stop_);
  thread_.join();
  word(mine_)->store(0, std::memory_order_release);  // nobody needs to watch us any more
}

void Pulse::guard(std::int64_t lease_ms, std::function<void()> act) {
  std::lock_guard lock(mutex_);
  lease_ms_ = lease_ms;
  act_ = std::move(act);
}

void Pulse::run() {
  last_ns_ = os::now_ns();
  while (stop_.load(std::memory_order_acquire) == 0) {
    beat(os::now_ns());
    os::futex_wait(&stop_, 0, beat_ms_ * 1'000'000);
  }
}

void Pulse::beat(std::int64_t now_ns) {
  word(mine_)->fetch_add(1, std::memory_order_release);
  if (!theirs_) return;
  const bool slept = now_ns - last_ns_ > 2 * beat_ms_ * 1'000'000;
  last_ns_ = now_ns;
  const std::uint64_t word_now = word(theirs_)->load(std::memory_order_acquire);
  const bool moved = std::exchange(seen_, word_now) != word_now;
  const std::int64_t silent = moved || slept ? 0 : silent_.load(std::memory_order_relaxed) + 1;
  silent_.store(silent, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  if (act_ && silent * beat_ms_ >= lease_ms_) std::exchange(act_, nullptr)();
}

}  // namespace farandole
