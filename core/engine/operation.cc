// Handles: finding, finishing and releasing operations.
// Touches base/ and os/.
#include "engine/operation.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "os/clock.h"
#include "os/memory.h"

namespace farandole {

Memory allocate(std::size_t bytes) {
  const bool large = bytes >= 2 * os::kHugePage;
  const std::size_t unit = large ? os::kHugePage : 64;
  const std::size_t rounded = std::max((bytes + unit - 1) / unit * unit, unit);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(unit, rounded));
  if (memory == nullptr)
    throw Failure(Code::no_memory, "cannot allocate " + std::to_string(bytes) + " bytes for a result");
  if (large) os::prefer_huge_pages(memory, rounded);
  return Memory(memory);
}

Memory allocate_zeros(std::size_t bytes) {
  Memory memory = allocate(bytes);
  std::memset(memory.get(), 0, bytes);
  return memory;
}

std::int64_t Handles::reserve(int count) {
  std::lock_guard lock(mutex_);
  std::int64_t first = next_;
  next_ += count;
  return first;
}

void Handles::insert(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  operations_.emplace(operation->handle, operation);
}

OperationPtr Handles::find(std::int64_t handle) const {
  std::lock_guard lock(mutex_);
  auto found = operations_.find(handle);
  return found == operations_.end() ? nullptr : found->second;
}

void Handles::release(std::int64_t handle) {
  OperationPtr dropped;  // declared before the lock: freed after it
  std::lock_guard lock(mutex_);
  auto found = operations_.find(handle);
  if (found == operations_.end()) return;
  dropped = std::move(found->second);
  operations_.erase(found);
}

void Handles::finish(Operation& operation) {
  operation.done.store(1, std::memory_order_seq_cst);
  if (operation.sleepers.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(&operation.done);
  std::lock_guard lock(finished_mutex_);
  if (!wanted_) return;
  finished_.push_back(operation.handle);
  finished_changed_.notify_one();
}

std::int64_t Handles::next_completion(std::int64_t timeout_ms) {
  std::unique_lock lock(finished_mutex_);
  if (!wanted_) {
    // What finished before anybody asked is still in the table.
    wanted_ = true;
    std::lock_guard table(mutex_);
    for (const auto& [handle, operation] : operations_)
      if (operation->done.load(std::memory_order_acquire) != 0) finished_.push_back(handle);
  }
  finished_changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return closed_ || !finished_.empty(); });
  if (finished_.empty()) return closed_ ? -1 : 0;
  std::int64_t handle = finished_.front();
  finished_.pop_front();
  return handle;
}

void Handles::close() {
  std::lock_guard lock(finished_mutex_);
  closed_ = true;
  finished_changed_.notify_all();
}

}  // namespace farandole
