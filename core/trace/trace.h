// The timeline of one engine: Chrome trace events as lines of JSON, kept until somebody pulls them.
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

// Every tensor is a "process" of the trace: NEGOTIATE_<OP> with a tick for each rank that reports, then <OP> with its
// activities inside. What was begun is always ended, also when the trace starts or stops in the middle of it. The
// driver records and another thread drains.
class Trace {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{64}
                                            << 20;  // not yet pulled; later events are counted, not kept

  // Times are in microseconds since `now_ns`, which was `epoch_us` on the calendar. Forgets what was not pulled.
  void start(std::int64_t now_ns, std::int64_t epoch_us, bool mark);
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void negotiate_begin(std::string_view name, Kind kind);
  void negotiate_tick(std::string_view name, int rank);  // may come before the beginning: other ranks are faster
  void negotiate_end(std::string_view name);
  void begin(std::string_view name, Kind kind);
  void activity_begin(std::string_view name, std::string_view activity);
  void activity_end(std::string_view name);
  void end(std::string_view name, DType dtype, const std::vector<std::int64_t>& shape);
  void mark(std::int64_t now_ns);  // where a planned bucket starts; CYCLE_START

  // Copies whole lines, as many as fit; the number of bytes.
  std::size_t drain(char* buffer, std::size_t capacity);

 private:
  enum class Level : std::uint8_t { negotiation, operation, activity };
  struct Span {
    Level level;
    bool written;  // its beginning is in the trace, so its end must be
  };
  struct Tensor {
    int pid = 0;  // 0: not announced yet
    std::int64_t last_ns = 0;
    std::vector<Span> open;
    std::vector<std::pair<std::int64_t, int>> early_ticks;
  };

  Tensor& tensor_of(std::string_view name);
  bool room();  // for one more event; counts it when there is none
  void announce(std::string_view name, Tensor& tensor);
  void open_span(std::string_view name, Tensor& tensor, Level level, std::string_view label, std::int64_t now_ns);
  void close_span(Tensor& tensor, std::int64_t now_ns, std::string_view args);
  void close_all(Tensor& tensor, std::int64_t now_ns);
  void tick(Tensor& tensor, int rank, std::int64_t now_ns);
  void instant(std::string_view label, std::int64_t now_ns, std::string_view args);
  void head(char phase, int pid, std::int64_t now_ns);

  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards all below
  std::unordered_map<std::string, Tensor> tensors_;
  std::string text_;
  std::size_t pulled_ = 0;  // bytes of text_ that are gone
  std::uint64_t dropped_ = 0;
  std::int64_t start_ns_ = 0;
  int pids_ = 0;
  bool mark_ = false;
};

}  // namespace farandole
