// Rings: the layout of a member's file and the counters that hand slots back and forth.
// Touches os/.
#include "link/rings.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace farandole::link {

namespace {

constexpr std::size_t kPage = 4096;
constinit const Words kNothingSaid{};

// A counter alone on its cache line, so that its readers are disturbed only by its own growth.
struct alignas(64) Counter {
  std::atomic<std::uint64_t> count;
};

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }
std::size_t size(int value) { return static_cast<std::size_t>(value); }

// A file begins with the words, then the heads of its writer's lanes (one per other member, then `everyone`), then the
// tails of its owner as a reader (two per writer: of the lane to it alone and of `everyone`), then the lanes' slots.
// A counter is written by the owner of its file alone. Behind a head stand the stamps of the lane's slots: up to 7 of
// them are on its cache line, which the reader has anyway.
std::size_t head_bytes(const RingShape& shape) {
  return round_up(sizeof(std::uint64_t) * (1 + size(shape.slots)), alignof(Counter));
}
std::size_t tails_at(const RingShape& shape) { return sizeof(Words) + head_bytes(shape) * size(shape.members); }
std::size_t header_bytes(const RingShape& shape) {
  return round_up(tails_at(shape) + sizeof(Counter) * 2 * size(shape.members), kPage);
}
std::size_t slot_stride(const RingShape& shape) { return round_up(shape.slot_bytes, kPage); }

// The lane from `writer` to `reader` in the writer's file. There is none to oneself, so later readers move up by one.
int lane_index(const RingShape& shape, int writer, int reader) {
  if (reader == Rings::everyone) return shape.members - 1;
  return reader < writer ? reader : reader - 1;
}
const std::atomic<std::uint64_t>* head(const os::SharedMemory& file, const RingShape& shape, int lane) {
  return reinterpret_cast<const std::atomic<std::uint64_t>*>(file.data() + sizeof(Words) +
                                                             head_bytes(shape) * size(lane));
}
const std::atomic<std::uint64_t>& stamp_of(const os::SharedMemory& file, const RingShape& shape, int lane,
                                           std::uint64_t count) {
  return head(file, shape, lane)[1 + count % static_cast<std::uint64_t>(shape.slots)];
}
const Counter& tail(const os::SharedMemory& file, const RingShape& shape, int writer, bool from_everyone) {
  return reinterpret_cast<const Counter*>(file.data() + tails_at(shape))[2 * writer + from_everyone];
}
std::byte* slot(const os::SharedMemory& file, const RingShape& shape, int lane, std::uint64_t count) {
  std::size_t index = size(lane) * size(shape.slots) + count % static_cast<std::uint64_t>(shape.slots);
  return file.data() + header_bytes(shape) + index * slot_stride(shape);
}

}  // namespace

// `mine` is the counter that I publish; `other` is the last value seen of the one it runs after: the slowest reader's
// tail for a lane I write, the writer's head for a lane I read.
struct Rings::Lane {
  std::uint64_t mine = 0;
  std::uint64_t other = 0;
};

std::size_t RingShape::file_bytes() const {
  return header_bytes(*this) + size(members) * size(slots) * slot_stride(*this);
}

Rings::Rings(RingShape shape, int me) : shape_(shape), me_(me) {
  if (shape.members < 2) throw Failure(Code::internal, "Rings: a member that is alone on its host needs none");
  if (shape.slots < 1 || shape.slot_bytes < 64 || shape.slot_bytes % 64 != 0) {
    throw Failure(Code::invalid_argument, "shared memory rings need at least 1 slot of a multiple of 64 bytes, not " +
                                              std::to_string(shape.slots) + " of " + std::to_string(shape.slot_bytes));
  }
  lanes_ = std::make_unique<Lane[]>(3 * size(shape.members));  // those I write, then two per writer that I read
  mine_ = os::SharedMemory::create(shape.file_bytes());
  files_.resize(size(shape.members));
  neighbours_.resize(size(shape.members), nullptr);
}

Rings::~Rings() = default;

const os::SharedMemory& Rings::memory() const { return mine_; }

void Rings::attach(int member, os::Descriptor file, const Neighbour* neighbour) {
  if (member < 0 || member >= shape_.members || member == me_ || files_[size(member)]) {
    throw Failure(Code::internal, "Rings::attach: no file is expected from local member " + std::to_string(member));
  }
  files_[size(member)] = os::SharedMemory::open(std::move(file), shape_.file_bytes());
  files_[size(member)].close_file();
  neighbours_[size(member)] = neighbour;
}

bool Rings::complete() const {
  for (int member = 0; member < shape_.members; ++member) {
    if (member != me_ && !files_[size(member)]) return false;
  }
  return true;
}

void Rings::close_file() { mine_.close_file(); }

Failure Rings::broken(int member, const char* what) const {
  const Neighbour* neighbour = neighbours_[size(member)];
  const int rank = neighbour == nullptr ? -1 : neighbour->rank();
  return Failure(Code::peer_lost,
                 "rank " + std::to_string(rank) + " has put " + what +
                     " into its shared memory: that memory is damaged, or the ranks do not run the same build of "
                     "Farandole, or they were told different things by the first rank of the process set",
                 rank);
}

std::byte* Rings::claim(int lane) {
  int index = lane_index(shape_, me_, lane);
  Lane& counters = lanes_[size(index)];
  auto slots = static_cast<std::uint64_t>(shape_.slots);
  if (counters.mine - counters.other >= slots) {
    // Acquire: the readers are done with the slot before I write into it.
    std::uint64_t slowest = counters.mine;
    const int first = lane == everyone ? 0 : lane, last = lane == everyone ? shape_.members - 1 : lane;
    for (int reader = first; reader <= last; ++reader) {
      if (reader == me_) continue;
      const Counter& counter = tail(files_[size(reader)], shape_, me_, lane == everyone);
      const std::uint64_t read = counter.count.load(std::memory_order_acquire);
      if (read < counters.other || read > counters.mine) throw broken(reader, "a count that cannot be");
      slowest = std::min(slowest, read);
    }
    counters.other = slowest;
    if (counters.mine - counters.other >= slots) return nullptr;
  }
  return slot(mine_, shape_, index, counters.mine);
}

void Rings::publish(int lane, std::uint64_t stamp) {
  int index = lane_index(shape_, me_, lane);
  Lane& counters = lanes_[size(index)];
  const_cast<std::atomic<std::uint64_t>&>(stamp_of(mine_, shape_, index, counters.mine))
      .store(stamp, std::memory_order_relaxed);
  ++counters.mine;
  const_cast<std::atomic<std::uint64_t>*>(head(mine_, shape_, index))->store(counters.mine, std::memory_order_release);
  if (lane == everyone) {
    notify_all();
  } else {
    notify(lane);
  }
}

const std::byte* Rings::peek(int writer, bool from_everyone, std::uint64_t stamp) const {
  Lane& counters = lanes_[size(shape_.members + 2 * writer + from_everyone)];
  int index = lane_index(shape_, writer, from_everyone ? everyone : me_);
  const os::SharedMemory& file = files_[size(writer)];
  if (counters.mine == counters.other) {
    const std::uint64_t published = head(file, shape_, index)->load(std::memory_order_acquire);
    if (published == counters.mine) return nullptr;
    if (published - counters.mine > static_cast<std::uint64_t>(shape_.slots))
      throw broken(writer, "a count that cannot be");
    counters.other = published;
  }
  if (stamp_of(file, shape_, index, counters.mine).load(std::memory_order_relaxed) != stamp)
    throw broken(writer, "other bytes than were agreed on");
  return slot(file, shape_, index, counters.mine);
}

void Rings::consume(int writer, bool from_everyone) {
  Lane& counters = lanes_[size(shape_.members + 2 * writer + from_everyone)];
  std::uint64_t before = counters.mine++;
  auto& counter = const_cast<Counter&>(tail(mine_, shape_, writer, from_everyone));
  counter.count.store(counters.mine, std::memory_order_release);
  // The writer can wait for this slot only if the lane was full. Either I see here the publish that filled it, or the
  // writer, which fences before it sleeps, sees my tail; so a writer that merely has nothing to do is left asleep.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  int index = lane_index(shape_, writer, from_everyone ? everyone : me_);
  std::uint64_t published = head(files_[size(writer)], shape_, index)->load(std::memory_order_relaxed);
  if (published - before >= static_cast<std::uint64_t>(shape_.slots)) {
    if (const Neighbour* neighbour = neighbours_[size(writer)]; neighbour != nullptr) neighbour->notify();
  }
}

Words& Rings::my_words() { return *reinterpret_cast<Words*>(mine_.data()); }

const Words& Rings::words_of(int member) const {
  const os::SharedMemory& file = member == me_ ? mine_ : files_[size(member)];
  return file ? *reinterpret_cast<const Words*>(file.data()) : kNothingSaid;
}

void Rings::notify(int member) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (const Neighbour* neighbour = neighbours_[size(member)]; neighbour != nullptr) neighbour->notify();
}

void Rings::notify_all(bool urgent) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const Neighbour* neighbour : neighbours_) {
    if (neighbour != nullptr) neighbour->notify(urgent);
  }
}

}  // namespace farandole::link
