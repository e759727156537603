// The functions of CUDA's run-time compiler (libnvrtc) that the core may call.
// Touches base/ and os/; written from the documented binary interface, without CUDA's headers.
#pragma once

#include <cstddef>

#include "cuda/open.h"

namespace farandole::cuda {

using Program = struct ProgramObject*;
using CompileResult = int;  // 0: success

// X(member, symbol, the version that brought it, needed, parameters)
/* clang-format off */
#define FARANDOLE_NVRTC_FUNCTIONS(X)                                                                                \
  X(create, nvrtcCreateProgram, 11010, true,                                                                        \
    (Program* program, const char* source, const char* name, int headers, const char* const* texts,                 \
     const char* const* names))                                                                                     \
  X(destroy, nvrtcDestroyProgram, 11010, true, (Program* program))                                                  \
  X(compile, nvrtcCompileProgram, 11010, true, (Program program, int count, const char* const* options))            \
  X(cubin_size, nvrtcGetCUBINSize, 11010, true, (Program program, std::size_t* bytes))                              \
  X(cubin, nvrtcGetCUBIN, 11010, true, (Program program, char* cubin))                                              \
  X(log_size, nvrtcGetProgramLogSize, 11010, true, (Program program, std::size_t* bytes))                           \
  X(log, nvrtcGetProgramLog, 11010, true, (Program program, char* log))                                             \
  X(arch_count, nvrtcGetNumSupportedArchs, 11020, false, (int* count))                                              \
  X(archs, nvrtcGetSupportedArchs, 11020, false, (int* archs))
/* clang-format on */

struct Nvrtc {
#define FARANDOLE_MEMBER(member, symbol, since, needed, parameters) CompileResult(*member) parameters = nullptr;
  FARANDOLE_NVRTC_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER
};

extern const LibraryDescription nvrtc_library;

}  // namespace farandole::cuda
