// Memory for results that the core allocates. The last large block that was released is kept: new memory costs as much
// as the collective itself. Touches base/ and os/.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "os/arena.h"

namespace farandole {

class Results;

// Returns the memory to its source.
class ReturnMemory {
 public:
  ReturnMemory() = default;
  ReturnMemory(std::shared_ptr<Results> results, std::size_t bytes) : results_(std::move(results)), bytes_(bytes) {}
  void operator()(std::byte* memory) const;
  // Never reuse this memory: a local peer that does not know of a failure yet may still write to it.
  void retire() { retired_ = true; }

 private:
  std::shared_ptr<Results> results_;
  std::size_t bytes_ = 0;
  bool retired_ = false;
};
using Memory = std::unique_ptr<std::byte, ReturnMemory>;

// Safe from any thread. Lives as long as any memory it has given out.
class Results : public std::enable_shared_from_this<Results> {
 public:
  using Share = std::function<void(const os::SharedMemory&)>;
  // With `share`, local peers may map memory.
  explicit Results(Share share) : share_(std::move(share)) {}
  ~Results();
  Memory allocate(std::size_t bytes);  // aligned to 64; throws Failure(no_memory)
  // In memory that local peers can write to, if possible. From one thread only.
  Memory allocate_shared(std::size_t bytes);
  // No allocations after this; memory in use stays valid.
  void close();

 private:
  friend class ReturnMemory;
  void release(std::byte* memory, std::size_t bytes, bool retired);

  const Share share_;
  int shared_requests_ = 0;
  std::unique_ptr<os::Arena> arena_;

  std::mutex mutex_;
  std::byte* kept_ = nullptr;
  std::size_t kept_bytes_ = 0;
};

}  // namespace farandole
