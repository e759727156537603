// What the stand-ins for CUDA's libraries share: the variables that tell them how to be, and how to fail.
// Touches the environment.
#pragma once

#include <cstdlib>
#include <string>

#define STANDIN extern "C" __attribute__((visibility("default")))

namespace standin {

inline int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == 0 ? otherwise : std::atoi(text);
}

// Whether a fault is wanted: `variable` lists them with commas.
inline bool wants(const char* variable, const std::string& fault) {
  const char* text = std::getenv(variable);
  return text != nullptr && ("," + std::string(text) + ",").find("," + fault + ",") != std::string::npos;
}

}  // namespace standin
