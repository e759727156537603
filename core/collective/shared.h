// Allreduce of memory that all members of a host can reach: one pass, no copies.
// Touches base/, link/, group/ and kernel/.
#pragma once

#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Fills `memory` with every member's tensor when all of them lie, to be reduced in place, in memory that all members
// have; leaves it empty when any does not. All members of the host call it and come to the same answer.
Task find_shared(const Context& context, const Pieces& in, const Pieces& out, std::vector<Pieces>& memory);
// Each member reduces its slice of all tensors and writes the result into each of them.
Task allreduce_shared(const Context& context, const std::vector<Pieces>& memory, const Reduction& reduction);

}  // namespace farandole::collective
