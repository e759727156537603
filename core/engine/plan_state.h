// The state that each member publishes while it follows a plan: how many buckets it is ready for, and whether it has
// left.
// Pure. Touches nothing.
#pragma once

#include <algorithm>
#include <cstdint>

namespace farandole {

// A plan is followed within one epoch. Bucket k runs when every member's `ready` exceeds k. A member that cannot follow
// any longer diverts: its `ready` then stays as it is. A member that sees a divert diverts too. When all have, the
// buckets below the smallest `ready` still run, and everything later is negotiated.
struct PlanState {
  std::uint32_t epoch = 0;  // 20 bits
  bool any = false;         // at least one member has diverted
  bool all = false;         // all members have
  std::uint64_t ready = 0;  // 42 bits; the smallest of all members

  static std::uint32_t trim(std::uint32_t epoch) { return epoch & 0xfffff; }
  std::uint64_t pack() const {
    return (static_cast<std::uint64_t>(trim(epoch)) << 44) | (static_cast<std::uint64_t>(any) << 43) |
           (static_cast<std::uint64_t>(all) << 42) | (ready & ((1ull << 42) - 1));
  }
  static PlanState unpack(std::uint64_t bits) {
    return {static_cast<std::uint32_t>(bits >> 44), ((bits >> 43) & 1) != 0, ((bits >> 42) & 1) != 0,
            bits & ((1ull << 42) - 1)};
  }
  // Combines two states in `epoch`; a state of another epoch belongs to a member that has not come so far yet.
  static PlanState combine(PlanState a, PlanState b, std::uint32_t epoch) {
    epoch = trim(epoch);
    if (a.epoch != epoch) a = {epoch, false, false, 0};
    if (b.epoch != epoch) b = {epoch, false, false, 0};
    return {epoch, a.any || b.any, a.all && b.all, std::min(a.ready, b.ready)};
  }
};

}  // namespace farandole
