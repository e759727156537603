// Picks the fastest kernel set once. The set does whole vectors, the scalar code the rest.
// Touches only set.h, processor.h and base/.
#include "kernel/kernel.h"

#include <atomic>
#include <cfloat>
#include <cstring>
#include <limits>

#include "kernel/processor.h"
#include "kernel/set.h"

namespace farandole::kernel {
namespace {

constexpr Set kScalar = {"scalar", nullptr, nullptr, nullptr};

// Best first; the last one always exists.
struct Sets {
  const Set* list[3];
  int count = 0;
  Sets() {
    [[maybe_unused]] const Features found = detect();
#if defined(__x86_64__)
    if (found.avx512) list[count++] = &kAvx512;
    if (found.avx2) list[count++] = &kAvx2;
#elif defined(__aarch64__)
    if (found.neon) list[count++] = &kNeon;
#endif
    list[count++] = &kScalar;
  }
};

const Sets& sets() {
  static const Sets all;
  return all;
}

std::atomic<const Set*>& current() {
  static std::atomic<const Set*> set{sets().list[0]};
  return set;
}

void copy(void* to, const void* from, std::size_t bytes) {
  if (to != nullptr && to != from) std::memcpy(to, from, bytes);
}

// Added in a fixed order; any NaN becomes the one quiet NaN.
double total(const double (&lane)[kDotLanes]) {
  const double sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  return sum == sum ? sum : std::numeric_limits<double>::quiet_NaN();
}

double coefficient(double ab, double norm_squared) {
  return norm_squared < DBL_MIN ? 1.0 : 1.0 - ab / norm_squared * 0.5;
}

}  // namespace

void reduce(const Reduce& work) {
  if (work.elements == 0) return;
  const bool scaled = work.prescale != 1 || work.postscale != 1 || work.divisor != 1;
  if (work.count == 1 && (!scaled || work.dtype == DType::boolean)) {
    const std::size_t bytes = work.elements * size_of(work.dtype);
    copy(work.out, work.sources[0], bytes);
    copy(work.mirror, work.sources[0], bytes);
    return;
  }
  const StandardArithmetic arithmetic;
  const Set& set = *current().load(std::memory_order_relaxed);
  const std::size_t done = set.reduce == nullptr ? 0 : set.reduce(work);
  if (done < work.elements) scalar::reduce(work, done);
}

Dots dots(DType dtype, const void* a, const void* b, std::size_t elements) {
  const StandardArithmetic arithmetic;
  const Set& set = *current().load(std::memory_order_relaxed);
  DotLanes lanes;
  const std::size_t done = set.dots == nullptr ? 0 : set.dots(dtype, a, b, elements, lanes);
  scalar::dots(dtype, a, b, done, elements, lanes);
  return {total(lanes.ab), total(lanes.aa), total(lanes.bb)};
}

void combine(DType dtype, const void* a, const void* b, const Dots& dots, void* out, std::size_t elements) {
  const StandardArithmetic arithmetic;
  const Set& set = *current().load(std::memory_order_relaxed);
  const Coefficients by = {coefficient(dots.ab, dots.aa), coefficient(dots.ab, dots.bb)};
  const std::size_t done = set.combine == nullptr ? 0 : set.combine(dtype, a, b, by, out, elements);
  scalar::combine(dtype, a, b, by, out, done, elements);
}

const char* name() { return current().load(std::memory_order_relaxed)->name; }

bool select(const char* name) {
  for (int i = 0; i < sets().count; ++i) {
    if (std::strcmp(sets().list[i]->name, name) != 0) continue;
    current().store(sets().list[i], std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace farandole::kernel
