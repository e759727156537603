// Allgather and broadcast: every block crosses to another host once, and is spread there through shared memory.
// Touches base/, link/ and group/.
#include <algorithm>

#include "collective/blocks.h"
#include "collective/collective.h"
#include "collective/local.h"
#include "collective/parts.h"
#include "collective/remote.h"

namespace farandole::collective {

namespace {

// Who takes the messages of members with this local index on another host: the same index, where there is one.
int counterpart(const Topology& topology, int host, int local) {
  const std::vector<int>& members = topology.hosts[index(host)];
  return members[index(local) % members.size()];
}

}  // namespace

Task gather_blocks(const Context& context, const Pieces& in, const std::vector<Pieces>& out, std::uint32_t step) {
  const Topology& topology = *context.topology;
  const std::vector<int>& neighbours = topology.my_host();
  wire::Tag tag{context.group, context.sequence, step};
  int my_host = topology.host_of[index(topology.me)];
  std::vector<link::TransferPtr> sends, receives;
  std::vector<Pieces> own(neighbours.size()), fetched(neighbours.size());  // by local member
  for (int local = 0; local < static_cast<int>(neighbours.size()); ++local) {
    own[index(local)] = out[index(neighbours[index(local)])];
  }
  for (int member = 0; member < topology.size(); ++member) {
    if (topology.host_of[index(member)] == my_host || out[index(member)].empty()) continue;
    int taker = counterpart(topology, my_host, topology.local_of[index(member)]);
    fetched[index(topology.local_of[index(taker)])].add(out[index(member)]);
    if (taker != topology.me) continue;
    receives.push_back(context.messenger->receive(topology.ranks[index(member)], tag, out[index(member)]));
  }
  enter(context, "send");
  for (int shift = 1; shift < topology.host_count() && !in.empty(); ++shift) {
    int host = (my_host + shift) % topology.host_count();
    int taker = counterpart(topology, host, topology.my_local());
    sends.push_back(context.messenger->send(topology.ranks[index(taker)], tag, in));
  }
  // The neighbours' own blocks move through memory while the messages are under way.
  if (context.rings != nullptr) {
    Task spread = local_allgather(context, in, own);
    co_await spread;
  } else {
    copy(in, own[0]);
  }
  enter(context, "recv");
  auto fetched_all = until([&receives] { return finished(receives); });
  co_await fetched_all;
  if (context.rings != nullptr && topology.host_count() > 1) {
    Task spread = local_allgather(context, fetched[index(topology.my_local())], fetched);
    co_await spread;
  }
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
  enter(context, "unpack");
}

Task allgather(Context context, Pieces in, std::vector<Pieces> out) {
  enter(context, "pack");
  Task task = gather_blocks(context, in, out, 0);
  co_await task;
}

namespace {

constexpr std::size_t kWindow = 8;  // chunks under way

// One member per host holds or takes the data and hands it on down a binomial tree of hosts, chunk by chunk; the chunk
// is spread on the host while the next is under way.
Task broadcast_between(const Context& context, const Pieces& data, int root) {
  const Topology& topology = *context.topology;
  int root_host = topology.host_of[index(root)];
  int hosts = topology.host_count();
  int my_host = topology.host_of[index(topology.me)];
  // On the root's own host the counterpart of its local index is the root.
  int source = counterpart(topology, my_host, topology.local_of[index(root)]);
  bool carrying = source == topology.me;
  Tree tree = binomial_tree(hosts, (my_host - root_host + hosts) % hosts);
  auto rank_at = [&](int place) {
    int host = (place + root_host) % hosts;
    return topology.ranks[index(counterpart(topology, host, topology.local_of[index(root)]))];
  };
  std::size_t chunk = std::max<std::size_t>(context.chunk_bytes, 64);
  std::size_t chunks = (data.bytes() + chunk - 1) / chunk;
  auto part = [&](std::size_t number) {
    return data.slice(number * chunk, std::min(chunk, data.bytes() - number * chunk));
  };
  std::vector<link::TransferPtr> receives(chunks), sends;
  std::size_t posted = 0, oldest = 0;
  for (std::size_t number = 0; number < chunks; ++number) {
    Pieces bytes = part(number);
    wire::Tag tag{context.group, context.sequence, static_cast<std::uint32_t>(number)};
    if (carrying && tree.parent >= 0) {
      for (; posted < chunks && posted < number + kWindow; ++posted) {
        wire::Tag next{context.group, context.sequence, static_cast<std::uint32_t>(posted)};
        receives[posted] = context.messenger->receive(rank_at(tree.parent), next, part(posted));
      }
      enter(context, "recv");
      link::Transfer* receive = receives[number].get();
      auto arrived = until([receive] { return receive->done(); });
      co_await arrived;
      receives[number] = nullptr;
    }
    if (carrying) {
      enter(context, "send");
      for (int child : tree.children) sends.push_back(context.messenger->send(rank_at(child), tag, bytes));
      // No more than a window of chunks waits for a slow child.
      std::size_t limit = sends.size() - std::min(sends.size(), kWindow * tree.children.size());
      for (; oldest < limit; ++oldest) {
        link::Transfer* send = sends[oldest].get();
        auto gone = until([send] { return send->done(); });
        co_await gone;
        sends[oldest] = nullptr;
      }
    }
    if (context.rings != nullptr) {
      std::vector<Pieces> blocks(topology.my_host().size());
      blocks[index(topology.local_of[index(source)])] = bytes;
      Task spread = local_allgather(context, blocks[index(topology.my_local())], blocks);
      co_await spread;
    }
  }
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
}

}  // namespace

Task broadcast(Context context, Pieces data, int root) {
  if (data.empty() || context.topology->size() == 1) co_return;
  enter(context, "pack");
  if (context.topology->host_count() > 1) {
    Task task = broadcast_between(context, data, root);
    co_await task;
  } else {
    std::vector<Pieces> blocks(context.topology->my_host().size());
    blocks[index(context.topology->local_of[index(root)])] = data;
    Task task = local_allgather(context, blocks[index(context.topology->my_local())], blocks);
    co_await task;
  }
  enter(context, "unpack");
}

}  // namespace farandole::collective
