// An operation: a submitted request, its memory and, when it is done, its outcome. Operations are found by their
// handles.
// Touches base/, os/, cuda/ and negotiate/.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/pieces.h"
#include "cuda/gpu.h"
#include "engine/results.h"
#include "negotiate/request.h"

namespace farandole {

// A completion queue: handles in the order in which they ended, for one consumer. Safe from any thread.
class Completions {
 public:
  void push(std::int64_t handle);
  std::int64_t next(std::int64_t timeout_ms);  // 0 after the timeout, -1 when it is closed and empty
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::int64_t> handles_;
  bool closed_ = false;
};

struct Operation {
  std::int64_t handle = 0;
  std::int32_t group = 0;
  std::int32_t peer = -1;  // send, receive: a rank of the job
  std::int64_t tag = 0;
  negotiate::Request request;
  const void* input = nullptr;
  void* output = nullptr;
  Pieces pieces;          // instead of both, for a tensor in several places
  cuda::MomentPtr ready;  // input and output are memory of a device, and can be used from then on; null: host memory
  std::int64_t submitted_ns = 0;
  std::uint64_t record = 0;            // its number in the recorder
  Completions* completions = nullptr;  // gets the handle when it is done; may be null

  // The driver writes these before `done` becomes 1; anyone may read them after.
  Error error;
  const char* phase = "enqueue";
  std::int64_t value = 0;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> splits;
  Memory owned;
  std::size_t output_bytes =
      0;  // of the result; before that, of the memory that the caller offers for a result of any size

  std::atomic<std::uint32_t> done{0};      // also the futex on which waiters sleep
  std::atomic<std::uint32_t> sleepers{0};  // threads that sleep on it
  std::atomic<bool> seen{false};           // the user has seen that it is done
  std::atomic<bool> slow{false};           // a thread has waited long: the peers are far behind, so spinning is no use
};
using OperationPtr = std::shared_ptr<Operation>;

constexpr int kAnySource = -1;
// The tag of remove_group that ends a member group on all its members, with an error; with others this rank alone
// leaves it.
constexpr std::int64_t kAbandon = 2;
// Sends and receives.
inline bool point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }
// Transfers, and changes of member groups, bypass negotiation.
inline bool bypasses_negotiation(const Operation& operation) {
  const Kind kind = operation.request.kind;
  return point_to_point(kind) || ((kind == Kind::add_group || kind == Kind::remove_group) && operation.tag != 0);
}

// All operations that have not been released, and the completion queues. Safe from any thread.
class Handles {
 public:
  std::int64_t reserve(int count);  // the first of `count` consecutive handles
  void insert(const OperationPtr& operation);
  OperationPtr find(std::int64_t handle) const;
  std::vector<OperationPtr> unfinished() const;
  void release(std::int64_t handle);
  void finish(Operation& operation);  // wakes its waiters
  std::int64_t open_queue();
  Completions* queue(std::int64_t number);  // null: there is none; else valid as long as this object
  void close();                             // closes all queues

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::int64_t, OperationPtr> operations_;
  std::deque<Completions> queues_;  // their numbers count up from 1
  bool closed_ = false;
  std::int64_t next_ = 1;
};

}  // namespace farandole
