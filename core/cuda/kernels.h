// The device kernels: compiled by NVRTC when they are first used, and kept in files.
// Touches base/, os/ and cuda/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/dtype.h"
#include "cuda/driver.h"
#include "cuda/nvrtc.h"

namespace farandole::cuda {

constexpr unsigned kThreads = 256;            // of a block
constexpr std::size_t kTileBytes = 16 << 10;  // of each source, for one block at a time

// Of one context. Used by one thread at a time, with the context current.
class Kernels {
 public:
  // `architecture`: 90 for compute capability 9.0. `folder`: where compiled kernels are kept; "": nowhere.
  Kernels(const Driver& driver, const Nvrtc& nvrtc, int version, int architecture, std::string folder)
      : driver_(driver), nvrtc_(nvrtc), version_(version), architecture_(architecture), folder_(std::move(folder)) {}

  // Reduces `ins` sources with sum, min, max or product; with one source and no scale it copies. Throws
  // Failure(precondition) with the compiler's words.
  Function reduce(DType dtype, ReduceOp op, std::size_t ins, bool scaled);

 private:
  std::string compile(const std::string& source) const;
  std::string binary(const std::string& source) const;

  const Driver& driver_;
  const Nvrtc& nvrtc_;
  const int version_, architecture_;
  const std::string folder_;
  std::map<std::tuple<DType, ReduceOp, std::size_t, bool>, Function> loaded_;
};

}  // namespace farandole::cuda
