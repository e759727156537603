// Writing and reading typed values in a sequence of bytes. A reader of invalid bytes reports failure and never reads
// past the end. Pure. Touches only base/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace farandole::wire {

// Little-endian, no padding. Strings and lists carry a 32-bit count.
class Writer {
 public:
  void u8(std::uint8_t value);
  void u32(std::uint32_t value);
  void u64(std::uint64_t value);
  void i32(std::int32_t value) { u32(static_cast<std::uint32_t>(value)); }
  void i64(std::int64_t value) { u64(static_cast<std::uint64_t>(value)); }
  void f64(double value);
  void text(std::string_view value);
  void list(std::span<const std::int64_t> values);
  void append(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  std::vector<std::byte> take() { return std::move(bytes_); }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::vector<std::byte> bytes_;
};

// After a failed read ok() is false and every further read returns zero or empty, so one check at the end is enough.
// Never allocates more than the remaining bytes can fill.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}
  std::uint8_t u8();
  std::uint32_t u32();
  std::uint64_t u64();
  std::int32_t i32() { return static_cast<std::int32_t>(u32()); }
  std::int64_t i64() { return static_cast<std::int64_t>(u64()); }
  double f64();
  std::string text();
  std::vector<std::int64_t> list();
  // A count of items of at least `each` bytes; fails when the remaining bytes cannot hold so many.
  std::uint32_t count(std::size_t each);
  bool ok() const { return ok_; }
  bool finished() const { return ok_ && left_.empty(); }
  void fail() {
    ok_ = false;
    left_ = {};
  }

 private:
  std::span<const std::byte> take(std::size_t bytes);
  std::span<const std::byte> left_;
  bool ok_ = true;
};

}  // namespace farandole::wire
