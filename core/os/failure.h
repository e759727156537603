// Turns an errno into a Failure that says what to do.
// Touches the operating system.
#pragma once

#include <string>

#include "base/error.h"

namespace farandole::os {

// The text is "too few file descriptors: raise `ulimit -n` (now 1024)", or `what` followed by the system's message.
[[noreturn]] void fail(const std::string& what, int error);

}  // namespace farandole::os
