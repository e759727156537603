// The GPUs of this process, as CUDA's driver names them. It creates no context.
// Touches base/, os/ and cuda/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/driver.h"

namespace farandole::cuda {

enum class Answer : int { no = 0, yes = 1, unknown = -1 };

struct DeviceFacts {
  std::string name;
  std::string uuid;  // "GPU-...", or "MIG-..." for a slice; "" when the driver is too old to tell
  std::int64_t bytes = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  Answer slice = Answer::no;     // of a GPU that MIG divides
  Answer mps = Answer::unknown;  // contexts of several processes share it
  bool stream_operations = false;
  bool exports_memory = false;  // as descriptors
};

// Throws Failure(precondition) when the driver fails; an empty list: it runs, and there is no GPU.
std::vector<DeviceFacts> find_devices(const Driver& driver);

}  // namespace farandole::cuda
