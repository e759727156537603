// Shared by the collectives: slices, arithmetic on pieces, phases.
// Touches base/ and kernel/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/failpoint.h"
#include "base/pieces.h"
#include "collective/collective.h"

namespace farandole::collective {

inline std::size_t index(int value) { return static_cast<std::size_t>(value); }

// Records the phase of a collective, and lets tests inject a failure there.
inline void enter(const Context& context, const char* phase) {
  if (context.phase != nullptr) *context.phase = phase;
  FARANDOLE_FAILPOINT(context.engine, context.kind, phase);
}

// What both sides of a slot must agree on: its collective, and its number of bytes.
inline std::uint64_t stamp(const Context& context, std::size_t bytes) {
  return context.sequence << 32 | static_cast<std::uint32_t>(bytes);
}

// `bytes` cut into `count` equal parts at multiples of 64, so that no cache line has two owners. The last parts are
// shorter or empty.
struct Slices {
  std::size_t bytes = 0;
  std::size_t each = 0;

  Slices(std::size_t total, int count) : bytes(total) {
    std::size_t share = total / index(count) + (total % index(count) != 0 ? 1 : 0);
    each = (share + 63) / 64 * 64;
  }
  std::size_t begin(int part) const { return std::min(bytes, index(part) * each); }
  std::size_t size(int part) const { return begin(part + 1) - begin(part); }
  // The chunk of this number in a slice; the last one is smaller, and those behind it are empty.
  Pieces chunk(const Pieces& whole, int part, std::size_t number, std::size_t chunk_bytes) const {
    const std::size_t offset = std::min(size(part), number * chunk_bytes);
    return whole.slice(begin(part) + offset, std::min(size(part) - offset, chunk_bytes));
  }
};

// The unit of transfer between hosts.
inline std::size_t remote_chunk(const Context& context, const Slices& slices) {
  return std::min(std::max<std::size_t>(context.chunk_bytes / 64 * 64, 64), slices.each);
}

// A reduction's scaling when it is done in two steps: the first prescales, the second applies the rest.
inline Reduction first_half(Reduction reduction) {
  reduction.postscale = 1.0;
  reduction.divisor = 1;
  return reduction;
}
inline Reduction last_half(Reduction reduction) {
  reduction.prescale = 1.0;
  return reduction;
}

// out = the sources combined in their order; all have the size of `out`. Each piece of `out` and of `mirror` may be one
// of a source; `mirror` gets the result too.
void reduce(const Reduction& reduction, const std::vector<Pieces>& sources, const Pieces& out,
            const Pieces* mirror = nullptr);
// Copies pieces; they may be the same memory.
void copy(const Pieces& from, const Pieces& to);

// Whether all transfers of a list are done (empty entries count as done). Throws the error of one that failed. Pure,
// for `until`.
bool finished(const std::vector<link::TransferPtr>& transfers);

}  // namespace farandole::collective
