// Collectives among the members of one host, through shared memory. The larger collectives are made of them.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Lists are by local member. Arguments are references and must live until the task has ended. `context.rings` must be
// set.

// Every member gets the finished result, reduced in local order. Each piece of `in` and `out` may be the same memory.
Task local_allreduce(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction);
// in[l] is for local member l (the same sizes everywhere; any may be empty). out: this member's part, which may be
// in[me].
Task local_reduce_scatter(const Context& context, const std::vector<Pieces>& in, const Pieces& out,
                          const Reduction& reduction);
// `mine` goes to all; out[l] comes from local member l, out[me] from `mine` (and may be it). Blocks may have any sizes:
// when only one is not empty, this is a broadcast.
Task local_allgather(const Context& context, const Pieces& mine, const std::vector<Pieces>& out);
// in[l] goes to local member l; out[l] comes from it. `large` as in alltoall.
Task local_alltoall(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out, bool large);
// Returns when all members of the host have entered.
Task local_barrier(const Context& context);

}  // namespace farandole::collective
