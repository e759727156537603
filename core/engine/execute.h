// From an agreed bucket to a running collective: which memory it reads and writes, and what its operations get.
// Touches collective/ and negotiate/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"
#include "engine/operation.h"
#include "negotiate/request.h"

namespace farandole {

// A bucket on its way through a group. `operations` follow bucket.items; null where this member has joined.
struct Job {
  negotiate::Bucket bucket;
  std::vector<OperationPtr> operations;
  Results* results = nullptr;
  std::vector<Memory> scratch;  // stands in for the tensors of a member that has joined
  std::uint64_t sequence = 0;
  std::size_t chunk_bytes = 0;  // as it was agreed on when the bucket was
  const char* phase = "queue";
  std::int64_t in_place = 0;  // bytes of it that were reduced where they lie
  std::unique_ptr<Running> running;
};

// Sets outputs, shapes and received splits of the job's operations, allocates results, and makes job.running (none for
// kinds that move no bytes).
void prepare(Job& job, collective::Context context);

}  // namespace farandole
