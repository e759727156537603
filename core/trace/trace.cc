// The timeline of one engine. See trace.h.
// Touches base/ and the clock of os/.
#include "trace/trace.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "os/clock.h"

namespace farandole {
namespace {

constexpr std::size_t kMaxTensors = 1 << 16;  // with more, idle tensors are removed, and announced again later
constexpr std::size_t kMaxEarlyTicks = 1 << 12;

void quote(std::string& text, std::string_view value) {
  text += '"';
  for (char letter : value) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      text += '\\';
      text += letter;
    } else if (byte < 0x20 || byte == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
      text += escaped;
    } else {
      text += letter;
    }
  }
  text += '"';
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace

void Trace::start(std::int64_t now_ns, std::int64_t epoch_us, bool mark) {
  const std::lock_guard lock(mutex_);
  tensors_.clear();
  text_.clear();
  drained_ = 0;
  dropped_ = 0;
  pids_ = 0;
  start_ns_ = now_ns;
  mark_ = mark;
  text_ += R"({"name":"process_name","ph":"M","pid":0,"args":{"start_time_since_epoch_in_micros":)" +
           std::to_string(epoch_us) + "}}\n";
  on_.store(true, std::memory_order_relaxed);
}

void Trace::stop() {
  const std::lock_guard lock(mutex_);
  if (!on()) return;
  const std::int64_t now = os::now_ns();
  for (auto& [name, tensor] : tensors_) close_all(tensor, now);
  tensors_.clear();
  if (dropped_ > 0) instant("DROPPED_EVENTS", now, R"({"count":)" + std::to_string(dropped_) + "}");
  dropped_ = 0;
  on_.store(false, std::memory_order_relaxed);
}

Trace::Tensor& Trace::tensor_of(std::string_view name) {
  if (tensors_.size() >= kMaxTensors) {
    std::erase_if(tensors_, [](const auto& entry) { return entry.second.open.empty(); });
  }
  return tensors_[std::string(name)];
}

bool Trace::has_room() {
  if (text_.size() - drained_ >= kMaxBytes) {
    ++dropped_;
    return false;
  }
  if (dropped_ > 0) {
    instant("DROPPED_EVENTS", os::now_ns(), R"({"count":)" + std::to_string(dropped_) + "}");
    dropped_ = 0;
  }
  return true;
}

void Trace::event_head(char phase, int pid, std::int64_t now_ns) {
  char text[96];
  const std::int64_t since = std::max<std::int64_t>(0, now_ns - start_ns_);
  std::snprintf(text, sizeof text, R"({"ph":"%c","pid":%d,"tid":0,"ts":%lld.%03lld)", phase, pid,
                static_cast<long long>(since / 1000), static_cast<long long>(since % 1000));
  text_ += text;
}

void Trace::announce(std::string_view name, Tensor& tensor) {
  if (tensor.pid != 0) return;
  tensor.pid = ++pids_;
  const std::string pid = std::to_string(tensor.pid);
  text_ += R"({"name":"process_name","ph":"M","pid":)" + pid + R"(,"args":{"name":)";
  quote(text_, name);
  text_ += "}}\n";
  text_ += R"({"name":"process_sort_index","ph":"M","pid":)" + pid + R"(,"args":{"sort_index":)" + pid + "}}\n";
}

void Trace::open_span(std::string_view name, Tensor& tensor, Level level, std::string_view label, std::int64_t now_ns) {
  const bool written = has_room();
  tensor.open.push_back({level, written});
  if (!written) return;
  announce(name, tensor);
  tensor.last_ns = std::max(tensor.last_ns, now_ns);
  event_head('B', tensor.pid, tensor.last_ns);
  text_ += R"(,"name":)";
  quote(text_, label);
  text_ += "}\n";
}

// Also without room: a span that began in the trace must end there, and few are open.
void Trace::close_span(Tensor& tensor, std::int64_t now_ns, std::string_view args) {
  const Span span = tensor.open.back();
  tensor.open.pop_back();
  if (!span.written) return;
  tensor.last_ns = std::max(tensor.last_ns, now_ns);
  event_head('E', tensor.pid, tensor.last_ns);
  if (!args.empty()) {
    text_ += R"(,"args":)";
    text_ += args;
  }
  text_ += "}\n";
}

void Trace::close_all(Tensor& tensor, std::int64_t now_ns) {
  while (!tensor.open.empty()) close_span(tensor, now_ns, "");
}

void Trace::tick(Tensor& tensor, int rank, std::int64_t now_ns) {
  if (!tensor.open.back().written || !has_room()) return;
  tensor.last_ns = std::max(tensor.last_ns, now_ns);
  event_head('X', tensor.pid, tensor.last_ns);
  text_ += R"(,"dur":0,"name":")" + std::to_string(rank) + "\"}\n";
}

void Trace::instant(std::string_view label, std::int64_t now_ns, std::string_view args) {
  event_head('i', 0, now_ns);
  text_ += R"(,"s":"g","name":)";
  quote(text_, label);
  if (!args.empty()) {
    text_ += R"(,"args":)";
    text_ += args;
  }
  text_ += "}\n";
}

template <class Record>
void Trace::when_on(std::string_view name, Record record) {
  if (!on()) return;
  const std::lock_guard lock(mutex_);
  if (on()) record(tensor_of(name), os::now_ns());
}

void Trace::negotiate_begin(std::string_view name, Kind kind) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    close_all(tensor, now);  // an operation that failed has no end of its own
    const std::vector<std::pair<std::int64_t, int>> early = std::move(tensor.early_ticks);
    tensor.early_ticks.clear();
    open_span(name, tensor, Level::negotiation, std::string("NEGOTIATE_") + name_of(kind),
              early.empty() ? now : early.front().first);
    for (const auto& [time, rank] : early) tick(tensor, rank, time);
  });
}

void Trace::negotiate_tick(std::string_view name, int rank) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    if (!tensor.open.empty() && tensor.open.back().level == Level::negotiation) {
      tick(tensor, rank, now);
    } else if (tensor.early_ticks.size() < kMaxEarlyTicks) {
      tensor.early_ticks.emplace_back(now, rank);
    }
  });
}

void Trace::negotiate_end(std::string_view name) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    if (!tensor.open.empty() && tensor.open.back().level == Level::negotiation) close_span(tensor, now, "");
  });
}

void Trace::begin(std::string_view name, Kind kind) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    close_all(tensor, now);
    open_span(name, tensor, Level::operation, name_of(kind), now);
  });
}

void Trace::activity_begin(std::string_view name, std::string_view activity) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    if (tensor.open.empty() || tensor.open.front().level != Level::operation) return;  // it began before the trace
    open_span(name, tensor, Level::activity, activity, now);
  });
}

void Trace::activity_end(std::string_view name) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    if (!tensor.open.empty() && tensor.open.back().level == Level::activity) close_span(tensor, now, "");
  });
}

void Trace::end(std::string_view name, DType dtype, const std::vector<std::int64_t>& shape) {
  when_on(name, [&](Tensor& tensor, std::int64_t now) {
    if (tensor.open.empty() || tensor.open.front().level != Level::operation) return;
    while (tensor.open.size() > 1) close_span(tensor, now, "");
    close_span(tensor, now,
               std::string(R"({"dtype":")") + name_of(dtype) + R"(","shape":")" + shape_text(shape) + "\"}");
  });
}

void Trace::mark(std::int64_t now_ns) {
  if (!on()) return;
  const std::lock_guard lock(mutex_);
  if (on() && mark_ && has_room()) instant("CYCLE_START", now_ns, "");
}

std::size_t Trace::drain(char* buffer, std::size_t capacity) {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = text_.size() - drained_;
  if (bytes > capacity) {
    const std::string_view fits = std::string_view(text_).substr(drained_, capacity);
    const std::size_t last = fits.rfind('\n');
    bytes = last == std::string_view::npos ? 0 : last + 1;
  }
  if (bytes == 0) return 0;
  std::memcpy(buffer, text_.data() + drained_, bytes);
  drained_ += bytes;
  if (drained_ == text_.size()) {
    text_ = {};
    drained_ = 0;
  } else if (drained_ > text_.size() / 2) {
    text_.erase(0, drained_);
    drained_ = 0;
  }
  return bytes;
}

}  // namespace farandole
