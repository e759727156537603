// Copying memory that nobody reads again soon.
// Touches nothing.
#pragma once

#include <cstddef>

namespace farandole::kernel {

// As memcpy, but the target does not come into the cache: on x86 an ordinary store would first read the line that it
// overwrites. On Arm processors notice such runs by themselves.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

}  // namespace farandole::kernel
