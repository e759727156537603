// The table of CUDA's run-time compiler, and how its version is read.
// Touches base/ and os/.
#include "cuda/nvrtc.h"

namespace farandole::cuda {

namespace {

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"};
using Table = Nvrtc;
constexpr Symbol kSymbols[] = {FARANDOLE_NVRTC_FUNCTIONS(FARANDOLE_SYMBOL)};

int version_of(const os::Library& library, std::string& error) {
  auto ask = reinterpret_cast<CompileResult (*)(int*, int*)>(library.symbol("nvrtcVersion"));
  int major = 0, minor = 0;
  if (ask == nullptr) return 0;
  if (CompileResult result = ask(&major, &minor); result != 0) {
    error = "nvrtcVersion fails with " + std::to_string(result);
    return 0;
  }
  return major * 1000 + minor * 10;
}

std::string text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace

const LibraryDescription nvrtc_library = {"NVRTC", kNames, 11010, version_of, text, kSymbols};

}  // namespace farandole::cuda
