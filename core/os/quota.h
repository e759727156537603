// How much processor time the control group of this process gets.
// Reads /proc and /sys/fs/cgroup.
#pragma once

#include <string>

namespace farandole::os {

// Whole cores, at least 1; 0: no limit is set, as far as can be seen. Containers have a quota where a mask of cores
// would show nothing. `proc` and `groups` are other places for tests.
int quota_cores(const std::string& proc = "/proc/self/cgroup", const std::string& groups = "/sys/fs/cgroup");

}  // namespace farandole::os
