// The word that each member publishes while a plan is followed: how far it is ready to go, and whether it has left.
// Pure. Touches nothing.
#pragma once

#include <algorithm>
#include <cstdint>

namespace farandole {

// A plan is followed within one epoch. Bucket k runs when everybody's `go` exceeds k. A member that cannot follow any
// longer diverts: its `go` stays for good. Whoever sees that anybody has diverted diverts too; when all have, the
// buckets below the smallest `go` still run, and everything later is negotiated.
struct Word {
  std::uint32_t epoch = 0;  // 20 bits
  bool any = false;         // someone behind this word has diverted
  bool all = false;         // everyone behind it has
  std::uint64_t go = 0;     // 42 bits; the smallest of those behind it

  static std::uint32_t trim(std::uint32_t epoch) { return epoch & 0xfffff; }
  std::uint64_t pack() const {
    return (static_cast<std::uint64_t>(trim(epoch)) << 44) | (static_cast<std::uint64_t>(any) << 43) |
           (static_cast<std::uint64_t>(all) << 42) | (go & ((1ull << 42) - 1));
  }
  static Word unpack(std::uint64_t bits) {
    return {static_cast<std::uint32_t>(bits >> 44), ((bits >> 43) & 1) != 0, ((bits >> 42) & 1) != 0,
            bits & ((1ull << 42) - 1)};
  }
  // Both together, as seen in `epoch`: a word of another epoch stands for someone who has not come so far yet.
  static Word combine(Word a, Word b, std::uint32_t epoch) {
    epoch = trim(epoch);
    if (a.epoch != epoch) a = {epoch, false, false, 0};
    if (b.epoch != epoch) b = {epoch, false, false, 0};
    return {epoch, a.any || b.any, a.all && b.all, std::min(a.go, b.go)};
  }
};

}  // namespace farandole
