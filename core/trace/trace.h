// The timeline of one engine: Chrome trace events as lines of JSON, kept until they are drained.
// Touches base/ and the clock of os/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/kind.h"

namespace farandole {

// Every tensor is a "process" of the trace: NEGOTIATE_<OP> with a tick for each rank that has submitted it, then <OP>
// with its activities inside. Every span that began also ends, even when the trace starts or stops in the middle of it.
// The driver records, another thread drains.
class Trace {
 public:
  static constexpr std::size_t kMaxBytes = std::size_t{64}
                                           << 20;  // limit for what is not drained yet; later events are only counted

  // Times are in microseconds since `now_ns`, which was `epoch_us` in wall-clock time. Drops what was not drained.
  void start(std::int64_t now_ns, std::int64_t epoch_us, bool mark);
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void negotiate_begin(std::string_view name, Kind kind);
  void negotiate_tick(std::string_view name,
                      int rank);  // may come before the beginning, because other ranks are faster
  void negotiate_end(std::string_view name);
  void begin(std::string_view name, Kind kind);
  void activity_begin(std::string_view name, std::string_view activity);
  void activity_end(std::string_view name);
  void end(std::string_view name, DType dtype, const std::vector<std::int64_t>& shape);
  void mark(std::int64_t now_ns);  // start of a bucket; CYCLE_START

  // Copies as many whole lines as fit; returns the number of bytes.
  std::size_t drain(char* buffer, std::size_t capacity);

 private:
  enum class Level : std::uint8_t { negotiation, operation, activity };
  struct Span {
    Level level;
    bool written;  // its beginning is in the trace, so its end must be too
  };
  struct Tensor {
    int pid = 0;  // 0: not announced yet
    std::int64_t last_ns = 0;
    std::vector<Span> open;
    std::vector<std::pair<std::int64_t, int>> early_ticks;
  };

  // Calls `record(tensor, now)` if the trace is on.
  template <class Record>
  void when_on(std::string_view name, Record record);
  Tensor& tensor_of(std::string_view name);
  bool has_room();  // for one more event; counts the event as dropped when there is none
  void announce(std::string_view name, Tensor& tensor);
  void open_span(std::string_view name, Tensor& tensor, Level level, std::string_view label, std::int64_t now_ns);
  void close_span(Tensor& tensor, std::int64_t now_ns, std::string_view args);
  void close_all(Tensor& tensor, std::int64_t now_ns);
  void tick(Tensor& tensor, int rank, std::int64_t now_ns);
  void instant(std::string_view label, std::int64_t now_ns, std::string_view args);
  void event_head(char phase, int pid, std::int64_t now_ns);

  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards all below
  std::unordered_map<std::string, Tensor> tensors_;
  std::string text_;
  std::size_t drained_ = 0;  // bytes of text_ that were drained
  std::uint64_t dropped_ = 0;
  std::int64_t start_ns_ = 0;
  int pids_ = 0;
  bool mark_ = false;
};

}  // namespace farandole
