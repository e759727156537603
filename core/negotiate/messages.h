// The two messages of negotiation, a member's requests and the coordinator's answer. Long ones are split into frames.
// Pure. Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

using Bytes = std::vector<std::byte>;

struct Requests {
  std::uint32_t group = 0;
  std::uint32_t epoch = 0;
  std::vector<Request> requests;
};

struct Answer {
  std::uint32_t group = 0;
  bool last = true;  // false: the next message continues the same answer
  std::vector<Bucket> buckets;
};

// When a message has reached this size, the next request or bucket begins another message.
inline constexpr std::size_t kMessageBytes = 1 << 20;

std::vector<Bytes> encode_requests(std::uint32_t group, std::uint32_t epoch, std::span<const Request> requests);
// False if the bytes were not written by encode_requests.
bool decode(std::span<const std::byte> bytes, Requests& message);

// Each member of an alltoall gets its row and its column: 2 * members^2 numbers for all members together, instead of
// members^2 for each of them.
Bucket answer_for(const Bucket& bucket, int member, int members);
// Whether all members get the same answer.
bool same_for_all(std::span<const Bucket> buckets);
std::vector<Bytes> encode_answer(std::uint32_t group, std::span<const Bucket> buckets, int member, int members);
bool decode(std::span<const std::byte> bytes, Answer& message);

}  // namespace farandole::negotiate
