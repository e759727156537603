// Memory for results: allocation, and what is kept.
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
// Shared memory takes longer to make than any other: it is for who asks again and again.
constexpr int kWishesInVain = 2;

}  // namespace

void GiveBack::operator()(std::byte* memory) const { results_->take_back(memory, bytes_, retired_); }

Results::~Results() { std::free(kept_); }

Memory Results::allocate(std::size_t bytes) {
  if (!os::fits(bytes))
    throw Failure(Code::no_memory,
                  "a result of " + std::to_string(bytes) + " bytes is more than the machine has available");
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

Memory Results::allocate_shared(std::size_t bytes) {
  if (shared_wishes_ < kWishesInVain) {
    ++shared_wishes_;
  } else {
    std::unique_lock lock(mutex_);
    if (arena_ == nullptr && shared_wishes_ == kWishesInVain) {
      ++shared_wishes_;
      try {
        arena_ = std::make_unique<os::Arena>();
        share_(arena_->memory());
      } catch (const Failure&) {
        arena_.reset();  // results go the way of memory that nobody shares
      }
    }
    std::byte* block = arena_ == nullptr ? nullptr : arena_->lend(bytes);
    if (block != nullptr) return Memory(block, GiveBack(shared_from_this(), bytes));
  }
  return allocate(bytes);
}

void Results::take_back(std::byte* memory, std::size_t bytes, bool retired) {
  {
    std::lock_guard lock(mutex_);
    if (arena_ != nullptr && arena_->owns(memory)) {
      if (!retired) arena_->take_back(memory, bytes);
      return;
    }
    if (bytes >= kSmallestKept && bytes <= kLargestKept) {
      std::swap(kept_, memory);
      kept_bytes_ = bytes;
    }
  }
  std::free(memory);
}

void Results::close() {
  std::lock_guard lock(mutex_);
  if (arena_ == nullptr) return;
  arena_->close();  // neighbours may still have it
  if (arena_->idle()) arena_.reset();
}

}  // namespace farandole
