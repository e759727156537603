// The pulse of a rank: a thread that does nothing but show that this process lives, and see whether its agent does.
// Touches os/ alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "os/memory.h"

namespace farandole {

// A word in each of two memory files: ours counts up with every beat, and the agent reads it; the agent's is the moment
// (milliseconds of the monotonic clock, which the processes of a host share) at which it last heard from the launcher.
// A process that did not run itself for longer than two beats starts anew: nobody else may have run either.
class Pulse {
 public:
  static constexpr std::size_t kBytes = 4096;

  // `theirs` may be empty: then nobody is watched.
  Pulse(os::Descriptor mine, os::Descriptor theirs, std::int64_t beat_ms);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  // `act` is called once, on the pulse's thread, when the agent has heard nothing for `lease_ms`; an empty one takes
  // the former back, and has returned only when it does not run any more.
  void guard(std::int64_t lease_ms, std::function<void()> act);
  std::int64_t silence_ms() const { return silent_ms_.load(std::memory_order_relaxed); }

 private:
  using Word = std::atomic<std::uint64_t>;
  static Word* word(const os::SharedMemory& memory) { return reinterpret_cast<Word*>(memory.data()); }
  void run();
  void beat(std::int64_t now_ms);

  os::SharedMemory mine_, theirs_;
  std::int64_t beat_ms_;
  std::int64_t last_ms_ = 0;   // our last beat
  std::int64_t awake_ms_ = 0;  // since when we run without a break
  std::atomic<std::int64_t> silent_ms_{0};
  std::atomic<std::uint32_t> stop_{0};
  std::mutex mutex_;  // of what follows
  std::int64_t lease_ms_ = 0;
  std::function<void()> act_;
  std::thread thread_;
};

}  // namespace farandole
