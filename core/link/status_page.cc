// The status page: creating this rank's own, and checking a local peer's.
// Touches base/ and os/.
#include "link/status_page.h"

#include <new>
#include <string>

#include "base/error.h"

namespace farandole::link {

StatusPage::StatusPage(std::uint32_t generation, int rank, std::uint64_t nonce)
    : memory_(os::SharedMemory::create(kStatusPageBytes)), page_(new (memory_.data()) StatusPageLayout) {
  page_->magic = kStatusPageMagic;
  page_->nonce = nonce;
  page_->generation = generation;
  page_->rank = static_cast<std::uint32_t>(rank);
  page_->sleeping.store(0, std::memory_order_relaxed);
  page_->core.store(-1, std::memory_order_relaxed);
}

void StatusPage::announce_sleep(Sleep how) {
  page_->sleeping.store(static_cast<std::uint32_t>(how), std::memory_order_relaxed);
  // Pairs with the fence of the publisher: either this rank's last check sees the bytes, or the publisher sees
  // `sleeping`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void StatusPage::announce_awake() { page_->sleeping.store(0, std::memory_order_relaxed); }

LocalPeer::LocalPeer(os::Descriptor page, os::Descriptor wakeup, std::uint32_t generation, int rank,
                     std::uint64_t nonce)
    : memory_(os::SharedMemory::open_read_only(std::move(page), kStatusPageBytes)),
      page_(reinterpret_cast<const StatusPageLayout*>(memory_.data())),
      wakeup_(std::move(wakeup)),
      rank_(rank) {
  memory_.close_file();
  if (page_->magic != kStatusPageMagic || page_->nonce != nonce || page_->generation != generation ||
      page_->rank != static_cast<std::uint32_t>(rank)) {
    throw Failure(Code::precondition,
                  "the shared memory page from rank " + std::to_string(rank) +
                      " does not have the content that the rank announced: the two ranks cannot share memory",
                  rank);
  }
}

}  // namespace farandole::link
