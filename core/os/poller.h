// Waiting for many descriptors at once, and a doorbell that wakes the one who waits.
// Touches the operating system.
#pragma once

#include <cstdint>
#include <utility>
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

// Rung by the threads of this process: an eventfd, which nobody else may have. Its O_NONBLOCK would be theirs too, and
// who clears it makes the next ring wait for ever.
class Doorbell {
 public:
  Doorbell();
  void ring() const;    // never blocks
  void answer() const;  // forgets all rings so far
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_;
};

// Rung by one other process, which holds the rope: a pair of datagram sockets, of which each side has but its own, and
// can do nothing to the other's.
class Farbell {
 public:
  Farbell();
  Descriptor give_rope() { return std::move(rope_); }  // once
  void answer() const;                                 // forgets the rings so far; if too many, rings on
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_, rope_;
};

// The other end of a bell that a neighbour has made.
class Rope {
 public:
  explicit Rope(Descriptor received);  // throws Failure(precondition) when it is none
  void ring() const;                   // never blocks, whatever its maker does
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_;
};

// pidfd: readable when the process has died. Invalid where the kernel has none, and for this process itself.
Descriptor watch_process(int pid);

}  // namespace farandole::os
