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

// A word in each of two memory files: ours counts up with every beat, the agent reads it; the agent's counts up as long
// as the agent hears the launcher. Silence is counted in our own beats: a process that did not run itself for longer
// than two of them has heard nothing because it did not listen, and starts anew.
class Pulse {
 public:
  static constexpr std::size_t kBytes = 4096;

  // `theirs` may be empty: then nobody is watched.
  Pulse(os::Descriptor mine, os::Descriptor theirs, std::int64_t beat_ms);
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  // `act` is called once, on the pulse's thread, when the agent has been silent for `lease_ms`; an empty one takes the
  // former back, and has returned only when it does not run any more.
  void guard(std::int64_t lease_ms, std::function<void()> act);
  std::int64_t silence_ms() const { return silent_.load(std::memory_order_relaxed) * beat_ms_; }

 private:
  using Word = std::atomic<std::uint64_t>;
  static Word* word(const os::SharedMemory& memory) { return reinterpret_cast<Word*>(memory.data()); }
  void run();
  void beat(std::int64_t now_ns);

  os::SharedMemory mine_, theirs_;
  std::int64_t beat_ms_;
  std::int64_t last_ns_ = 0;
  std::uint64_t seen_ = 0;
  std::atomic<std::int64_t> silent_{0};  // beats
  std::atomic<std::uint32_t> stop_{0};
  std::mutex mutex_;  // of what follows
  std::int64_t lease_ms_ = 0;
  std::function<void()> act_;
  std::thread thread_;
};

}  // namespace farandole
