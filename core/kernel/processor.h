// The processor's optional features, and the floating-point mode that the kernels need.
// Touches nothing.
#pragma once

#include <cstdint>

namespace farandole::kernel {

struct Features {
  bool neon = false, avx2 = false, avx512 = false;  // avx2 includes F16C; avx512 means F, BW, DQ and VL
};
Features detect();

// While an object of this class exists: rounding to nearest, subnormals kept, no traps. A user's thread may have
// another mode (torch.set_flush_denormal), and the bits must not depend on the thread that does the work. On Arm,
// operations also give the default NaN, so that no search for other NaNs is needed.
class StandardArithmetic {
 public:
  StandardArithmetic();
  ~StandardArithmetic();
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
  std::uint64_t user_mode_;
  bool changed_;
};

}  // namespace farandole::kernel
