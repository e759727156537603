// epoll, eventfd, socket pairs and pidfd.
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
#define SYS_pidfd_open 434  // the same number on every architecture
#endif

namespace farandole::os {

namespace {

constexpr int kEventsPerCall = 64;
constexpr unsigned kDrainAtOnce = 16;  // more than the socket's buffer holds

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
  epoll_event ready[kEventsPerCall];
  const int count = epoll_wait(epoll_.get(), ready, kEventsPerCall, timeout_ms);
  if (count < 0 && errno != EINTR) fail("cannot wait for descriptors", errno);
  for (int i = 0; i < count; ++i) {
    const std::uint32_t bits = ready[i].events;
    events.push_back(
        {ready[i].data.u64, (bits & EPOLLIN) != 0, (bits & EPOLLOUT) != 0, (bits & (EPOLLHUP | EPOLLERR)) != 0});
  }
  return events;
}

Wakeup::Wakeup() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) fail("cannot create a wake-up descriptor", errno);
  fd_ = Descriptor(fd);
}

void Wakeup::notify() const {
  // Fails only when 2^64 - 2 notifications are waiting.
  [[maybe_unused]] const auto written = eventfd_write(fd_.get(), 1);
}

void Wakeup::drain() const {
  eventfd_t rings = 0;
  [[maybe_unused]] const auto read = eventfd_read(fd_.get(), &rings);
}

PeerWakeup::PeerWakeup() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0) fail("cannot create a wake-up descriptor", errno);
  fd_ = Descriptor(ends[0]);
  sender_ = Descriptor(ends[1]);
  // One waiting notification is enough, so the smallest buffer that the kernel allows will do.
  const int smallest = 1;
  setsockopt(sender_.get(), SOL_SOCKET, SO_SNDBUF, &smallest, sizeof smallest);
}

void PeerWakeup::drain() const {
  mmsghdr notifications[kDrainAtOnce] = {};
  [[maybe_unused]] const int drained = recvmmsg(fd_.get(), notifications, kDrainAtOnce, MSG_DONTWAIT, nullptr);
}

// Another end of a stream could corrupt its frames; any other kind of descriptor could block the writer.
WakeupSender::WakeupSender(Descriptor received) : fd_(std::move(received)) {
  int domain = 0, type = 0;
  socklen_t size = sizeof domain;
  const bool pair = getsockopt(fd_.get(), SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX &&
                    getsockopt(fd_.get(), SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_DGRAM;
  if (!pair) throw Failure(Code::precondition, "a descriptor for waking a local peer is not a datagram socket pair");
}

void WakeupSender::notify() const {
  // Fails when a notification is waiting already, or when the peer is gone.
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
