// Asks the processor (x86-64) or the kernel (Arm) for its features, and sets and restores the floating-point mode.
// Touches nothing else.
#include "kernel/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace farandole::kernel {

#if defined(__x86_64__)

namespace {

// The registers that the system saves at a thread switch. Called only when cpuid has OSXSAVE.
std::uint64_t saved_registers() {
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

}  // namespace

Features detect() {
  Features found;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool f16c = (c & bit_F16C) != 0, avx = (c & bit_AVX) != 0, xsave = (c & bit_OSXSAVE) != 0;
  if (!f16c || !avx || !xsave || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  const std::uint64_t saved = saved_registers();
  constexpr std::uint64_t kYmm = 0x06, kZmm = 0xe6;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  found.avx2 = (b & bit_AVX2) != 0 && (saved & kYmm) == kYmm;
  found.avx512 = found.avx2 && (b & kAvx512) == kAvx512 && (saved & kZmm) == kZmm;
  return found;
}

StandardArithmetic::StandardArithmetic() {
  constexpr std::uint32_t kStandard = 0x1f80, kFlags = 0x3f;
  std::uint32_t mode;
  __asm__ volatile("stmxcsr %0" : "=m"(mode));
  user_mode_ = mode;
  changed_ = (mode & ~kFlags) != kStandard;
  if (changed_) __asm__ volatile("ldmxcsr %0" : : "m"(kStandard));
}

StandardArithmetic::~StandardArithmetic() {
  const std::uint32_t mode = static_cast<std::uint32_t>(user_mode_);
  if (changed_) __asm__ volatile("ldmxcsr %0" : : "m"(mode));
}

#elif defined(__aarch64__)

Features detect() {
  Features found;
  found.neon = true;
  return found;
}

StandardArithmetic::StandardArithmetic() {
  constexpr std::uint64_t kDefaultNan = std::uint64_t{1} << 25;
  __asm__ volatile("mrs %0, fpcr" : "=r"(user_mode_));
  changed_ = user_mode_ != kDefaultNan;
  if (changed_) __asm__ volatile("msr fpcr, %0" : : "r"(kDefaultNan));
}

StandardArithmetic::~StandardArithmetic() {
  if (changed_) __asm__ volatile("msr fpcr, %0" : : "r"(user_mode_));
}

#else

Features detect() { return {}; }
StandardArithmetic::StandardArithmetic() : user_mode_(0), changed_(false) {}
StandardArithmetic::~StandardArithmetic() = default;

#endif

}  // namespace farandole::kernel
