// The collectives, from the view of one member of a group. docs/algorithms.md has their cost.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/kind.h"
#include "base/pieces.h"
#include "collective/task.h"
#include "group/topology.h"
#include "link/messenger.h"
#include "link/regions.h"
#include "link/rings.h"

namespace farandole::collective {

// The values are part of the C interface.
enum class Algorithm : std::uint8_t { automatic = 0, ring = 1, direct = 2, doubling = 3, tree = 4 };

// What a collective needs. One per collective. What it points to must exist until the collective ends.
struct Context {
  const Topology* topology = nullptr;
  link::Messenger* messenger = nullptr;
  link::Rings* rings = nullptr;  // null when no other member is on this host
  const link::Regions* regions = nullptr;
  std::uint32_t group = 0;
  std::uint64_t sequence = 0;  // equal on all members, new for each collective of the group
  Algorithm algorithm = Algorithm::automatic;
  std::size_t chunk_bytes = 256 << 10;  // between hosts
  Kind kind = Kind::allreduce;          // for failpoints and phases
  const void* engine = nullptr;         // for failpoints
  Algorithm* chosen = nullptr;          // gets the algorithm between hosts of an allreduce
  std::int64_t* in_place = nullptr;     // counts bytes that were reduced directly in shared memory
  const char** phase = nullptr;  // its current phase, for error messages: "pack", "connect", "send", "recv", "reduce",
                                 // "unpack"
};

struct Reduction {
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;  // sum, min, max, product
  double prescale = 1.0;
  double postscale = 1.0;
  std::int64_t divisor = 1;  // > 1 for an average
};

// `in` and `out` have the same size; each piece may be the same memory in both.
Task allreduce(Context context, Pieces in, Pieces out, Reduction reduction);
// Each tensor of the bucket has its own dot products.
Task adasum(Context context, std::vector<Pieces> in, std::vector<Pieces> out, Reduction reduction);
// out[m] receives member m's contribution, out[me] this member's.
Task allgather(Context context, Pieces in, std::vector<Pieces> out);
// data: read on the root (a member), written on the others.
Task broadcast(Context context, Pieces data, int root);
// in[m] goes to member m; out[m] comes from member m. `large`, the same on all members: the blocks are large enough to
// ask whether the results lie in shared memory.
Task alltoall(Context context, std::vector<Pieces> in, std::vector<Pieces> out, bool large);
// in[m] is reduced for member m; all members have the same sizes. out: this member's part.
Task reducescatter(Context context, std::vector<Pieces> in, Pieces out, Reduction reduction);
// Returns when every member has entered it.
Task barrier(Context context);

}  // namespace farandole::collective
