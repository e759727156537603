// Memory for results: allocation, and the one that is kept.
// Touches base/ and os/.
#include "engine/results.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/error.h"
#include "os/memory.h"

namespace farandole {

namespace {

// Smaller ones are quick to make; larger ones are too much to hold for a caller who may never ask again.
constexpr std::size_t kSmallestKept = 1 << 20;
constexpr std::size_t kLargestKept = 64 << 20;

}  // namespace

void GiveBack::operator()(std::byte* memory) const {
  if (results_ != nullptr && bytes_ >= kSmallestKept && bytes_ <= kLargestKept) {
    results_->keep(memory, bytes_);
  } else {
    std::free(memory);
  }
}

Results::~Results() { std::free(kept_); }

Memory Results::allocate(std::size_t bytes) {
  const bool large = bytes >= 2 * os::kHugePage;
  const std::size_t unit = large ? os::kHugePage : 64;
  const std::size_t rounded = std::max((bytes + unit - 1) / unit * unit, unit);
  {
    std::lock_guard lock(mutex_);
    if (kept_ != nullptr && kept_bytes_ == rounded) {
      return Memory(std::exchange(kept_, nullptr), GiveBack(shared_from_this(), rounded));
    }
  }
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(unit, rounded));
  if (memory == nullptr)
    throw Failure(Code::no_memory, "cannot allocate " + std::to_string(bytes) + " bytes for a result");
  if (large) os::prefer_huge_pages(memory, rounded);
  return Memory(memory, GiveBack(shared_from_this(), rounded));
}

void Results::keep(std::byte* memory, std::size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    std::swap(kept_, memory);
    kept_bytes_ = bytes;
  }
  std::free(memory);
}

}  // namespace farandole
