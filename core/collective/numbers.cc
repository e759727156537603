// Numbers in the slots that everyone reads.
// Touches base/ and link/.
#include "collective/numbers.h"

#include <algorithm>
#include <cstring>

#include "collective/parts.h"

namespace farandole::collective {

namespace {

using link::Rings;

constexpr std::uint32_t kAnyCount = ~0u;  // in the stamp of a slot that contains the number of its numbers

}  // namespace

Task publish_numbers(const Context& context, const Numbers& mine, std::vector<Numbers>& all) {
  Rings& rings = *context.rings;
  const std::uint64_t any_count = stamp(context, kAnyCount);
  auto free = until([&rings] { return rings.claim(Rings::everyone) != nullptr; });
  co_await free;
  enter(context, "send");
  std::byte* slot = rings.claim(Rings::everyone);
  const std::uint64_t count = mine.size();
  std::memcpy(slot, &count, sizeof count);
  if (count > 0) std::memcpy(slot + sizeof count, mine.data(), count * sizeof count);
  rings.publish(Rings::everyone, any_count);
  enter(context, "recv");
  all.assign(index(rings.members()), mine);
  for (int member = 0; member < rings.members(); ++member) {
    if (member == rings.me()) continue;
    auto arrived = until([&rings, member, any_count] { return rings.peek(member, true, any_count) != nullptr; });
    co_await arrived;
    const std::byte* published = rings.peek(member, true, any_count);
    // Read once, because the writer could change it.
    const std::uint64_t announced =
        __atomic_load_n(reinterpret_cast<const std::uint64_t*>(published), __ATOMIC_RELAXED);
    const std::uint64_t theirs = std::min<std::uint64_t>(announced, most_numbers(rings));
    Numbers& numbers = all[index(member)];
    numbers.resize(theirs);
    if (theirs > 0) std::memcpy(numbers.data(), published + sizeof theirs, theirs * sizeof theirs);
    rings.consume(member, true);
  }
}

}  // namespace farandole::collective
