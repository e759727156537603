// Memory for results: allocation, and what is kept for reuse.
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

// Smaller ones are fast to allocate. Larger ones are too much to keep for a caller who may not return.
constexpr std::size_t kMinKept = 1 << 20;
constexpr std::size_t kMaxKept = 64 << 20;
// Shared memory takes longest to allocate: it is for callers that need it repeatedly.
constexpr int kRequestsBeforeSharedMemory = 2;

}  // namespace

void ReturnMemory::operator()(std::byte* memory) const { results_->release(memory, bytes_, retired_); }

Results::~Results() { std::free(kept_); }

Memory Results::allocate(std::size_t bytes) {
  if (!os::can_allocate(bytes))
    throw Failure(Code::no_memory,
                  "a result of " + std::to_string(bytes) + " bytes is more than the machine has available");
  const bool large = bytes >= 2 * os::kHugePage;
  const std::size_t unit = large ? os::kHugePage : 64;
  const std::size_t rounded = std::max((bytes + unit - 1) / unit * unit, unit);
  {
    std::lock_guard lock(mutex_);
    if (kept_ != nullptr && kept_bytes_ == rounded) {
      return Memory(std::exchange(kept_, nullptr), ReturnMemory(shared_from_this(), rounded));
    }
  }
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(unit, rounded));
  if (memory == nullptr)
    throw Failure(Code::no_memory, "cannot allocate " + std::to_string(bytes) + " bytes for a result");
  if (large) os::prefer_huge_pages(memory, rounded);
  return Memory(memory, ReturnMemory(shared_from_this(), rounded));
}

Memory Results::allocate_shared(std::size_t bytes) {
  if (shared_requests_ < kRequestsBeforeSharedMemory) {
    ++shared_requests_;
  } else {
    std::unique_lock lock(mutex_);
    if (arena_ == nullptr && shared_requests_ == kRequestsBeforeSharedMemory) {
      ++shared_requests_;
      try {
        arena_ = std::make_unique<os::Arena>();
        share_(arena_->memory());
      } catch (const Failure&) {
        arena_.reset();  // results are then copied through the rings
      }
    }
    std::byte* block = arena_ == nullptr ? nullptr : arena_->allocate(bytes);
    if (block != nullptr) return Memory(block, ReturnMemory(shared_from_this(), bytes));
  }
  return allocate(bytes);
}

void Results::release(std::byte* memory, std::size_t bytes, bool retired) {
  {
    std::lock_guard lock(mutex_);
    if (arena_ != nullptr && arena_->owns(memory)) {
      if (!retired) arena_->release(memory, bytes);
      return;
    }
    if (bytes >= kMinKept && bytes <= kMaxKept) {
      std::swap(kept_, memory);
      kept_bytes_ = bytes;
    }
  }
  std::free(memory);
}

void Results::close() {
  std::lock_guard lock(mutex_);
  if (arena_ == nullptr) return;
  arena_->close();  // local peers may still have it mapped
  if (arena_->idle()) arena_.reset();
}

}  // namespace farandole
