// Tests of wire/: buffers, frames, checksums, and invalid bytes.
// Touches wire/.
#include <array>
#include <limits>
#include <numeric>
#include <random>

#include "check.h"
#include "wire/buffer.h"
#include "wire/frame.h"

using namespace farandole::wire;

namespace {

Frame example() {
  Frame frame;
  frame.type = FrameType::data;
  frame.generation = 0x01020304;
  frame.tag = {0xfffffffe, 0x1122334455667788, 7};
  frame.total = std::uint64_t{1} << 40;
  frame.length = kMaxDataPayload;
  frame.crc = 0xdeadbeef;
  return frame;
}

std::array<std::byte, kFrameBytes> encoded(const Frame& frame) {
  std::array<std::byte, kFrameBytes> bytes{};
  encode(frame, bytes);
  return bytes;
}

}  // namespace

TEST(buffer_values_are_read_as_written) {
  Writer writer;
  writer.u8(200);
  writer.u32(0xfedcba98);
  writer.u64(0xfedcba9876543210);
  writer.i32(-5);
  writer.i64(std::numeric_limits<std::int64_t>::min());
  writer.f64(-0.1);
  writer.text("größe");
  writer.text("");
  const std::vector<std::int64_t> numbers{1, -2, std::numeric_limits<std::int64_t>::max()};
  writer.list(numbers);
  writer.list({});
  const std::size_t size = writer.size();
  const auto bytes = writer.take();
  CHECK_EQUAL(bytes.size(), size);
  CHECK(bytes[1] == std::byte{0x98});  // little-endian
  Reader reader(bytes);
  CHECK_EQUAL(reader.u8(), 200);
  CHECK_EQUAL(reader.u32(), 0xfedcba98u);
  CHECK_EQUAL(reader.u64(), 0xfedcba9876543210u);
  CHECK_EQUAL(reader.i32(), -5);
  CHECK_EQUAL(reader.i64(), std::numeric_limits<std::int64_t>::min());
  CHECK_EQUAL(reader.f64(), -0.1);
  CHECK_EQUAL(reader.text(), "größe");
  CHECK_EQUAL(reader.text(), "");
  CHECK(reader.list() == numbers);
  CHECK(reader.list().empty());
  CHECK(reader.finished());
}

TEST(truncated_bytes_are_refused) {
  Writer writer;
  writer.u8(1);
  writer.text("name");
  const std::vector<std::int64_t> numbers{3, 4};
  writer.list(numbers);
  const auto bytes = writer.take();
  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    Reader reader{std::span<const std::byte>(bytes).first(cut)};
    reader.u8();
    reader.text();
    reader.list();
    CHECK(!reader.ok());
    CHECK_EQUAL(reader.u64(), 0u);
    CHECK(!reader.finished());
  }
}

TEST(a_wrong_count_allocates_nothing) {
  Writer writer;
  writer.u32(0xffffffff);
  writer.u64(0);
  const auto bytes = writer.take();
  Reader list(bytes), text(bytes), count(bytes);
  CHECK(list.list().empty() && !list.ok());
  CHECK(text.text().empty() && !text.ok());
  CHECK(count.count(0) == 0 && !count.ok());
}

TEST(a_decoded_frame_equals_the_encoded_one) {
  const Frame frame = example();
  const auto found = decode(encoded(frame));
  CHECK(found.has_value());
  CHECK(found->type == frame.type && found->tag == frame.tag);
  CHECK_EQUAL(found->generation, frame.generation);
  CHECK_EQUAL(found->total, frame.total);
  CHECK_EQUAL(found->length, frame.length);
  CHECK_EQUAL(found->crc, frame.crc);
}

TEST(every_flipped_bit_is_noticed) {
  const auto good = encoded(example());
  for (std::size_t bit = 0; bit < kFrameBytes * 8; ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    CHECK(!decode(bad).has_value());
  }
}

TEST(impossible_lengths_are_refused) {
  Frame frame = example();
  frame.length = kMaxDataPayload + 1;
  CHECK(!decode(encoded(frame)));
  frame = example();
  frame.total = frame.length - 1;
  CHECK(!decode(encoded(frame)));
  frame = {};
  frame.type = FrameType::control;
  frame.length = kMaxControlPayload;
  CHECK(decode(encoded(frame)));
  frame.length = kMaxControlPayload + 1;
  CHECK(!decode(encoded(frame)));
  frame.length = 0;
  frame.total = kMaxDescriptors + 1;
  CHECK(!decode(encoded(frame)));
  for (FrameType type : {FrameType::grant, FrameType::answer, FrameType::cancel_grant, FrameType::leave}) {
    frame = {};
    frame.type = type;
    frame.total = 99;
    CHECK(decode(encoded(frame)));
    frame.length = 1;
    CHECK(!decode(encoded(frame)));
  }
  for (int type : {0, 7, 255}) {
    frame = {};
    frame.type = static_cast<FrameType>(type);
    CHECK(!decode(encoded(frame)));
  }
}

TEST(checksums_are_crc32c) {
  CHECK_EQUAL(crc32c(0, "123456789", 9), 0xe3069283u);
  const std::array<unsigned char, 32> zeros{};
  CHECK_EQUAL(crc32c(0, zeros.data(), 32), 0x8a9136aau);
  CHECK_EQUAL(crc32c(0, nullptr, 0), 0u);
  std::vector<unsigned char> bytes(1000);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(3));
  for (std::size_t begin = 0; begin < 9; ++begin) {
    for (std::size_t length : {0, 1, 7, 8, 9, 63, 64, 65, 900}) {
      const std::uint32_t whole = crc32c(0, bytes.data() + begin, length);
      CHECK_EQUAL(whole, crc32c_by_tables(0, bytes.data() + begin, length));
      const std::size_t cut = length / 3;
      const std::uint32_t head = crc32c(0, bytes.data() + begin, cut);
      CHECK_EQUAL(whole, crc32c(head, bytes.data() + begin + cut, length - cut));
    }
  }
}

TEST(random_headers_are_refused) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::array<std::byte, kFrameBytes> bytes;
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    bytes[0] = std::byte{0x4d};
    bytes[1] = std::byte{0xfa};
    CHECK(!decode(bytes));
  }
}
