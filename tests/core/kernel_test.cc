// Every vector set against the scalar kernels, bit for bit; the scalar kernels against plain arithmetic; CRC32C.
// Touches only kernel/ and base/.
#include "kernel/kernel.h"

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "base/error.h"
#include "check.h"
#include "kernel/half.h"
#include "kernel/set.h"

namespace kernel = farandole::kernel;
using farandole::DType;
using farandole::ReduceOp;
using kernel::Reduce;

namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
constexpr DType kFloats[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};
using Bytes = std::vector<std::uint8_t>;

struct Selected {  // back to the best set at the end, also of a test that fails
  Selected() : best(kernel::name()) {}
  ~Selected() { kernel::select(best); }
  const char* best;
};

std::vector<const char*> vector_sets() {
  std::vector<const char*> found;
  Selected restore;
  for (const char* name : {"neon", "avx2", "avx512"}) {
    if (kernel::select(name)) found.push_back(name);
  }
  return found;
}

std::mt19937_64& random_bits() {
  static std::mt19937_64 generator(20230601);
  return generator;
}

std::uint64_t special(DType dtype) {
  const std::size_t which = random_bits()() % 10;
  constexpr std::uint64_t half[] = {0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 1, 0x8001, 0x7bff};
  constexpr std::uint64_t brain[] = {0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81, 1, 0x8001, 0x7f7f};
  constexpr std::uint64_t single[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                      0xffc00001, 0x7f800001, 1,          0x80000001, 0x7f7fffff};
  if (dtype == DType::float16) return half[which];
  if (dtype == DType::bfloat16) return brain[which];
  if (dtype == DType::float32) return single[which];
  const std::uint64_t bits = single[which];
  return (bits & 0x80000000) << 32 | (bits & 0x7f800000 ? std::uint64_t{0x7ff} << 52 : 0) | (bits & 0x400000) << 29 |
         (bits & 0xff);
}

// Half of them ordinary numbers near 1, the others any bits; some floats are NaN, infinite, zero or subnormal.
Bytes random_elements(DType dtype, std::size_t elements) {
  Bytes bytes(elements * size_of(dtype));
  for (std::size_t i = 0; i < elements; ++i) {
    std::uint64_t bits = random_bits()();
    const double ordinary = std::ldexp(static_cast<double>(bits >> 11), -52) - 1.0;
    const bool tame = bits & 1, rare = is_floating(dtype) && bits % 32 == 0;
    if (rare) bits = special(dtype);
    if (dtype == DType::boolean && tame) bits &= 0xff00;
    if (is_floating(dtype) && tame && !rare) {
      if (dtype == DType::float16) bits = kernel::float16_of_float(static_cast<float>(ordinary));
      if (dtype == DType::bfloat16) bits = kernel::bfloat16_of_float(static_cast<float>(ordinary));
      if (dtype == DType::float32) bits = std::bit_cast<std::uint32_t>(static_cast<float>(ordinary));
      if (dtype == DType::float64) bits = std::bit_cast<std::uint64_t>(ordinary);
    }
    if (dtype == DType::boolean) bits >>= 8;
    std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return bytes;
}

struct Shape {
  DType dtype;
  ReduceOp op;
  std::size_t elements;
  int count;
  double prescale, postscale;
  std::int64_t divisor;
  bool mirror;
  int alias;  // the source that is also the output, or -1
};

std::string text(const Shape& shape, const char* set) {
  std::ostringstream out;
  out << set << ' ' << name_of(shape.dtype) << ' ' << name_of(shape.op) << " n=" << shape.elements
      << " sources=" << shape.count << " pre=" << shape.prescale << " post=" << shape.postscale << '/' << shape.divisor
      << " mirror=" << shape.mirror << " alias=" << shape.alias;
  return out.str();
}

// Runs one reduce in buffers that start at odd addresses, and checks that it wrote nothing beyond its output.
Bytes reduced(const Shape& shape, const std::vector<Bytes>& inputs) {
  const std::size_t bytes = shape.elements * size_of(shape.dtype);
  constexpr std::size_t kBefore = 1, kAfter = 64;
  std::vector<Bytes> sources;
  std::vector<const void*> pointers;
  for (int s = 0; s < shape.count; ++s) {
    Bytes shifted(kBefore + 2 * static_cast<std::size_t>(s), 0xee);
    const std::size_t before = shifted.size();
    shifted.insert(shifted.end(), inputs[s].begin(), inputs[s].end());
    shifted.insert(shifted.end(), kAfter, 0xee);
    sources.push_back(std::move(shifted));
    pointers.push_back(sources.back().data() + before);
  }
  Bytes out(kBefore + bytes + kAfter, 0xee), mirror(kBefore + 2 + bytes + kAfter, 0xee);
  Reduce work;
  work.dtype = shape.dtype;
  work.op = shape.op;
  work.sources = pointers.data();
  work.count = shape.count;
  work.out = shape.alias < 0 ? out.data() + kBefore : const_cast<void*>(pointers[shape.alias]);
  work.mirror = shape.mirror ? mirror.data() + kBefore + 2 : nullptr;
  work.elements = shape.elements;
  work.prescale = shape.prescale;
  work.postscale = shape.postscale;
  work.divisor = shape.divisor;
  kernel::reduce(work);
  const auto* result = static_cast<const std::uint8_t*>(work.out);
  for (std::size_t i = 0; i < kAfter; ++i) CHECK(result[bytes + i] == 0xee && mirror[kBefore + 2 + bytes + i] == 0xee);
  CHECK_EQUAL(int{result[-1]}, 0xee);
  CHECK_EQUAL(int{mirror[kBefore + 1]}, 0xee);
  for (int s = 0; s < shape.count; ++s) {
    if (s != shape.alias && bytes > 0) CHECK(std::memcmp(pointers[s], inputs[s].data(), bytes) == 0);
  }
  const Bytes copy(result, result + bytes);
  if (shape.mirror) CHECK(Bytes(mirror.begin() + kBefore + 2, mirror.end() - kAfter) == copy);
  return copy;
}

void compare(const Shape& shape, const std::vector<const char*>& sets) {
  std::vector<Bytes> inputs;
  for (int s = 0; s < shape.count; ++s) inputs.push_back(random_elements(shape.dtype, shape.elements));
  CHECK(kernel::select("scalar"));
  const Bytes truth = reduced(shape, inputs);
  for (const char* set : sets) {
    CHECK(kernel::select(set));
    if (reduced(shape, inputs) != truth) check::fail(__FILE__, __LINE__, text(shape, set));
  }
}

// Reduces tensors of one element each.
template <class T>
T reduce_elements(DType dtype, ReduceOp op, const std::vector<T>& elements, double prescale, double postscale,
                  std::int64_t divisor) {
  std::vector<const void*> sources;
  for (const T& element : elements) sources.push_back(&element);
  T out{};
  Reduce work;
  work.dtype = dtype;
  work.op = op;
  work.sources = sources.data();
  work.count = static_cast<int>(sources.size());
  work.out = &out;
  work.elements = 1;
  work.prescale = prescale;
  work.postscale = postscale;
  work.divisor = divisor;
  kernel::reduce(work);
  return out;
}

template <class T>
T reduce_two(DType dtype, ReduceOp op, T a, T b, double prescale = 1, double postscale = 1, std::int64_t divisor = 1) {
  return reduce_elements<T>(dtype, op, {a, b}, prescale, postscale, divisor);
}

template <class T>
T scale_one(DType dtype, T value, double prescale, double postscale, std::int64_t divisor) {
  return reduce_elements<T>(dtype, ReduceOp::sum, {value}, prescale, postscale, divisor);
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

}  // namespace

TEST(kernel_sets_can_be_selected) {
  Selected restore;
  CHECK(!kernel::select("abacus"));
  CHECK(kernel::select("scalar"));
  CHECK_EQUAL(std::string(kernel::name()), "scalar");
  for (const char* set : vector_sets()) std::printf("compared with scalar: %s\n", set);
}

TEST(vector_kernels_give_the_bits_of_scalar_kernels) {
  Selected restore;
  const std::vector<const char*> sets = vector_sets();
  struct Factors {
    double prescale, postscale;
    std::int64_t divisor;
  };
  constexpr Factors factors[] = {{1, 1, 1}, {1, 1, 3}, {0.3, 1, 1}, {1, 0.7, 1}, {-1.5, 2.5, 7}, {1e30, 1e30, 1}};
  constexpr std::size_t sizes[] = {0, 1, 3, 8, 17, 63, 64, 65, 257, 1031};
  for (int d = 0; d < farandole::kDTypes; ++d) {
    for (ReduceOp op : kOps) {
      for (const Factors& by : factors) {
        for (std::size_t n : sizes) {
          for (int count : {1, 2, 3, 5, 8}) {
            const int alias = static_cast<int>(random_bits()() % (count + 1)) - 1;
            const bool mirror = random_bits()() & 1;
            const auto dtype = static_cast<DType>(d);
            compare({dtype, op, n, count, by.prescale, by.postscale, by.divisor, mirror, alias}, sets);
          }
        }
      }
    }
  }
}

TEST(every_alias_with_and_without_mirror) {
  Selected restore;
  const std::vector<const char*> sets = vector_sets();
  for (int d = 0; d < farandole::kDTypes; ++d) {
    for (int count : {1, 2, 3}) {
      for (int alias = -1; alias < count; ++alias) {
        for (bool mirror : {false, true}) {
          for (std::int64_t divisor : {1, 2}) {
            compare({static_cast<DType>(d), ReduceOp::sum, 333, count, 1, 1, divisor, mirror, alias}, sets);
          }
        }
      }
    }
  }
}

TEST(kernels_on_large_arrays) {
  Selected restore;
  const std::vector<const char*> sets = vector_sets();
  for (int d = 0; d < farandole::kDTypes; ++d) {
    for (ReduceOp op : kOps) compare({static_cast<DType>(d), op, 40009, 2, 1, 1, 1, true, 0}, sets);
  }
}

TEST(sums_are_added_in_member_order) {
  Selected restore;
  constexpr std::size_t kElements = 100;
  std::vector<float> sources[3];
  for (auto& source : sources) {
    for (std::size_t i = 0; i < kElements; ++i) source.push_back(std::ldexp(float(random_bits()() >> 40), -20) - 7.5f);
  }
  const void* pointers[] = {sources[0].data(), sources[1].data(), sources[2].data()};
  std::vector<float> out(kElements);
  Reduce work;
  work.sources = pointers;
  work.count = 3;
  work.out = out.data();
  work.elements = kElements;
  work.divisor = 3;
  kernel::reduce(work);
  for (std::size_t i = 0; i < kElements; ++i) {
    volatile float sum = sources[0][i] + sources[1][i];  // volatile: no wider intermediate
    sum = sum + sources[2][i];
    CHECK_EQUAL(out[i], sum * static_cast<float>(1.0 / 3.0));
  }
}

TEST(nan_and_signed_zero) {
  constexpr DType f32 = DType::float32;
  const float nan = std::bit_cast<float>(0xffc12345u), one = 1.0f;
  for (ReduceOp op : kOps) {
    CHECK_EQUAL(bits_of(reduce_two(f32, op, nan, one)), 0x7fc00000u);
    CHECK_EQUAL(bits_of(reduce_two(f32, op, one, nan)), 0x7fc00000u);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQUAL(bits_of(reduce_two(f32, ReduceOp::sum, infinity, -infinity)), 0x7fc00000u);
  CHECK_EQUAL(bits_of(reduce_two(f32, ReduceOp::min, 0.0f, -0.0f)), 0x80000000u);
  CHECK_EQUAL(bits_of(reduce_two(f32, ReduceOp::min, -0.0f, 0.0f)), 0x80000000u);
  CHECK_EQUAL(bits_of(reduce_two(f32, ReduceOp::max, 0.0f, -0.0f)), 0u);
  CHECK_EQUAL(bits_of(reduce_two(f32, ReduceOp::max, -0.0f, 0.0f)), 0u);
  CHECK_EQUAL(reduce_two(DType::float64, ReduceOp::max, -3.0, 2.0), 2.0);
}

TEST(integers_wrap_truncate_and_saturate) {
  constexpr auto least = std::numeric_limits<std::int64_t>::min(), most = std::numeric_limits<std::int64_t>::max();
  CHECK_EQUAL(reduce_two<std::int64_t>(DType::int64, ReduceOp::sum, most, 1), least);
  CHECK_EQUAL(reduce_two<std::int64_t>(DType::int64, ReduceOp::product, most, 2), -2);
  CHECK_EQUAL(int{reduce_two<std::uint8_t>(DType::uint8, ReduceOp::sum, 200, 100)}, 44);
  CHECK_EQUAL(int{reduce_two<std::uint16_t>(DType::uint16, ReduceOp::product, 65535, 65535)}, 1);
  CHECK_EQUAL(int{reduce_two<std::int8_t>(DType::int8, ReduceOp::min, -128, 127)}, -128);
  // Averages: in integer arithmetic, towards zero.
  CHECK_EQUAL(reduce_two(DType::int32, ReduceOp::sum, 3, 4, 1, 1, 2), 3);
  CHECK_EQUAL(reduce_two(DType::int32, ReduceOp::sum, -3, -4, 1, 1, 2), -3);
  CHECK_EQUAL(reduce_two<std::int64_t>(DType::int64, ReduceOp::sum, most - 1, 0, 1, 1, 2), most / 2);
  CHECK_EQUAL(int{scale_one<std::uint8_t>(DType::uint8, 200, 1, 1, 1000)}, 0);
  // Scales: each product towards zero, out of range to the limit.
  CHECK_EQUAL(reduce_two(DType::int32, ReduceOp::sum, 3, 3, 0.5), 2);
  CHECK_EQUAL(reduce_two(DType::int32, ReduceOp::sum, -3, -3, 0.5), -2);
  CHECK_EQUAL(reduce_two(DType::int32, ReduceOp::sum, 3, 4, 1, 0.5), 3);
  CHECK_EQUAL(scale_one(DType::int32, 3, 1, 2, 3), 2);
  CHECK_EQUAL(scale_one<std::int64_t>(DType::int64, most, 2, 1, 1), most);
  CHECK_EQUAL(scale_one<std::int64_t>(DType::int64, most, -2, 1, 1), least);
  CHECK_EQUAL(int{scale_one<std::uint8_t>(DType::uint8, 200, -1, 1, 1)}, 0);
  CHECK_EQUAL(int{scale_one<std::int16_t>(DType::int16, 5, std::nan(""), 1, 1)}, 0);
}

TEST(bool_is_or_and_and) {
  for (std::uint8_t a : {0, 1, 2}) {
    for (std::uint8_t b : {0, 1, 4}) {
      CHECK_EQUAL(int{reduce_two(DType::boolean, ReduceOp::sum, a, b)}, int{a || b});
      CHECK_EQUAL(int{reduce_two(DType::boolean, ReduceOp::max, a, b, 0.5, 1, 2)}, int{a || b});
      CHECK_EQUAL(int{reduce_two(DType::boolean, ReduceOp::product, a, b)}, int{a && b});
      CHECK_EQUAL(int{reduce_two(DType::boolean, ReduceOp::min, a, b)}, int{a && b});
    }
  }
}

TEST(one_source_without_scale_keeps_the_bits) {
  const float nan = std::bit_cast<float>(0xff812345u);
  CHECK_EQUAL(bits_of(scale_one(DType::float32, nan, 1, 1, 1)), 0xff812345u);
  CHECK_EQUAL(bits_of(scale_one(DType::float32, nan, 2, 1, 1)), 0x7fc00000u);
}

TEST(float16_and_bfloat16_round_to_nearest_even) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float wide = kernel::float_of_float16(half), brain = kernel::float_of_bfloat16(half);
    CHECK_EQUAL(kernel::float16_of_float(wide), wide == wide ? half : 0x7e00);
    CHECK_EQUAL(kernel::bfloat16_of_float(brain), brain == brain ? half : 0x7fc0);
  }
  CHECK_EQUAL(kernel::float16_of_float(65519.0f), 0x7bff);
  CHECK_EQUAL(kernel::float16_of_float(65520.0f), 0x7c00);
  CHECK_EQUAL(kernel::float16_of_float(0x1p-25f), 0);
  CHECK_EQUAL(kernel::float16_of_float(0x1.8p-25f), 1);
  CHECK_EQUAL(kernel::float16_of_float(0x1.8p-24f), 2);
  CHECK_EQUAL(kernel::float16_of_float(1.0f + 0x1p-11f), 0x3c00);
  CHECK_EQUAL(kernel::float16_of_float(1.0f + 0x3p-11f), 0x3c02);
  CHECK_EQUAL(kernel::bfloat16_of_float(1.0f + 0x1p-8f), 0x3f80);
  CHECK_EQUAL(kernel::bfloat16_of_float(1.0f + 0x3p-8f), 0x3f82);
  // Rounded once: rounded after each addition, 1 + 2^-8 + 2^-8 would stay 1.
  const std::uint16_t one = 0x3f80, small = 0x3b80;  // 2^-8
  const void* sources[] = {&one, &small, &small};
  std::uint16_t out = 0;
  Reduce work;
  work.dtype = DType::bfloat16;
  work.sources = sources;
  work.count = 3;
  work.out = &out;
  work.elements = 1;
  kernel::reduce(work);
  CHECK_EQUAL(out, 0x3f81);
}

TEST(every_fp16_and_the_values_next_to_it_round_alike) {
  Selected restore;
  const std::vector<const char*> sets = vector_sets();
  // prescale makes fp32 values between the fp16 ones, so the vector sets' rounding is met at ties and near them.
  std::vector<std::uint16_t> values(0x10000), truth(0x10000), out(0x10000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i);
  const void* sources[] = {values.data()};
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    for (double scale : {0.5, 0.25, 0x1p-10, 1.0 + 0x1p-11, 1.5, 0.3}) {
      Reduce work;
      work.dtype = dtype;
      work.sources = sources;
      work.count = 1;
      work.out = truth.data();
      work.elements = values.size();
      work.prescale = scale;
      kernel::select("scalar");
      kernel::reduce(work);
      work.out = out.data();
      for (const char* set : sets) {
        kernel::select(set);
        kernel::reduce(work);
        CHECK(out == truth);
      }
    }
  }
}

TEST(adasum_vector_kernels_give_the_bits_of_scalar_kernels) {
  Selected restore;
  const std::vector<const char*> sets = vector_sets();
  for (DType dtype : kFloats) {
    for (std::size_t n : {0, 1, 7, 8, 9, 31, 100, 1024, 5003}) {
      for (bool tame : {true, false}) {
        Bytes a = random_elements(dtype, n), b = random_elements(dtype, n);
        if (tame) {  // without NaN the sums mean something
          for (std::size_t i = 0; i + 1 < n * size_of(dtype); i += 2) a[i + 1] &= 0x3b, b[i + 1] &= 0xbb;
        }
        Bytes truth(a.size()), out(a.size());
        CHECK(kernel::select("scalar"));
        const kernel::Dots first = kernel::dots(dtype, a.data(), b.data(), n);
        kernel::combine(dtype, a.data(), b.data(), first, truth.data(), n);
        if (tame && n > 1) CHECK(first.aa == first.aa && first.aa > 0);
        for (const char* set : sets) {
          CHECK(kernel::select(set));
          const kernel::Dots second = kernel::dots(dtype, a.data(), b.data(), n);
          CHECK(std::memcmp(&first, &second, sizeof first) == 0);
          kernel::combine(dtype, a.data(), b.data(), second, out.data(), n);
          CHECK(out == truth);
        }
      }
    }
  }
}

TEST(adasum_equals_values_computed_by_hand) {
  const double a[] = {1, 2, 0}, b[] = {2, -1, 0}, zero[] = {0, 0, 0};
  double out[3];
  kernel::Dots dots = kernel::dots(DType::float64, a, b, 3);
  CHECK(dots.ab == 0 && dots.aa == 5 && dots.bb == 5);
  kernel::combine(DType::float64, a, b, dots, out, 3);  // orthogonal: the sum
  CHECK(out[0] == 3 && out[1] == 1 && out[2] == 0);
  dots = kernel::dots(DType::float64, a, a, 3);
  kernel::combine(DType::float64, a, a, dots, out, 3);  // parallel: the average
  CHECK(out[0] == 1 && out[1] == 2);
  dots = kernel::dots(DType::float64, a, zero, 3);
  kernel::combine(DType::float64, a, zero, dots, out, 3);
  CHECK(out[0] == 1 && out[1] == 2);
  // A product is rounded before it is added: fused, the two halves would leave the rounding error.
  double x[16] = {}, y[16] = {};
  x[0] = 1 + 0x1p-30, y[0] = 1 + 0x1p-30;
  x[8] = -1, y[8] = 1 + 0x1p-29;
  CHECK_EQUAL(kernel::dots(DType::float64, x, y, 16).ab, 0.0);
}

TEST(wrong_requests_are_refused) {
  CHECK_THROWS(reduce_two(DType::float32, ReduceOp::adasum, 1.0f, 1.0f), farandole::Failure);
  CHECK_THROWS(kernel::dots(DType::int32, nullptr, nullptr, 0), farandole::Failure);
}

TEST(rounding_mode_of_the_caller_does_not_matter) {
  const double usual = reduce_two(DType::float64, ReduceOp::sum, 1.0, 0x1p-60);
  std::fesetround(FE_UPWARD);
  const double upward = reduce_two(DType::float64, ReduceOp::sum, 1.0, 0x1p-60);
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  CHECK_EQUAL(upward, usual);
  CHECK_EQUAL(mode, FE_UPWARD);
}
