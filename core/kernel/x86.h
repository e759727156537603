// What the kernels for AVX2 and AVX-512 have in common. avx2.cc and avx512.cc include it after they define
// FARANDOLE_TARGET, the attribute that allows a function to use the set. Touches nothing.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstring>

#define FARANDOLE_MACHINE FARANDOLE_TARGET static inline __attribute__((always_inline))

namespace farandole::kernel {
namespace {

template <class Bits>
FARANDOLE_MACHINE Bits bits_at(const std::byte* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

struct X86 {
  static constexpr bool kOneNan = false;

  // -0.0 counts as below 0.0. Where neither value is below the other, the bits of both are combined: "or" gives the
  // smaller for min, "and" the larger for max. A NaN stays NaN under "or".
  template <class V>
  FARANDOLE_MACHINE V min(V a, V b) {
    using Bits = decltype(a < b);
    return (V)((Bits)(a < b ? a : b) | (Bits)(b < a ? b : a));
  }
  template <class V>
  FARANDOLE_MACHINE V max(V a, V b) {
    using Bits = decltype(a < b);
    return (V)(((Bits)(a > b ? a : b) & (Bits)(b > a ? b : a)) | (a != a) | (b != b));
  }
};

}  // namespace
}  // namespace farandole::kernel
