// Control frames between engines: their types, their fields, and decoders that refuse anything an engine does not send.
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
  hello = 1,   // to a local peer: this rank's status page, and a wake-up sender for that peer alone
  segment,     // to a local peer: this rank's file of a group's rings
  requests,    // to a group's coordinator
  buckets,     // the coordinator's answer
  plan_state,  // between the first members of hosts: how far they follow the plan
  leaving,     // before the frame `leave`: the progress of this rank in its groups
  revoke,      // the generation has ended
  abandon,     // a member group has ended
  share,       // to a local peer: memory that it may use
  unshare
};
inline constexpr std::uint32_t kControls = 10;

// IDs of member groups, which only their members create. Groups that all ranks agree on count up from 1.
inline constexpr std::uint32_t kFirstMemberGroup = 1 << 20;
inline constexpr std::uint32_t kLastMemberGroup = 1 << 30;

// A member's progress in a group: answers it has handled, collectives it has finished.
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
struct PlanState {
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
  bool results = false;  // the engine's own memory for results, else the user's tensors
};
struct Unshare {
  std::uint64_t region = 0;
};

Bytes encode(const Hello& hello);
Bytes encode(const Segment& segment);
Bytes encode(const PlanState& state);
Bytes encode(const Leaving& leaving);
Bytes encode(const Revocation& revocation);
Bytes encode(const Abandon& abandon);
Bytes encode(const Share& share);
Bytes encode(const Unshare& unshare);

// False when the bytes are not what encode() writes. A revocation must have the code of a failure and, for no_memory, a
// rank.
bool decode(std::span<const std::byte> bytes, Hello& hello);
bool decode(std::span<const std::byte> bytes, Segment& segment);
bool decode(std::span<const std::byte> bytes, PlanState& state);
bool decode(std::span<const std::byte> bytes, Leaving& leaving);
bool decode(std::span<const std::byte> bytes, Revocation& revocation);
bool decode(std::span<const std::byte> bytes, Abandon& abandon);
bool decode(std::span<const std::byte> bytes, Share& share);
bool decode(std::span<const std::byte> bytes, Unshare& unshare);

// The number of descriptors that come with a frame of this type.
std::size_t descriptors_with(Control type);

// The error for a peer that does what no engine of this build does. `what` follows "rank 3".
Failure violation(int peer, const std::string& what);

// Runs the body; errors of a file that cannot be what the peer announced are the peer's violation.
template <class Body>
void with_file_of(int peer, Body body) {
  try {
    body();
  } catch (const Failure& failure) {
    if (failure.error().code != Code::precondition || failure.error().rank >= 0) throw;
    throw violation(peer, "sent memory that cannot be used (" + failure.error().message + ")");
  }
}

}  // namespace control
}  // namespace farandole
