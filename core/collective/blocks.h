// Allgather and alltoall as steps of a larger collective, which counts the steps.
// Touches base/, link/ and group/.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

// Lists are by member. Arguments are taken by reference: they stay until the task has ended. `step` marks the messages;
// each needs one of its own within the collective. `large` as in alltoall.
Task gather_blocks(const Context& context, const Pieces& in, const std::vector<Pieces>& out, std::uint32_t step);
Task swap_blocks(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out,
                 std::uint32_t step, bool large);

}  // namespace farandole::collective
