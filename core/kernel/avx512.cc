// Kernels for x86-64 with AVX-512 (F, BW, DQ, VL), in vectors of 64 bytes. They run only when processor.h has found
// all of these. Touches only x86.h and vector.h.
#if defined(__x86_64__)
#if !defined(__clang__)  // gcc 12 warns of "undefined" vectors in its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#define FARANDOLE_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define FARANDOLE_SET kAvx512

#include "kernel/x86.h"

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 64;

struct Machine : X86 {
  static constexpr const char* kName = "avx512";

  FARANDOLE_MACHINE __m512 load_float16(const std::byte* from) { return _mm512_cvtph_ps(bits_at<__m256i>(from)); }
  FARANDOLE_MACHINE void store_float16(std::byte* to, __m512 value) {
    const __m256i bits = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, sizeof bits);
  }
  FARANDOLE_MACHINE __m512 load_bfloat16(const std::byte* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits_at<__m256i>(from)), 16));
  }
  FARANDOLE_MACHINE void store_bfloat16(std::byte* to, __m512 value) {
    const __m512i wide = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i high = _mm512_srli_epi32(rounded, 16);
    const __m256i bits = _mm512_cvtepi32_epi16(high);
    std::memcpy(to, &bits, sizeof bits);
  }
  FARANDOLE_MACHINE __m512d load_doubles(const float*, const std::byte* from) {
    return _mm512_cvtps_pd(bits_at<__m256>(from));
  }
  FARANDOLE_MACHINE __m512d load_doubles(const double*, const std::byte* from) { return bits_at<__m512d>(from); }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"
#endif
