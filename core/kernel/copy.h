// Copying memory that will not be read again soon.
// Touches nothing.
#pragma once

#include <cstddef>

namespace farandole::kernel {

// As memcpy, but the target does not go into the cache: on x86 an ordinary store would first read the cache line that
// it overwrites. Arm processors detect long copies themselves.
void copy_past_cache(void* to, const void* from, std::size_t bytes);

}  // namespace farandole::kernel
