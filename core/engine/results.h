// Memory for results that the core allocates. The last large one that came back is kept: fresh memory costs as much as
// the collective itself. Touches base/ and os/.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

namespace farandole {

class Results;

// Gives the memory back to where it came from.
class GiveBack {
 public:
  GiveBack() = default;
  GiveBack(std::shared_ptr<Results> results, std::size_t bytes) : results_(std::move(results)), bytes_(bytes) {}
  void operator()(std::byte* memory) const;

 private:
  std::shared_ptr<Results> results_;
  std::size_t bytes_ = 0;
};
using Memory = std::unique_ptr<std::byte, GiveBack>;

// Safe from any thread. Lives as long as anything it has given away.
class Results : public std::enable_shared_from_this<Results> {
 public:
  ~Results();
  Memory allocate(std::size_t bytes);  // aligned to 64; throws Failure(no_memory)

 private:
  friend class GiveBack;
  void keep(std::byte* memory, std::size_t bytes);

  std::mutex mutex_;
  std::byte* kept_ = nullptr;
  std::size_t kept_bytes_ = 0;
};

}  // namespace farandole
