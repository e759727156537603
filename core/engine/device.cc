// What a bucket does on the device, as parts of tensors; the copies to pinned host memory and back.
// Touches collective/, cuda/ and negotiate/.
#include "engine/device.h"

#include <algorithm>
#include <numeric>

#include "collective/device.h"
#include "collective/parts.h"

namespace farandole {
namespace {

using collective::DeviceJob;
using collective::DevicePart;
using collective::DeviceTensor;
using collective::index;
using collective::Numbers;
using collective::Obstacle;
using negotiate::Bucket;
using negotiate::Item;

constexpr int kMostMembers = 64;  // of the kernel's sources

cuda::Address address_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

// The rows of all members' results of a reducescatter.
Numbers shares(std::int64_t rows, int members) {
  Numbers found;
  for (int member = 0; member < members; ++member)
    found.push_back(static_cast<std::uint64_t>(rows / members + (member < rows % members ? 1 : 0)));
  return found;
}

struct Sizes {
  std::size_t in = 0, out = 0;
};

Sizes sizes_of(const Bucket& bucket, const Item& item, const Topology& topology) {
  const std::size_t row = row_bytes(item);
  const auto members = static_cast<std::ptrdiff_t>(topology.size());
  const auto sum = [&](auto first, auto last) {
    return static_cast<std::size_t>(std::accumulate(first, last, std::int64_t{0})) * row;
  };
  switch (bucket.kind) {
    case Kind::allgather:
      return {static_cast<std::size_t>(item.first_dims[index(topology.me)]) * row,
              sum(item.first_dims.begin(), item.first_dims.end())};
    case Kind::alltoall:
      return {sum(item.splits.begin(), item.splits.begin() + members),
              sum(item.splits.begin() + members, item.splits.end())};
    case Kind::reducescatter:
      return {bytes_of(item), shares(rows_of(item), topology.size())[index(topology.me)] * row};
    default:
      return {bytes_of(item), bytes_of(item)};
  }
}

std::vector<DevicePart::Place> everyone(int members, std::size_t offset) {
  std::vector<DevicePart::Place> places;
  for (int member = 0; member < members; ++member) places.push_back({member, offset});
  return places;
}

// One tensor's parts, by kind.
void add_parts(std::vector<DevicePart>& parts, const Bucket& bucket, std::size_t tensor, const Topology& topology,
               const std::vector<Numbers>& sends) {
  const Item& item = bucket.items[tensor];
  const int members = topology.size();
  const std::size_t row = row_bytes(item);
  std::size_t at = 0;
  switch (bucket.kind) {
    case Kind::allreduce:
      return parts.push_back({tensor, bytes_of(item), everyone(members, 0), everyone(members, 0)});
    case Kind::broadcast:
      return parts.push_back({tensor, bytes_of(item), {{topology.member_of(bucket.root), 0}}, everyone(members, 0)});
    case Kind::allgather:
      for (int member = 0; member < members; ++member) {
        const std::size_t bytes = static_cast<std::size_t>(item.first_dims[index(member)]) * row;
        parts.push_back({tensor, bytes, {{member, 0}}, everyone(members, at)});
        at += bytes;
      }
      return;
    case Kind::reducescatter:
      for (int member = 0; member < members; ++member) {
        const std::size_t bytes = shares(rows_of(item), members)[index(member)] * row;
        parts.push_back({tensor, bytes, everyone(members, at), {{member, 0}}});
        at += bytes;
      }
      return;
    default:
      break;
  }
  std::vector<std::size_t> received(index(members), 0);
  for (int from = 0; from < members; ++from) {
    at = 0;
    for (int to = 0; to < members && sends[index(from)].size() == index(members); ++to) {
      const std::size_t bytes = sends[index(from)][index(to)];
      parts.push_back({tensor, bytes, {{from, at}}, {{to, received[index(to)]}}});
      received[index(to)] += bytes;
      at += bytes;
    }
  }
}

// Whether all members of the group know, without a word, that there is no way but through host memory.
bool hopeless(const Bucket& bucket) { return bucket.device < 0 || bucket.joined > 0 || bucket.op == ReduceOp::adasum; }
// The same for memory that the members of one host map.
bool mappable(const Topology& topology) { return topology.host_count() == 1 && topology.size() <= kMostMembers; }

// The device of all of this member's tensors; null when some are elsewhere.
cuda::Gpu* gpu_of(const Job& job) {
  cuda::Gpu* gpu = nullptr;
  for (const OperationPtr& operation : job.operations) {
    if (operation == nullptr || operation->ready == nullptr) return nullptr;
    if (gpu != nullptr && gpu != operation->ready->gpu().get()) return nullptr;
    gpu = operation->ready->gpu().get();
  }
  return gpu;
}

// Every different moment once: operations that were submitted together share theirs.
std::vector<cuda::MomentPtr> moments_of(const Job& job) {
  std::vector<cuda::MomentPtr> moments;
  for (const OperationPtr& operation : job.operations)
    if (operation != nullptr && operation->ready != nullptr && (moments.empty() || moments.back() != operation->ready))
      moments.push_back(operation->ready);
  return moments;
}

DeviceJob describe(const Job& job, const Topology& topology) {
  const Bucket& bucket = *job.bucket;
  DeviceJob described;
  described.count = bucket.items.size();
  described.lane = gpu_of(job) == nullptr ? nullptr : job.lane;
  if (described.lane != nullptr) described.ready = moments_of(job);
  described.reduces = bucket.kind == Kind::allreduce || bucket.kind == Kind::reducescatter;
  described.reduction = reduction_of(bucket, topology.size());
  for (std::size_t i = 0; i < bucket.items.size() && described.lane != nullptr; ++i) {
    const Operation& operation = *job.operations[i];
    const Sizes sizes = sizes_of(bucket, bucket.items[i], topology);
    if (rows_vary(bucket.kind) && (operation.output == nullptr || operation.output_bytes != sizes.out))
      described.obstacle = Obstacle::result_size;
    described.tensors.push_back({address_of(operation.input), address_of(operation.output), sizes.in, sizes.out});
  }
  const auto members = static_cast<std::size_t>(topology.size());
  if (bucket.kind == Kind::alltoall && described.lane != nullptr)
    for (std::size_t i = 0; i < 2 * members; ++i)
      (i < members ? described.sends : described.receives)
          .push_back(static_cast<std::uint64_t>(bucket.items[0].splits[i]) * row_bytes(bucket.items[0]));
  described.parts = [&bucket, &topology](const std::vector<Numbers>& sends) {
    std::vector<DevicePart> parts;
    for (std::size_t i = 0; i < bucket.items.size(); ++i) add_parts(parts, bucket, i, topology, sends);
    return parts;
  };
  return described;
}

// What `execute.cc` sets for collectives on host memory.
void set_results(Job& job, const Topology& topology) {
  const Bucket& bucket = *job.bucket;
  for (std::size_t i = 0; i < bucket.items.size(); ++i) {
    const Item& item = bucket.items[i];
    Operation& operation = *job.operations[i];
    const Sizes sizes = sizes_of(bucket, item, topology);
    operation.output_bytes = sizes.out;
    operation.shape = item.shape;
    if (bucket.kind == Kind::alltoall)
      operation.splits.assign(item.splits.begin() + topology.size(), item.splits.end());
    if (const std::size_t row = row_bytes(item);
        row > 0 && !operation.shape.empty() && bucket.kind != Kind::allreduce && bucket.kind != Kind::broadcast)
      operation.shape[0] = static_cast<std::int64_t>(sizes.out / row);
  }
}

// Tensors of a device and their copies in pinned host memory.
class Staging {
 public:
  explicit Staging(Job& job, const Topology& topology) : job_(job) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < job.operations.size(); ++i) {
      Operation* operation = job.operations[i].get();
      if (operation == nullptr || operation->ready == nullptr) continue;
      const Sizes sizes = sizes_of(*job.bucket, job.bucket->items[i], topology);
      const bool in_place = operation->input == operation->output;
      const std::size_t room = rows_vary(job.bucket->kind) ? operation->output_bytes : sizes.out;
      kept_.push_back({operation, operation->input, operation->output, room, sizes.in, bytes});
      bytes += aligned(sizes.in) + (in_place ? 0 : aligned(room));
    }
    std::byte* memory = job.lane == nullptr || kept_.empty() ? nullptr : job.lane->pinned(bytes);
    for (const cuda::MomentPtr& moment : moments_of(job)) job.lane->after(*moment);
    for (const Kept& kept : kept_) {
      std::byte* in = memory + kept.at;
      if (kept.in_bytes > 0) job.lane->to_host(in, address_of(kept.input), kept.in_bytes);
      kept.operation->input = in;
      const bool in_place = kept.input == kept.output;
      if (kept.output != nullptr) kept.operation->output = in_place ? in : in + aligned(kept.in_bytes);
    }
  }

  bool empty() const { return kept_.empty(); }

  // The results to the device, where the user has memory for them; else they stay in the core's.
  void give_back() {
    for (const Kept& kept : kept_) {
      Operation& operation = *kept.operation;
      operation.input = kept.input;
      if (kept.output == nullptr || operation.output_bytes != kept.room) continue;
      if (kept.room > 0) job_.lane->to_device(address_of(kept.output), operation.output, kept.room);
      operation.output = kept.output;
    }
  }

 private:
  struct Kept {
    Operation* operation;
    const void* input;
    void* output;
    std::size_t room, in_bytes, at;
  };
  static std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  Job& job_;
  std::vector<Kept> kept_;
};

Task through_host_memory(Job& job, const collective::Context& context) {
  Staging staging(job, *context.topology);
  cuda::MomentPtr moment = staging.empty() ? nullptr : job.lane->mark();
  auto copied = until([&] { return moment == nullptr || job.lane->reached(*moment); });
  co_await copied;
  Task task = task_of(job, context);
  co_await task;
  if (staging.empty()) co_return;
  const cuda::Settled settled(*job.lane);
  staging.give_back();
  moment = job.lane->mark();
  auto back = until([&] { return job.lane->reached(*moment); });
  co_await back;
}

// The first way that all members can take: by mapped memory, or by NCCL. `met`: why there is none.
Task without_host_memory(Job& job, const collective::Context& context, DeviceJob described, Obstacle& met) {
  const Topology& topology = *context.topology;
  const bool possible = job.nccl->possible(described, topology), mapped = mappable(topology);
  if (mapped) {
    if (possible && job.nccl->preferred() && described.obstacle == Obstacle::none)
      described.obstacle = Obstacle::wants_nccl;
    Task task = collective::on_device(context, described, met);
    co_await task;
    if (met == Obstacle::none) {
      job.on_device = static_cast<std::int64_t>(job.bucket->bytes());
      co_return;
    }
    if (!possible || (met != Obstacle::wants_nccl && met != Obstacle::unreachable)) co_return;
  }
  const bool wanted = met == Obstacle::wants_nccl;
  if (possible) {
    Task task = collective::by_nccl(context, described, *job.nccl, met);
    co_await task;
    if (met == Obstacle::none) job.by_nccl = static_cast<std::int64_t>(job.bucket->bytes());
    if (met == Obstacle::none || !wanted) co_return;
  }
  if (!mapped) co_return;
  if (described.obstacle == Obstacle::wants_nccl) described.obstacle = Obstacle::none;
  Task task = collective::on_device(context, described, met);
  co_await task;
  if (met == Obstacle::none) job.on_device = static_cast<std::int64_t>(job.bucket->bytes());
}

}  // namespace

Task device_task(Job& job, collective::Context context) {
  if (!hopeless(*job.bucket)) {
    Obstacle met = Obstacle::host_memory;
    Task task = without_host_memory(job, context, describe(job, *context.topology), met);
    co_await task;
    if (met == Obstacle::none) {
      set_results(job, *context.topology);
      co_return;
    }
    job.obstacle = collective::text_of(met);
  }
  Task task = through_host_memory(job, context);
  co_await task;
}

}  // namespace farandole
