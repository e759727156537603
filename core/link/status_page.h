// The status page: each rank has one, and tells its local peers there whether it sleeps and must be woken.
// Touches os/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "os/memory.h"
#include "os/poller.h"

namespace farandole::link {

// Lies in shared memory; only its owner writes it.
struct StatusPageLayout {
  std::uint64_t magic;
  std::uint64_t nonce;  // also sent in `hello`: the same value here proves that both ranks see the same memory
  std::uint32_t generation;
  std::uint32_t rank;
  alignas(64) std::atomic<std::uint32_t> sleeping;  // a Sleep
  std::atomic<std::int32_t> core;                   // where its driver ran last; -1 unknown
};
// `waiting`: wake it for anything. `idle`: nothing is pending there, so it checks everything when it next has work, and
// only urgent news wakes it. So a rank that computes is not woken by ranks that are ahead.
enum class Sleep : std::uint32_t { awake = 0, waiting = 1, idle = 2 };
inline constexpr std::uint64_t kStatusPageMagic = 0x656c6f646e617261;  // "arandole"
inline constexpr std::size_t kStatusPageBytes = 4096;

// This rank's own page. The order announce_sleep(), check everything once more, wait, misses no wake-up: publishers
// store first and then read `sleeping`, with a full fence between the two on both sides.
class StatusPage {
 public:
  StatusPage(std::uint32_t generation, int rank, std::uint64_t nonce);
  const os::SharedMemory& memory() const { return memory_; }
  void announce_sleep(Sleep how);
  void announce_awake();
  void set_core(int core) { page_->core.store(core, std::memory_order_relaxed); }

 private:
  os::SharedMemory memory_;
  StatusPageLayout* page_;
};

// A local peer: its status page, and the means to wake it.
class LocalPeer {
 public:
  // Throws Failure(precondition) when magic, nonce, generation or rank differ from what the peer announced, or when
  // `wakeup` is not a wake-up socket.
  LocalPeer(os::Descriptor page, os::Descriptor wakeup, std::uint32_t generation, int rank, std::uint64_t nonce);
  int rank() const { return rank_; }
  // Call it after publishing; wakes the peer only when it sleeps. The caller has issued a seq_cst fence since its
  // store.
  void notify(bool urgent = false) const {
    auto sleep = static_cast<Sleep>(page_->sleeping.load(std::memory_order_relaxed));
    if (sleep == Sleep::waiting || (urgent && sleep == Sleep::idle)) wakeup_.notify();
  }
  // The core where its driver ran last; -1 when it sleeps.
  int core() const {
    bool awake = static_cast<Sleep>(page_->sleeping.load(std::memory_order_relaxed)) == Sleep::awake;
    return awake ? page_->core.load(std::memory_order_relaxed) : -1;
  }

 private:
  os::SharedMemory memory_;
  const StatusPageLayout* page_;
  os::WakeupSender wakeup_;
  int rank_;
};

}  // namespace farandole::link
