// Exchange: the hot loop of every local collective. No allocation and no search per chunk.
// Touches base/, link/ and kernel/.
#include "collective/exchange.h"

#include <algorithm>

#include "collective/parts.h"
#include "kernel/copy.h"

namespace farandole::collective {

namespace {

constexpr int kStepsAtOnce = 8;  // some 100 microseconds of copying
// Results of this size push each other out of the cache before anybody reads them.
constexpr std::size_t kBeyondCache = 4 << 20;

}  // namespace

Exchange::Exchange(const Context& context, std::size_t chunk)
    : context_(context), rings_(*context.rings), chunk_(chunk) {
  outgoing_.reserve(index(rings_.members()));
  incoming_.reserve(index(rings_.members()));
}

void Exchange::give(int lane, Cursor from, std::size_t bytes) {
  if (bytes > 0 || tells_empty_) outgoing_.push_back({lane, from, bytes, std::nullopt});
}

void Exchange::give(int lane, Cursor from, std::size_t bytes, const std::size_t* allowed) {
  if (bytes > 0) outgoing_.push_back({lane, from, bytes, std::nullopt, allowed});
}

void Exchange::give(int lane, Cursor from, std::size_t bytes, Cursor also) {
  if (bytes > 0 || tells_empty_) outgoing_.push_back({lane, from, bytes, also});
}

void Exchange::take(int writer, bool from_everyone, Cursor to, std::size_t bytes) {
  if (bytes > 0 || tells_empty_) incoming_.push_back({writer, from_everyone, to, bytes});
  incoming_bytes_ += bytes;
}

void Exchange::keep(Cursor from, Cursor to, std::size_t bytes) {
  keep_from_ = from;
  keep_to_ = to;
  keep_left_ = bytes;
  incoming_bytes_ += bytes;
}

void Exchange::fold(Cursor in, Cursor out, std::size_t bytes, const Reduction& reduction, bool mirror,
                    std::size_t* folded) {
  fold_in_ = in;
  fold_out_ = out;
  fold_left_ = bytes;
  mirror_ = mirror;
  folded_ = folded;
  slots_.resize(index(rings_.members()));
  sources_.resize(index(rings_.members()));
  work_.dtype = reduction.dtype;
  work_.op = reduction.op;
  work_.sources = sources_.data();
  work_.count = rings_.members();
  work_.prescale = reduction.prescale;
  work_.postscale = reduction.postscale;
  work_.divisor = reduction.divisor;
}

Task Exchange::run() {
  auto movable = until([this] { return ready(); });
  Pause pause;
  for (int steps = 1; !done(); ++steps) {
    if (!step()) {
      co_await movable;
    } else if (steps % kStepsAtOnce == 0) {
      co_await pause;
    }
  }
}

bool Exchange::done() const {
  if (fold_left_ > 0 || keep_left_ > 0) return false;
  for (const Outgoing& outgoing : outgoing_) {
    if (outgoing.open) return false;
  }
  for (const Incoming& incoming : incoming_) {
    if (incoming.open) return false;
  }
  return true;
}

bool Exchange::ready() const {
  if (keep_left_ > 0) return true;
  for (const Incoming& incoming : incoming_) {
    if (incoming.open && next_of(incoming) != nullptr) return true;
  }
  if (can_fold()) return true;
  for (const Outgoing& outgoing : outgoing_) {
    if (can_give(outgoing) != nullptr) return true;
  }
  return false;
}

bool Exchange::step() {
  bool moved = false;
  for (Outgoing& outgoing : outgoing_) moved |= give_one(outgoing);
  moved |= fold_one();
  for (Incoming& incoming : incoming_) moved |= take_one(incoming);
  return moved || keep_one();
}

std::byte* Exchange::can_give(const Outgoing& outgoing) const {
  if (!outgoing.open) return nullptr;
  bool there = outgoing.allowed == nullptr || *outgoing.allowed - outgoing.given >= std::min(outgoing.left, chunk_);
  return there ? rings_.claim(outgoing.lane) : nullptr;
}

bool Exchange::give_one(Outgoing& outgoing) {
  std::byte* slot = can_give(outgoing);
  if (slot == nullptr) return false;
  enter(context_, "pack");
  std::size_t bytes = std::min(outgoing.left, chunk_);
  outgoing.from.read(slot, bytes);
  if (outgoing.also) outgoing.also->write(slot, bytes);  // from cache
  enter(context_, "send");
  rings_.publish(outgoing.lane, stamp(context_, bytes));
  outgoing.left -= bytes;
  outgoing.given += bytes;
  outgoing.open = outgoing.left > 0;
  return true;
}

const std::byte* Exchange::next_of(const Incoming& incoming) const {
  return rings_.peek(incoming.writer, incoming.from_everyone, stamp(context_, std::min(incoming.left, chunk_)));
}

bool Exchange::take_one(Incoming& incoming) {
  if (!incoming.open) return false;
  const std::byte* slot = next_of(incoming);
  if (slot == nullptr) return false;
  enter(context_, "unpack");
  std::size_t bytes = std::min(incoming.left, chunk_);
  store(incoming.to, slot, bytes);
  rings_.consume(incoming.writer, incoming.from_everyone);
  incoming.left -= bytes;
  incoming.open = incoming.left > 0;
  enter(context_, "recv");
  return true;
}

void Exchange::store(Cursor& to, const std::byte* from, std::size_t bytes) const {
  if (anew_ && incoming_bytes_ >= kBeyondCache) {
    to.write(from, bytes, kernel::copy_past_cache);
  } else {
    to.write(from, bytes);
  }
}

bool Exchange::keep_one() {
  if (keep_left_ == 0) return false;
  std::size_t bytes = std::min({keep_left_, chunk_, keep_from_.run()});
  store(keep_to_, keep_from_.data(), bytes);
  keep_from_.skip(bytes);
  keep_left_ -= bytes;
  return true;
}

bool Exchange::can_fold() const {
  if (fold_left_ == 0) return false;
  const std::uint64_t expected = stamp(context_, std::min(fold_left_, chunk_));
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me() && rings_.peek(member, false, expected) == nullptr) return false;
  }
  return !mirror_ || rings_.claim(link::Rings::everyone) != nullptr;
}

bool Exchange::fold_one() {
  if (!can_fold()) return false;
  enter(context_, "reduce");
  std::size_t bytes = std::min(fold_left_, chunk_);
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me()) slots_[index(member)] = rings_.peek(member, false, stamp(context_, bytes));
  }
  std::byte* mirror = mirror_ ? rings_.claim(link::Rings::everyone) : nullptr;
  for (std::size_t at = 0; at < bytes;) {
    std::size_t step = std::min({bytes - at, fold_in_.run(), fold_out_.run()});
    for (std::size_t member = 0; member < slots_.size(); ++member) sources_[member] = slots_[member] + at;
    sources_[index(rings_.me())] = fold_in_.data();
    work_.out = fold_out_.data();
    work_.mirror = mirror_ ? mirror + at : nullptr;
    work_.elements = step / size_of(work_.dtype);
    kernel::reduce(work_);
    fold_in_.skip(step);
    fold_out_.skip(step);
    at += step;
  }
  if (mirror_) rings_.publish(link::Rings::everyone, stamp(context_, bytes));
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me()) rings_.consume(member, false);
  }
  fold_left_ -= bytes;
  if (folded_ != nullptr) *folded_ += bytes;
  return true;
}

}  // namespace farandole::collective
