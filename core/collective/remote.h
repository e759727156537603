// Allreduce between members without shared memory, by messages. docs/algorithms.md has the cost of each.
// Touches base/, link/ and kernel/.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// The members that take part, in the order in which their contributions are added; equal on all members except `me`.
struct Party {
  std::vector<int> ranks;  // in the job
  int me = 0;              // this member's position in it
  int size() const { return static_cast<int>(ranks.size()); }
};

// Progress of a remote allreduce, so that the stages before and after it can overlap with it.
struct Flow {
  std::size_t ready = 0;     // bytes of `in` that are ready, in Order::in; the other stage increases it
  std::size_t finished = 0;  // bytes of `out` that are final, in Order::out; the allreduce increases it
};

// The order in which an allreduce of `bytes` between `hosts` reads its contribution and finishes its result on host
// `me`.
struct Range {
  std::size_t begin = 0;
  std::size_t bytes = 0;
};
struct Order {
  std::vector<Range> in;
  std::vector<Range> out;
};
Order remote_order(const Context& context, std::size_t bytes, int hosts, int me);

// Arguments are references and must live until the task has ended. Each piece of `in` and `out` may be the same memory.
// The reduction's prescale is ignored: contributions are scaled before. A collective runs at most one of these, once.
Task remote_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow);

// For bandwidth: each member reduces a slice and sends it to all.
Task direct_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow);
// For bandwidth with many hosts: every segment goes around the ring once to be reduced and once to be distributed.
Task ring_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow);
// For latency: each member gets all contributions in ceil(log2 N) steps and reduces them itself.
Task doubling_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                        const Reduction& reduction, Flow& flow);
// For few messages: contributions go up a binomial tree to the first member, which reduces them; the result comes down.
Task tree_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow);

// A binomial tree over a party, from the view of one position.
struct Tree {
  int parent = -1;            // -1 at the root
  std::vector<int> children;  // the one with the largest subtree first
  int width = 1;              // the subtree has this position and the width - 1 that follow it
};
Tree binomial_tree(int size, int me);

}  // namespace farandole::collective
