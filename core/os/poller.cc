// epoll, eventfd, pairs of sockets and pidfd.
// Touches the operating system.
#include "os/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "os/failure.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // one number on every architecture
#endif

namespace farandole::os {

namespace {

constexpr int kEventsAtOnce = 64;
constexpr unsigned kRingsAtOnce = 16;  // more than fit into a bell

epoll_event interest(std::uint64_t key, bool writable) {
  epoll_event event{};
  event.events = EPOLLIN | (writable ? EPOLLOUT : 0u);
  event.data.u64 = key;
  return event;
}

}  // namespace

Poller::Poller() {
  const int fd = epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) fail("cannot create an event loop", errno);
  epoll_ = Descriptor(fd);
}

void Poller::add(int fd, std::uint64_t key, bool writable) {
  epoll_event event = interest(key, writable);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return;
  if (errno == ENOSPC) {
    throw Failure(Code::no_memory, "cannot watch a descriptor: raise the sysctl fs.epoll.max_user_watches");
  }
  fail("cannot watch a descriptor", errno);
}

void Poller::change(int fd, std::uint64_t key, bool writable) {
  epoll_event event = interest(key, writable);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) fail("cannot watch a descriptor", errno);
}

void Poller::remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

const std::vector<Event>& Poller::wait(int timeout_ms, std::vector<Event>& events) const {
  events.clear();
  epoll_event ready[kEventsAtOnce];
  const int count = epoll_wait(epoll_.get(), ready, kEventsAtOnce, timeout_ms);
  if (count < 0 && errno != EINTR) fail("cannot wait for descriptors", errno);
  for (int i = 0; i < count; ++i) {
    const std::uint32_t bits = ready[i].events;
    events.push_back(
        {ready[i].data.u64, (bits & EPOLLIN) != 0, (bits & EPOLLOUT) != 0, (bits & (EPOLLHUP | EPOLLERR)) != 0});
  }
  return events;
}

Doorbell::Doorbell() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) fail("cannot create a doorbell", errno);
  fd_ = Descriptor(fd);
}

void Doorbell::ring() const {
  // Fails only when it rings already 2^64 - 2 times over.
  [[maybe_unused]] const auto written = eventfd_write(fd_.get(), 1);
}

void Doorbell::answer() const {
  eventfd_t rings = 0;
  [[maybe_unused]] const auto read = eventfd_read(fd_.get(), &rings);
}

Farbell::Farbell() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0) fail("cannot create a doorbell", errno);
  fd_ = Descriptor(ends[0]);
  rope_ = Descriptor(ends[1]);
  // One ring that waits is as good as many: the kernel's least is room for a few.
  const int least = 1;
  setsockopt(rope_.get(), SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
}

void Farbell::answer() const {
  mmsghdr rings[kRingsAtOnce] = {};
  [[maybe_unused]] const int heard = recvmmsg(fd_.get(), rings, kRingsAtOnce, MSG_DONTWAIT, nullptr);
}

// A stream could be one that somebody reads as frames; any other descriptor could hold up whoever writes to it.
Rope::Rope(Descriptor received) : fd_(std::move(received)) {
  int domain = 0, type = 0;
  socklen_t size = sizeof domain;
  const bool pair = getsockopt(fd_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX &&
                    getsockopt(fd_.get(), SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_DGRAM;
  if (!pair) throw Failure(Code::precondition, "a descriptor that should ring a doorbell is something else");
}

void Rope::ring() const {
  // Fails when it rings already, or when nobody is there to hear it.
  [[maybe_unused]] const auto sent = send(fd_.get(), "", 0, MSG_DONTWAIT | MSG_NOSIGNAL);
}

Descriptor watch_process(int pid) {
  if (pid <= 0 || pid == getpid()) return {};
  const long fd = syscall(SYS_pidfd_open, pid, 0);
  if (fd >= 0) return Descriptor(static_cast<int>(fd));
  if (errno == EMFILE || errno == ENFILE) fail("cannot watch a process", errno);
  return {};
}

}  // namespace farandole::os
