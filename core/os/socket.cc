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

constexpr std::size_t kDescriptorsAtOnce = 253;  // the kernel's own limit: what a peer sends is cut short by ours alone
constexpr int kSilenceMs = 60'000;               // unacknowledged data for this long ends a connection
constexpr int kLocalBuffer = 1 << 20;

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

Moved outcome(ssize_t result) {
  if (result >= 0) return {Moved::What::bytes, static_cast<std::size_t>(result), 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {Moved::What::would_block, 0, 0};
  return {Moved::What::failed, 0, errno};
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

Moved send_some(int fd, std::span<const iovec> parts, std::span<const Descriptor> descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsAtOnce * sizeof(int))] = {};
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
  return outcome(sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

Moved receive_some(int fd, std::span<const iovec> parts, std::vector<Descriptor>* descriptors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  alignas(cmsghdr) char space[CMSG_SPACE(kDescriptorsAtOnce * sizeof(int))];
  if (descriptors != nullptr) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
  }
  Moved moved = outcome(recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC));
  if (moved.what != Moved::What::bytes) return moved;
  if (descriptors != nullptr) take_descriptors(message, *descriptors);
  // Only when this process has no number left for them: the rest of the stream would make no sense.
  if ((message.msg_flags & MSG_CTRUNC) != 0) return {Moved::What::failed, 0, EMFILE};
  if (moved.bytes == 0) moved.what = Moved::What::end;
  return moved;
}

void make_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) fail("cannot use a socket", errno);
}

// The buffers are left to the kernel: asking for a size ends its own tuning, which goes far beyond net.core.rmem_max.
void tune_tcp(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  int silence = 0;
  socklen_t size = sizeof silence;
  getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, &size);
  if (silence > 0) return;  // whoever made the connection has chosen how long a silent peer is waited for
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 20);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kSilenceMs);
}

void tune_local(int fd) { set_option(fd, SOL_SOCKET, SO_SNDBUF, kLocalBuffer); }

void stop_writing(int fd) { shutdown(fd, SHUT_WR); }

int process_behind(int fd) {
  ucred who{};
  socklen_t size = sizeof who;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return 0;
  return who.pid;
}

std::string text_of(int error) { return std::generic_category().message(error); }

}  // namespace farandole::os
