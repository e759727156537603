// The table of CUDA's driver, and how its version is read.
// Touches base/ and os/.
#include "cuda/driver.h"

namespace farandole::cuda {

namespace {

constexpr const char* kNames[] = {"libcuda.so.1"};
using Table = Driver;
constexpr Symbol kSymbols[] = {FARANDOLE_DRIVER_FUNCTIONS(FARANDOLE_SYMBOL)};

int version_of(const os::Library& library, std::string& error) {
  return asked_version(library, "cuDriverGetVersion", error);
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
