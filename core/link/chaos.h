// Faults in the bytes of a stream, for tests. In the product library the answer is always no.
// Touches nothing here; link/chaos.cc, part of the test-only library, has the answers.
#pragma once

namespace farandole::link {

#ifdef FARANDOLE_CHAOS
// "stream.short": from its first firing on, one byte at a time. "stream.corrupt": flips one bit of what was just read,
// once. "stream.truncate": the stream ends here.
bool chaos_fires(const void* engine, const char* point);
#else
constexpr bool chaos_fires(const void*, const char*) { return false; }
#endif

}  // namespace farandole::link
