// Scalar kernels, element by element. They define the results, bit for bit, and do the elements that fill no vector.
// Touches only half.h, set.h and base/.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/error.h"
#include "kernel/half.h"
#include "kernel/set.h"

namespace farandole::kernel::scalar {
namespace {

// How an element type is stored, and the type in which it is accumulated.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static T value(T stored) { return stored; }
  static T stored(T value) { return value; }
};
struct Float16 {
  using Stored = std::uint16_t;
  using Value = float;
  static float value(std::uint16_t stored) { return float_of_float16(stored); }
  static std::uint16_t stored(float value) { return float16_of_float(value); }
};
struct BFloat16 {
  using Stored = std::uint16_t;
  using Value = float;
  static float value(std::uint16_t stored) { return float_of_bfloat16(stored); }
  static std::uint16_t stored(float value) { return bfloat16_of_float(value); }
};
struct Boolean {  // any byte but zero is true
  using Stored = std::uint8_t;
  using Value = std::uint8_t;
  static std::uint8_t value(std::uint8_t stored) { return stored != 0; }
  static std::uint8_t stored(std::uint8_t value) { return value; }
};

template <class Element>
typename Element::Value load(const void* from, std::size_t index) {
  typename Element::Stored stored;
  std::memcpy(&stored, static_cast<const std::byte*>(from) + index * sizeof stored, sizeof stored);
  return Element::value(stored);
}

// Processors differ in which NaN an addition gives, so a NaN result is always replaced by the positive quiet one.
template <class Element>
void store(void* to, std::size_t index, typename Element::Value value) {
  using Value = typename Element::Value;
  if constexpr (std::is_floating_point_v<Value>) {
    if (value != value) value = std::numeric_limits<Value>::quiet_NaN();
  }
  const typename Element::Stored stored = Element::stored(value);
  std::memcpy(static_cast<std::byte*>(to) + index * sizeof stored, &stored, sizeof stored);
}

template <class T>
T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) ? a : b;
  }
  return a < b ? a : b;
}

template <class T>
T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a > b ? a : b;
}

template <ReduceOp kOp, class T>
T apply(T a, T b) {
  if constexpr (kOp == ReduceOp::min) {
    return smaller(a, b);
  } else if constexpr (kOp == ReduceOp::max) {
    return larger(a, b);
  } else if constexpr (std::is_floating_point_v<T>) {
    return kOp == ReduceOp::sum ? a + b : a * b;
  } else {  // unsigned and wide, so that it wraps around
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    return static_cast<T>(kOp == ReduceOp::sum ? x + y : x * y);
  }
}

template <class T>
T saturated(double value) {
  if (value != value) return 0;
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (value >= std::ldexp(1.0, std::numeric_limits<T>::digits)) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

struct Unscaled {
  explicit Unscaled(const Reduce&) {}
  template <class T>
  T pre(T value) const {
    return value;
  }
  template <class T>
  T post(T value) const {
    return value;
  }
};
template <class T>
struct ScaledFloat {
  explicit ScaledFloat(const Reduce& work)
      : before(static_cast<T>(work.prescale)),
        after(static_cast<T>(work.postscale / static_cast<double>(work.divisor))) {}
  T pre(T value) const { return value * before; }
  T post(T value) const { return value * after; }
  T before, after;
};
template <class T>
struct ScaledInteger {
  explicit ScaledInteger(const Reduce& work)
      : prescale(work.prescale), postscale(work.postscale), divisor(work.divisor) {}
  T pre(T value) const { return prescale == 1 ? value : saturated<T>(static_cast<double>(value) * prescale); }
  T post(T value) const {
    if (postscale == 1) return divisor == 1 ? value : static_cast<T>(std::int64_t{value} / divisor);
    return saturated<T>(static_cast<double>(value) * postscale / static_cast<double>(divisor));
  }
  double prescale, postscale;
  std::int64_t divisor;
};

template <class Element, ReduceOp kOp, class Scale>
void run(const Reduce& work, std::size_t begin) {
  const Scale scale(work);
  for (std::size_t i = begin; i < work.elements; ++i) {
    typename Element::Value result = scale.pre(load<Element>(work.sources[0], i));
    for (int s = 1; s < work.count; ++s) {
      result = apply<kOp>(result, scale.pre(load<Element>(work.sources[s], i)));
    }
    result = scale.post(result);
    store<Element>(work.out, i, result);
    if (work.mirror != nullptr) store<Element>(work.mirror, i, result);
  }
}

template <class Element, class Scale>
void run_scaled(const Reduce& work, std::size_t begin) {
  constexpr bool kBoolean = std::is_same_v<Element, Boolean>;  // for 0 and 1, "or" is max and "and" is min
  switch (work.op) {
    case ReduceOp::sum:
      return run<Element, kBoolean ? ReduceOp::max : ReduceOp::sum, Scale>(work, begin);
    case ReduceOp::product:
      return run<Element, kBoolean ? ReduceOp::min : ReduceOp::product, Scale>(work, begin);
    case ReduceOp::min:
      return run<Element, ReduceOp::min, Scale>(work, begin);
    case ReduceOp::max:
      return run<Element, ReduceOp::max, Scale>(work, begin);
    case ReduceOp::average:
    case ReduceOp::adasum:
      break;
  }
  throw Failure(Code::internal, "the kernels reduce by sum, min, max or product");
}

template <class Element>
void run(const Reduce& work, std::size_t begin) {
  using Value = typename Element::Value;
  using Scaled = std::conditional_t<std::is_floating_point_v<Value>, ScaledFloat<Value>, ScaledInteger<Value>>;
  const bool scaled = work.prescale != 1 || work.postscale != 1 || work.divisor != 1;
  return scaled ? run_scaled<Element, Scaled>(work, begin) : run_scaled<Element, Unscaled>(work, begin);
}

template <class Element>
void run_dots(const void* a, const void* b, std::size_t begin, std::size_t elements, DotLanes& lanes) {
  for (std::size_t i = begin; i < elements; ++i) {
    const double x = load<Element>(a, i), y = load<Element>(b, i);
    lanes.ab[i % kDotLanes] += x * y;
    lanes.aa[i % kDotLanes] += x * x;
    lanes.bb[i % kDotLanes] += y * y;
  }
}

template <class Element>
void run_combine(const void* a, const void* b, Coefficients by, void* out, std::size_t begin, std::size_t elements) {
  using Value = typename Element::Value;
  const Value by_a = static_cast<Value>(by.a), by_b = static_cast<Value>(by.b);
  for (std::size_t i = begin; i < elements; ++i) {
    store<Element>(out, i, load<Element>(a, i) * by_a + load<Element>(b, i) * by_b);
  }
}

// Calls `run` with an element of Adasum's type.
template <class Run>
void with_float(DType dtype, Run run) {
  switch (dtype) {
    case DType::float16:
      return run(Float16{});
    case DType::bfloat16:
      return run(BFloat16{});
    case DType::float32:
      return run(Plain<float>{});
    case DType::float64:
      return run(Plain<double>{});
    default:
      throw Failure(Code::internal, "Adasum needs a floating type");
  }
}

}  // namespace

void reduce(const Reduce& work, std::size_t begin) {
  switch (work.dtype) {
    case DType::boolean:
      return run_scaled<Boolean, Unscaled>(work, begin);
    case DType::uint8:
      return run<Plain<std::uint8_t>>(work, begin);
    case DType::int8:
      return run<Plain<std::int8_t>>(work, begin);
    case DType::uint16:
      return run<Plain<std::uint16_t>>(work, begin);
    case DType::int16:
      return run<Plain<std::int16_t>>(work, begin);
    case DType::int32:
      return run<Plain<std::int32_t>>(work, begin);
    case DType::int64:
      return run<Plain<std::int64_t>>(work, begin);
    case DType::float16:
      return run<Float16>(work, begin);
    case DType::float32:
      return run<Plain<float>>(work, begin);
    case DType::float64:
      return run<Plain<double>>(work, begin);
    case DType::bfloat16:
      return run<BFloat16>(work, begin);
  }
}

void dots(DType dtype, const void* a, const void* b, std::size_t begin, std::size_t elements, DotLanes& lanes) {
  with_float(dtype, [&](auto element) { run_dots<decltype(element)>(a, b, begin, elements, lanes); });
}

void combine(DType dtype, const void* a, const void* b, Coefficients by, void* out, std::size_t begin,
             std::size_t elements) {
  with_float(dtype, [&](auto element) { run_combine<decltype(element)>(a, b, by, out, begin, elements); });
}

}  // namespace farandole::kernel::scalar
