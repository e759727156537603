// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL), in vectors of 64 bytes. They run only where processor.h has seen
// all of these. Touches vector.h alone.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FARANDOLE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 64;

struct Half {
  FARANDOLE_TARGET static inline __attribute__((always_inline)) __m512 load(const std::byte* from) {
    __m256i bits;
    std::memcpy(&bits, from, sizeof bits);
    return _mm512_cvtph_ps(bits);
  }
  FARANDOLE_TARGET static inline __attribute__((always_inline)) void store(std::byte* to, __m512 value) {
    const __m256i bits = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, sizeof bits);
  }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"

namespace farandole::kernel {

const Set kAvx512 = {"avx512", vector_reduce, vector_dots, vector_combine};

}  // namespace farandole::kernel
#endif
