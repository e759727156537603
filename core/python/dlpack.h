// DLPack's structs as its specification lays them out, and the data types of its tensors.
// Touches core/api/farandole.h alone.
#pragma once

#include <cstdint>

#include "api/farandole.h"

namespace farandole::python {

// The part of DLPack's tensor that is read here, as the specification lays it out (versions before 1.0).
struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device;
  std::int32_t dimensions;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // null: contiguous
  std::uint64_t byte_offset;
};
constexpr std::int32_t kCpu = 1;
// Since version 1.0 the tensor comes with a version and flags.
struct DLVersioned {
  std::uint32_t major, minor;
  void* manager;
  void (*deleter)(DLVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};
constexpr std::uint64_t kReadOnly = 1, kCopied = 2;  // of its flags

// What a type offers, in a capsule, when its tensors can be read without an export. Since version 1.3.
struct DLExchange {
  std::uint32_t major, minor;
  const DLExchange* previous;
  void* unused[3];
  int (*read)(void* object, DLTensor* tensor);  // -1 with a Python error set; null: not offered
};

inline bool contiguous(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.dimensions - 1; tensor.strides != nullptr && i >= 0; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// DLPack's code and bits as a data type; -1: unknown here.
inline int dtype_of(const DLTensor& tensor) {
  constexpr struct {
    std::uint8_t code, bits;
    int dtype;
  } known[] = {{0, 8, FARANDOLE_DTYPE_INT8},      {0, 16, FARANDOLE_DTYPE_INT16},   {0, 32, FARANDOLE_DTYPE_INT32},
               {0, 64, FARANDOLE_DTYPE_INT64},    {1, 8, FARANDOLE_DTYPE_UINT8},    {1, 16, FARANDOLE_DTYPE_UINT16},
               {2, 16, FARANDOLE_DTYPE_FLOAT16},  {2, 32, FARANDOLE_DTYPE_FLOAT32}, {2, 64, FARANDOLE_DTYPE_FLOAT64},
               {4, 16, FARANDOLE_DTYPE_BFLOAT16}, {6, 8, FARANDOLE_DTYPE_BOOL}};
  for (const auto& one : known)
    if (one.code == tensor.code && one.bits == tensor.bits && tensor.lanes == 1) return one.dtype;
  return -1;
}

}  // namespace farandole::python
