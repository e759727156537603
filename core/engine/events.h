// Events from the core to its binding: log lines and link requests. The binding pulls them.
// Touches nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

namespace farandole {

// The values are part of the C interface.
enum class EventKind { link_wanted = 1, log = 2 };
enum class Level { debug = 10, info = 20, warning = 30, error = 40 };

struct BindingEvent {
  EventKind kind = EventKind::log;
  int peer = -1;
  Level level = Level::info;
  std::string text;
};

class Events {
 public:
  void push(BindingEvent event) {
    std::lock_guard lock(mutex_);
    // If no thread reads events, log lines may be dropped. Link requests are kept: each is made once per peer.
    if (closed_ || (event.kind == EventKind::log && queue_.size() >= kMaxEvents)) return;
    queue_.push_back(std::move(event));
    changed_.notify_one();
  }
  enum class Next { event, timeout, closed };
  Next next(BindingEvent& event, std::int64_t timeout_ms) {
    std::unique_lock lock(mutex_);
    auto ready = [&] { return closed_ || !queue_.empty(); };
    if (timeout_ms < 0)
      changed_.wait(lock, ready);
    else if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), ready))
      return Next::timeout;
    if (queue_.empty()) return Next::closed;
    event = std::move(queue_.front());
    queue_.pop_front();
    return Next::event;
  }
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  static constexpr std::size_t kMaxEvents = 4096;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<BindingEvent> queue_;
  bool closed_ = false;
};

}  // namespace farandole
