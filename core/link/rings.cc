// Rings: the layout of a member's file, and the counters that pass slots from writers to readers.
// Touches base/ and os/.
#include "link/rings.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace farandole::link {

namespace {

constexpr std::size_t kPage = 4096;
constinit const PlanStates kNoPlanStates{};

// A counter on a cache line of its own, so that only its own updates disturb its readers.
struct alignas(64) Counter {
  std::atomic<std::uint64_t> count;
};

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }
std::size_t size(int value) { return static_cast<std::size_t>(value); }

// Layout of a file: the plan states, then the heads of its writer's rings (one per other member, then `everyone`), then
// the tails of its owner as a reader (two per writer: of the ring to it alone and of `everyone`), then the slots of the
// rings. Only the owner of a file writes its counters. The stamps of a ring's slots follow its head: up to 7 of them
// share its cache line, which the reader loads anyway.
std::size_t head_bytes(const RingShape& shape) {
  return round_up(sizeof(std::uint64_t) * (1 + size(shape.slots)), alignof(Counter));
}
std::size_t tails_at(const RingShape& shape) { return sizeof(PlanStates) + head_bytes(shape) * size(shape.members); }
std::size_t header_bytes(const RingShape& shape) {
  return round_up(tails_at(shape) + sizeof(Counter) * 2 * size(shape.members), kPage);
}
std::size_t slot_stride(const RingShape& shape) { return round_up(shape.slot_bytes, kPage); }

// The ring from `writer` to `reader` in the writer's file. A member has no ring to itself, so later readers move up by
// one.
int ring_index(const RingShape& shape, int writer, int reader) {
  if (reader == Rings::everyone) return shape.members - 1;
  return reader < writer ? reader : reader - 1;
}
const std::atomic<std::uint64_t>* head(const os::SharedMemory& file, const RingShape& shape, int ring) {
  return reinterpret_cast<const std::atomic<std::uint64_t>*>(file.data() + sizeof(PlanStates) +
                                                             head_bytes(shape) * size(ring));
}
const std::atomic<std::uint64_t>& stamp_of(const os::SharedMemory& file, const RingShape& shape, int ring,
                                           std::uint64_t count) {
  return head(file, shape, ring)[1 + count % static_cast<std::uint64_t>(shape.slots)];
}
const Counter& tail(const os::SharedMemory& file, const RingShape& shape, int writer, bool from_everyone) {
  return reinterpret_cast<const Counter*>(file.data() + tails_at(shape))[2 * writer + from_everyone];
}
std::byte* slot(const os::SharedMemory& file, const RingShape& shape, int ring, std::uint64_t count) {
  std::size_t index = size(ring) * size(shape.slots) + count % static_cast<std::uint64_t>(shape.slots);
  return file.data() + header_bytes(shape) + index * slot_stride(shape);
}

}  // namespace

// `mine` is the counter that this member publishes. `other` is the last value read of the counter it depends on: for a
// ring that I write, the tail of the slowest reader; for a ring that I read, the head of the writer.
struct Rings::Ring {
  std::uint64_t mine = 0;
  std::uint64_t other = 0;
};

std::size_t RingShape::file_bytes() const {
  return header_bytes(*this) + size(members) * size(slots) * slot_stride(*this);
}

Rings::Rings(RingShape shape, int me) : shape_(shape), me_(me) {
  if (shape.members < 2) throw Failure(Code::internal, "Rings: a group needs at least 2 members on this host");
  if (shape.slots < 1 || shape.slot_bytes < 64 || shape.slot_bytes % 64 != 0) {
    throw Failure(Code::invalid_argument,
                  "shared memory rings need at least 1 slot, and a slot size that is a multiple of 64 bytes: got " +
                      std::to_string(shape.slots) + " slots of " + std::to_string(shape.slot_bytes) + " bytes");
  }
  rings_ = std::make_unique<Ring[]>(3 * size(shape.members));  // the rings I write, then two per writer that I read
  mine_ = os::SharedMemory::create(shape.file_bytes());
  files_.resize(size(shape.members));
  local_peers_.resize(size(shape.members), nullptr);
}

Rings::~Rings() = default;

const os::SharedMemory& Rings::memory() const { return mine_; }

void Rings::attach(int member, os::Descriptor file, const LocalPeer* local_peer) {
  if (member < 0 || member >= shape_.members || member == me_ || files_[size(member)]) {
    throw Failure(Code::internal,
                  "Rings::attach: local member " + std::to_string(member) + " sent a file that was not expected");
  }
  files_[size(member)] = os::SharedMemory::open_read_only(std::move(file), shape_.file_bytes());
  files_[size(member)].close_file();
  local_peers_[size(member)] = local_peer;
}

bool Rings::complete() const {
  for (int member = 0; member < shape_.members; ++member) {
    if (member != me_ && !files_[size(member)]) return false;
  }
  return true;
}

void Rings::close_file() { mine_.close_file(); }

Failure Rings::broken(int member, const char* what) const {
  const LocalPeer* local_peer = local_peers_[size(member)];
  const int rank = local_peer == nullptr ? -1 : local_peer->rank();
  return Failure(Code::peer_lost,
                 "rank " + std::to_string(rank) + " wrote " + what +
                     " into its shared memory. Either that memory is damaged, or the ranks run different builds of "
                     "Farandole, or the first rank of the process set sent them different plans",
                 rank);
}

std::byte* Rings::claim(int ring) {
  int index = ring_index(shape_, me_, ring);
  Ring& counters = rings_[size(index)];
  auto slots = static_cast<std::uint64_t>(shape_.slots);
  if (counters.mine - counters.other >= slots) {
    // Acquire: the readers have finished with the slot before this member writes into it.
    std::uint64_t slowest = counters.mine;
    const int first = ring == everyone ? 0 : ring, last = ring == everyone ? shape_.members - 1 : ring;
    for (int reader = first; reader <= last; ++reader) {
      if (reader == me_) continue;
      const Counter& counter = tail(files_[size(reader)], shape_, me_, ring == everyone);
      const std::uint64_t read = counter.count.load(std::memory_order_acquire);
      if (read < counters.other || read > counters.mine) throw broken(reader, "a counter that is out of range");
      slowest = std::min(slowest, read);
    }
    counters.other = slowest;
    if (counters.mine - counters.other >= slots) return nullptr;
  }
  return slot(mine_, shape_, index, counters.mine);
}

void Rings::publish(int ring, std::uint64_t stamp) {
  int index = ring_index(shape_, me_, ring);
  Ring& counters = rings_[size(index)];
  const_cast<std::atomic<std::uint64_t>&>(stamp_of(mine_, shape_, index, counters.mine))
      .store(stamp, std::memory_order_relaxed);
  ++counters.mine;
  const_cast<std::atomic<std::uint64_t>*>(head(mine_, shape_, index))->store(counters.mine, std::memory_order_release);
  if (ring == everyone) {
    notify_all();
  } else {
    notify(ring);
  }
}

const std::byte* Rings::peek(int writer, bool from_everyone, std::uint64_t stamp) const {
  Ring& counters = rings_[size(shape_.members + 2 * writer + from_everyone)];
  int index = ring_index(shape_, writer, from_everyone ? everyone : me_);
  const os::SharedMemory& file = files_[size(writer)];
  if (counters.mine == counters.other) {
    const std::uint64_t published = head(file, shape_, index)->load(std::memory_order_acquire);
    if (published == counters.mine) return nullptr;
    if (published - counters.mine > static_cast<std::uint64_t>(shape_.slots))
      throw broken(writer, "a counter that is out of range");
    counters.other = published;
  }
  if (stamp_of(file, shape_, index, counters.mine).load(std::memory_order_relaxed) != stamp)
    throw broken(writer, "data of another operation or step");
  return slot(file, shape_, index, counters.mine);
}

void Rings::consume(int writer, bool from_everyone) {
  Ring& counters = rings_[size(shape_.members + 2 * writer + from_everyone)];
  std::uint64_t before = counters.mine++;
  auto& counter = const_cast<Counter&>(tail(mine_, shape_, writer, from_everyone));
  counter.count.store(counters.mine, std::memory_order_release);
  // The writer can wait for this slot only if the ring was full. Either this member sees here the publish that filled
  // it, or the writer, which has a fence before it sleeps, sees the new tail. So a writer that has nothing to do is not
  // woken.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  int index = ring_index(shape_, writer, from_everyone ? everyone : me_);
  std::uint64_t published = head(files_[size(writer)], shape_, index)->load(std::memory_order_relaxed);
  if (published - before >= static_cast<std::uint64_t>(shape_.slots)) {
    if (const LocalPeer* local_peer = local_peers_[size(writer)]; local_peer != nullptr) local_peer->notify();
  }
}

PlanStates& Rings::own_plan_states() { return *reinterpret_cast<PlanStates*>(mine_.data()); }

const PlanStates& Rings::plan_states_of(int member) const {
  const os::SharedMemory& file = member == me_ ? mine_ : files_[size(member)];
  return file ? *reinterpret_cast<const PlanStates*>(file.data()) : kNoPlanStates;
}

void Rings::notify(int member) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (const LocalPeer* local_peer = local_peers_[size(member)]; local_peer != nullptr) local_peer->notify();
}

void Rings::notify_all(bool urgent) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const LocalPeer* local_peer : local_peers_) {
    if (local_peer != nullptr) local_peer->notify(urgent);
  }
}

}  // namespace farandole::link
