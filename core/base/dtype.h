// The element types and reduction operations that all rooms use, and their sizes.
// Includes no other file of this project.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

// The values are part of the C interface (api/farandole.h) and of the messages between ranks.
enum class DType : std::uint8_t {
  boolean = 0,
  uint8 = 1,
  int8 = 2,
  uint16 = 3,
  int16 = 4,
  int32 = 5,
  int64 = 6,
  float16 = 7,
  float32 = 8,
  float64 = 9,
  bfloat16 = 10,
};
inline constexpr int kDTypes = 11;

// Horovod's numbers.
enum class ReduceOp : std::uint8_t { average = 0, sum = 1, adasum = 2, min = 3, max = 4, product = 5 };
inline constexpr int kReduceOps = 6;

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::boolean:
    case DType::uint8:
    case DType::int8:
      return 1;
    case DType::uint16:
    case DType::int16:
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::int32:
    case DType::float32:
      return 4;
    case DType::int64:
    case DType::float64:
      return 8;
  }
  return 1;
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"bool",  "uint8",   "int8",    "uint16",  "int16",   "int32",
                                   "int64", "float16", "float32", "float64", "bfloat16"};
  return names[static_cast<int>(dtype)];
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* names[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return names[static_cast<int>(op)];
}

}  // namespace farandole
