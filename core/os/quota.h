// How much CPU time the control group of this process gets.
// Reads /proc and /sys/fs/cgroup.
#pragma once

#include <string>

namespace farandole::os {

// Whole cores, at least 1; 0 when no limit is visible. Containers often set a quota while the affinity mask shows all
// cores. Tests pass other paths in `proc` and `groups`.
int quota_cores(const std::string& proc = "/proc/self/cgroup", const std::string& groups = "/sys/fs/cgroup");

}  // namespace farandole::os
