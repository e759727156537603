// Which algorithm is used for how many bytes. Pure: every member makes the same choice from the same numbers.
// Touches only base/.
#pragma once

#include <cstddef>

#include "collective/collective.h"

namespace farandole::collective {

struct Choice {
  Algorithm algorithm;
  const char* reason;
};

// For an allreduce of `bytes` between `parties` hosts (one member of each). `forced` decides unless it is automatic.
Choice choose(Algorithm forced, std::size_t bytes, int parties);

// Inside a host: from this size on it is worth asking whether the tensors lie in shared memory.
inline constexpr std::size_t kAskForShared = 2 << 20;
// From this average block size on, results of an alltoall are put where local peers can write them (SHARED in
// torch/repeats.py).
inline constexpr std::size_t kShareResults = 4 << 20;
// Inside a host: true when every member reduces everything itself; false when each reduces a slice.
bool local_one_hop(std::size_t bytes, int members, std::size_t slot_bytes);
// The chunk for slices of `slice` bytes: small enough that a few are under way.
std::size_t local_chunk(std::size_t slice, std::size_t slot_bytes);

}  // namespace farandole::collective
