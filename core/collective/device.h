// Collectives on tensors in the memory of GPUs, among the members of one host: no byte passes through host memory.
// Touches base/, cuda/, link/ and group/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collective/collective.h"
#include "collective/numbers.h"
#include "cuda/gpu.h"

namespace farandole::collective {

struct DeviceTensor {
  cuda::Address in = 0, out = 0;
  std::size_t in_bytes = 0, out_bytes = 0;
};

// Bytes of one tensor that are reduced, in the order of `from`, and written to all of `to`.
struct DevicePart {
  struct Place {
    int member;
    std::size_t offset;  // in that member's input or output
  };
  std::size_t tensor = 0;
  std::size_t bytes = 0;
  std::vector<Place> from, to;
};

// Why a collective cannot take a way. All members learn the same one, and take the next way.
enum class Obstacle : std::uint64_t {
  none = 0,
  wants_nccl,     // a member prefers NCCL to memory that is mapped
  host_memory,    // a member's tensors are in host memory, or on several devices
  result_size,    // a member has no memory of the result's size
  device_memory,  // a member has no device memory left, or cannot name so many tensors at once
  unreachable,    // a member cannot open the memory of another one
  kernel,         // the kernel cannot be compiled or loaded
  shared_gpu,     // of NCCL: members share a device
  other_gpu,      // a member's tensors are not on the device of its communicator
  nccl_off,       // a member cannot use it, or must not
  nccl_versions,  // members have different ones
  nccl_failed,    // it could not connect the members
};
const char* text_of(Obstacle obstacle);

struct DeviceJob {
  cuda::Lane* lane = nullptr;          // null: this member takes no part, for the reason `obstacle`
  std::vector<cuda::MomentPtr> ready;  // when all are reached, the tensors can be used
  Obstacle obstacle = Obstacle::none;
  std::size_t count = 0;  // of tensors, also on a member that takes no part
  std::vector<DeviceTensor> tensors;
  Numbers sends, receives;  // alltoall: bytes for and from each member
  Reduction reduction;
  bool reduces = false;  // else it only copies
  // What is to be done, the same on all members; all parts have as many sources, and as many results. Given every
  // member's `sends`.
  std::function<std::vector<DevicePart>(const std::vector<Numbers>& sends)> parts;
};

// The first member of each device does the work for all members of the device: a kernel that waited for the kernel of
// another process would burn time slices where processes share a device. `met` is the same on all members; when it is
// not `none`, no result was written.
Task on_device(const Context& context, const DeviceJob& job, Obstacle& met);

}  // namespace farandole::collective
