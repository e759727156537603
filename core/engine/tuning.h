// What may change while a job runs, and how rank 0 measures steps. None of it changes the bits of a result.
// Touches base/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"

namespace farandole {

struct Tuning {
  std::size_t fusion_threshold = 128 << 20;
  std::int64_t flush_ns = 20'000'000;
  std::int64_t spin_ns = 100'000;
  std::size_t chunk_bytes = 256 << 10;  // of a message between hosts
  int streams = 1;                      // at most this many streams carry messages to another host

  static constexpr std::size_t kValues = 6;

  // From a request of kind tune (the order is in api/farandole.h); `measuring` is its last value.
  static Error read(const std::vector<std::int64_t>& values, Tuning& tuning, bool& measuring) {
    constexpr std::int64_t kLongest = 1'000'000'000'000;  // microseconds
    if (values.size() != kValues) return {Code::invalid_argument, "tuning takes 6 values"};
    if (*std::min_element(values.begin(), values.end()) < 0 || values[1] > kLongest || values[2] > kLongest)
      return {Code::invalid_argument, "tuning: sizes and times must not be negative, and times must be at most " +
                                          std::to_string(kLongest) + " microseconds"};
    if (values[3] < 64 || values[3] > (1 << 30) || values[3] % 64 != 0)
      return {Code::invalid_argument, "chunk_bytes must be a multiple of 64 up to 1 GiB"};
    if (values[4] < 1 || values[4] > 64) return {Code::invalid_argument, "streams must be from 1 to 64"};
    tuning.fusion_threshold = static_cast<std::size_t>(values[0]);
    tuning.flush_ns = values[1] * 1000;
    tuning.spin_ns = values[2] * 1000;
    tuning.chunk_bytes = static_cast<std::size_t>(values[3]);
    tuning.streams = static_cast<int>(values[4]);
    measuring = values[5] != 0;
    return {};
  }
};

// Counts steps without knowledge of the program: a step ends when the name that was reduced most often is reduced
// again. Unnamed tensors share one name.
class StepTimer {
 public:
  void begin(bool measuring) {
    on_ = measuring;
    times_.clear();
    steps_ = 0;
    bytes_ = 0;
  }
  bool on() const { return on_; }
  // True when this bucket, whose first tensor is `name`, ends a step.
  bool reduced(const std::string& name, std::size_t bytes) {
    bytes_ += static_cast<std::int64_t>(bytes);
    if (times_.size() > kMaxNames) times_.clear();  // a program that never repeats a name has no steps
    std::int64_t times = ++times_[name];
    if (times <= steps_) return false;
    steps_ = times;
    return true;
  }
  std::int64_t steps() const { return steps_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kMaxNames = 4096;
  bool on_ = false;
  std::unordered_map<std::string, std::int64_t> times_;
  std::int64_t steps_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace farandole
