// Faults in the bytes of a stream, for tests. In the product library the question is always answered with no.
// Touches nothing here; link/chaos.cc, part of the test-only library, holds the answers.
#pragma once

namespace farandole::link {

#ifdef FARANDOLE_CHAOS
// "stream.short": one byte at a time, from the first time it fires. "stream.corrupt": a bit of what was just read is
// flipped, once. "stream.truncate": the stream ends here.
bool chaos_fires(const void* engine, const char* point);
#else
constexpr bool chaos_fires(const void*, const char*) { return false; }
#endif

}  // namespace farandole::link
