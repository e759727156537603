// The vector kernels, written once for all widths. neon.cc, avx2.cc and avx512.cc include it after they define
// FARANDOLE_TARGET (the attribute that allows a function to use the set), FARANDOLE_SET (the constant of set.h),
// kVectorBytes, and struct Machine, which has what the set does better than the compiler. Touches set.h and base/
// alone.
#pragma once

#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernel/set.h"

#define FARANDOLE_INLINE FARANDOLE_TARGET inline __attribute__((always_inline))

// Everything has internal linkage: the linker must not replace one set's copy of a function with another's.
namespace farandole::kernel {
namespace {

template <class T, std::size_t kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T>
using Wide = typename VectorOf<T, kVectorBytes / sizeof(T)>::Type;
template <class V>
using Lane = std::remove_cvref_t<decltype(std::declval<V&>()[0])>;

template <class V>
FARANDOLE_INLINE V load_bytes(const std::byte* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
template <class V>
FARANDOLE_INLINE void store_bytes(std::byte* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}
template <class V>
FARANDOLE_INLINE V splat(Lane<V> value) {
  return value - V{};  // minus, because plus would lose the sign of -0.0
}

template <class T>
struct Plain {
  using Value = T;
  using Vector = Wide<T>;
  static constexpr std::size_t kBytes = kVectorBytes;  // of one vector's elements in memory
  FARANDOLE_INLINE static Vector load(const std::byte* from) { return load_bytes<Vector>(from); }
  FARANDOLE_INLINE static void store(std::byte* to, Vector value) { store_bytes(to, value); }
};
struct Half {
  using Value = float;
  using Vector = Wide<float>;
  static constexpr std::size_t kBytes = kVectorBytes / 2;
};
struct Float16 : Half {
  FARANDOLE_INLINE static Vector load(const std::byte* from) { return (Vector)Machine::load_float16(from); }
  FARANDOLE_INLINE static void store(std::byte* to, Vector value) { Machine::store_float16(to, value); }
};
struct BFloat16 : Half {
  FARANDOLE_INLINE static Vector load(const std::byte* from) { return (Vector)Machine::load_bfloat16(from); }
  // Only the quiet NaN arrives here, and it rounds to the quiet NaN.
  FARANDOLE_INLINE static void store(std::byte* to, Vector value) { Machine::store_bfloat16(to, value); }
};
struct Boolean {
  using Value = std::uint8_t;
  using Vector = Wide<std::uint8_t>;
  static constexpr std::size_t kBytes = kVectorBytes;
  FARANDOLE_INLINE static Vector load(const std::byte* from) {
    return (Vector)(load_bytes<Vector>(from) != Vector{}) & splat<Vector>(1);
  }
  FARANDOLE_INLINE static void store(std::byte* to, Vector value) { store_bytes(to, value); }
};

template <ReduceOp kOp, class V>
FARANDOLE_INLINE V apply(V a, V b) {
  constexpr bool kFloating = std::is_floating_point_v<Lane<V>>;
  if constexpr (kOp == ReduceOp::sum) {
    return a + b;
  } else if constexpr (kOp == ReduceOp::product) {
    return a * b;
  } else if constexpr (kOp == ReduceOp::min) {
    if constexpr (kFloating) return Machine::min(a, b);
    return a < b ? a : b;
  } else {
    if constexpr (kFloating) return Machine::max(a, b);
    return a > b ? a : b;
  }
}

template <class V>
FARANDOLE_INLINE V one_nan(V value) {
  if constexpr (std::is_floating_point_v<Lane<V>> && !Machine::kOneNan) {
    return value == value ? value : splat<V>(std::numeric_limits<Lane<V>>::quiet_NaN());
  } else {
    return value;
  }
}

// What is scaled: nothing, the result (as in an average), or the sources and the result.
enum class Scale { none, after, both };

// `kVectors` vectors at byte `at`: kept in registers over all sources, written once. All loads come before the stores,
// because `out` may be a source.
template <class Element, ReduceOp kOp, Scale kScale, int kVectors>
FARANDOLE_INLINE void block(const void* const* sources, int count, std::size_t at, void* out, void* mirror,
                            typename Element::Vector pre, typename Element::Vector post) {
  typename Element::Vector result[kVectors];
  const std::byte* from = static_cast<const std::byte*>(sources[0]) + at;
  for (int v = 0; v < kVectors; ++v) {
    result[v] = Element::load(from + v * Element::kBytes);
    if constexpr (kScale == Scale::both) result[v] = result[v] * pre;
  }
  for (int s = 1; s < count; ++s) {
    from = static_cast<const std::byte*>(sources[s]) + at;
    for (int v = 0; v < kVectors; ++v) {
      typename Element::Vector next = Element::load(from + v * Element::kBytes);
      if constexpr (kScale == Scale::both) next = next * pre;
      result[v] = apply<kOp>(result[v], next);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kScale != Scale::none) result[v] = result[v] * post;
    result[v] = one_nan(result[v]);
  }
  std::byte* to = static_cast<std::byte*>(out) + at;
  for (int v = 0; v < kVectors; ++v) Element::store(to + v * Element::kBytes, result[v]);
  if (mirror == nullptr) return;
  to = static_cast<std::byte*>(mirror) + at;
  for (int v = 0; v < kVectors; ++v) Element::store(to + v * Element::kBytes, result[v]);
}

template <class Element, ReduceOp kOp, Scale kScale>
FARANDOLE_TARGET std::size_t run(const Reduce& work) {
  using Vector = typename Element::Vector;
  using Value = typename Element::Value;
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(Value), kSize = Element::kBytes / kLanes;
  constexpr std::size_t kPair = 4 * Element::kBytes, kMany = 8 * Element::kBytes;  // more when there are many sources
  const std::size_t bytes = work.elements * kSize;
  // Local copies, which no store can alias, so that they stay in registers.
  void *const out = work.out, *const mirror = work.mirror;
  const void* const* const sources = work.sources;
  const int count = work.count;
  Vector pre{}, post{};
  if constexpr (kScale != Scale::none) {
    pre = splat<Vector>(static_cast<Value>(work.prescale));
    post = splat<Vector>(static_cast<Value>(work.postscale / static_cast<double>(work.divisor)));
  }
  std::size_t at = 0;
  if (count == 2) {
    const void* const pair[2] = {sources[0], sources[1]};
    for (; bytes - at >= kPair; at += kPair) {
      block<Element, kOp, kScale, 4>(pair, 2, at, out, mirror, pre, post);
    }
  }
  for (; bytes - at >= kMany; at += kMany) {
    block<Element, kOp, kScale, 8>(sources, count, at, out, mirror, pre, post);
  }
  for (; bytes - at >= Element::kBytes; at += Element::kBytes) {
    block<Element, kOp, kScale, 1>(sources, count, at, out, mirror, pre, post);
  }
  return at / kSize;
}

template <class Element, Scale kScale>
std::size_t run_scaled(const Reduce& work) {
  constexpr bool kBoolean = std::is_same_v<Element, Boolean>;  // for 0 and 1, "or" is max and "and" is min
  switch (work.op) {
    case ReduceOp::sum:
      return run<Element, kBoolean ? ReduceOp::max : ReduceOp::sum, kScale>(work);
    case ReduceOp::product:
      return run<Element, kBoolean ? ReduceOp::min : ReduceOp::product, kScale>(work);
    case ReduceOp::min:
      return run<Element, ReduceOp::min, kScale>(work);
    case ReduceOp::max:
      return run<Element, ReduceOp::max, kScale>(work);
    default:
      return 0;
  }
}

template <class Element>
std::size_t run_float(const Reduce& work) {
  if (work.prescale != 1) return run_scaled<Element, Scale::both>(work);
  const bool after = work.postscale != 1 || work.divisor != 1;
  return after ? run_scaled<Element, Scale::after>(work) : run_scaled<Element, Scale::none>(work);
}

// Sums and products wrap around, which C++ allows for unsigned types only; the bits are the same for signed ones.
// Scaled integers need double and division: scalar code.
template <class T>
std::size_t run_integer(const Reduce& work) {
  using Unsigned = Plain<std::make_unsigned_t<T>>;
  if (work.prescale != 1 || work.postscale != 1 || work.divisor != 1) return 0;
  switch (work.op) {
    case ReduceOp::sum:
      return run<Unsigned, ReduceOp::sum, Scale::none>(work);
    case ReduceOp::product:
      return run<Unsigned, ReduceOp::product, Scale::none>(work);
    case ReduceOp::min:
      return run<Plain<T>, ReduceOp::min, Scale::none>(work);
    case ReduceOp::max:
      return run<Plain<T>, ReduceOp::max, Scale::none>(work);
    default:
      return 0;
  }
}

std::size_t vector_reduce(const Reduce& work) {
  switch (work.dtype) {
    case DType::boolean:
      return run_scaled<Boolean, Scale::none>(work);
    case DType::uint8:
      return run_integer<std::uint8_t>(work);
    case DType::int8:
      return run_integer<std::int8_t>(work);
    case DType::uint16:
      return run_integer<std::uint16_t>(work);
    case DType::int16:
      return run_integer<std::int16_t>(work);
    case DType::int32:
      return run_integer<std::int32_t>(work);
    case DType::int64:
      return run_integer<std::int64_t>(work);
    case DType::float16:
      return run_float<Float16>(work);
    case DType::float32:
      return run_float<Plain<float>>(work);
    case DType::float64:
      return run_float<Plain<double>>(work);
    case DType::bfloat16:
      return run_float<BFloat16>(work);
  }
  return 0;
}

// Eight elements at a time; each vector of doubles is added to the running sums of its lanes.
template <class T>
FARANDOLE_TARGET std::size_t run_dots(const std::byte* a, const std::byte* b, std::size_t elements, DotLanes& lanes) {
  using Doubles = Wide<double>;
  constexpr int kWidth = kVectorBytes / sizeof(double), kVectors = kDotLanes / kWidth;
  constexpr const T* kType = nullptr;
  Doubles ab[kVectors], aa[kVectors], bb[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    std::memcpy(&ab[v], lanes.ab + v * kWidth, sizeof(Doubles));
    std::memcpy(&aa[v], lanes.aa + v * kWidth, sizeof(Doubles));
    std::memcpy(&bb[v], lanes.bb + v * kWidth, sizeof(Doubles));
  }
  const std::size_t whole = elements - elements % kDotLanes;
  for (std::size_t i = 0; i < whole; i += kDotLanes) {
    for (int v = 0; v < kVectors; ++v) {
      const std::size_t at = (i + v * kWidth) * sizeof(T);
      const Doubles x = (Doubles)Machine::load_doubles(kType, a + at);
      const Doubles y = (Doubles)Machine::load_doubles(kType, b + at);
      ab[v] += x * y;
      aa[v] += x * x;
      bb[v] += y * y;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    std::memcpy(lanes.ab + v * kWidth, &ab[v], sizeof(Doubles));
    std::memcpy(lanes.aa + v * kWidth, &aa[v], sizeof(Doubles));
    std::memcpy(lanes.bb + v * kWidth, &bb[v], sizeof(Doubles));
  }
  return whole;
}

// Two-byte types are widened to fp32 in blocks that stay in cache.
template <class Element>
FARANDOLE_TARGET std::size_t run_dots_widened(const std::byte* a, const std::byte* b, std::size_t elements,
                                              DotLanes& lanes) {
  constexpr std::size_t kRun = 1024, kLanes = kVectorBytes / sizeof(float);
  constexpr std::size_t kUnit =
      kLanes > kDotLanes ? kLanes : kDotLanes;  // whole vectors, and whole groups of the running sums
  static_assert(kRun % kUnit == 0);
  std::byte wide_a[kRun * sizeof(float)], wide_b[kRun * sizeof(float)];
  const std::size_t whole = elements - elements % kUnit;
  for (std::size_t i = 0; i < whole; i += kRun) {
    const std::size_t turn = whole - i < kRun ? whole - i : kRun;
    for (std::size_t j = 0; j < turn; j += kLanes) {
      store_bytes(wide_a + j * sizeof(float), Element::load(a + (i + j) * 2));
      store_bytes(wide_b + j * sizeof(float), Element::load(b + (i + j) * 2));
    }
    run_dots<float>(wide_a, wide_b, turn, lanes);
  }
  return whole;
}

std::size_t vector_dots(DType dtype, const void* a, const void* b, std::size_t elements, DotLanes& lanes) {
  const auto *x = static_cast<const std::byte*>(a), *y = static_cast<const std::byte*>(b);
  switch (dtype) {
    case DType::float16:
      return run_dots_widened<Float16>(x, y, elements, lanes);
    case DType::bfloat16:
      return run_dots_widened<BFloat16>(x, y, elements, lanes);
    case DType::float32:
      return run_dots<float>(x, y, elements, lanes);
    case DType::float64:
      return run_dots<double>(x, y, elements, lanes);
    default:
      return 0;
  }
}

template <class Element>
FARANDOLE_TARGET std::size_t run_combine(const std::byte* a, const std::byte* b, Coefficients by, std::byte* out,
                                         std::size_t elements) {
  using Vector = typename Element::Vector;
  using Value = typename Element::Value;
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(Value), kSize = Element::kBytes / kLanes;
  const Vector by_a = splat<Vector>(static_cast<Value>(by.a)), by_b = splat<Vector>(static_cast<Value>(by.b));
  const std::size_t bytes = elements * kSize;
  std::size_t at = 0;
  for (; bytes - at >= Element::kBytes; at += Element::kBytes) {
    const Vector x = Element::load(a + at), y = Element::load(b + at);
    Element::store(out + at, one_nan<Vector>(x * by_a + y * by_b));
  }
  return at / kSize;
}

std::size_t vector_combine(DType dtype, const void* a, const void* b, Coefficients by, void* out,
                           std::size_t elements) {
  const auto *x = static_cast<const std::byte*>(a), *y = static_cast<const std::byte*>(b);
  auto* to = static_cast<std::byte*>(out);
  switch (dtype) {
    case DType::float16:
      return run_combine<Float16>(x, y, by, to, elements);
    case DType::bfloat16:
      return run_combine<BFloat16>(x, y, by, to, elements);
    case DType::float32:
      return run_combine<Plain<float>>(x, y, by, to, elements);
    case DType::float64:
      return run_combine<Plain<double>>(x, y, by, to, elements);
    default:
      return 0;
  }
}

}  // namespace

const Set FARANDOLE_SET = {Machine::kName, vector_reduce, vector_dots, vector_combine};

}  // namespace farandole::kernel
