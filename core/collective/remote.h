// Allreduce between members that share no memory, by messages. docs/algorithms.md has the cost of each.
// Touches base/, link/ and kernel/.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Those who take part, in the order in which their contributions are added; equal on all of them but for `me`.
struct Party {
  std::vector<int> ranks;  // in the job
  int me = 0;              // my place in it
  int size() const { return static_cast<int>(ranks.size()); }
};

// How far things are while a remote allreduce runs, so that what comes before and after it goes on at the same time.
struct Flow {
  std::size_t ready = 0;     // bytes of `in` that are there, in Order::in; the other side counts them up
  std::size_t finished = 0;  // bytes of `out` that are final, in Order::out; the allreduce counts them up
};

// In which order an allreduce of `bytes` between `hosts` reads its contribution and finishes its result, on host `me`.
struct Range {
  std::size_t begin = 0;
  std::size_t bytes = 0;
};
struct Order {
  std::vector<Range> in;
  std::vector<Range> out;
};
Order remote_order(const Context& context, std::size_t bytes, int hosts, int me);

// Arguments are taken by reference: they stay until the task has ended. `in` and `out` may be the same memory, piece by
// piece. The reduction's prescale is not looked at: contributions are scaled before. A collective runs one of these
// once, and all its messages have steps of their own.
Task remote_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow);

// Bandwidth: each reduces a slice of its own and sends it to all.
Task direct_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow);
// Bandwidth for many: every segment goes round once to be summed and once to be spread.
Task ring_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow);
// Latency: everyone learns all contributions in ceil(log2 N) steps and adds them up itself.
Task doubling_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                        const Reduction& reduction, Flow& flow);
// Few messages: contributions go up a binomial tree to the first, which adds them up; the result comes down.
Task tree_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow);

// A binomial tree over a party, seen from one place of it.
struct Tree {
  int parent = -1;            // -1 at the root
  std::vector<int> children;  // the one with the largest subtree first
  int width = 1;              // the places of my subtree are mine and the width - 1 that follow it
};
Tree binomial_tree(int size, int me);

}  // namespace farandole::collective
