// Allreduce by a ring of messages: for many hosts, because each needs links to two neighbours only.
// Touches base/, link/ and kernel/.
#include <deque>
#include <memory>

#include "collective/parts.h"
#include "collective/remote.h"

namespace farandole::collective {

namespace {

constexpr std::size_t kWindow = 8;  // chunks under way in each direction

// The bytes are cut into N segments, a segment into `chunks` chunks. Turn t = step * chunks + chunk. In step s of the
// first N-1, a member sends segment me-s and receives me-s-1, adds its own contribution, and sends the sum in step s+1.
// After these, segment me+1 is complete here, and in N-1 more steps the complete segments go around.
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
    chunk_ = remote_chunk(context, slices_);
    chunks_ = (slices_.each + chunk_ - 1) / chunk_;
    turns_ = 2 * index(party.size() - 1) * chunks_;
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(chunk_ * kWindow);
    receives_.resize(kWindow);
  }

  // Posts the sends and receives that are allowed after `handled_` turns.
  void post() {
    int before = party_.ranks[index((party_.me + party_.size() - 1) % party_.size())];
    int after = party_.ranks[index((party_.me + 1) % party_.size())];
    for (; received_ < turns_ && received_ < handled_ + kWindow; ++received_) {
      Pieces space = received(received_, out_);
      if (summing(received_)) space = Pieces(scratch_.get() + received_ % kWindow * chunk_, space.bytes());
      link::TransferPtr& receive = receives_[received_ % kWindow];
      receive = space.empty() ? nullptr : context_.messenger->receive(before, step(received_), space);
    }
    for (; can_send(); ++sent_) {
      Pieces bytes =
          part(sent_ < chunks_ ? in_ : out_, party_.me + party_.size() + sent_segment(sent_), sent_ % chunks_);
      if (!bytes.empty()) sends_.push_back(context_.messenger->send(after, step(sent_), bytes));
    }
    while (!sends_.empty() && sends_.front()->done()) sends_.pop_front();
  }
  // What this turn sends on has arrived or, in the first step, this member's own input is ready.
  bool can_send() const {
    return sent_ < turns_ && sent_ < handled_ + std::min(kWindow, chunks_) && (sent_ >= chunks_ || there(0, sent_));
  }
  // Also needs this member's own contribution, which is added to it.
  bool arrived() const {
    const link::TransferPtr& receive = receives_[handled_ % kWindow];
    if (receive && !receive->done()) return false;
    return !summing(handled_) || there(handled_ / chunks_ + 1, handled_ % chunks_);
  }
  void handle() {
    Pieces target = received(handled_, out_);
    if (summing(handled_) && !target.empty()) {
      enter(context_, "reduce");
      bool last = handled_ / chunks_ + 2 == index(party_.size());
      std::vector<Pieces> sources;
      sources.emplace_back(scratch_.get() + handled_ % kWindow * chunk_, target.bytes());
      sources.push_back(received(handled_, in_));
      reduce(last ? last_half(reduction_) : last_half(first_half(reduction_)), sources, target);
    }
    // From the last step of reducing on, what arrives is complete.
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
  bool summing(std::size_t turn) const { return turn < turns_ / 2; }
  // This member's contribution to this chunk of the segment `back` before its own.
  bool there(std::size_t back, std::size_t chunk) const {
    std::size_t needed = 0;
    for (std::size_t i = 0; i <= back; ++i) {
      std::size_t size = slices_.size((party_.me + party_.size() - static_cast<int>(i)) % party_.size());
      needed += i < back ? size : std::min(size, (chunk + 1) * chunk_);
    }
    return flow_.ready >= needed;
  }
  wire::Tag step(std::size_t turn) const {
    return {context_.group, context_.sequence, static_cast<std::uint32_t>(turn)};
  }
  // Relative to `me`; between -(N-1) and 1.
  int sent_segment(std::size_t turn) const {
    int s = static_cast<int>(turn / chunks_);
    return summing(turn) ? -s : 1 - (s - (party_.size() - 1));
  }
  Pieces received(std::size_t turn, const Pieces& whole) const {
    return part(whole, party_.me + party_.size() + sent_segment(turn) - 1, turn % chunks_);
  }
  Pieces part(const Pieces& whole, int segment, std::size_t chunk) const {
    segment %= party_.size();
    std::size_t offset = std::min(slices_.size(segment), chunk * chunk_);
    return whole.slice(slices_.begin(segment) + offset, std::min(slices_.size(segment) - offset, chunk_));
  }

  const Context& context_;
  const Party& party_;
  const Pieces& in_;
  const Pieces& out_;
  const Reduction& reduction_;
  Flow& flow_;
  Slices slices_;
  std::size_t chunk_;
  std::size_t chunks_;
  std::size_t turns_;
  std::size_t received_ = 0;  // turns whose receive is posted
  std::size_t sent_ = 0;      // turns whose send is posted
  std::size_t handled_ = 0;   // turns whose bytes have arrived and are reduced
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<link::TransferPtr> receives_;  // by turn modulo the window
  std::deque<link::TransferPtr> sends_;
};

}  // namespace

// In place is safe: a complete segment arrives only after this member's contribution to it has been sent.
Task ring_allreduce(const Context& context, const Party& party, const Pieces& in, const Pieces& out,
                    const Reduction& reduction, Flow& flow) {
  if (in.empty()) co_return;
  Ring ring(context, party, in, out, reduction, flow);
  enter(context, "send");
  ring.post();
  while (!ring.handled_all()) {
    enter(context, "recv");
    auto movable = until([&ring] { return ring.arrived() || ring.can_send(); });
    co_await movable;
    if (ring.arrived()) ring.handle();
    ring.post();
  }
  enter(context, "send");
  auto sent_all = until([&ring] { return ring.sent_all(); });
  co_await sent_all;
  enter(context, "unpack");
}

}  // namespace farandole::collective
