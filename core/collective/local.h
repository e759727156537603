// Collectives among the members of one host, through shared memory. They are the steps from which the others are made.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Lists are by local member. Arguments are taken by reference: they stay until the task has ended. `context.rings` is
// set.

// Every member gets the result, finished; in local order. `in` and `out` may be the same memory, piece by piece.
Task local_allreduce(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction);
// in[l] is what local member l owns (the same sizes everywhere, any of them may be empty); out: my part. out may be
// in[me].
Task local_reduce_scatter(const Context& context, const std::vector<Pieces>& in, const Pieces& out,
                          const Reduction& reduction);
// mine goes to everybody; out[l] comes from local member l, out[me] from mine (which it may be). Blocks of any sizes:
// with only one that is not empty this is a broadcast.
Task local_allgather(const Context& context, const Pieces& mine, const std::vector<Pieces>& out);
// in[l] goes to local member l; out[l] comes from it. `large` as in alltoall.
Task local_alltoall(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out, bool large);
// Returns when all members of the host have entered.
Task local_barrier(const Context& context);

}  // namespace farandole::collective
