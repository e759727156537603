// Alltoall, reducescatter and barrier.
// Touches base/, link/, group/ and kernel/.
#include <memory>

#include "collective/blocks.h"
#include "collective/collective.h"
#include "collective/local.h"
#include "collective/parts.h"

namespace farandole::collective {

Task swap_blocks(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out,
                 std::uint32_t step, bool large) {
  const Topology& topology = *context.topology;
  int my_host = topology.host_of[index(topology.me)];
  wire::Tag tag{context.group, context.sequence, step};
  std::vector<link::TransferPtr> transfers;
  enter(context, "send");
  // Each member starts with another peer, so that they do not all send to the same one first.
  for (int shift = 1; shift < topology.size(); ++shift) {
    int to = (topology.me + shift) % topology.size();
    int from = (topology.me + topology.size() - shift) % topology.size();
    if (topology.host_of[index(from)] != my_host && !out[index(from)].empty()) {
      transfers.push_back(context.messenger->receive(topology.ranks[index(from)], tag, out[index(from)]));
    }
    if (topology.host_of[index(to)] != my_host && !in[index(to)].empty()) {
      transfers.push_back(context.messenger->send(topology.ranks[index(to)], tag, in[index(to)]));
    }
  }
  if (context.rings != nullptr) {
    std::vector<Pieces> local_in, local_out;
    for (int member : topology.my_host()) {
      local_in.push_back(in[index(member)]);
      local_out.push_back(out[index(member)]);
    }
    Task task = local_alltoall(context, local_in, local_out, large);
    co_await task;
  } else {
    copy(in[index(topology.me)], out[index(topology.me)]);
  }
  enter(context, "recv");
  auto all_done = until([&transfers] { return finished(transfers); });
  co_await all_done;
}

Task alltoall(Context context, std::vector<Pieces> in, std::vector<Pieces> out, bool large) {
  enter(context, "pack");
  Task task = swap_blocks(context, in, out, 0, large);
  co_await task;
  enter(context, "unpack");
}

namespace {

// The member of `host` that adds up this host's contributions for `destination`: the member with the same local index,
// if there is one. On the destination's own host it is the destination itself.
int adder(const Topology& topology, int host, int destination) {
  const std::vector<int>& members = topology.hosts[index(host)];
  return members[index(topology.local_of[index(destination)]) % members.size()];
}

// For each member m whose adder is this member, partials[m] becomes the host's sum for m. The sums are in `memory`, or
// in `in` itself if this is the only member of the host and nothing is scaled.
Task add_up_host(const Context& context, const std::vector<Pieces>& in, const Reduction& reduction,
                 std::unique_ptr<std::byte[]>& memory, std::vector<Pieces>& partials) {
  const Topology& topology = *context.topology;
  int my_host = topology.host_of[index(topology.me)];
  if (context.rings == nullptr && reduction.prescale == 1.0) {
    partials = in;
    co_return;
  }
  std::vector<Pieces> by_adder(topology.my_host().size());
  for (int member = 0; member < topology.size(); ++member) {
    int local = topology.local_of[index(adder(topology, my_host, member))];
    by_adder[index(local)].add(in[index(member)]);
  }
  const Pieces& own = by_adder[index(topology.my_local())];
  memory = std::make_unique_for_overwrite<std::byte[]>(own.bytes());
  Pieces sums(memory.get(), own.bytes());
  Reduction first = first_half(reduction);
  if (context.rings != nullptr) {
    Task task = local_reduce_scatter(context, by_adder, sums, first);
    co_await task;
  } else {
    reduce(first, by_adder, sums);
  }
  std::size_t offset = 0;
  for (int member = 0; member < topology.size(); ++member) {
    if (adder(topology, my_host, member) != topology.me) continue;
    partials[index(member)] = sums.slice(offset, in[index(member)].bytes());
    offset += in[index(member)].bytes();
  }
}

// Each host adds up its contributions; the sums of all hosts are sent to the member that needs them, which adds them.
Task reducescatter_by_hosts(const Context& context, const std::vector<Pieces>& in, const Pieces& out,
                            const Reduction& reduction) {
  const Topology& topology = *context.topology;
  int my_host = topology.host_of[index(topology.me)];
  wire::Tag tag{context.group, context.sequence, 0};
  std::size_t bytes = out.bytes();
  auto arrivals = std::make_unique_for_overwrite<std::byte[]>(bytes * index(topology.host_count()));
  std::unique_ptr<std::byte[]> memory;
  std::vector<Pieces> sources(index(topology.host_count()));
  std::vector<link::TransferPtr> receives, sends;  // declared after what they point to, so cancelled first
  for (int host = 0; host < topology.host_count() && bytes > 0; ++host) {
    if (host == my_host) continue;
    sources[index(host)] = Pieces(arrivals.get() + bytes * index(host), bytes);
    int from = topology.ranks[index(adder(topology, host, topology.me))];
    receives.push_back(context.messenger->receive(from, tag, sources[index(host)]));
  }
  std::vector<Pieces> partials(index(topology.size()));
  Task sum = add_up_host(context, in, reduction, memory, partials);
  co_await sum;
  enter(context, "send");
  for (int shift = 1; shift < topology.size(); ++shift) {
    int to = (topology.me + shift) % topology.size();
    if (topology.host_of[index(to)] == my_host || adder(topology, my_host, to) != topology.me) continue;
    if (partials[index(to)].empty()) continue;
    sends.push_back(context.messenger->send(topology.ranks[index(to)], tag, partials[index(to)]));
  }
  enter(context, "recv");
  auto arrived = until([&receives] { return finished(receives); });
  co_await arrived;
  enter(context, "reduce");
  sources[index(my_host)] = partials[index(topology.me)];
  reduce(last_half(reduction), sources, out);
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
}

}  // namespace

Task reducescatter(Context context, std::vector<Pieces> in, Pieces out, Reduction reduction) {
  enter(context, "pack");
  Task task;
  if (context.topology->size() == 1) {
    reduce(reduction, in, out);
    co_return;
  } else if (context.topology->host_count() == 1) {
    task = local_reduce_scatter(context, in, out, reduction);
  } else {
    task = reducescatter_by_hosts(context, in, out, reduction);
  }
  co_await task;
  enter(context, "unpack");
}

namespace {

// Dissemination: after the step of distance d, a host has messages of the 2d hosts before it, directly or through
// others.
Task barrier_between(const Context& context) {
  const Topology& topology = *context.topology;
  int hosts = topology.host_count();
  int my_host = topology.host_of[index(topology.me)];
  std::vector<link::TransferPtr> sends;
  for (int distance = 1; distance < hosts; distance *= 2) {
    int to = topology.ranks[index(topology.hosts[index((my_host + distance) % hosts)][0])];
    int from = topology.ranks[index(topology.hosts[index((my_host + hosts - distance) % hosts)][0])];
    wire::Tag tag{context.group, context.sequence, static_cast<std::uint32_t>(distance)};
    Pieces nothing;
    enter(context, "send");
    link::TransferPtr receive = context.messenger->receive(from, tag, nothing);
    sends.push_back(context.messenger->send(to, tag, nothing));
    enter(context, "recv");
    auto received = until([&receive] { return receive->done(); });
    co_await received;
  }
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
}

}  // namespace

Task barrier(Context context) {
  const Topology& topology = *context.topology;
  if (context.rings != nullptr) {
    Task task = local_barrier(context);
    co_await task;
  }
  if (topology.host_count() == 1) co_return;
  if (topology.my_local() == 0) {
    Task task = barrier_between(context);
    co_await task;
  }
  if (context.rings != nullptr) {  // the first member of the host releases the others
    Task task = local_barrier(context);
    co_await task;
  }
}

}  // namespace farandole::collective
