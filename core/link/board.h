// The board: one page per rank where it tells its neighbours on the host whether it sleeps and must be rung.
// Touches os/.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "os/memory.h"
#include "os/poller.h"

namespace farandole::link {

// Lies in shared memory; written by its owner alone.
struct BoardPage {
  std::uint64_t magic;
  std::uint64_t nonce;  // also sent in `hello`: reading it back proves that both look at the same memory
  std::uint32_t generation;
  std::uint32_t rank;
  alignas(64) std::atomic<std::uint32_t> sleeping;  // a Sleep
  std::atomic<std::int32_t> core;                   // where its driver was seen last; -1 unknown
};
// Who sleeps with nothing pending looks at everything when it next has something to do; only what cannot wait for that
// rings it. So ranks that compute are not woken by those that are ahead.
enum class Sleep : std::uint32_t { awake = 0, waiting = 1, idle = 2 };
inline constexpr std::uint64_t kBoardMagic = 0x656c6f646e617261;  // "arandole"
inline constexpr std::size_t kBoardBytes = 4096;

// Mine. `sleep_soon` then looking once more at everything, then waiting, loses no ring: publishers store first, then
// read `sleeping`, with a full fence in between on both sides.
class Board {
 public:
  Board(std::uint32_t generation, int rank, std::uint64_t nonce);
  const os::SharedMemory& memory() const { return memory_; }
  void sleep_soon(Sleep how);
  void awake();
  void on_core(int core) { page_->core.store(core, std::memory_order_relaxed); }

 private:
  os::SharedMemory memory_;
  BoardPage* page_;
};

// A neighbour's board and doorbell.
class Neighbour {
 public:
  // Throws Failure(precondition) when magic, nonce, generation or rank are not what the neighbour said, or the rope of
  // its doorbell is none.
  Neighbour(os::Descriptor board, os::Descriptor rope, std::uint32_t generation, int rank, std::uint64_t nonce);
  int rank() const { return rank_; }
  // Call after publishing; rings only when the neighbour sleeps. The caller has issued a seq_cst fence since its store.
  void notify(bool urgent = false) const {
    auto sleep = static_cast<Sleep>(page_->sleeping.load(std::memory_order_relaxed));
    if (sleep == Sleep::waiting || (urgent && sleep == Sleep::idle)) bell_.ring();
  }
  // Where its driver was seen last; -1 when it sleeps.
  int core() const {
    bool awake = static_cast<Sleep>(page_->sleeping.load(std::memory_order_relaxed)) == Sleep::awake;
    return awake ? page_->core.load(std::memory_order_relaxed) : -1;
  }

 private:
  os::SharedMemory memory_;
  const BoardPage* page_;
  os::Rope bell_;
  int rank_;
};

}  // namespace farandole::link
