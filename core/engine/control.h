// Control frames between engines: their types, their fields, and decoders that refuse what no engine writes.
// Pure. Touches base/ and wire/. Requests and answers are in negotiate/messages.h.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace farandole {

enum class Control : std::uint32_t {
  hello = 1,  // to a neighbour on the host: my board, and the rope of a doorbell for it alone
  segment,    // to a neighbour: my file of a group's rings
  requests,   // to a group's coordinator
  buckets,    // from it: its answer
  word,       // between the first members of hosts: how far the plan may go
  leaving,    // before the frame `leave`: how far I have come
  revoke,     // the generation is over
  abandon,    // a group that its members made is over
  share,      // to a neighbour: memory that it may use
  unshare
};
inline constexpr std::uint32_t kControls = 10;

// Numbers of groups that only their members make; those that all ranks agree on count up from 1.
inline constexpr std::uint32_t kFirstFounded = 1 << 20;
inline constexpr std::uint32_t kLastFounded = 1 << 30;

// How far a member has come in a group: answers it has handled, collectives it has finished.
struct Progress {
  std::uint64_t agreed = 0;
  std::uint64_t completed = 0;
};

namespace control {

using Bytes = std::vector<std::byte>;

struct Hello {
  std::uint32_t generation = 0;
  std::int32_t rank = -1;
  std::uint64_t nonce = 0;
};
struct Segment {
  std::uint32_t group = 0;
};
struct Word {
  std::uint32_t group = 0;
  std::uint64_t bits = 0;
};
struct Leaving {
  std::map<std::uint32_t, Progress> groups;
};
struct Revocation {
  Error error;
};
struct Abandon {
  std::uint32_t group = 0;
  std::string why;
};
struct Share {
  std::uint64_t region = 0;  // counted from 1
  std::uint64_t bytes = 0;
  bool results = false;  // the engine's own memory for results, else tensors of its user's
};
struct Unshare {
  std::uint64_t region = 0;
};

Bytes encode(const Hello& hello);
Bytes encode(const Segment& segment);
Bytes encode(const Word& word);
Bytes encode(const Leaving& leaving);
Bytes encode(const Revocation& revocation);
Bytes encode(const Abandon& abandon);
Bytes encode(const Share& share);
Bytes encode(const Unshare& unshare);

// False when the bytes are anything but what encode() writes. A revocation has the code of a failure, and
// a rank when that is a lack of memory.
bool decode(std::span<const std::byte> bytes, Hello& hello);
bool decode(std::span<const std::byte> bytes, Segment& segment);
bool decode(std::span<const std::byte> bytes, Word& word);
bool decode(std::span<const std::byte> bytes, Leaving& leaving);
bool decode(std::span<const std::byte> bytes, Revocation& revocation);
bool decode(std::span<const std::byte> bytes, Abandon& abandon);
bool decode(std::span<const std::byte> bytes, Share& share);
bool decode(std::span<const std::byte> bytes, Unshare& unshare);

// How many descriptors come with a frame of this type.
std::size_t descriptors_with(Control type);

// A peer did what no engine of this build does. `what` goes on from "rank 3".
Failure violation(int peer, const std::string& what);

}  // namespace control
}  // namespace farandole
