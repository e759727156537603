// The board: creating one's own page and checking a neighbour's.
// Touches os/.
#include "link/board.h"

#include <new>
#include <string>

#include "base/error.h"

namespace farandole::link {

Board::Board(std::uint32_t generation, int rank, std::uint64_t nonce)
    : memory_(os::SharedMemory::create(kBoardBytes)), page_(new (memory_.data()) BoardPage) {
  page_->magic = kBoardMagic;
  page_->nonce = nonce;
  page_->generation = generation;
  page_->rank = static_cast<std::uint32_t>(rank);
  page_->sleeping.store(0, std::memory_order_relaxed);
  page_->core.store(-1, std::memory_order_relaxed);
}

void Board::sleep_soon(Sleep how) {
  page_->sleeping.store(static_cast<std::uint32_t>(how), std::memory_order_relaxed);
  // Pairs with the fence of whoever publishes: either the last look of the sleeper sees the bytes, or they see
  // `sleeping`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Board::awake() { page_->sleeping.store(0, std::memory_order_relaxed); }

Neighbour::Neighbour(os::Descriptor board, os::Descriptor rope, std::uint32_t generation, int rank, std::uint64_t nonce)
    : memory_(os::SharedMemory::open(std::move(board), kBoardBytes)),
      page_(reinterpret_cast<const BoardPage*>(memory_.data())),
      bell_(std::move(rope)),
      rank_(rank) {
  memory_.close_file();
  if (page_->magic != kBoardMagic || page_->nonce != nonce || page_->generation != generation ||
      page_->rank != static_cast<std::uint32_t>(rank)) {
    throw Failure(Code::precondition,
                  "the memory page received from rank " + std::to_string(rank) +
                      " is not the one that it described: the two ranks do not share memory",
                  rank);
  }
}

}  // namespace farandole::link
