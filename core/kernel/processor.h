// What this processor can do beyond its baseline, and the floating-point mode the kernels need.
// Touches nothing.
#pragma once

#include <cstdint>

namespace farandole::kernel {

struct Features {
  bool neon = false, avx2 = false, avx512 = false;  // avx2 includes F16C; avx512 means F, BW, DQ and VL
};
Features detect();

// Rounding to nearest, subnormals kept, nothing trapped, for as long as it lives: a user's thread may have set
// something else (torch.set_flush_denormal), and the bits must not depend on which thread does the work. On Arm also:
// an operation that gives NaN gives the default one, which saves looking for others.
class StandardArithmetic {
 public:
  StandardArithmetic();
  ~StandardArithmetic();
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
  std::uint64_t found_;
  bool changed_;
};

}  // namespace farandole::kernel
