// Arithmetic on arrays: reduce, scale, Adasum. The fastest kernel set for this processor is picked once.
// Touches only base/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace farandole::kernel {

// out[i] = finish(source[0][i] * prescale  op  source[1][i] * prescale  op ...), from left to right.
// fp16 and bf16 are accumulated in fp32 and rounded once (to nearest even). finish(x) = x * postscale / divisor: for
// floating types x * (postscale / divisor) in the accumulator's type; for integers truncated towards zero, in integer
// arithmetic when postscale is 1. A prescale on integers truncates each product towards zero; integer sums and products
// wrap around; conversions out of range saturate. bool: sum and max are "or", product and min are "and"; scales do not
// apply. `out` may be one of the sources, or overlap none of them. Every set gives the same bits. A floating result
// that is NaN is always the positive quiet NaN without payload. min and max give NaN when any source has it, and treat
// -0.0 as below 0.0, so they do not depend on the order.
struct Reduce {
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;  // sum, min, max or product; an average is a sum with a divisor
  const void* const* sources = nullptr;
  int count = 0;  // >= 1; with 1 it copies and scales
  void* out = nullptr;
  void* mirror = nullptr;  // if set, the result is also written here, in the same pass
  std::size_t elements = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::int64_t divisor = 1;  // >= 1
};
void reduce(const Reduce& work);

// Adasum of two vectors: a * (1 - a.b / (2 |a|^2)) + b * (1 - a.b / (2 |b|^2)); a coefficient is 1 when its norm is
// below sqrt(DBL_MIN). Products are summed in double, in a fixed order that depends on `elements` alone. The vectors
// are combined in the accumulator's type and rounded once. `out` may be `a` or `b`, or overlap neither.
struct Dots {
  double ab = 0, aa = 0, bb = 0;
};
Dots dots(DType dtype, const void* a, const void* b, std::size_t elements);  // floating types only
void combine(DType dtype, const void* a, const void* b, const Dots& dots, void* out, std::size_t elements);

// "scalar", "neon", "avx2" or "avx512".
const char* name();
// For tests: forces a set; false when this processor cannot run it.
bool select(const char* name);

}  // namespace farandole::kernel
