// The text of the device kernel that reduces and copies, as NVRTC compiles it: once for each element type and
// operation. Touches nothing.
#pragma once

namespace farandole::cuda {

// In front of it come lines that define ELEMENT (an element type as below), OP_..., INS (the sources; 0: more than a
// thread can hold, their number comes with the call), SCALED (0 or 1) and TILE_BYTES; KERNEL becomes the kernel's name.
// Each kernel has only what it needs: NVRTC takes seconds for all cases in one.
//
// The table has a row for each tensor: its first tile, its elements, the addresses of the `ins` sources and of the
// `outs` results. A tile has TILE_BYTES of each of them; blocks take tiles in turn. The arithmetic is that of
// core/kernel/kernel.h, bit for bit, so the compiler must not contract a product and a sum into one operation.
inline constexpr char kReduceSource[] = R"source(
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <class T> struct Limits;
template <> struct Limits<u8> { static const u64 least = 0, most = 255; };
template <> struct Limits<signed char> { static const long long least = -128, most = 127; };
template <> struct Limits<u16> { static const u64 least = 0, most = 65535; };
template <> struct Limits<short> { static const long long least = -32768, most = 32767; };
template <> struct Limits<int> { static const long long least = -2147483647ll - 1, most = 2147483647ll; };
template <> struct Limits<long long> {
  static const long long least = -9223372036854775807ll - 1, most = 9223372036854775807ll;
};

template <class T> __device__ T saturated(double value) {
  if (value != value) return 0;
  if (value <= (double)Limits<T>::least) return (T)Limits<T>::least;
  if (value >= (double)Limits<T>::most + (sizeof(T) < 8 ? 1.0 : 0.0)) return (T)Limits<T>::most;
  return (T)value;
}

template <class T> struct Integer {
  typedef T Stored;
  typedef T Value;
  static const bool floating = false;
  static __device__ T value(T stored) { return stored; }
  static __device__ T stored(T value) { return value; }
  static __device__ T pre(T value, double prescale) {
    return prescale == 1 ? value : saturated<T>((double)value * prescale);
  }
  static __device__ T post(T value, double postscale, long long divisor) {
    if (postscale == 1) return divisor == 1 ? value : (T)((long long)value / divisor);
    return saturated<T>((double)value * postscale / (double)divisor);
  }
  static __device__ T sum(T a, T b) { return (T)((u64)a + (u64)b); }
  static __device__ T product(T a, T b) { return (T)((u64)a * (u64)b); }
  static __device__ T least(T a, T b) { return a < b ? a : b; }
  static __device__ T most(T a, T b) { return a > b ? a : b; }
};
struct Boolean : Integer<u8> {
  static __device__ u8 value(u8 stored) { return stored != 0; }
  static __device__ u8 pre(u8 value, double) { return value; }
  static __device__ u8 post(u8 value, double, long long) { return value; }
  static __device__ u8 sum(u8 a, u8 b) { return a | b; }
  static __device__ u8 product(u8 a, u8 b) { return a & b; }
};

__device__ bool negative(float value) { return __float_as_int(value) < 0; }
__device__ bool negative(double value) { return __double_as_longlong(value) < 0; }
__device__ float quiet(float) { return __int_as_float(0x7fc00000); }
__device__ double quiet(double) { return __longlong_as_double(0x7ff8000000000000ll); }

template <class T> struct Floating {
  typedef T Value;
  static const bool floating = true;
  static __device__ T pre(T value, double prescale) { return value * (T)prescale; }
  static __device__ T post(T value, double postscale, long long divisor) {
    return value * (T)(postscale / (double)divisor);
  }
  static __device__ T sum(T a, T b) { return a + b; }
  static __device__ T product(T a, T b) { return a * b; }
  static __device__ T least(T a, T b) {
    if (a != a || b != b) return quiet(a);
    if (a == b) return negative(a) ? a : b;
    return a < b ? a : b;
  }
  static __device__ T most(T a, T b) {
    if (a != a || b != b) return quiet(a);
    if (a == b) return negative(a) ? b : a;
    return a > b ? a : b;
  }
};
template <class T> struct Plain : Floating<T> {
  typedef T Stored;
  static __device__ T value(T stored) { return stored; }
  static __device__ T stored(T value) { return value != value ? quiet(value) : value; }
};
struct Float16 : Floating<float> {
  typedef u16 Stored;
  static __device__ float value(u16 stored) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
  }
  static __device__ u16 stored(float value) {
    u16 stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return value != value ? 0x7e00 : stored;
  }
};
struct BFloat16 : Floating<float> {
  typedef u16 Stored;
  static __device__ float value(u16 stored) { return __uint_as_float((u32)stored << 16); }
  static __device__ u16 stored(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7fc0 : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

typedef ELEMENT Element;
typedef Element::Stored Stored;
typedef Element::Value Value;

__device__ Value apply(Value a, Value b) {
#if defined(OP_SUM)
  return Element::sum(a, b);
#elif defined(OP_PRODUCT)
  return Element::product(a, b);
#elif defined(OP_MIN)
  return Element::least(a, b);
#else
  return Element::most(a, b);
#endif
}

struct Scale {
  double before, after;
  long long divisor;
  __device__ Value pre(Stored stored) const {
    const Value value = Element::value(stored);
    return SCALED ? Element::pre(value, before) : value;
  }
  __device__ Stored post(Value value) const {
    return Element::stored(SCALED ? Element::post(value, after, divisor) : value);
  }
};

const int kThreads = 256;
const int kPerVector = 16 / sizeof(Stored);
const u64 kTile = TILE_BYTES / sizeof(Stored);
struct alignas(16) Vector {
  Stored element[kPerVector];
};

// A row of the table behind its first tile and its elements.
struct Row {
  const u64* in;
  const u64* out;
  int ins, outs;
  __device__ const Stored* source(int i) const { return (const Stored*)in[i]; }
  __device__ Stored* result(int i) const { return (Stored*)out[i]; }
};

__device__ void one(const Row& row, const Scale& scale, u64 at) {
  if (INS == 1 && !SCALED) {
    const Stored same = row.source(0)[at];
    for (int i = 0; i < row.outs; ++i) row.result(i)[at] = same;
    return;
  }
  Value sum = scale.pre(row.source(0)[at]);
  for (int i = 1; i < row.ins; ++i) sum = apply(sum, scale.pre(row.source(i)[at]));
  const Stored stored = scale.post(sum);
  for (int i = 0; i < row.outs; ++i) row.result(i)[at] = stored;
}

#if INS > 0
const int kIns = INS, kDeep = INS <= 2 ? 4 : INS <= 4 ? 2 : 1;

// Vectors from `first` to `last`, by all threads of a block; `kDeep` vectors of each source at once, so that enough
// loads are under way.
__device__ void vectors(const Row& row, const Scale& scale, u64 first, u64 last) {
  const Vector* in[kIns];
#pragma unroll
  for (int i = 0; i < kIns; ++i) in[i] = (const Vector*)row.in[i];
  for (u64 at = first + threadIdx.x; at < last; at += kThreads * kDeep) {
    Vector loaded[kDeep][kIns];
#pragma unroll
    for (int d = 0; d < kDeep; ++d)
#pragma unroll
      for (int i = 0; i < kIns; ++i)
        if (at + d * kThreads < last) loaded[d][i] = in[i][at + d * kThreads];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (at + d * kThreads >= last) break;
      if (kIns > 1 || SCALED) {
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) {
          Value sum = scale.pre(loaded[d][0].element[e]);
#pragma unroll
          for (int i = 1; i < kIns; ++i) sum = apply(sum, scale.pre(loaded[d][i].element[e]));
          loaded[d][0].element[e] = scale.post(sum);
        }
      }
      for (int i = 0; i < row.outs; ++i) ((Vector*)row.out[i])[at + d * kThreads] = loaded[d][0];
    }
  }
}

#else

__device__ void vectors(const Row& row, const Scale& scale, u64 first, u64 last) {
  for (u64 at = first + threadIdx.x; at < last; at += kThreads) {
    Value sum[kPerVector];
    Vector loaded = ((const Vector*)row.in[0])[at];
#pragma unroll
    for (int e = 0; e < kPerVector; ++e) sum[e] = scale.pre(loaded.element[e]);
#pragma unroll 4
    for (int i = 1; i < row.ins; ++i) {
      loaded = ((const Vector*)row.in[i])[at];
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) sum[e] = apply(sum[e], scale.pre(loaded.element[e]));
    }
#pragma unroll
    for (int e = 0; e < kPerVector; ++e) loaded.element[e] = scale.post(sum[e]);
    for (int i = 0; i < row.outs; ++i) ((Vector*)row.out[i])[at] = loaded;
  }
}
#endif

extern "C" __global__ void KERNEL(const u64* table, u64 rows, u64 tiles, u64 ins, u64 outs, double prescale,
                                  double postscale, long long divisor) {
  const u64 width = 2 + ins + outs;
  const Scale scale = {prescale, postscale, divisor};
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    u64 low = 0;
    for (u64 high = rows - 1; low < high;) {
      const u64 middle = (low + high + 1) / 2;
      if (table[middle * width] <= tile)
        low = middle;
      else
        high = middle - 1;
    }
    const u64* words = table + low * width;
    const Row row = {words + 2, words + 2 + ins, (int)ins, (int)outs};
    const u64 begin = (tile - words[0]) * kTile;
    const u64 end = begin + kTile < words[1] ? begin + kTile : words[1];
    u64 all = 0;
    for (u64 i = 0; i < ins + outs; ++i) all |= words[2 + i];
    u64 rest = begin;
    if (all % 16 == 0) {
      const u64 first = begin / kPerVector, last = end / kPerVector;
      rest = last * kPerVector;
      vectors(row, scale, first, last);
    }
    for (u64 at = rest + threadIdx.x; at < end; at += kThreads) one(row, scale, at);
  }
}
)source";

}  // namespace farandole::cuda
