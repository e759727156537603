// A stand-in for NVRTC with its binary interface: its "binary" is the names of the kernels in the source.
// Touches the environment: STANDIN_NVRTC_VERSION. A source with `#error` does not compile.
#include <cstring>
#include <regex>
#include <string>

#include "standin.h"

namespace {

struct Program {
  std::string source, image, log;
};

Program& program_of(void* handle) { return *static_cast<Program*>(handle); }

}  // namespace

STANDIN int nvrtcVersion(int* major, int* minor) {
  const int version = standin::number("STANDIN_NVRTC_VERSION", 13000);
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return 0;
}
STANDIN int nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return 0;
}
STANDIN int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 80;
  archs[1] = 90;
  return 0;
}
STANDIN int nvrtcCreateProgram(void** made, const char* source, const char*, int, const char* const*,
                               const char* const*) {
  *made = new Program{source, "", ""};
  return 0;
}
STANDIN int nvrtcDestroyProgram(void** made) {
  delete static_cast<Program*>(*made);
  *made = nullptr;
  return 0;
}
STANDIN int nvrtcCompileProgram(void* handle, int, const char* const*) {
  Program& program = program_of(handle);
  if (program.source.find("#error") != std::string::npos) {
    program.log = "error: #error directive";
    return 6;  // NVRTC_ERROR_COMPILATION
  }
  program.image = "standin\n";
  const std::regex kernel("__global__\\s+void\\s+(\\w+)\\s*\\(");
  for (std::sregex_iterator at(program.source.begin(), program.source.end(), kernel), end; at != end; ++at)
    program.image += (*at)[1].str() + "\n";
  return 0;
}
STANDIN int nvrtcGetCUBINSize(void* handle, std::size_t* bytes) {
  *bytes = program_of(handle).image.size() + 1;
  return 0;
}
STANDIN int nvrtcGetCUBIN(void* handle, char* cubin) {
  std::memcpy(cubin, program_of(handle).image.c_str(), program_of(handle).image.size() + 1);
  return 0;
}
STANDIN int nvrtcGetProgramLogSize(void* handle, std::size_t* bytes) {
  *bytes = program_of(handle).log.size() + 1;
  return 0;
}
STANDIN int nvrtcGetProgramLog(void* handle, char* log) {
  std::memcpy(log, program_of(handle).log.c_str(), program_of(handle).log.size() + 1);
  return 0;
}
