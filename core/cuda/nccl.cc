// The table of NCCL's functions, and how its version is read.
// Touches base/ and os/.
#include "cuda/nccl.h"

namespace farandole::cuda {

namespace {

constexpr const char* kNames[] = {"libnccl.so.2", "librccl.so.1", "librccl.so"};
using Table = Nccl;
constexpr Symbol kSymbols[] = {FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_SYMBOL)};

int version_of(const os::Library& library, std::string& error) {
  return asked_version(library, "ncclGetVersion", error);
}

// From 2.9 on a version is major * 10000 + minor * 100 + patch; before, major * 1000 + minor * 100 + patch.
std::string text(int version) {
  const int major = version >= 10000 ? version / 10000 : version / 1000;
  const int minor = version >= 10000 ? version % 10000 / 100 : version % 1000 / 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

}  // namespace

const LibraryDescription nccl_library = {"NCCL", kNames, 21800, version_of, text, kSymbols};

}  // namespace farandole::cuda
