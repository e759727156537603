// The heartbeat of a rank: a thread that shows that this process runs, and checks that its agent does.
// Touches only os/.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "os/memory.h"

namespace farandole {

// There is one word in each of two memory files. This process increments its own with every beat, and the agent reads
// it. The agent writes the time (monotonic clock in ms, which all processes of a host share) of its last message from
// the launcher. If this process itself did not run for two beats, the silence is counted from now: the agent may not
// have run either.
class Heartbeat {
 public:
  static constexpr std::size_t kBytes = 4096;

  // `theirs` may be empty: then no agent is watched.
  Heartbeat(os::Descriptor mine, os::Descriptor theirs, std::int64_t beat_ms);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // `act` is called once, on the heartbeat's thread, when the agent has had no message for `lease_ms`. An empty
  // function removes the former one; when guard() returns, the former one is not running.
  void guard(std::int64_t lease_ms, std::function<void()> act);
  std::int64_t silence_ms() const { return silent_ms_.load(std::memory_order_relaxed); }

 private:
  using Word = std::atomic<std::uint64_t>;
  static Word* word(const os::SharedMemory& memory) { return reinterpret_cast<Word*>(memory.data()); }
  void run();
  void beat(std::int64_t now_ms);

  os::SharedMemory mine_, theirs_;
  std::int64_t beat_ms_;
  std::int64_t last_ms_ = 0;   // time of the last beat
  std::int64_t awake_ms_ = 0;  // this process has run without a break since then
  std::atomic<std::int64_t> silent_ms_{0};
  std::atomic<std::uint32_t> stop_{0};
  std::mutex mutex_;  // guards what follows
  std::int64_t lease_ms_ = 0;
  std::function<void()> act_;
  std::thread thread_;
};

}  // namespace farandole
