// The registry of descriptors that forked children close. Fixed memory and lock-free words: the child of a process with
// many threads may neither allocate nor take a lock.
// Touches the operating system.
#include "os/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace farandole::os {

namespace {

// One bit per descriptor number. Untouched pages cost nothing, and a `ulimit -n` beyond this is rare: such descriptors
// are still close-on-exec.
constexpr int kHighest = 1 << 20;
constexpr int kBits = 64;
std::atomic<std::uint64_t> watched[kHighest / kBits];
std::atomic<int> words_used{0};
std::atomic<unsigned> depth{0};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void in_child() {
  depth.fetch_add(1, std::memory_order_relaxed);
  const int used = words_used.load(std::memory_order_relaxed);
  for (int word = 0; word < used; ++word) {
    std::uint64_t bits = watched[word].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) close(word * kBits + __builtin_ctzll(bits));
  }
}

// Also counts forks of a process that has watched nothing yet.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &in_child);

}  // namespace

void watch_descriptor(int fd) {
  if (fd < 0 || fd >= kHighest) return;
  const int word = fd / kBits;
  int used = words_used.load(std::memory_order_relaxed);
  while (used <= word && !words_used.compare_exchange_weak(used, word + 1)) {
  }
  watched[word].fetch_or(std::uint64_t{1} << (fd % kBits));
}

bool forget_descriptor(int fd) {
  if (fd < 0 || fd >= kHighest) return true;
  const std::uint64_t bit = std::uint64_t{1} << (fd % kBits);
  return (watched[fd / kBits].fetch_and(~bit) & bit) != 0;
}

unsigned fork_depth() { return depth.load(std::memory_order_relaxed); }

}  // namespace farandole::os
