// Waiting for many descriptors at once, and a doorbell that wakes the one who waits.
// Touches the operating system.
#pragma once

#include <cstdint>
#include <vector>

#include "os/descriptor.h"

namespace farandole::os {

struct Event {
  std::uint64_t key;
  bool readable;
  bool writable;
  bool hung_up;
};

// Level-triggered epoll. wait() may run in one thread while another adds or removes.
class Poller {
 public:
  Poller();  // throws Failure(no_memory) naming `ulimit -n` when descriptors have run out
  void add(int fd, std::uint64_t key, bool writable = false);
  void change(int fd, std::uint64_t key, bool writable);
  void remove(int fd);
  // -1 waits without end. Returns what is ready now; empty on a signal.
  const std::vector<Event>& wait(int timeout_ms, std::vector<Event>& events) const;

 private:
  Descriptor epoll_;
};

// An eventfd: anyone who holds it may ring; only its owner answers.
class Doorbell {
 public:
  Doorbell();
  explicit Doorbell(Descriptor received);  // throws Failure(precondition) when ringing it could block
  void ring() const;                       // never blocks
  void answer() const;                     // forgets all rings so far
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_;
};

// pidfd: readable when the process has died. Invalid where the kernel has none, and for this process itself.
Descriptor watch_process(int pid);

}  // namespace farandole::os
