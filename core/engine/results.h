// Memory for results that the core allocates. The last large one that came back is kept: fresh memory costs as much as
// the collective itself. Touches base/ and os/.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>

#include "os/arena.h"

namespace farandole {

class Results;

// Gives the memory back to where it came from.
class GiveBack {
 public:
  GiveBack() = default;
  GiveBack(std::shared_ptr<Results> results, std::size_t bytes) : results_(std::move(results)), bytes_(bytes) {}
  void operator()(std::byte* memory) const;
  // Nobody uses it again: a neighbour that has not heard of a failure may still write there.
  void retire() { retired_ = true; }

 private:
  std::shared_ptr<Results> results_;
  std::size_t bytes_ = 0;
  bool retired_ = false;
};
using Memory = std::unique_ptr<std::byte, GiveBack>;

// Safe from any thread. Lives as long as anything it has given away.
class Results : public std::enable_shared_from_this<Results> {
 public:
  using Share = std::function<void(const os::SharedMemory&)>;
  // `share` lets neighbours have memory.
  explicit Results(Share share) : share_(std::move(share)) {}
  ~Results();
  Memory allocate(std::size_t bytes);  // aligned to 64; throws Failure(no_memory)
  // In memory that neighbours can write to, if there is any. From one thread.
  Memory allocate_shared(std::size_t bytes);
  // Nothing is allocated any more; what is in use stays.
  void close();

 private:
  friend class GiveBack;
  void take_back(std::byte* memory, std::size_t bytes, bool retired);

  const Share share_;
  int shared_wishes_ = 0;
  std::unique_ptr<os::Arena> arena_;

  std::mutex mutex_;
  std::byte* kept_ = nullptr;
  std::size_t kept_bytes_ = 0;
};

}  // namespace farandole
