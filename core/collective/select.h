// Which algorithm moves how many bytes. Pure: every member comes to the same choice from the same numbers.
// Touches base/ alone.
#pragma once

#include <cstddef>

#include "collective/collective.h"

namespace farandole::collective {

struct Choice {
  Algorithm algorithm;
  const char* reason;
};

// An allreduce of `bytes` between `parties` hosts (one member of each). `forced` unless automatic.
Choice choose(Algorithm forced, std::size_t bytes, int parties);

// Inside a host: from here on it is worth asking whether the members have shared their memory.
inline constexpr std::size_t kAskForShared = 2 << 20;
// From this mean on, results of an alltoall are put where neighbours can write them (SHARED in torch/repeats.py).
inline constexpr std::size_t kShareResults = 4 << 20;
// Inside a host: true when every member adds up everything itself; false when each reduces a slice.
bool local_one_hop(std::size_t bytes, int members, std::size_t slot_bytes);
// The chunk in which slices of `slice` bytes move: small enough for a few to be under way.
std::size_t local_chunk(std::size_t slice, std::size_t slot_bytes);

}  // namespace farandole::collective
