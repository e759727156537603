// The frame: the unit of bytes on a stream between two ranks.
// Pure. Touches only base/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace farandole::wire {

enum class FrameType : std::uint8_t {
  data = 1,          // a part of a message's bytes
  grant = 2,         // the receiver of a message is ready for it
  control = 3,       // a typed message between the engines; `step` holds its type
  leave = 4,         // the last frame of a rank that shuts down normally
  answer = 5,        // to the announcement of a message: the size of the receive that it matched
  cancel_grant = 6,  // cancels a grant of this size: its receive was matched by a message that did not use it
};

// The message that a frame belongs to: number `step` of collective `sequence` of `group`. The collective defines its
// meaning.
struct Tag {
  std::uint32_t group = 0;
  std::uint64_t sequence = 0;
  std::uint32_t step = 0;
  auto operator<=>(const Tag&) const = default;
};

// On the wire: 48 bytes, little-endian: magic u16, type u8, flags u8, generation u32, group u32, step u32, sequence
// u64, total u64 (bytes of the whole message), length u32 (bytes that follow), payload crc u32, header crc u32, zero
// u32. In `grant`, `answer` and `cancel_grant`, `total` is the size of the receive; in `control`, the number of
// descriptors that were sent along.
struct Frame {
  FrameType type = FrameType::data;
  std::uint32_t generation = 0;
  Tag tag;
  std::uint64_t total = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;  // CRC32C of the payload; 0 on links inside a host, which are not checked
};
inline constexpr std::size_t kFrameBytes = 48;
inline constexpr std::uint32_t kMaxDataPayload = 1u << 20;      // payload of one data frame
inline constexpr std::uint32_t kMaxControlPayload = 64u << 20;  // payload of one control frame

inline constexpr std::uint32_t kMaxDescriptors = 64;  // with one control frame

// CRC32C (Castagnoli). Start with seed 0; to continue, pass the last result.
std::uint32_t crc32c(std::uint32_t seed, const void* data, std::size_t bytes);
std::uint32_t crc32c_by_tables(std::uint32_t seed, const void* data, std::size_t bytes);  // for tests

void encode(const Frame& frame, std::span<std::byte, kFrameBytes> out);
// Nothing when the magic, the header's CRC, the type or a length is wrong.
std::optional<Frame> decode(std::span<const std::byte, kFrameBytes> in);

}  // namespace farandole::wire
