// The memory of each kind of collective. Buckets arrive here verified (negotiate/verify.h).
// Touches collective/, negotiate/ and os/.
#include "engine/execute.h"

#include <cstring>
#include <limits>
#include <numeric>

#include "collective/select.h"
#include "engine/device.h"
#include "os/memory.h"

namespace farandole {

using negotiate::Bucket;
using negotiate::Item;

std::int64_t rows_of(const Item& item) { return item.shape.empty() ? 1 : item.shape[0]; }

std::size_t row_bytes(const Item& item) {
  std::size_t bytes = size_of(item.dtype);
  for (std::size_t d = 1; d < item.shape.size(); ++d) bytes *= static_cast<std::size_t>(item.shape[d]);
  return bytes;
}

std::size_t bytes_of(const Item& item) { return static_cast<std::size_t>(rows_of(item)) * row_bytes(item); }

collective::Reduction reduction_of(const Bucket& bucket, int members) {
  collective::Reduction reduction;
  reduction.dtype = bucket.items.front().dtype;
  reduction.op = bucket.op == ReduceOp::average ? ReduceOp::sum : bucket.op;
  reduction.prescale = bucket.prescale;
  reduction.postscale = bucket.postscale;
  reduction.divisor = bucket.op == ReduceOp::average ? members : 1;
  return reduction;
}

namespace {

std::byte* result(Job& job, Operation& operation, std::size_t bytes, std::vector<std::int64_t> shape,
                  bool shared = false) {
  operation.shape = std::move(shape);
  const bool fits = !rows_vary(job.bucket->kind) || operation.output_bytes == bytes;
  operation.output_bytes = bytes;
  if (operation.output == nullptr || !fits) {
    operation.owned = shared ? job.results->allocate_shared(bytes) : job.results->allocate(bytes);
    operation.output = operation.owned.get();
  }
  return static_cast<std::byte*>(operation.output);
}

std::vector<std::int64_t> with_rows(std::vector<std::int64_t> shape, std::int64_t rows) {
  if (!shape.empty()) shape[0] = rows;
  return shape;
}

// Checks the whole bucket before any memory is allocated: the tensors of a joined member, and received results, are as
// large as others say. Each tensor alone may look small.
void check_room(const Job& job) {
  const Bucket& bucket = *job.bucket;
  if (bucket.joined == 0 && bucket.kind != Kind::allgather) return;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < bucket.items.size(); ++i) {
    const Item& item = bucket.items[i];
    std::size_t more = 0;
    if (bucket.kind == Kind::allgather)
      more = row_bytes(item) *
             static_cast<std::size_t>(std::accumulate(item.first_dims.begin(), item.first_dims.end(), std::int64_t{0}));
    else if (job.operations[i] == nullptr)
      more = bytes_of(item);
    if (!__builtin_add_overflow(bytes, more, &bytes)) continue;
    bytes = std::numeric_limits<std::size_t>::max();
    break;
  }
  if (os::can_allocate(bytes)) return;
  throw Failure(Code::no_memory, "tensor '" + bucket.items.front().name + "' and the tensors fused with it need " +
                                     std::to_string(bytes) + " bytes, more than the machine has available");
}

Task allreduce(Job& job, const collective::Context& context) {
  const bool apart = job.bucket->op == ReduceOp::adasum;
  std::vector<Pieces> in(apart ? job.bucket->items.size() : 1), out(in.size());
  for (std::size_t i = 0; i < job.bucket->items.size(); ++i) {
    const Item& item = job.bucket->items[i];
    std::size_t bytes = bytes_of(item);
    Pieces &from = in[apart ? i : 0], &to = out[apart ? i : 0];
    if (Operation* operation = job.operations[i].get(); operation != nullptr && !operation->pieces.empty()) {
      operation->shape = item.shape;
      from.add(operation->pieces);
      to.add(operation->pieces);
    } else if (operation != nullptr) {
      from.add(operation->input, bytes);
      to.add(result(job, *operation, bytes, item.shape), bytes);
    } else {
      job.scratch.push_back(job.results->allocate(bytes));
      std::memset(job.scratch.back().get(), 0, bytes);
      from.add(job.scratch.back().get(), bytes);
      to.add(job.scratch.back().get(), bytes);
    }
  }
  collective::Reduction reduction = reduction_of(*job.bucket, context.topology->size());
  return apart ? collective::adasum(context, std::move(in), std::move(out), reduction)
               : collective::allreduce(context, std::move(in[0]), std::move(out[0]), reduction);
}

Task allgather(Job& job, const collective::Context& context) {
  auto me = static_cast<std::size_t>(context.topology->me);
  Pieces in;
  std::vector<Pieces> out(static_cast<std::size_t>(context.topology->size()));
  for (std::size_t i = 0; i < job.bucket->items.size(); ++i) {
    const Item& item = job.bucket->items[i];
    Operation& operation = *job.operations[i];
    std::size_t row = row_bytes(item);
    std::int64_t rows = std::accumulate(item.first_dims.begin(), item.first_dims.end(), std::int64_t{0});
    std::byte* to = result(job, operation, static_cast<std::size_t>(rows) * row, with_rows(item.shape, rows));
    for (std::size_t member = 0; member < out.size(); ++member) {
      std::size_t bytes = static_cast<std::size_t>(item.first_dims[member]) * row;
      out[member].add(to, bytes);
      to += bytes;
    }
    in.add(operation.input, static_cast<std::size_t>(item.first_dims[me]) * row);
  }
  return collective::allgather(context, std::move(in), std::move(out));
}

Task broadcast(Job& job, const collective::Context& context) {
  const Item& item = job.bucket->items.front();
  Operation& operation = *job.operations.front();
  std::size_t bytes = bytes_of(item);
  std::byte* to = result(job, operation, bytes, item.shape);
  int root = context.topology->member_of(job.bucket->root);
  if (root == context.topology->me && operation.input != to && bytes > 0) std::memcpy(to, operation.input, bytes);
  return collective::broadcast(context, Pieces(to, bytes), root);
}

Task alltoall(Job& job, const collective::Context& context) {
  const Item& item = job.bucket->items.front();
  Operation& operation = *job.operations.front();
  auto members = static_cast<std::size_t>(context.topology->size());
  std::size_t row = row_bytes(item);
  operation.splits.assign(item.splits.begin() + static_cast<std::ptrdiff_t>(members), item.splits.end());
  std::int64_t rows = std::accumulate(operation.splits.begin(), operation.splits.end(), std::int64_t{0});
  const bool large = static_cast<std::size_t>(item.rows) * row / members >= collective::kShareResults;
  std::byte* to = result(job, operation, static_cast<std::size_t>(rows) * row, with_rows(item.shape, rows),
                         large && context.rings != nullptr);
  const auto* from = static_cast<const std::byte*>(operation.input);
  std::vector<Pieces> in, out;
  for (std::size_t member = 0; member < members; ++member) {
    std::size_t send = static_cast<std::size_t>(item.splits[member]) * row;
    std::size_t receive = static_cast<std::size_t>(operation.splits[member]) * row;
    in.emplace_back(from, send);
    out.emplace_back(to, receive);
    from += send;
    to += receive;
  }
  return collective::alltoall(context, std::move(in), std::move(out), large);
}

Task reducescatter(Job& job, const collective::Context& context) {
  auto members = static_cast<std::size_t>(context.topology->size());
  std::vector<Pieces> in(members);
  Pieces out;
  for (std::size_t i = 0; i < job.bucket->items.size(); ++i) {
    const Item& item = job.bucket->items[i];
    Operation& operation = *job.operations[i];
    std::size_t row = row_bytes(item);
    const auto* from = static_cast<const std::byte*>(operation.input);
    std::int64_t each = rows_of(item) / static_cast<std::int64_t>(members);
    std::int64_t extra = rows_of(item) % static_cast<std::int64_t>(members);
    for (std::size_t member = 0; member < members; ++member) {
      std::int64_t rows = each + (static_cast<std::int64_t>(member) < extra ? 1 : 0);
      std::size_t bytes = static_cast<std::size_t>(rows) * row;
      in[member].add(from, bytes);
      from += bytes;
      if (member == static_cast<std::size_t>(context.topology->me))
        out.add(result(job, operation, bytes, with_rows(item.shape, rows)), bytes);
    }
  }
  return collective::reducescatter(context, std::move(in), std::move(out),
                                   reduction_of(*job.bucket, context.topology->size()));
}

}  // namespace

Task task_of(Job& job, const collective::Context& context) {
  switch (job.bucket->kind) {
    case Kind::allreduce:
      return allreduce(job, context);
    case Kind::allgather:
      return allgather(job, context);
    case Kind::broadcast:
      return broadcast(job, context);
    case Kind::alltoall:
      return alltoall(job, context);
    default:
      return reducescatter(job, context);
  }
}

void prepare(Job& job, collective::Context context) {
  context.kind = job.bucket->kind;
  context.phase = &job.phase;
  context.in_place = &job.in_place;
  context.chosen = &job.algorithm;
  context.sequence = job.sequence;
  check_room(job);
  const bool device = job.bucket->device >= 0 || job.lane != nullptr;
  job.running = std::make_unique<Running>(device ? device_task(job, context) : task_of(job, context));
}

}  // namespace farandole
