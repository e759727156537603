// The functions that an instruction set offers to kernel.cc, and the scalar code that defines the results.
// Touches only kernel.h.
#pragma once

#include "kernel/kernel.h"

namespace farandole::kernel {

// A dot product is kept as eight running sums; element i goes to sum i % 8. Every vector width can follow this order.
inline constexpr int kDotLanes = 8;
struct DotLanes {
  double ab[kDotLanes] = {}, aa[kDotLanes] = {}, bb[kDotLanes] = {};
};
struct Coefficients {
  double a = 1, b = 1;
};

// Each function does as many leading elements as fill whole vectors and returns their number; the scalar code does the
// rest. Zero means that the set has no fast kernel for it. `dots` does a multiple of kDotLanes.
struct Set {
  const char* name;
  std::size_t (*reduce)(const Reduce& work);
  std::size_t (*dots)(DType dtype, const void* a, const void* b, std::size_t elements, DotLanes& lanes);
  std::size_t (*combine)(DType dtype, const void* a, const void* b, Coefficients by, void* out, std::size_t elements);
};
extern const Set kNeon, kAvx2, kAvx512;  // each defined on its own architecture only

// The definition of the results: element by element, from `begin` on.
namespace scalar {
void reduce(const Reduce& work, std::size_t begin);
void dots(DType dtype, const void* a, const void* b, std::size_t begin, std::size_t elements, DotLanes& lanes);
void combine(DType dtype, const void* a, const void* b, Coefficients by, void* out, std::size_t begin,
             std::size_t elements);
}  // namespace scalar

}  // namespace farandole::kernel
