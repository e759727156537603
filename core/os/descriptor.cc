// Owning, duplicating and closing a descriptor.
// Touches the operating system.
#include "os/descriptor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "os/failure.h"
#include "os/fork.h"

namespace farandole::os {

Descriptor::Descriptor(int fd) : fd_(fd < 0 ? -1 : fd) {
  if (fd_ < 0) return;
  fcntl(fd_, F_SETFD, FD_CLOEXEC);  // a binding may have passed one without this flag
  register_descriptor(fd_);
}

void Descriptor::reset() {
  if (fd_ < 0) return;
  const int fd = std::exchange(fd_, -1);
  if (unregister_descriptor(fd)) close(fd);
}

Descriptor Descriptor::duplicate() const {
  if (fd_ < 0) return {};
  const int copy = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) fail("cannot duplicate a descriptor", errno);
  return Descriptor(copy);
}

std::size_t max_descriptors() {
  constexpr std::size_t kUsual = 1024;
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur) : kUsual;
}

}  // namespace farandole::os
