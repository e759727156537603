// Kernels for x86-64 with AVX2 and F16C, in vectors of 32 bytes. They run only when processor.h has found both.
// Touches only x86.h and vector.h.
#if defined(__x86_64__)
#define FARANDOLE_TARGET __attribute__((target("avx2,f16c")))
#define FARANDOLE_SET kAvx2

#include "kernel/x86.h"

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 32;

struct Machine : X86 {
  static constexpr const char* kName = "avx2";

  FARANDOLE_MACHINE __m256 load_float16(const std::byte* from) { return _mm256_cvtph_ps(bits_at<__m128i>(from)); }
  FARANDOLE_MACHINE void store_float16(std::byte* to, __m256 value) {
    const __m128i bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &bits, sizeof bits);
  }
  FARANDOLE_MACHINE __m256 load_bfloat16(const std::byte* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits_at<__m128i>(from)), 16));
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
    return _mm256_cvtps_pd(bits_at<__m128>(from));
  }
  FARANDOLE_MACHINE __m256d load_doubles(const double*, const std::byte* from) { return bits_at<__m256d>(from); }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"
#endif
