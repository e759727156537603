// Handles: finding, finishing and releasing operations.
// Touches base/ and os/.
#include "engine/operation.h"

#include <chrono>

#include "os/clock.h"

namespace farandole {

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
