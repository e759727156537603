// Writer and Reader work byte by byte, so that the processor's byte order does not matter.
// Pure. Touches only base/.
#include "wire/buffer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "base/error.h"

namespace farandole::wire {

namespace {

// Compilers turn this loop into one store, and the loop in `load` into one load.
template <class Integer>
void put(std::vector<std::byte>& bytes, Integer value) {
  std::array<std::byte, sizeof(Integer)> little;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) little[i] = static_cast<std::byte>(value >> (8 * i));
  bytes.insert(bytes.end(), little.begin(), little.end());
}

template <class Integer>
Integer load(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(Integer)) return 0;  // `take` found too few bytes and has already called fail()
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value = static_cast<Integer>(value | static_cast<Integer>(static_cast<Integer>(bytes[i]) << (8 * i)));
  }
  return value;
}

std::uint32_t checked_count(std::size_t count) {
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    throw Failure(Code::invalid_argument, "cannot send a text or list of " + std::to_string(count) +
                                              " entries: the limit is 2^32 - 1 entries. Split it.");
  }
  return static_cast<std::uint32_t>(count);
}

}  // namespace

void Writer::u8(std::uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
void Writer::u32(std::uint32_t value) { put(bytes_, value); }
void Writer::u64(std::uint64_t value) { put(bytes_, value); }
void Writer::f64(double value) { put(bytes_, std::bit_cast<std::uint64_t>(value)); }

void Writer::text(std::string_view value) {
  u32(checked_count(value.size()));
  append(std::as_bytes(std::span(value.data(), value.size())));
}

void Writer::list(std::span<const std::int64_t> values) {
  u32(checked_count(values.size()));
  bytes_.reserve(bytes_.size() + values.size() * sizeof(std::int64_t));
  for (std::int64_t value : values) i64(value);
}

std::span<const std::byte> Reader::take(std::size_t bytes) {
  if (bytes > left_.size()) {
    fail();
    return {};
  }
  const auto taken = left_.first(bytes);
  left_ = left_.subspan(bytes);
  return taken;
}

std::uint8_t Reader::u8() { return load<std::uint8_t>(take(1)); }
std::uint32_t Reader::u32() { return load<std::uint32_t>(take(4)); }
std::uint64_t Reader::u64() { return load<std::uint64_t>(take(8)); }
double Reader::f64() { return std::bit_cast<double>(u64()); }

std::string Reader::text() {
  const auto bytes = take(count(1));
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<std::int64_t> Reader::list() {
  std::vector<std::int64_t> values(count(sizeof(std::int64_t)));
  for (std::int64_t& value : values) value = i64();
  return values;
}

std::uint32_t Reader::count(std::size_t each) {
  const std::uint32_t items = u32();
  if (items > left_.size() / std::max<std::size_t>(each, 1)) {
    fail();
    return 0;
  }
  return items;
}

}  // namespace farandole::wire
