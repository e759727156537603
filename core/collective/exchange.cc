// Exchange: the inner loop of every local collective. No allocation and no search per chunk.
// Touches base/, link/ and kernel/.
#include "collective/exchange.h"

#include <algorithm>

#include "collective/parts.h"
#include "kernel/copy.h"

namespace farandole::collective {

namespace {

constexpr int kStepsPerTurn = 8;  // about 100 microseconds of copying
// Results from this size on would replace each other in the cache before anyone reads them.
constexpr std::size_t kBeyondCache = 4 << 20;

}  // namespace

Exchange::Exchange(const Context& context, std::size_t chunk)
    : context_(context), rings_(*context.rings), chunk_(chunk) {
  outgoing_.reserve(index(rings_.members()));
  incoming_.reserve(index(rings_.members()));
}

void Exchange::send(int reader, Cursor from, std::size_t bytes) {
  if (bytes > 0 || sends_empty_) outgoing_.push_back({reader, from, bytes, std::nullopt});
}

void Exchange::send(int reader, Cursor from, std::size_t bytes, const std::size_t* allowed) {
  if (bytes > 0) outgoing_.push_back({reader, from, bytes, std::nullopt, allowed});
}

void Exchange::send(int reader, Cursor from, std::size_t bytes, Cursor also) {
  if (bytes > 0 || sends_empty_) outgoing_.push_back({reader, from, bytes, also});
}

void Exchange::receive(int writer, bool from_everyone, Cursor to, std::size_t bytes) {
  if (bytes > 0 || sends_empty_) incoming_.push_back({writer, from_everyone, to, bytes});
  incoming_bytes_ += bytes;
}

void Exchange::copy(Cursor from, Cursor to, std::size_t bytes) {
  copy_from_ = from;
  copy_to_ = to;
  copy_left_ = bytes;
  incoming_bytes_ += bytes;
}

void Exchange::reduce(Cursor in, Cursor out, std::size_t bytes, const Reduction& reduction, bool mirror,
                      std::size_t* reduced) {
  reduce_in_ = in;
  reduce_out_ = out;
  reduce_left_ = bytes;
  mirror_ = mirror;
  reduced_ = reduced;
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
    } else if (steps % kStepsPerTurn == 0) {
      co_await pause;
    }
  }
}

bool Exchange::done() const {
  if (reduce_left_ > 0 || copy_left_ > 0) return false;
  for (const Outgoing& outgoing : outgoing_) {
    if (outgoing.open) return false;
  }
  for (const Incoming& incoming : incoming_) {
    if (incoming.open) return false;
  }
  return true;
}

bool Exchange::ready() const {
  if (copy_left_ > 0) return true;
  for (const Incoming& incoming : incoming_) {
    if (incoming.open && next_of(incoming) != nullptr) return true;
  }
  if (can_reduce()) return true;
  for (const Outgoing& outgoing : outgoing_) {
    if (free_slot(outgoing) != nullptr) return true;
  }
  return false;
}

bool Exchange::step() {
  bool moved = false;
  for (Outgoing& outgoing : outgoing_) moved |= send_one(outgoing);
  moved |= reduce_one();
  for (Incoming& incoming : incoming_) moved |= receive_one(incoming);
  return moved || copy_one();
}

std::byte* Exchange::free_slot(const Outgoing& outgoing) const {
  if (!outgoing.open) return nullptr;
  bool there = outgoing.allowed == nullptr || *outgoing.allowed - outgoing.sent >= std::min(outgoing.left, chunk_);
  return there ? rings_.claim(outgoing.reader) : nullptr;
}

bool Exchange::send_one(Outgoing& outgoing) {
  std::byte* slot = free_slot(outgoing);
  if (slot == nullptr) return false;
  enter(context_, "pack");
  std::size_t bytes = std::min(outgoing.left, chunk_);
  outgoing.from.read(slot, bytes);
  if (outgoing.also) outgoing.also->write(slot, bytes);  // from cache
  enter(context_, "send");
  rings_.publish(outgoing.reader, stamp(context_, bytes));
  outgoing.left -= bytes;
  outgoing.sent += bytes;
  outgoing.open = outgoing.left > 0;
  return true;
}

const std::byte* Exchange::next_of(const Incoming& incoming) const {
  return rings_.peek(incoming.writer, incoming.from_everyone, stamp(context_, std::min(incoming.left, chunk_)));
}

bool Exchange::receive_one(Incoming& incoming) {
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
  if (past_cache_ && incoming_bytes_ >= kBeyondCache) {
    to.write(from, bytes, kernel::copy_past_cache);
  } else {
    to.write(from, bytes);
  }
}

bool Exchange::copy_one() {
  if (copy_left_ == 0) return false;
  std::size_t bytes = std::min({copy_left_, chunk_, copy_from_.run()});
  store(copy_to_, copy_from_.data(), bytes);
  copy_from_.skip(bytes);
  copy_left_ -= bytes;
  return true;
}

bool Exchange::can_reduce() const {
  if (reduce_left_ == 0) return false;
  const std::uint64_t expected = stamp(context_, std::min(reduce_left_, chunk_));
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me() && rings_.peek(member, false, expected) == nullptr) return false;
  }
  return !mirror_ || rings_.claim(link::Rings::everyone) != nullptr;
}

bool Exchange::reduce_one() {
  if (!can_reduce()) return false;
  enter(context_, "reduce");
  std::size_t bytes = std::min(reduce_left_, chunk_);
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me()) slots_[index(member)] = rings_.peek(member, false, stamp(context_, bytes));
  }
  std::byte* mirror = mirror_ ? rings_.claim(link::Rings::everyone) : nullptr;
  for (std::size_t at = 0; at < bytes;) {
    std::size_t step = std::min({bytes - at, reduce_in_.run(), reduce_out_.run()});
    for (std::size_t member = 0; member < slots_.size(); ++member) sources_[member] = slots_[member] + at;
    sources_[index(rings_.me())] = reduce_in_.data();
    work_.out = reduce_out_.data();
    work_.mirror = mirror_ ? mirror + at : nullptr;
    work_.elements = step / size_of(work_.dtype);
    kernel::reduce(work_);
    reduce_in_.skip(step);
    reduce_out_.skip(step);
    at += step;
  }
  if (mirror_) rings_.publish(link::Rings::everyone, stamp(context_, bytes));
  for (int member = 0; member < rings_.members(); ++member) {
    if (member != rings_.me()) rings_.consume(member, false);
  }
  reduce_left_ -= bytes;
  if (reduced_ != nullptr) *reduced_ += bytes;
  return true;
}

}  // namespace farandole::collective
