// The collectives: what moves, from the view of one member of a group. docs/algorithms.md has their cost.
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

// What a collective runs on. One per collective; everything it points to outlives it.
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
  std::int64_t* in_place = nullptr;     // counts bytes that were reduced in memory that all members share
  const char** phase = nullptr;  // where it stands, for error messages: "pack", "send", "recv", "reduce", "unpack"
};

struct Reduction {
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;  // sum, min, max, product
  double prescale = 1.0;
  double postscale = 1.0;
  std::int64_t divisor = 1;  // > 1 for an average
};

// `in` and `out` have equal sizes and may be the same memory, piece by piece.
Task allreduce(Context context, Pieces in, Pieces out, Reduction reduction);
// Each tensor of the bucket by itself: its own dot products.
Task adasum(Context context, std::vector<Pieces> in, std::vector<Pieces> out, Reduction reduction);
// out[m] receives member m's contribution, out[me] mine.
Task allgather(Context context, Pieces in, std::vector<Pieces> out);
// data: read on the root (a member), written on the others.
Task broadcast(Context context, Pieces data, int root);
// in[m] goes to member m; out[m] comes from member m. `large`, the same on all members: it is worth asking whether
// their results lie in memory that they share.
Task alltoall(Context context, std::vector<Pieces> in, std::vector<Pieces> out, bool large);
// in[m]: what is reduced for member m; all members have the same sizes. out: my part.
Task reducescatter(Context context, std::vector<Pieces> in, Pieces out, Reduction reduction);
// Returns when every member has entered it.
Task barrier(Context context);

}  // namespace farandole::collective
