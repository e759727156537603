// Error texts for failed system calls.
// Touches the operating system.
#include "os/failure.h"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>

namespace farandole::os {

namespace {

std::string limit_of(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<decltype(RLIMIT_NOFILE)>(resource), &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return std::to_string(limit.rlim_cur);
}

}  // namespace

void fail(const std::string& what, int error) {
  const std::string reason = std::generic_category().message(error);  // thread-safe, unlike strerror
  switch (error) {
    case EMFILE:
      throw Failure(Code::no_memory,
                    what + ": too few file descriptors: raise `ulimit -n` (now " + limit_of(RLIMIT_NOFILE) + ")");
    case ENFILE:
      throw Failure(Code::no_memory, what + ": the system has too few file descriptors: raise the sysctl fs.file-max");
    case ENOMEM:
    case ENOSPC:
      throw Failure(Code::no_memory, what + ": " + reason + ": raise the memory limit of the job or container");
    default:
      throw Failure(Code::internal, what + ": " + reason);
  }
}

}  // namespace farandole::os
