// Turns an errno into a Failure that says what to do about it.
// Touches the operating system.
#pragma once

#include <string>

#include "base/error.h"

namespace farandole::os {

// "too few file descriptors: raise `ulimit -n` (now 1024)", or `what` with the system's own words.
[[noreturn]] void fail(const std::string& what, int error);

}  // namespace farandole::os
