// Copying past the cache, with stores that every x86-64 has.
// Touches nothing.
#include "kernel/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace farandole::kernel {

#if defined(__x86_64__)

void copy_past_cache(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const std::size_t head = std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine);
  std::memcpy(target, source, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(source + at);
    auto* place = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(place, a);
    _mm_stream_si128(place + 1, b);
    _mm_stream_si128(place + 2, c);
    _mm_stream_si128(place + 3, d);
  }
  _mm_sfence();  // so that a reader that is told of the bytes next also sees them
  std::memcpy(target + at, source + at, bytes - at);
}

#else

void copy_past_cache(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

#endif

}  // namespace farandole::kernel
