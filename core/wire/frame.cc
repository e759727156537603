// Encoding and checking of frame headers.
// Pure. Touches only base/.
#include "wire/frame.h"

namespace farandole::wire {

namespace {

constexpr std::uint16_t kMagic = 0xfa4d;
constexpr std::size_t kCheckedBytes = 40;  // the header's own CRC covers these

template <class Integer>
void store(std::byte* to, Integer value) {
  for (std::size_t i = 0; i < sizeof(Integer); ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

template <class Integer>
Integer load(const std::byte* from) {
  Integer value = 0;
  for (std::size_t i = 0; i < sizeof(Integer); ++i) {
    value = static_cast<Integer>(value | static_cast<Integer>(static_cast<Integer>(from[i]) << (8 * i)));
  }
  return value;
}

bool plausible(const Frame& frame) {
  switch (frame.type) {
    case FrameType::data:
      return frame.length <= kMaxDataPayload && frame.length <= frame.total;
    case FrameType::control:
      return frame.length <= kMaxControlPayload && frame.total <= kMaxDescriptors;
    case FrameType::grant:
    case FrameType::answer:
    case FrameType::cancel_grant:
    case FrameType::leave:
      return frame.length == 0;
  }
  return false;
}

}  // namespace

void encode(const Frame& frame, std::span<std::byte, kFrameBytes> out) {
  std::byte* to = out.data();
  store<std::uint16_t>(to, kMagic);
  store<std::uint8_t>(to + 2, static_cast<std::uint8_t>(frame.type));
  store<std::uint8_t>(to + 3, 0);
  store<std::uint32_t>(to + 4, frame.generation);
  store<std::uint32_t>(to + 8, frame.tag.group);
  store<std::uint32_t>(to + 12, frame.tag.step);
  store<std::uint64_t>(to + 16, frame.tag.sequence);
  store<std::uint64_t>(to + 24, frame.total);
  store<std::uint32_t>(to + 32, frame.length);
  store<std::uint32_t>(to + 36, frame.crc);
  store<std::uint32_t>(to + 40, crc32c(0, to, kCheckedBytes));
  store<std::uint32_t>(to + 44, 0);
}

std::optional<Frame> decode(std::span<const std::byte, kFrameBytes> in) {
  const std::byte* from = in.data();
  if (load<std::uint16_t>(from) != kMagic || load<std::uint8_t>(from + 3) != 0) return std::nullopt;
  if (load<std::uint32_t>(from + 40) != crc32c(0, from, kCheckedBytes)) return std::nullopt;
  if (load<std::uint32_t>(from + 44) != 0) return std::nullopt;
  Frame frame;
  frame.type = static_cast<FrameType>(load<std::uint8_t>(from + 2));
  frame.generation = load<std::uint32_t>(from + 4);
  frame.tag.group = load<std::uint32_t>(from + 8);
  frame.tag.step = load<std::uint32_t>(from + 12);
  frame.tag.sequence = load<std::uint64_t>(from + 16);
  frame.total = load<std::uint64_t>(from + 24);
  frame.length = load<std::uint32_t>(from + 32);
  frame.crc = load<std::uint32_t>(from + 36);
  if (!plausible(frame)) return std::nullopt;
  return frame;
}

}  // namespace farandole::wire
