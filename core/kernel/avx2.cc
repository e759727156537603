// The kernels for x86-64 with AVX2 and F16C, in vectors of 32 bytes. They run only where processor.h has seen both.
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

struct Half {
  FARANDOLE_TARGET static inline __attribute__((always_inline)) __m256 load(const std::byte* from) {
    __m128i bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm256_cvtph_ps(bits);
  }
  FARANDOLE_TARGET static inline __attribute__((always_inline)) void store(std::byte* to, __m256 value) {
    const __m128i bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, sizeof bits);
  }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"

namespace farandole::kernel {

const Set kAvx2 = {"avx2", vector_reduce, vector_dots, vector_combine};

}  // namespace farandole::kernel
#endif
