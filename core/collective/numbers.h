// A few numbers that each member of a host tells all others, through shared memory.
// Touches base/ and link/.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/collective.h"

namespace farandole::collective {

using Numbers = std::vector<std::uint64_t>;

// How many numbers a member can publish at once.
inline std::size_t most_numbers(const link::Rings& rings) { return rings.slot_bytes() / sizeof(std::uint64_t) - 1; }

// Every member publishes its numbers (at most most_numbers()) and reads the others'; `all` is by local member.
Task publish_numbers(const Context& context, const Numbers& mine, std::vector<Numbers>& all);

}  // namespace farandole::collective
