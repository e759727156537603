// Allreduce over any topology: local reduction, reduction between hosts slice by slice, local distribution.
// Touches base/, link/, group/ and kernel/.
#include <algorithm>

#include "collective/collective.h"
#include "collective/exchange.h"
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

// A member that is alone on its host: its contribution is the host's sum. It needs memory only when it is scaled.
Task allreduce_alone(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  Party party = party_of(*context.topology, 0);
  bool scaled = reduction.prescale != 1.0;
  if (scaled) {
    enter(context, "pack");
    std::vector<Pieces> source(1, in);
    reduce(first_half(reduction), source, out);
  }
  Flow flow;
  flow.ready = in.bytes();
  Task task = remote_allreduce(context, party, scaled ? out : in, out, reduction, flow);
  co_await task;
}

Pieces in_order(const Pieces& whole, std::size_t offset, const std::vector<Range>& order) {
  Pieces found;
  for (const Range& range : order) {
    if (range.bytes > 0) found.add(whole.slice(offset + range.begin, range.bytes));
  }
  return found;
}

// There are as many slices as every host has members. The host's sum of a slice is kept in its owner's `out`, where the
// sums of all hosts are added. Reduction, messages and distribution overlap: a chunk leaves the host as soon as it is
// reduced there, and is distributed as soon as it is final.
Task allreduce_by_hosts(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  const Topology& topology = *context.topology;
  link::Rings& rings = *context.rings;
  std::size_t owners = topology.my_host().size();
  for (const std::vector<int>& host : topology.hosts) owners = std::min(owners, host.size());
  Slices slices(in.bytes(), static_cast<int>(owners));
  std::vector<Pieces> sources(topology.my_host().size()), sums(topology.my_host().size()), results(sums.size());
  for (int owner = 0; index(owner) < owners; ++owner) {
    Order order =
        remote_order(context, slices.size(owner), topology.host_count(), topology.host_of[index(topology.me)]);
    sources[index(owner)] = in_order(in, slices.begin(owner), order.in);
    sums[index(owner)] = in_order(out, slices.begin(owner), order.in);
    results[index(owner)] = in_order(out, slices.begin(owner), order.out);
  }
  std::size_t me = index(topology.my_local());
  Reduction first = first_half(reduction);
  Flow flow;
  Exchange exchange(context, rings.slot_bytes());
  for (int shift = 1; shift < rings.members(); ++shift) {
    int member = (rings.me() + shift) % rings.members();
    exchange.send(member, Cursor(sources[index(member)]), sources[index(member)].bytes());
    exchange.receive(member, true, Cursor(results[index(member)]), results[index(member)].bytes());
  }
  exchange.reduce(Cursor(sources[me]), Cursor(sums[me]), sums[me].bytes(), first, false, &flow.ready);
  exchange.send(link::Rings::everyone, Cursor(results[me]), results[me].bytes(), &flow.finished);
  if (me >= owners) {
    Task task = exchange.run();
    co_await task;
    co_return;
  }
  Party party = party_of(topology, topology.my_local());
  Pieces mine = out.slice(slices.begin(topology.my_local()), slices.size(topology.my_local()));
  Task task = side_by_side(exchange.run(), remote_allreduce(context, party, mine, mine, reduction, flow));
  co_await task;
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
