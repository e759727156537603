// A descriptor that closes itself, here and in forked children.
// Touches the operating system.
#pragma once

#include <cstddef>
#include <utility>

namespace farandole::os {

// Every descriptor the core owns is close-on-exec and is also closed in children that fork without exec (os/fork.h), so
// that a worker process of a data loader cannot keep a dead rank's links open.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);  // takes ownership
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  Descriptor duplicate() const;  // throws Failure when there are no descriptors left

 private:
  int fd_ = -1;
};

// The limit of this process (ulimit -n).
std::size_t max_descriptors();

}  // namespace farandole::os
