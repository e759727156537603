// Time, threads and waiting on a word.
// Touches the operating system.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace farandole::os {

std::int64_t now_ns();    // monotonic
std::int64_t epoch_us();  // of the calendar, for traces alone

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Sleeps while *word == expected, at most `timeout_ns`. Returns early on a wake-up or a signal; the caller looks again.
void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected, std::int64_t timeout_ns);
void futex_wake_all(const std::atomic<std::uint32_t>* word);

// A thread that blocks every signal (they belong to the user's threads) and carries `name` (15 characters).
std::thread start_thread(const char* name, std::function<void()> body);

int usable_cores();  // of this thread, by its affinity mask and its control group's quota
int current_core();  // where this thread runs; -1 where the kernel does not say
// Moves this thread at once to a core that is not one of these; it may come back later. False where it has no other.
bool leave_cores(const std::vector<int>& taken);

}  // namespace farandole::os
