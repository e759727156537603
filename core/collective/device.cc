// Members tell each other where their tensors lie, the first member of each device works, and tells that it has ended.
// Touches base/, cuda/, link/ and group/.
#include "collective/device.h"

#include <algorithm>
#include <optional>

#include "collective/parts.h"

namespace farandole::collective {

namespace {

using cuda::Address;
using cuda::Segment;

constexpr std::size_t kHead = 6;  // numbers in front: obstacle, process, device (2), segments, sends
constexpr std::size_t kPerTensor = 4;
constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Where this member's tensors lie, for the others: in its own allocations or, if one of those cannot be opened by other
// processes, in the arena.
class Mine {
 public:
  Mine(const Context& context, const DeviceJob& job) : job_(job), most_(most(context)) {
    if (job.obstacle != Obstacle::none || job.lane == nullptr) {
      refuse(job.obstacle);
      return;
    }
    const cuda::Gpu::Current current(job.lane->gpu());
    if (!lay_out_directly() && !lay_out_in_arena()) refuse(Obstacle::device_memory);
  }

  const Numbers& numbers() const { return numbers_; }
  // Whether others may read the tensors where they lie.
  bool ready() {
    while (waited_ < job_.ready.size() && job_.lane->reached(*job_.ready[waited_])) ++waited_;
    return waited_ == job_.ready.size() && (packed_ == nullptr || job_.lane->reached(*packed_));
  }
  // Behind the collective: the results from the arena to their places. False: they are there.
  bool unpack() const {
    for (const auto& [to, from, bytes] : results_) job_.lane->copy(to, from, bytes);
    return !results_.empty();
  }

 private:
  struct Copy {
    Address to, from;
    std::size_t bytes;
  };

  static std::size_t most(const Context& context) {
    return context.rings == nullptr ? ~std::size_t{0} : most_numbers(*context.rings);
  }

  void refuse(Obstacle obstacle) {
    numbers_ = {static_cast<std::uint64_t>(obstacle == Obstacle::none ? Obstacle::host_memory : obstacle)};
  }

  bool write(const std::vector<Segment>& segments, const Numbers& places) {
    const std::size_t size = kHead + segments.size() * cuda::kSegmentNumbers + job_.sends.size() + places.size();
    if (size > most_) return false;
    const auto& device = job_.lane->gpu().uuid();
    numbers_ = {0, cuda::process_nonce(), device[0], device[1], segments.size(), job_.sends.size()};
    for (const Segment& segment : segments) {
      numbers_.insert(numbers_.end(), {segment.id, segment.base, segment.bytes});
      numbers_.insert(numbers_.end(), segment.handle.begin(), segment.handle.end());
    }
    numbers_.insert(numbers_.end(), job_.sends.begin(), job_.sends.end());
    numbers_.insert(numbers_.end(), places.begin(), places.end());
    return true;
  }

  // False: there is no handle for this memory.
  bool place(Address address, std::size_t bytes, std::vector<Segment>& segments, Numbers& places) const {
    if (bytes == 0) {
      places.insert(places.end(), {0, 0});
      return true;
    }
    const auto holds = [&](const Segment& one) {
      return one.base <= address && address + bytes <= one.base + one.bytes;
    };
    auto found = std::find_if(segments.begin(), segments.end(), holds);
    if (found == segments.end()) {
      const Segment segment = job_.lane->gpu().segment_of(address, bytes);
      if (segment.id == 0) return false;
      found = segments.insert(segments.end(), segment);
    }
    places.insert(places.end(), {static_cast<std::uint64_t>(found - segments.begin()), address - found->base});
    return true;
  }

  bool place_result(const DeviceTensor& tensor, std::vector<Segment>& segments, Numbers& places) const {
    if (tensor.out != tensor.in || tensor.out_bytes != tensor.in_bytes)
      return place(tensor.out, tensor.out_bytes, segments, places);
    const std::uint64_t segment = places[places.size() - 2], offset = places.back();
    places.insert(places.end(), {segment, offset});
    return true;
  }

  bool lay_out_directly() {
    std::vector<Segment> segments;
    Numbers places;
    if (kHead + job_.tensors.size() * kPerTensor > most_) return false;
    for (const DeviceTensor& tensor : job_.tensors)
      if (!place(tensor.in, tensor.in_bytes, segments, places) || !place_result(tensor, segments, places)) return false;
    return write(segments, places);
  }

  bool lay_out_in_arena() {
    std::size_t bytes = 0;
    for (const DeviceTensor& tensor : job_.tensors)
      bytes += aligned(tensor.in_bytes) + (tensor.out == tensor.in ? 0 : aligned(tensor.out_bytes));
    Address at = job_.lane->arena(bytes);
    if (at == 0) return false;
    for (const cuda::MomentPtr& moment : job_.ready) job_.lane->after(*moment);
    std::vector<Segment> segments;
    Numbers places;
    for (const DeviceTensor& tensor : job_.tensors) {
      const Address in = at;
      at += aligned(tensor.in_bytes);
      const Address out = tensor.out == tensor.in ? in : at;
      if (out != in) at += aligned(tensor.out_bytes);
      if (!place(in, tensor.in_bytes, segments, places) || !place(out, tensor.out_bytes, segments, places))
        return false;
      if (tensor.in_bytes > 0) job_.lane->copy(in, tensor.in, tensor.in_bytes);
      if (tensor.out_bytes > 0) results_.push_back({tensor.out, out, tensor.out_bytes});
    }
    packed_ = job_.lane->mark();
    if (write(segments, places)) return true;
    results_.clear();
    return false;
  }

  const DeviceJob& job_;
  const std::size_t most_;
  Numbers numbers_;
  std::vector<Copy> results_;
  cuda::MomentPtr packed_;  // the arena has the tensors; null: it is not used
  std::size_t waited_ = 0;
};

// What another member has told.
class Theirs {
 public:
  Theirs(const Numbers& numbers, std::size_t tensors) : numbers_(numbers) {
    obstacle_ = numbers.empty() ? Obstacle::host_memory : static_cast<Obstacle>(numbers[0]);
    if (obstacle_ != Obstacle::none) return;
    // Read with bounds: a member can be damaged.
    if (numbers.size() < kHead || numbers[4] > numbers.size() || numbers[5] > numbers.size() ||
        numbers.size() != kHead + numbers[4] * cuda::kSegmentNumbers + numbers[5] + kPerTensor * tensors)
      obstacle_ = Obstacle::unreachable;
  }

  Obstacle obstacle() const { return obstacle_; }
  std::pair<std::uint64_t, std::uint64_t> device() const { return {numbers_[2], numbers_[3]}; }
  Numbers sends() const {
    const auto first = numbers_.begin() + static_cast<std::ptrdiff_t>(sends_at());
    return {first, first + static_cast<std::ptrdiff_t>(numbers_[5])};
  }

  // Where its allocations lie in this process; false: one cannot be opened.
  bool open(cuda::Gpu& gpu) {
    for (std::size_t i = 0; i < numbers_[4]; ++i) {
      const auto* words = &numbers_[kHead + i * cuda::kSegmentNumbers];
      Segment segment{words[0], words[1], words[2], {}};
      std::copy_n(words + 3, segment.handle.size(), segment.handle.begin());
      const Address at = numbers_[1] == cuda::process_nonce() ? segment.base : gpu.open(numbers_[1], segment);
      if (at == 0) return false;
      opened_.push_back({at, segment.bytes});
    }
    return true;
  }

  // 0: outside of its allocations.
  Address input(std::size_t tensor, std::size_t offset, std::size_t bytes) const {
    return address(tensor * kPerTensor, offset, bytes);
  }
  Address output(std::size_t tensor, std::size_t offset, std::size_t bytes) const {
    return address(tensor * kPerTensor + 2, offset, bytes);
  }

 private:
  struct Opened {
    Address at;
    std::uint64_t bytes;
  };

  std::size_t sends_at() const { return kHead + numbers_[4] * cuda::kSegmentNumbers; }

  Address address(std::size_t place, std::size_t offset, std::size_t bytes) const {
    const std::uint64_t* words = &numbers_[sends_at() + numbers_[5] + place];
    if (words[0] >= opened_.size()) return 0;
    const Opened& segment = opened_[words[0]];
    const bool inside =
        words[1] <= segment.bytes && offset <= segment.bytes - words[1] && bytes <= segment.bytes - words[1] - offset;
    return inside ? segment.at + words[1] + offset : 0;
  }

  const Numbers& numbers_;
  Obstacle obstacle_;
  std::vector<Opened> opened_;
};

Obstacle worst(const std::vector<Theirs>& members) {
  Obstacle found = Obstacle::none;
  for (const Theirs& member : members) found = std::max(found, member.obstacle());
  return found;
}

// The number of this member among the first members of their devices, and how many there are.
struct Leaders {
  std::optional<int> me;
  int count = 0;
};

Leaders leaders_of(const std::vector<Theirs>& members, std::size_t me) {
  Leaders leaders;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto same = [&](const Theirs& other) { return other.device() == members[i].device(); };
    if (std::find_if(members.begin(), members.end(), same) - members.begin() != static_cast<std::ptrdiff_t>(i))
      continue;
    if (i == me) leaders.me = leaders.count;
    ++leaders.count;
  }
  return leaders;
}

// This leader's slice of all parts as a table. False: a part lies outside of the memory that a member has announced.
bool fill(cuda::Work& work, const std::vector<DevicePart>& parts, const std::vector<Theirs>& members, Leaders leaders) {
  std::size_t total = 0, at = 0;
  for (const DevicePart& part : parts) total += part.bytes;
  const Slices slices(total, leaders.count);
  const std::size_t begin = slices.begin(*leaders.me), end = begin + slices.size(*leaders.me);
  for (const DevicePart& part : parts) {
    const std::size_t from = std::max(begin, at), to = std::min(end, at + part.bytes), skipped = from - at;
    at += part.bytes;
    if (from >= to) continue;
    work.ins = part.from.size();
    work.outs = part.to.size();
    work.add_row((to - from) / size_of(work.dtype));
    for (const DevicePart::Place& place : part.from)
      work.table.push_back(members[index(place.member)].input(part.tensor, place.offset + skipped, to - from));
    for (const DevicePart::Place& place : part.to)
      work.table.push_back(members[index(place.member)].output(part.tensor, place.offset + skipped, to - from));
    const auto row = work.table.end() - static_cast<std::ptrdiff_t>(work.ins + work.outs);
    if (std::find(row, work.table.end(), 0) != work.table.end()) return false;
  }
  return true;
}

cuda::Work work_of(const DeviceJob& job) {
  cuda::Work work;
  if (!job.reduces) return work;
  work.dtype = job.reduction.dtype;
  work.op = job.reduction.op;
  work.prescale = job.reduction.prescale;
  work.postscale = job.reduction.postscale;
  work.divisor = job.reduction.divisor;
  work.scaled = work.prescale != 1 || work.postscale != 1 || work.divisor != 1;
  return work;
}

// Opens the members' memory and fills the table.
Obstacle prepare(const DeviceJob& job, std::vector<Theirs>& members, const Leaders& leaders, cuda::Work& work) {
  const cuda::Gpu::Current current(job.lane->gpu());
  std::vector<Numbers> sends;
  for (Theirs& member : members) {
    if (!member.open(job.lane->gpu())) return Obstacle::unreachable;
    sends.push_back(member.sends());
  }
  work = work_of(job);
  if (!fill(work, job.parts(sends), members, leaders)) return Obstacle::unreachable;
  return job.lane->loads(work) ? Obstacle::none : Obstacle::kernel;
}

// All members' obstacles; the same result everywhere.
Task agree(const Context& context, Obstacle& met) {
  if (context.rings == nullptr) co_return;
  std::vector<Numbers> all;
  const Numbers mine(1, static_cast<std::uint64_t>(met));
  Task task = publish_numbers(context, mine, all);
  co_await task;
  for (const Numbers& numbers : all)
    met = std::max(met, numbers.empty() ? Obstacle::unreachable : static_cast<Obstacle>(numbers[0]));
}

}  // namespace

const char* text_of(Obstacle obstacle) {
  switch (obstacle) {
    case Obstacle::none:
      return "nothing";
    case Obstacle::host_memory:
      return "a rank has its tensors in host memory or on several GPUs, or does not use this way";
    case Obstacle::result_size:
      return "a rank has no GPU memory of the result's size";
    case Obstacle::device_memory:
      return "a rank has no GPU memory left, or the tensors of one operation are too many";
    case Obstacle::unreachable:
      return "a rank cannot open the GPU memory of another one";
    case Obstacle::kernel:
      return "a rank cannot compile or load the kernel";
    case Obstacle::wants_nccl:
      return "a rank prefers NCCL";
    case Obstacle::shared_gpu:
      return "ranks share a GPU, and NCCL needs one for each";
    case Obstacle::other_gpu:
      return "a rank has its tensors on another GPU than before";
    case Obstacle::nccl_off:
      return "a rank does not use NCCL";
    case Obstacle::nccl_versions:
      return "the ranks have different versions of NCCL";
    case Obstacle::nccl_failed:
      return "NCCL could not connect the ranks";
  }
  return "unknown";
}

Task on_device(const Context& context, const DeviceJob& job, Obstacle& met) {
  enter(context, "pack");
  Mine mine(context, job);
  auto ready = until([&mine] { return mine.ready(); });
  co_await ready;
  std::vector<Numbers> all(1, mine.numbers());
  if (context.rings != nullptr) {
    Task task = publish_numbers(context, mine.numbers(), all);
    co_await task;
  }
  std::vector<Theirs> members;
  members.reserve(all.size());
  for (const Numbers& numbers : all) members.emplace_back(numbers, job.count);
  met = worst(members);
  if (met != Obstacle::none) co_return;
  enter(context, "reduce");
  const Leaders leaders = leaders_of(members, index(context.topology->my_local()));
  cuda::Work work;
  if (leaders.me.has_value()) met = prepare(job, members, leaders, work);
  if (leaders.count > 1) {  // one must not write while another one cannot
    Task task = agree(context, met);
    co_await task;
    if (met != Obstacle::none) co_return;
  }
  if (leaders.me.has_value() && met == Obstacle::none) {
    const cuda::Settled settled(*job.lane);
    job.lane->run(work);
    const cuda::MomentPtr moment = job.lane->mark();
    auto finished = until([&] { return job.lane->reached(*moment); });
    co_await finished;
  }
  Task task = agree(context, met);
  co_await task;
  if (met == Obstacle::none && mine.unpack()) {
    enter(context, "unpack");
    const cuda::Settled settled(*job.lane);
    const cuda::MomentPtr moment = job.lane->mark();
    auto unpacked = until([&] { return job.lane->reached(*moment); });
    co_await unpacked;
  }
}

}  // namespace farandole::collective
