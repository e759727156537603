// Kernels for x86-64 with AVX2 and F16C, in vectors of 32 bytes. They run only when processor.h has found both.
// Touches vector.h alone.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FARANDOLE_TARGET __attribute__((target("avx2,f16c")))

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 32;

#define FARANDOLE_MACHINE FARANDOLE_TARGET static inline __attribute__((always_inline))

struct Machine {
  static constexpr bool kOneNan = false;

  FARANDOLE_MACHINE __m256 load_float16(const std::byte* from) {
    __m128i bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm256_cvtph_ps(bits);
  }
  FARANDOLE_MACHINE void store_float16(std::byte* to, __m256 value) {
    const __m128i bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, sizeof bits);
  }
  FARANDOLE_MACHINE __m256 load_bfloat16(const std::byte* from) {
    __m128i bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  FARANDOLE_MACHINE void store_bfloat16(std::byte* to, __m256 value) {
    const __m256i wide = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(wide, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    const __m128i bits = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    std::memcpy(to, &bits, sizeof bits);
  }
  FARANDOLE_MACHINE __m256d load_doubles(const float*, const std::byte* from) {
    __m128 values;
    std::memcpy(&values, from, sizeof values);
    return _mm256_cvtps_pd(values);
  }
  FARANDOLE_MACHINE __m256d load_doubles(const double*, const std::byte* from) {
    __m256d values;
    std::memcpy(&values, from, sizeof values);
    return values;
  }
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

#include "kernel/vector.h"

namespace farandole::kernel {

const Set kAvx2 = {"avx2", vector_reduce, vector_dots, vector_combine};

}  // namespace farandole::kernel
#endif
