// Allreduce by messages for few hosts or few bytes: direct, doubling, tree. All of them add in the party's order.
// Touches base/, link/ and kernel/.
#include "collective/remote.h"

#include <memory>

#include "collective/parts.h"
#include "collective/select.h"

namespace farandole::collective {

namespace {

constexpr std::size_t kWindow = 8;            // chunks under way
constexpr std::uint32_t kResults = 1u << 31;  // added to the step of messages that carry results

wire::Tag tag(const Context& context, std::size_t step) {
  return {context.group, context.sequence, static_cast<std::uint32_t>(step)};
}

// Between two hosts, the usual chunk. Among more hosts a quarter of it: all send to all, and more bytes under way would
// only compete at the switch ports.
std::size_t direct_chunk(Context context, const Slices& slices, int parties) {
  if (parties > 2) context.chunk_bytes /= 4;
  return remote_chunk(context, slices);
}

// `direct` reads and finishes one chunk of every slice per round.
std::vector<Range> by_rounds(const Slices& slices, std::size_t chunk, int parties) {
  std::vector<Range> found;
  for (std::size_t at = 0; at < slices.each; at += chunk) {
    for (int owner = 0; owner < parties; ++owner) {
      std::size_t offset = std::min(slices.size(owner), at);
      found.push_back({slices.begin(owner) + offset, std::min(slices.size(owner) - offset, chunk)});
    }
  }
  return found;
}

// The ring reads and finishes segment after segment in descending order: it reads from this member's own on, and
// finishes from the one after its own on.
std::vector<Range> by_segments(const Slices& slices, int parties, int first) {
  std::vector<Range> found;
  for (int step = 0; step < parties; ++step) {
    int segment = (first + parties - step) % parties;
    found.push_back({slices.begin(segment), slices.size(segment)});
  }
  return found;
}

}  // namespace

Order remote_order(const Context& context, std::size_t bytes, int hosts, int me) {
  Slices slices(bytes, hosts);
  Algorithm algorithm = choose(context.algorithm, bytes, hosts).algorithm;
  if (algorithm == Algorithm::ring) return {by_segments(slices, hosts, me), by_segments(slices, hosts, me + 1)};
  if (algorithm != Algorithm::direct) return {{{0, bytes}}, {{0, bytes}}};
  std::vector<Range> rounds = by_rounds(slices, direct_chunk(context, slices, hosts), hosts);
  return {rounds, rounds};
}

Task remote_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow) {
  const Algorithm algorithm = choose(context.algorithm, in.bytes(), party.size()).algorithm;
  if (context.chosen != nullptr) *context.chosen = algorithm;
  switch (algorithm) {
    case Algorithm::ring:
      return ring_allreduce(context, party, in, out, reduction, flow);
    case Algorithm::doubling:
      return doubling_allreduce(context, party, in, out, reduction, flow);
    case Algorithm::tree:
      return tree_allreduce(context, party, in, out, reduction, flow);
    case Algorithm::direct:
    case Algorithm::automatic:
      break;
  }
  return direct_allreduce(context, party, in, out, reduction, flow);
}

namespace {

// One chunk of every slice: contributions go to the slices' owners, this member's slice is reduced here, results go
// back.
class DirectRound {
 public:
  DirectRound(const Context& context, const Party& party, const Pieces& in, const Pieces& out)
      : context_(context), party_(party), in_(in), out_(out), slices_(in.bytes(), party.size()) {
    chunk_ = direct_chunk(context, slices_, party.size());
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(chunk_ * index(party.size() - 1));
  }

  void begin(std::size_t round) {
    round_ = round;
    contributions_.clear();
    others_.clear();
    Pieces mine = part(out_, party_.me);
    std::byte* at = scratch_.get();
    for (int shift = 1; shift < party_.size(); ++shift) {
      int from = (party_.me + shift) % party_.size();
      if (!mine.empty()) {
        contributions_.push_back(context_.messenger->receive(party_.ranks[index(from)], tag(context_, round),
                                                             Pieces(at + chunk_ * index(shift - 1), mine.bytes())));
      }
      Pieces theirs = part(out_, from);
      if (theirs.empty()) continue;
      others_.push_back(
          context_.messenger->receive(party_.ranks[index(from)], tag(context_, round | kResults), theirs));
      others_.push_back(context_.messenger->send(party_.ranks[index(from)], tag(context_, round), part(in_, from)));
    }
  }
  bool complete() const { return finished(contributions_); }
  void reduce_and_send(const Reduction& reduction) {
    Pieces mine = part(out_, party_.me);
    if (mine.empty()) return;
    enter(context_, "reduce");
    std::vector<Pieces> sources(index(party_.size()));
    sources[index(party_.me)] = part(in_, party_.me);
    for (int shift = 1; shift < party_.size(); ++shift) {
      int from = (party_.me + shift) % party_.size();
      sources[index(from)] = Pieces(scratch_.get() + chunk_ * index(shift - 1), mine.bytes());
    }
    reduce(reduction, sources, mine);
    enter(context_, "send");
    for (int shift = 1; shift < party_.size(); ++shift) {
      int to = (party_.me + shift) % party_.size();
      others_.push_back(context_.messenger->send(party_.ranks[index(to)], tag(context_, round_ | kResults), mine));
    }
  }
  bool over() const { return finished(others_); }

  std::size_t rounds() const { return (slices_.each + chunk_ - 1) / chunk_; }
  // The sum over the first `count` rounds.
  std::size_t bytes_of(std::size_t count) const {
    std::size_t sum = 0;
    for (int owner = 0; owner < party_.size(); ++owner) sum += std::min(slices_.size(owner), count * chunk_);
    return sum;
  }

 private:
  Pieces part(const Pieces& whole, int owner) const { return slices_.chunk(whole, owner, round_, chunk_); }

  const Context& context_;
  const Party& party_;
  const Pieces& in_;
  const Pieces& out_;
  Slices slices_;
  std::size_t chunk_;
  std::size_t round_ = 0;
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<link::TransferPtr> contributions_;
  std::vector<link::TransferPtr> others_;
};

// The rounds under way; a window place is reused when its round is over.
class Direct {
 public:
  Direct(const Context& context, const Party& party, const Pieces& in, const Pieces& out, Flow& flow) : flow_(flow) {
    window_.push_back(std::make_unique<DirectRound>(context, party, in, out));
    rounds_ = window_[0]->rounds();
    while (window_.size() < std::min(kWindow, rounds_)) {
      window_.push_back(std::make_unique<DirectRound>(context, party, in, out));
    }
  }
  bool can_begin() const {
    return begun_ < rounds_ && begun_ < ended_ + window_.size() && flow_.ready >= window_[0]->bytes_of(begun_ + 1);
  }
  bool can_reduce() const { return reduced_ < begun_ && at(reduced_).complete(); }
  bool can_end() const { return ended_ < reduced_ && at(ended_).over(); }

  void begin() {
    at(begun_).begin(begun_);
    ++begun_;
  }
  void reduce(const Reduction& reduction) {
    at(reduced_).reduce_and_send(reduction);
    ++reduced_;
  }
  void end() { flow_.finished = window_[0]->bytes_of(++ended_); }
  bool over() const { return ended_ == rounds_; }

 private:
  DirectRound& at(std::size_t round) const { return *window_[round % window_.size()]; }

  Flow& flow_;
  std::vector<std::unique_ptr<DirectRound>> window_;
  std::size_t rounds_ = 0;
  std::size_t begun_ = 0;    // rounds whose contributions are under way
  std::size_t reduced_ = 0;  // ... whose slice of this member is reduced
  std::size_t ended_ = 0;    // ... that are complete
};

}  // namespace

// In place is safe: a result arrives only after its owner has this member's contribution to it, so those bytes are
// sent.
Task direct_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                      const Reduction& reduction, Flow& flow) {
  if (in.empty()) co_return;
  Reduction last = last_half(reduction);
  Direct direct(context, party, in, out, flow);
  auto movable = until([&direct] { return direct.can_begin() || direct.can_reduce() || direct.can_end(); });
  while (!direct.over()) {
    enter(context, "recv");
    co_await movable;
    while (direct.can_end()) direct.end();
    if (direct.can_begin()) enter(context, "send");
    while (direct.can_begin()) direct.begin();
    if (direct.can_reduce()) direct.reduce(last);
  }
  enter(context, "unpack");
}

// Bruck's allgather: after the step of distance d, a member has the contributions of the 2d positions from its own on.
Task doubling_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                        const Reduction& reduction, Flow& flow) {
  if (in.empty()) co_return;
  auto whole = until([&flow, &in] { return flow.ready == in.bytes(); });
  co_await whole;
  Reduction last = last_half(reduction);
  int size = party.size();
  std::size_t bytes = in.bytes();
  std::vector<std::byte> known(bytes * index(size));  // at position i: the contribution of (me + i) mod size
  enter(context, "pack");
  in.copy_out(0, known.data(), bytes);
  std::vector<link::TransferPtr> receives, sends;
  for (int distance = 1; distance < size; distance *= 2) {
    int count = std::min(distance, size - distance);
    int from = party.ranks[index((party.me + distance) % size)];
    Pieces space(known.data() + bytes * index(distance), bytes * index(count));
    receives.push_back(context.messenger->receive(from, tag(context, index(distance)), space));
  }
  std::size_t step = 0;
  for (int distance = 1; distance < size; distance *= 2, ++step) {
    int count = std::min(distance, size - distance);
    int to = party.ranks[index((party.me + size - distance) % size)];
    enter(context, "send");
    Pieces sent(known.data(), bytes * index(count));
    sends.push_back(context.messenger->send(to, tag(context, index(distance)), sent));
    enter(context, "recv");
    link::Transfer* receive = receives[step].get();
    auto arrived = until([receive] { return receive->done(); });
    co_await arrived;
  }
  enter(context, "reduce");
  std::vector<Pieces> sources(index(size));
  for (int place = 0; place < size; ++place) {
    sources[index((party.me + place) % size)] = Pieces(known.data() + bytes * index(place), bytes);
  }
  reduce(last, sources, out);
  flow.finished = bytes;
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
  enter(context, "unpack");
}

Tree binomial_tree(int size, int me) {
  Tree tree;
  int distance = 1;
  while (distance < size && me % (2 * distance) == 0) {
    if (me + distance < size) tree.children.insert(tree.children.begin(), me + distance);
    distance *= 2;
  }
  if (me != 0) tree.parent = me - distance;
  tree.width = me == 0 ? size : std::min(distance, size - me);
  return tree;
}

Task tree_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow) {
  if (in.empty()) co_return;
  auto whole = until([&flow, &in] { return flow.ready == in.bytes(); });
  co_await whole;
  Reduction last = last_half(reduction);
  std::size_t bytes = in.bytes();
  Tree tree = binomial_tree(party.size(), party.me);
  std::vector<std::byte> known(bytes * index(tree.width));  // the contributions of this subtree, in order
  std::vector<link::TransferPtr> receives, sends;
  for (int child : tree.children) {
    int width = binomial_tree(party.size(), child).width;
    Pieces space(known.data() + bytes * index(child - party.me), bytes * index(width));
    receives.push_back(context.messenger->receive(party.ranks[index(child)], tag(context, 0), space));
  }
  enter(context, "pack");
  in.copy_out(0, known.data(), bytes);
  enter(context, "recv");
  auto gathered = until([&receives] { return finished(receives); });
  co_await gathered;
  if (tree.parent >= 0) {
    int parent = party.ranks[index(tree.parent)];
    enter(context, "send");
    Pieces all(known.data(), known.size());
    sends.push_back(context.messenger->send(parent, tag(context, 0), all));
    // The result may go into the memory of `in`, which has been copied.
    link::TransferPtr result = context.messenger->receive(parent, tag(context, kResults), out);
    enter(context, "recv");
    auto arrived = until([&result] { return result->done(); });
    co_await arrived;
  } else {
    enter(context, "reduce");
    std::vector<Pieces> sources;
    for (int place = 0; place < party.size(); ++place) {
      Pieces source(known.data() + bytes * index(place), bytes);
      sources.push_back(source);
    }
    reduce(last, sources, out);
  }
  flow.finished = bytes;
  enter(context, "send");
  for (int child : tree.children) {
    sends.push_back(context.messenger->send(party.ranks[index(child)], tag(context, kResults), out));
  }
  auto sent_all = until([&sends] { return finished(sends); });
  co_await sent_all;
  enter(context, "unpack");
}

}  // namespace farandole::collective
