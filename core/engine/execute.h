// From an agreed bucket to a running collective: the memory that it reads and writes, and the results of its
// operations.
// Touches collective/ and negotiate/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
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
  std::int64_t in_place = 0;  // bytes that were reduced directly in shared memory
  std::unique_ptr<Running> running;
};

// Sets outputs, shapes and received splits of the job's operations, allocates results, and creates job.running (none
// for kinds that move no bytes).
void prepare(Job& job, collective::Context context);

}  // namespace farandole
