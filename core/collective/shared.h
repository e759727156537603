// Collectives on memory that all members of a host can access: one pass, no intermediate copies.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <memory>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Mappings of local peers' memory, held as long as they are used.
using Held = std::vector<std::shared_ptr<const os::SharedMemory>>;

struct SharedTensors {
  std::vector<Pieces> members;  // each member's tensor
  Held held;
};

// Finds every member's tensor when all of them are reduced in place and lie in memory that all members have mapped.
// Empty when one does not, or is divided inside an element. All members of the host call it and get the same answer.
Task find_shared(const Context& context, const Pieces& in, const Pieces& out, std::size_t element,
                 SharedTensors& tensors);
// Each member reduces its slice of all tensors and writes the result into all of them.
Task allreduce_shared(const Context& context, const SharedTensors& tensors, const Reduction& reduction);
// As local_alltoall, when every member's engine has put its result into such memory: each member writes its blocks
// directly to their place. Else nothing has moved, and `done` is false on all members.
Task alltoall_shared(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out, bool& done);

}  // namespace farandole::collective
