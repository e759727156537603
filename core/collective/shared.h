// Collectives on memory that all members of a host can reach: one pass, no copies in between.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Memory of neighbours, for as long as it is used.
using Held = std::vector<std::shared_ptr<const os::SharedMemory>>;

struct SharedTensors {
  std::vector<Pieces> members;  // each member's tensor
  Held held;
};

// Finds every member's tensor when all of them lie, to be reduced in place, in memory that all members have; none when
// any does not, or cuts an element. All members of the host call it and come to the same answer.
Task find_shared(const Context& context, const Pieces& in, const Pieces& out, std::size_t element,
                 SharedTensors& tensors);
// Each member reduces its slice of all tensors and writes the result into each of them.
Task allreduce_shared(const Context& context, const SharedTensors& tensors, const Reduction& reduction);
// As local_alltoall, when every member's engine has put the result into such memory: each writes its blocks where they
// belong. Else nothing has moved, and `done` is false on all of them.
Task alltoall_shared(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out, bool& done);

}  // namespace farandole::collective
