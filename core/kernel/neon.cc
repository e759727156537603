// The kernels for 64-bit Arm, in vectors of 16 bytes: NEON is part of every such processor.
// Touches vector.h alone.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FARANDOLE_TARGET

namespace farandole::kernel {
namespace {

constexpr std::size_t kVectorBytes = 16;

struct Half {
  static inline __attribute__((always_inline)) float32x4_t load(const std::byte* from) {
    uint16x4_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
  }
  static inline __attribute__((always_inline)) void store(std::byte* to, float32x4_t value) {
    const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32(value));
    std::memcpy(to, &bits, sizeof bits);
  }
};

}  // namespace
}  // namespace farandole::kernel

#include "kernel/vector.h"

namespace farandole::kernel {

const Set kNeon = {"neon", vector_reduce, vector_dots, vector_combine};

}  // namespace farandole::kernel
#endif
