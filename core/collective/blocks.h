// Allgather and alltoall as parts of a larger collective, which assigns their steps.
// Touches base/, link/ and group/.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Lists are by member. Arguments are references and must live until the task has ended. `step` is in the messages'
// tags; each call within one collective needs its own. `large` as in alltoall.
Task gather_blocks(const Context& context, const Pieces& in, const std::vector<Pieces>& out, std::uint32_t step);
Task swap_blocks(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out,
                 std::uint32_t step, bool large);

}  // namespace farandole::collective
