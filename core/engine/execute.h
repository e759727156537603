// From an agreed bucket to a running collective: the memory that it reads and writes, and the results of its
// operations.
// Touches collective/, cuda/ and negotiate/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "collective/nccl.h"
#include "cuda/gpu.h"
#include "engine/operation.h"
#include "negotiate/request.h"

namespace farandole {

// A bucket in a group's queue. `operations` are in the order of bucket.items; null where this member has joined.
struct Job {
  std::shared_ptr<const negotiate::Bucket> bucket;  // that of a plan is in use again and again
  std::vector<OperationPtr> operations;
  Results* results = nullptr;
  std::vector<Memory> scratch;  // instead of tensors, on a member that has joined
  std::uint64_t sequence = 0;
  std::size_t chunk_bytes = 0;  // the group's value when the bucket was agreed on
  const char* phase = "queue";
  collective::Algorithm algorithm = collective::Algorithm::automatic;  // the chosen one, of an allreduce between hosts
  std::int64_t in_place = 0;              // bytes that were reduced directly in shared memory
  cuda::Lane* lane = nullptr;             // for tensors on a device; null when this member has none
  collective::NcclGroup* nccl = nullptr;  // the group's, for tensors on devices
  std::int64_t on_device = 0;             // bytes that did not leave the device
  std::int64_t by_nccl = 0;               // bytes that NCCL has moved
  const char* obstacle = nullptr;         // why they did; null: they did not, or nothing else was possible
  std::unique_ptr<Running> running;
};

// Of a bucket's tensors.
std::int64_t rows_of(const negotiate::Item& item);
std::size_t row_bytes(const negotiate::Item& item);
std::size_t bytes_of(const negotiate::Item& item);
collective::Reduction reduction_of(const negotiate::Bucket& bucket, int members);

// The collective on host memory. Sets outputs, shapes and received splits of the job's operations, and allocates
// results.
Task task_of(Job& job, const collective::Context& context);
// Creates job.running, on whatever memory the tensors lie.
void prepare(Job& job, collective::Context context);

}  // namespace farandole
