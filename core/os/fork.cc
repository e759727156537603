// The registry of descriptors that forked children close. It has fixed memory and is lock-free, because the child of a
// process with many threads may neither allocate nor take a lock.
// Touches the operating system.
#include "os/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace farandole::os {

namespace {

// One bit per descriptor number. Untouched pages cost nothing. Descriptors above this limit are rare and still
// close-on-exec.
constexpr int kMaxRegistered = 1 << 20;
constexpr int kBits = 64;
std::atomic<std::uint64_t> registered_bits[kMaxRegistered / kBits];
std::atomic<int> entries_used{0};
std::atomic<unsigned> depth{0};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void in_child() {
  depth.fetch_add(1, std::memory_order_relaxed);
  const int used = entries_used.load(std::memory_order_relaxed);
  for (int entry = 0; entry < used; ++entry) {
    std::uint64_t bits = registered_bits[entry].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) close(entry * kBits + __builtin_ctzll(bits));
  }
}

// This handler also counts forks of a process that has registered nothing yet.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &in_child);

}  // namespace

void register_descriptor(int fd) {
  if (fd < 0 || fd >= kMaxRegistered) return;
  const int entry = fd / kBits;
  int used = entries_used.load(std::memory_order_relaxed);
  while (used <= entry && !entries_used.compare_exchange_weak(used, entry + 1)) {
  }
  registered_bits[entry].fetch_or(std::uint64_t{1} << (fd % kBits));
}

bool unregister_descriptor(int fd) {
  if (fd < 0 || fd >= kMaxRegistered) return true;
  const std::uint64_t bit = std::uint64_t{1} << (fd % kBits);
  return (registered_bits[fd / kBits].fetch_and(~bit) & bit) != 0;
}

unsigned fork_depth() { return depth.load(std::memory_order_relaxed); }

}  // namespace farandole::os
