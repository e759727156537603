// Handles: finding, finishing and releasing operations.
// Touches base/, os/ and negotiate/.
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

std::vector<OperationPtr> Handles::unfinished() const {
  std::vector<OperationPtr> found;
  std::lock_guard lock(mutex_);
  for (const auto& [handle, operation] : operations_)
    if (operation->done.load(std::memory_order_relaxed) == 0) found.push_back(operation);
  return found;
}

void Handles::release(std::int64_t handle) {
  OperationPtr dropped;  // declared before the lock, so freed after it
  std::lock_guard lock(mutex_);
  auto found = operations_.find(handle);
  if (found == operations_.end()) return;
  dropped = std::move(found->second);
  operations_.erase(found);
}

void Handles::finish(Operation& operation) {
  Completions* completions = operation.completions;  // a waiter may free the operation once it is done
  const std::int64_t handle = operation.handle;
  operation.done.store(1, std::memory_order_seq_cst);
  if (operation.sleepers.load(std::memory_order_seq_cst) != 0) os::futex_wake_all(&operation.done);
  if (completions != nullptr) completions->push(handle);
}

std::int64_t Handles::open_queue() {
  std::lock_guard lock(mutex_);
  queues_.emplace_back();
  if (closed_) queues_.back().close();
  return static_cast<std::int64_t>(queues_.size());
}

Completions* Handles::queue(std::int64_t number) {
  if (number == 0) return nullptr;
  std::lock_guard lock(mutex_);
  if (number < 0 || number > static_cast<std::int64_t>(queues_.size())) return nullptr;
  return &queues_[static_cast<std::size_t>(number - 1)];
}

void Handles::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (Completions& queue : queues_) queue.close();
}

void Completions::push(std::int64_t handle) {
  std::lock_guard lock(mutex_);
  handles_.push_back(handle);
  changed_.notify_one();
}

std::int64_t Completions::next(std::int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return closed_ || !handles_.empty(); });
  if (handles_.empty()) return closed_ ? -1 : 0;
  std::int64_t handle = handles_.front();
  handles_.pop_front();
  return handle;
}

void Completions::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace farandole
