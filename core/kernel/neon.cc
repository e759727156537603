// Kernels for 64-bit Arm, in vectors of 16 bytes: every such processor has NEON.
// Touches only vector.h.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FARANDOLE_TARGET
#define FARANDOLE_SET kNeon

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 16;

#define FARANDOLE_MACHINE static inline __attribute__((always_inline))

struct Machine {
  static constexpr const char* kName = "neon";
  static constexpr bool kOneNan = true;  // StandardArithmetic sets "default NaN", so every operation gives it

  // Eight bytes from any address. Compilers do memcpy through a general register, which is slower.
  FARANDOLE_MACHINE uint16x4_t load_halves(const std::byte* from) {
    return vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(from)));
  }
  FARANDOLE_MACHINE void store_halves(std::byte* to, uint16x4_t bits) {
    vst1_u8(reinterpret_cast<std::uint8_t*>(to), vreinterpret_u8_u16(bits));
  }
  FARANDOLE_MACHINE float32x4_t load_float16(const std::byte* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(from)));
  }
  FARANDOLE_MACHINE void store_float16(std::byte* to, float32x4_t value) {
    store_halves(to, vreinterpret_u16_f16(vcvt_f16_f32(value)));
  }
  // Zip, unzip and compare instead of shifts: many processors start only one shift per cycle.
  FARANDOLE_MACHINE float32x4_t load_bfloat16(const std::byte* from) {
    const uint16x4_t bits = load_halves(from);
    return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), vcombine_u16(bits, bits)));
  }
  FARANDOLE_MACHINE void store_bfloat16(std::byte* to, float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value), odd = vtstq_u32(bits, vdupq_n_u32(0x10000));
    const uint16x8_t rounded = vreinterpretq_u16_u32(vsubq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd));
    store_halves(to, vget_low_u16(vuzp2q_u16(rounded, rounded)));
  }
  FARANDOLE_MACHINE float64x2_t load_doubles(const float*, const std::byte* from) {
    return vcvt_f64_f32(vreinterpret_f32_u16(load_halves(from)));
  }
  FARANDOLE_MACHINE float64x2_t load_doubles(const double*, const std::byte* from) {
    return vreinterpretq_f64_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(from)));
  }
  // These propagate NaN and treat -0.0 as below 0.0.
  FARANDOLE_MACHINE float32x4_t min(float32x4_t a, float32x4_t b) { return vminq_f32(a, b); }
  FARANDOLE_MACHINE float32x4_t max(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
  FARANDOLE_MACHINE float64x2_t min(float64x2_t a, float64x2_t b) { return vminq_f64(a, b); }
  FARANDOLE_MACHINE float64x2_t max(float64x2_t a, float64x2_t b) { return vmaxq_f64(a, b); }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"
#endif
