// Allreduce in a ring: for many hosts, because each host needs links only to the one before and the one after it.
// Touches base/, link/ and kernel/.
#include <deque>
#include <memory>

#include "collective/parts.h"
#include "collective/remote.h"

namespace farandole::collective {

namespace {

constexpr std::size_t kWindow = 8;  // how many turns may be posted and not handled

// The bytes are cut into N segments (one for each member), and each segment into `chunks` chunks. There are 2(N-1)
// steps. In each step a member sends one segment and receives one. The transfer of one chunk in one step is a turn:
// turn = step * chunks + chunk. Segment numbers are modulo N.
// Steps 0 to N-2 reduce: in step s, a member sends segment me-s and receives segment me-s-1. It adds its own
// contribution to the received segment, and sends the sum in step s+1. After step N-2, this member has the
// complete sum of segment me+1. The other N-1 steps distribute the complete segments.
class Ring {
 public:
  Ring(const Context& context, const Party& party, const Pieces& in, const Pieces& out, const Reduction& reduction,
       Flow& flow)
      : context_(context),
        party_(party),
        in_(in),
        out_(out),
        reduction_(reduction),
        flow_(flow),
        slices_(in.bytes(), party.size()) {
    chunk_bytes_ = remote_chunk(context, slices_);
    chunks_ = (slices_.each + chunk_bytes_ - 1) / chunk_bytes_;
    turns_ = 2 * index(party.size() - 1) * chunks_;
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(chunk_bytes_ * kWindow);
    receives_.resize(kWindow);
  }

  // Posts all sends and receives that are possible now.
  void post() {
    int previous = party_.ranks[index((party_.me + party_.size() - 1) % party_.size())];
    int next = party_.ranks[index((party_.me + 1) % party_.size())];
    for (; receives_posted_ < turns_ && receives_posted_ < handled_ + kWindow; ++receives_posted_) {
      Pieces target = received_part(receives_posted_, out_);
      if (is_reducing(receives_posted_))
        target = Pieces(scratch_.get() + receives_posted_ % kWindow * chunk_bytes_, target.bytes());
      link::TransferPtr& receive = receives_[receives_posted_ % kWindow];
      receive = target.empty() ? nullptr : context_.messenger->receive(previous, tag_of(receives_posted_), target);
    }
    for (; can_send(); ++sends_posted_) {
      Pieces bytes = part(sends_posted_ < chunks_ ? in_ : out_, party_.me + party_.size() + sent_segment(sends_posted_),
                          sends_posted_ % chunks_);
      if (!bytes.empty()) sends_.push_back(context_.messenger->send(next, tag_of(sends_posted_), bytes));
    }
    while (!sends_.empty() && sends_.front()->done()) sends_.pop_front();
  }
  // Whether the next chunk can be sent. In step 0 it is this member's input; later it is the result of an earlier turn.
  bool can_send() const {
    return sends_posted_ < turns_ && sends_posted_ < handled_ + std::min(kWindow, chunks_) &&
           (sends_posted_ >= chunks_ || contribution_ready(0, sends_posted_));
  }
  // Whether the bytes of turn `handled_` have arrived and, if they must be summed, this member's contribution is ready.
  bool can_handle() const {
    const link::TransferPtr& receive = receives_[handled_ % kWindow];
    if (receive && !receive->done()) return false;
    return !is_reducing(handled_) || contribution_ready(handled_ / chunks_ + 1, handled_ % chunks_);
  }
  void handle() {
    Pieces target = received_part(handled_, out_);
    if (is_reducing(handled_) && !target.empty()) {
      enter(context_, "reduce");
      bool last_reducing_step = handled_ / chunks_ + 2 == index(party_.size());
      std::vector<Pieces> sources;
      sources.emplace_back(scratch_.get() + handled_ % kWindow * chunk_bytes_, target.bytes());
      sources.push_back(received_part(handled_, in_));
      reduce(last_reducing_step ? last_half(reduction_) : last_half(first_half(reduction_)), sources, target);
    }
    // From the last reducing step on, each turn makes one chunk of the result complete.
    if (handled_ / chunks_ + 2 >= index(party_.size())) flow_.finished += target.bytes();
    receives_[handled_ % kWindow] = nullptr;
    ++handled_;
  }
  bool handled_all() const { return handled_ == turns_; }
  bool sent_all() const {
    for (const link::TransferPtr& send : sends_) {
      if (!send->done()) return false;
    }
    return true;
  }

 private:
  bool is_reducing(std::size_t turn) const { return turn < turns_ / 2; }
  // Whether this member's contribution to the chunk is ready, in segment `me - back`. Contributions become ready in the
  // order of the steps: segment `me`, `me - 1`, and so on.
  bool contribution_ready(std::size_t back, std::size_t chunk) const {
    std::size_t needed = 0;
    for (std::size_t i = 0; i <= back; ++i) {
      std::size_t size = slices_.size((party_.me + party_.size() - static_cast<int>(i)) % party_.size());
      needed += i < back ? size : std::min(size, (chunk + 1) * chunk_bytes_);
    }
    return flow_.ready >= needed;
  }
  wire::Tag tag_of(std::size_t turn) const {
    return {context_.group, context_.sequence, static_cast<std::uint32_t>(turn)};
  }
  // The segment that the turn sends, minus `me`: between -(N-1) and 1.
  int sent_segment(std::size_t turn) const {
    int s = static_cast<int>(turn / chunks_);
    return is_reducing(turn) ? -s : 1 - (s - (party_.size() - 1));
  }
  Pieces received_part(std::size_t turn, const Pieces& whole) const {
    return part(whole, party_.me + party_.size() + sent_segment(turn) - 1, turn % chunks_);
  }
  Pieces part(const Pieces& whole, int segment, std::size_t chunk) const {
    return slices_.chunk(whole, segment % party_.size(), chunk, chunk_bytes_);
  }

  const Context& context_;
  const Party& party_;
  const Pieces& in_;
  const Pieces& out_;
  const Reduction& reduction_;
  Flow& flow_;
  Slices slices_;
  std::size_t chunk_bytes_;
  std::size_t chunks_;
  std::size_t turns_;
  std::size_t receives_posted_ = 0;  // turns whose receive is posted
  std::size_t sends_posted_ = 0;     // turns whose send is posted
  std::size_t handled_ = 0;          // turns whose bytes have arrived and, if necessary, are reduced
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<link::TransferPtr> receives_;  // the receive of turn t is at index t % kWindow
  std::deque<link::TransferPtr> sends_;
};

}  // namespace

// `in` and `out` may be the same memory: the sum of a chunk arrives after this member's contribution has been sent.
Task ring_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow) {
  if (in.empty()) co_return;
  Ring ring(context, party, in, out, reduction, flow);
  enter(context, "send");
  ring.post();
  while (!ring.handled_all()) {
    enter(context, "recv");
    auto next_turn = until([&ring] { return ring.can_handle() || ring.can_send(); });
    co_await next_turn;
    if (ring.can_handle()) ring.handle();
    ring.post();
  }
  enter(context, "send");
  auto sent_all = until([&ring] { return ring.sent_all(); });
  co_await sent_all;
  enter(context, "unpack");
}

}  // namespace farandole::collective
