// Allgather and broadcast: every block goes to another host once, and is distributed there through shared memory.
// Touches base/, link/ and group/.
#include <algorithm>

#include "collective/blocks.h"
#include "collective/collective.h"
#include "collective/local.h"
#include "collective/parts.h"
#include "collective/remote.h"

namespace farandole::collective {

namespace {

// The member of another host that receives from members with this local index: the one with the same index, if there is
// one.
int counterpart(const Topology& topology, int host, int local) {
  const std::vector<int>& members = topology.hosts[index(host)];
  return members[index(local) % members.size()];
}

}  // namespace

Task gather_blocks(const Context& context, const Pieces& in, const std::vector<Pieces>& out, std::uint32_t step) {
  const Topology& topology = *context.topology;
  const std::vector<int>& locals = topology.my_host();
  wire::Tag tag{context.group, context.sequence, step};
  int my_host = topology.host_of[index(topology.me)];
  const bool send_empty =
      rows_vary(context.kind);  // the receiver cannot know these sizes, so empty blocks are sent too
  std::vector<link::TransferPtr> sends, receives;
  std::vector<Pieces> own(locals.size()), fetched(locals.size());  // by local member
  for (int local = 0; local < static_cast<int>(locals.size()); ++local) {
    own[index(local)] = out[index(locals[index(local)])];
  }
  for (int member = 0; member < topology.size(); ++member) {
    if (topology.host_of[index(member)] == my_host || (out[index(member)].empty() && !send_empty)) continue;
    int taker = counterpart(topology, my_host, topology.local_of[index(member)]);
    fetched[index(topology.local_of[index(taker)])].add(out[index(member)]);
    if (taker != topology.me) continue;
    receives.push_back(context.messenger->receive(topology.ranks[index(member)], tag, out[index(member)]));
  }
  enter(context, "send");
  for (int shift = 1; shift < topology.host_count() && (send_empty || !in.empty()); ++shift) {
    int host = (my_host + shift) % topology.host_count();
    int taker = counterpart(topology, host, topology.my_local());
    sends.push_back(context.messenger->send(topology.ranks[index(taker)], tag, in));
  }
  // The local peers' own blocks move through memory while the messages are under way.
  if (context.rings != nullptr) {
    Task distribution = local_allgather(context, in, own);
    co_await distribution;
  } else {
    copy(in, own[0]);
  }
  enter(context, "recv");
  auto fetched_all = until([&receives] { return finished(receives); });
  co_await fetched_all;
  if (context.rings != nullptr && topology.host_count() > 1) {
    Task distribution = local_allgather(context, fetched[index(topology.my_local())], fetched);
    co_await distribution;
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

// A broadcast between hosts, for the member of a host that takes part: chunk by chunk down a binomial tree of hosts.
class Carrier {
 public:
  Carrier(const Context& context, const Pieces& data, int root)
      : context_(context), topology_(*context.topology), data_(data), root_(root) {
    int hosts = topology_.host_count();
    int place = topology_.host_of[index(topology_.me)] - topology_.host_of[index(root)];
    tree_ = binomial_tree(hosts, (place + hosts) % hosts);
    chunk_ = std::max<std::size_t>(context.chunk_bytes, 64);
    receives_.resize(tree_.parent >= 0 ? chunks() : 0);
  }
  std::size_t chunks() const { return (data_.bytes() + chunk_ - 1) / chunk_; }
  Pieces part(std::size_t chunk) const {
    return data_.slice(chunk * chunk_, std::min(chunk_, data_.bytes() - chunk * chunk_));
  }
  void post_receives(std::size_t from) {
    for (; posted_ < receives_.size() && posted_ < from + kWindow; ++posted_) {
      receives_[posted_] = context_.messenger->receive(rank_at(tree_.parent), tag(posted_), part(posted_));
    }
  }
  bool arrived(std::size_t chunk) const { return receives_.empty() || receives_[chunk]->done(); }
  void hand_on(std::size_t chunk) {
    if (!receives_.empty()) receives_[chunk] = nullptr;
    for (int child : tree_.children) {
      sends_.push_back(context_.messenger->send(rank_at(child), tag(chunk), part(chunk)));
    }
  }
  // At most a window of chunks waits for a slow child.
  bool room() const {
    std::size_t waiting = 0;
    for (const link::TransferPtr& send : sends_) waiting += send->done() ? 0 : 1;
    return waiting < kWindow * std::max<std::size_t>(tree_.children.size(), 1);
  }
  bool sent_all() const { return finished(sends_); }
  void forget_sent() {
    std::erase_if(sends_, [](const link::TransferPtr& send) { return send->done(); });
  }

 private:
  int rank_at(int place) const {
    int host = (place + topology_.host_of[index(root_)]) % topology_.host_count();
    return topology_.ranks[index(counterpart(topology_, host, topology_.local_of[index(root_)]))];
  }
  wire::Tag tag(std::size_t chunk) const {
    return {context_.group, context_.sequence, static_cast<std::uint32_t>(chunk)};
  }

  const Context& context_;
  const Topology& topology_;
  const Pieces& data_;
  int root_;
  Tree tree_;
  std::size_t chunk_;
  std::size_t posted_ = 0;
  std::vector<link::TransferPtr> receives_;  // by chunk; none at the root
  std::vector<link::TransferPtr> sends_;
};

// While a chunk is distributed on the host, the next one is under way between hosts.
Task broadcast_between(const Context& context, const Pieces& data, int root) {
  const Topology& topology = *context.topology;
  // On the root's own host, the root takes the place of the member with the local index of the carrier.
  int source = counterpart(topology, topology.host_of[index(topology.me)], topology.local_of[index(root)]);
  bool carrying = source == topology.me;
  Carrier carrier(context, data, root);
  for (std::size_t chunk = 0; chunk < carrier.chunks(); ++chunk) {
    if (carrying) {
      enter(context, "recv");
      carrier.post_receives(chunk);
      auto arrived = until([&carrier, chunk] { return carrier.arrived(chunk) && carrier.room(); });
      co_await arrived;
      enter(context, "send");
      carrier.forget_sent();
      carrier.hand_on(chunk);
    }
    if (context.rings != nullptr) {
      std::vector<Pieces> blocks(topology.my_host().size());
      blocks[index(topology.local_of[index(source)])] = carrier.part(chunk);
      Task distribution = local_allgather(context, blocks[index(topology.my_local())], blocks);
      co_await distribution;
    }
  }
  auto sent_all = until([&carrier] { return carrier.sent_all(); });
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
