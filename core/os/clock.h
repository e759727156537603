// Time, threads and futexes.
// Touches the operating system.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace farandole::os {

std::int64_t now_ns();    // monotonic
std::int64_t epoch_us();  // wall-clock time, only for traces

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Sleeps while *word == expected, for at most `timeout_ns`. May return early (wake-up, signal), so the caller checks
// again.
void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected, std::int64_t timeout_ns);
void futex_wake_all(const std::atomic<std::uint32_t>* word);

// A thread that blocks every signal (they belong to the user's threads) and carries `name` (15 characters).
std::thread start_thread(const char* name, std::function<void()> body);

int usable_cores();  // that this thread may use: its affinity mask and the quota of its control group
int current_core();  // where this thread runs; -1 when the kernel does not tell
// Moves this thread to a core that is not in the list; it may come back later. False when it may use no other core.
bool avoid_cores(const std::vector<int>& taken);

}  // namespace farandole::os
