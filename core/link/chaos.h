// Failpoints that change the bytes of a stream. Only in the library for tests; elsewhere none of them fires.
// Includes no other file of this project; link/chaos.cc has the rules.
#pragma once

namespace farandole::link {

#ifdef FARANDOLE_CHAOS
// Whether a rule fires at this point. "stream.short": from now on, read and write one byte at a time. "stream.corrupt":
// flip one bit of what was just read, once. "stream.truncate": the stream ends here.
bool chaos_fires(const void* engine, const char* point);
#else
constexpr bool chaos_fires(const void*, const char*) { return false; }
#endif

}  // namespace farandole::link
