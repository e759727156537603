// The table of CUDA's driver, and how its version is read.
// Touches base/ and os/.
#include "cuda/driver.h"

namespace farandole::cuda {

namespace {

constexpr const char* kNames[] = {"libcuda.so.1"};
constexpr Symbol kSymbols[] = {
#define FARANDOLE_SYMBOL(member, symbol, since, needed, parameters) {#symbol, since, needed, offsetof(Driver, member)},
    FARANDOLE_DRIVER_FUNCTIONS(FARANDOLE_SYMBOL)
#undef FARANDOLE_SYMBOL
};

int version_of(const os::Library& library, std::string& error) {
  auto ask = reinterpret_cast<Result (*)(int*)>(library.symbol("cuDriverGetVersion"));
  int version = 0;
  if (ask == nullptr) return 0;
  if (Result result = ask(&version); result != kSuccess) {
    error = "cuDriverGetVersion fails with " + std::to_string(result);
    return 0;
  }
  return version;
}

std::string text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace

const LibraryDescription driver_library = {"the driver for CUDA", kNames, 10020, version_of, text, kSymbols};

std::string error_name(const Driver& driver, Result result) {
  const char* name = nullptr;
  if (driver.get_error_name != nullptr && driver.get_error_name(result, &name) == kSuccess && name != nullptr)
    return name;
  return "CUDA error " + std::to_string(result);
}

}  // namespace farandole::cuda
