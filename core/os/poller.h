// Waiting for many descriptors at once, and the means to wake the thread that waits.
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
  // -1: without a time limit. Returns the events that are ready now; empty on a signal.
  const std::vector<Event>& wait(int timeout_ms, std::vector<Event>& events) const;

 private:
  Descriptor epoll_;
};

// Wakes a thread of this process through an eventfd. No other process may have the eventfd: O_NONBLOCK is shared with
// it, and clearing that flag would make the next notify() block without end.
class Wakeup {
 public:
  Wakeup();
  void notify() const;  // never blocks
  void drain() const;   // resets all notifications so far
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_;
};

// Wakes this process from one other process, which holds the sender. This is a datagram socket pair: each side has only
// its own socket and cannot change the other's.
class PeerWakeup {
 public:
  PeerWakeup();
  Descriptor take_sender() { return std::move(sender_); }  // once
  void drain() const;  // resets the notifications; if there are very many, some stay
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_, sender_;
};

// The sending end of a PeerWakeup that a local peer has created.
class WakeupSender {
 public:
  explicit WakeupSender(Descriptor received);  // throws Failure(precondition) when it is no such socket
  void notify() const;                         // never blocks, whatever the peer does
  const Descriptor& descriptor() const { return fd_; }

 private:
  Descriptor fd_;
};

// A pidfd, readable when the process has died. Invalid where the kernel has no pidfds, and for this process itself.
Descriptor watch_process(int pid);

}  // namespace farandole::os
