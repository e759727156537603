// Conversion of single fp16 and bf16 numbers to fp32 and back in integer arithmetic, the same on every processor.
// Touches nothing.
#pragma once

#include <bit>
#include <cstdint>

namespace farandole::kernel {

inline float float_of_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// Rounds to nearest even. Every NaN becomes the one quiet NaN.
inline std::uint16_t bfloat16_of_float(float value) {
  if (value != value) return 0x7fc0;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of_float16(std::uint16_t bits) {
  const std::uint32_t sign = (std::uint32_t{bits} & 0x8000) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1f;
  const std::uint32_t fraction = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // exact
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

// Rounds to nearest even, with subnormals; too large values become infinity. Every NaN becomes the one quiet NaN.
inline std::uint16_t float16_of_float(float value) {
  if (value != value) return 0x7e00;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);  // 65520 and above
  if (magnitude >= 0x38800000) {                                                  // a normal fp16
    const std::uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
  if (magnitude <= 0x33000000)
    return static_cast<std::uint16_t>(sign);            // up to half of the smallest number: rounds to zero
  const std::uint32_t shift = 126 - (magnitude >> 23);  // 14 to 24
  const std::uint32_t fraction = (magnitude & 0x7fffff) | 0x800000;
  const std::uint32_t rest = fraction & ((1u << shift) - 1), middle = 1u << (shift - 1);
  std::uint32_t result = fraction >> shift;
  if (rest > middle || (rest == middle && (result & 1))) ++result;
  return static_cast<std::uint16_t>(sign | result);
}

}  // namespace farandole::kernel
