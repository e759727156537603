// Allreduce over any topology: local sums, sums between hosts slice by slice, local spreading.
// Touches base/, link/, group/ and kernel/.
#include <algorithm>

#include "collective/collective.h"
#include "collective/local.h"
#include "collective/parts.h"
#include "collective/remote.h"

namespace farandole::collective {

namespace {

// The members of all hosts with one local index, in host order.
Party party_of(const Topology& topology, int local) {
  Party party;
  for (const std::vector<int>& host : topology.hosts) party.ranks.push_back(topology.ranks[index(host[index(local)])]);
  party.me = topology.host_of[index(topology.me)];
  return party;
}

// Alone on this host: its contribution is the host's sum, and needs memory of its own only when it is scaled.
Task allreduce_alone(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  Party party = party_of(*context.topology, 0);
  bool scaled = reduction.prescale != 1.0;
  if (scaled) {
    enter(context, "pack");
    std::vector<Pieces> source(1, in);
    reduce(first_half(reduction), source, out);
  }
  Task task = remote_allreduce(context, party, scaled ? out : in, out, reduction);
  co_await task;
}

// As many slices as every host has members; the host's sum of a slice lies in its owner's `out` until all hosts' sums
// are added to it there.
Task allreduce_by_hosts(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  const Topology& topology = *context.topology;
  std::size_t owners = topology.my_host().size();
  for (const std::vector<int>& host : topology.hosts) owners = std::min(owners, host.size());
  Slices slices(in.bytes(), static_cast<int>(owners));
  std::vector<Pieces> sources(topology.my_host().size()), results(topology.my_host().size());
  for (std::size_t owner = 0; owner < owners; ++owner) {
    int s = static_cast<int>(owner);
    sources[owner] = in.slice(slices.begin(s), slices.size(s));
    results[owner] = out.slice(slices.begin(s), slices.size(s));
  }
  const Pieces& mine = results[index(topology.my_local())];
  Reduction first = first_half(reduction);
  Task sum = local_reduce_scatter(context, sources, mine, first);
  co_await sum;
  if (index(topology.my_local()) < owners) {
    Party party = party_of(topology, topology.my_local());
    Task between = remote_allreduce(context, party, mine, mine, reduction);
    co_await between;
  }
  Task spread = local_allgather(context, mine, results);
  co_await spread;
}

}  // namespace

Task allreduce(Context context, Pieces in, Pieces out, Reduction reduction) {
  if (in.empty()) co_return;
  Task task;
  if (context.topology->size() == 1) {
    enter(context, "reduce");
    std::vector<Pieces> source(1, in);
    reduce(reduction, source, out);
    co_return;
  } else if (context.topology->host_count() == 1) {
    task = local_allreduce(context, in, out, reduction);
  } else if (context.rings == nullptr) {
    task = allreduce_alone(context, in, out, reduction);
  } else {
    task = allreduce_by_hosts(context, in, out, reduction);
  }
  co_await task;
}

}  // namespace farandole::collective
