// Allreduce of memory that all members of a host can reach: one pass, no copies.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

struct SharedTensors {
  std::vector<Pieces> members;  // each member's tensor
  std::vector<std::shared_ptr<const os::SharedMemory>> held;
};

// Finds every member's tensor when all of them lie, to be reduced in place, in memory that all members have; none when
// any does not. All members of the host call it and come to the same answer.
Task find_shared(const Context& context, const Pieces& in, const Pieces& out, SharedTensors& tensors);
// Each member reduces its slice of all tensors and writes the result into each of them.
Task allreduce_shared(const Context& context, const SharedTensors& tensors, const Reduction& reduction);

}  // namespace farandole::collective
