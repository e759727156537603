// What kernel.cc needs from each instruction set, and from the scalar code that defines the results.
// Touches kernel.h alone.
#pragma once

#include "kernel/kernel.h"

namespace farandole::kernel {

// Dots are kept as eight running sums per product, element i going to sum i % 8: an order that every width can follow.
inline constexpr int kDotLanes = 8;
struct DotLanes {
  double ab[kDotLanes] = {}, aa[kDotLanes] = {}, bb[kDotLanes] = {};
};
struct Coefficients {
  double a = 1, b = 1;
};

// Each function does the first elements, as many as fill whole vectors, and says how many; the scalar code does the
// rest. Zero means that the set has no fast way. `dots` does a multiple of kDotLanes.
struct Set {
  const char* name;
  std::size_t (*reduce)(const Reduce& work);
  std::size_t (*dots)(DType dtype, const void* a, const void* b, std::size_t elements, DotLanes& lanes);
  std::size_t (*combine)(DType dtype, const void* a, const void* b, Coefficients by, void* out, std::size_t elements);
};
extern const Set kNeon, kAvx2, kAvx512;  // each defined on its own architecture only

// The truth: element by element, from `begin` on.
namespace scalar {
void reduce(const Reduce& work, std::size_t begin);
void dots(DType dtype, const void* a, const void* b, std::size_t begin, std::size_t elements, DotLanes& lanes);
void combine(DType dtype, const void* a, const void* b, Coefficients by, void* out, std::size_t begin,
             std::size_t elements);
}  // namespace scalar

}  // namespace farandole::kernel
