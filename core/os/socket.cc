// sendmsg, recvmsg and socket options.
// Touches the operating system.
#include "os/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "os/failure.h"

namespace farandole::os {

namespace {

constexpr std::size_t kDescriptorsPerCall =
    253;                            // the kernel's limit, so that only our own limit applies to what a peer sends
constexpr int kTimeoutMs = 60'000;  // unacknowledged data for this long ends a connection
constexpr int kLocalBuffer = 1 << 20;

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

IoResult io_result(ssize_t count) {
  if (count >= 0) return {IoResult::Status::bytes, static_cast<std::size_t>(count), 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {IoResult::Status::would_block, 0, 0};
  return {IoResult::Status::failed, 0, errno};
}

void take_descriptors(msghdr& message, std::vector<Descriptor>& descriptors) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(fd);
    }
  }
}

}  // namespace

IoResult send_some(int fd, std::span<const iovec> parts, std::span<const Descriptor> descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsPerCall * sizeof(int))] = {};
  if (!descriptors.empty()) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    for (std::size_t i = 0; i < descriptors.size(); ++i) {
      const int raw = descriptors[i].get();
      std::memcpy(CMSG_DATA(part) + i * sizeof(int), &raw, sizeof(int));
    }
  }
  return io_result(sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

IoResult receive_some(int fd, std::span<const iovec> parts, std::vector<Descriptor>* descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsPerCall * sizeof(int))];
  if (descriptors != nullptr) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
  }
  IoResult result = io_result(recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC));
  if (result.status != IoResult::Status::bytes) return result;
  if (descriptors != nullptr) take_descriptors(message, *descriptors);
  // This happens only when this process has no descriptor numbers left. The rest of the stream would be unreadable.
  if ((message.msg_flags & MSG_CTRUNC) != 0) return {IoResult::Status::failed, 0, EMFILE};
  if (result.bytes == 0) result.status = IoResult::Status::end;
  return result;
}

void make_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) fail("cannot use a socket", errno);
}

// The buffer sizes are left to the kernel: setting one disables its autotuning, which goes far beyond
// net.core.rmem_max.
void tune_tcp(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  int timeout = 0;
  socklen_t size = sizeof timeout;
  getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &size);
  if (timeout > 0) return;  // the code that made the connection has set its timeout
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kTimeoutMs);
}

void tune_local(int fd) { set_option(fd, SOL_SOCKET, SO_SNDBUF, kLocalBuffer); }

void shutdown_write(int fd) { shutdown(fd, SHUT_WR); }

int peer_process(int fd) {
  ucred who{};
  socklen_t size = sizeof who;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return 0;
  return who.pid;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace farandole::os
