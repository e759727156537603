// The thread of a heartbeat.
// Touches only os/.
#include "group/heartbeat.h"

#include <algorithm>
#include <utility>

#include "os/clock.h"

namespace farandole {

Heartbeat::Heartbeat(os::Descriptor mine, os::Descriptor theirs, std::int64_t beat_ms)
    : mine_(os::SharedMemory::open_writable(std::move(mine), kBytes)), beat_ms_(beat_ms) {
  if (theirs) theirs_ = os::SharedMemory::open_read_only(std::move(theirs), kBytes);
  mine_.close_file();
  theirs_.close_file();
  thread_ = os::start_thread("farandole-heartbeat", [this] { run(); });
}

Heartbeat::~Heartbeat() {
  stop_.store(1, std::memory_order_release);
  os::futex_wake_all(&stop_);
  thread_.join();
  word(mine_)->store(0, std::memory_order_release);  // from now on the agent does not watch this process
}

void Heartbeat::guard(std::int64_t lease_ms, std::function<void()> act) {
  std::lock_guard lock(mutex_);
  lease_ms_ = lease_ms;
  act_ = std::move(act);
}

void Heartbeat::run() {
  last_ms_ = awake_ms_ = os::now_ns() / 1'000'000;
  while (stop_.load(std::memory_order_acquire) == 0) {
    beat(os::now_ns() / 1'000'000);
    os::futex_wait(&stop_, 0, beat_ms_ * 1'000'000);
  }
}

void Heartbeat::beat(std::int64_t now_ms) {
  word(mine_)->fetch_add(1, std::memory_order_release);
  if (!theirs_) return;
  if (now_ms - std::exchange(last_ms_, now_ms) > 2 * beat_ms_) awake_ms_ = now_ms;
  const auto last_beat = static_cast<std::int64_t>(word(theirs_)->load(std::memory_order_acquire));
  const std::int64_t silent = now_ms - std::max(last_beat, awake_ms_);
  silent_ms_.store(silent, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  if (act_ && silent >= lease_ms_) std::exchange(act_, nullptr)();
}

}  // namespace farandole
