// The arithmetic of the stand-in for NCCL: ranks are added in their order; fp16 and bf16 in float.
// Touches nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cuda/nccl.h"
#include "kernel/half.h"
#include "nccl_room.h"

namespace standin {

using farandole::cuda::NcclOp;
using farandole::cuda::NcclType;

inline std::size_t bytes_of(NcclType type) {
  constexpr std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return sizes[static_cast<int>(type)];
}

template <class T>
T combine(T left, T right, NcclOp op) {
  switch (op) {
    case NcclOp::product:
      return static_cast<T>(left * right);
    case NcclOp::max:
      return std::max(left, right);
    case NcclOp::min:
      return std::min(left, right);
    default:
      return static_cast<T>(left + right);
  }
}

template <class Stored, class Sum, class Load, class Store>
void reduce_as(std::byte* out, std::byte (*slots)[kSlotBytes], int ranks, std::size_t count, NcclOp op, Load load,
               Store store) {
  for (std::size_t i = 0; i < count; ++i) {
    Sum sum{};
    for (int rank = 0; rank < ranks; ++rank) {
      Stored one;
      std::memcpy(&one, slots[rank] + i * sizeof one, sizeof one);
      sum = rank == 0 ? load(one) : combine<Sum>(sum, load(one), op);
    }
    if (op == NcclOp::average) sum = static_cast<Sum>(sum / static_cast<Sum>(ranks));
    const Stored result = store(sum);
    std::memcpy(out + i * sizeof result, &result, sizeof result);
  }
}

template <class T>
void reduce_plain(std::byte* out, std::byte (*slots)[kSlotBytes], int ranks, std::size_t count, NcclOp op) {
  reduce_as<T, T>(out, slots, ranks, count, op, [](T one) { return one; }, [](T one) { return one; });
}

inline void reduce(std::byte* out, std::byte (*slots)[kSlotBytes], int ranks, std::size_t count, NcclType type,
                   NcclOp op) {
  switch (type) {
    case NcclType::int8:
      return reduce_plain<std::int8_t>(out, slots, ranks, count, op);
    case NcclType::uint8:
      return reduce_plain<std::uint8_t>(out, slots, ranks, count, op);
    case NcclType::int32:
      return reduce_plain<std::int32_t>(out, slots, ranks, count, op);
    case NcclType::uint32:
      return reduce_plain<std::uint32_t>(out, slots, ranks, count, op);
    case NcclType::int64:
      return reduce_plain<std::int64_t>(out, slots, ranks, count, op);
    case NcclType::uint64:
      return reduce_plain<std::uint64_t>(out, slots, ranks, count, op);
    case NcclType::float32:
      return reduce_plain<float>(out, slots, ranks, count, op);
    case NcclType::float64:
      return reduce_plain<double>(out, slots, ranks, count, op);
    case NcclType::float16:
      return reduce_as<std::uint16_t, float>(out, slots, ranks, count, op, farandole::kernel::float_of_float16,
                                             farandole::kernel::float16_of_float);
    case NcclType::bfloat16:
      return reduce_as<std::uint16_t, float>(out, slots, ranks, count, op, farandole::kernel::float_of_bfloat16,
                                             farandole::kernel::bfloat16_of_float);
  }
}

}  // namespace standin
