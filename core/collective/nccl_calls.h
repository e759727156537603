// What a collective on device tensors is as calls of NCCL, with the copies and the arithmetic around them.
// Touches base/ and cuda/.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "collective/device.h"
#include "cuda/nccl.h"

namespace farandole::collective {

struct NcclCall {
  enum class What { all_reduce, reduce, reduce_scatter, broadcast, all_gather, send, receive };
  What what = What::all_reduce;
  cuda::Address from = 0, to = 0;
  std::size_t count = 0;  // elements
  int peer = 0;           // or root
};

struct NcclPlan {
  std::optional<cuda::Work> before, after;  // kernels of our own: pack and prescale, unpack and postscale
  std::vector<NcclCall> calls;
  cuda::NcclType type = cuda::NcclType::uint8;
  cuda::NcclOp op = cuda::NcclOp::sum;
};

// Whether NCCL has this type, or needs none because bytes are only moved.
bool nccl_has(const DeviceJob& job);
// For member `me` of `members`. Tensors that are packed lie in the lane's arena. Obstacle::device_memory: there is no
// memory for it.
Obstacle plan_of(const DeviceJob& job, int me, int members, NcclPlan& plan);
cuda::NcclResult call(const NcclCall& call, const NcclPlan& plan, const cuda::Nccl& nccl, cuda::Comm comm,
                      cuda::Stream stream);

}  // namespace farandole::collective
