// Arenas: blocks, and what a fork makes of them.
// Touches the operating system. The registry is global because pthread_atfork knows no object.
#include "os/arena.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/error.h"

namespace farandole::os {

namespace {

constexpr std::size_t kMost = 64;  // of a process; tests have many engines in one
Arena* arenas[kMost];
std::mutex mutex;  // of all arenas, and of the registry: held from before a fork until the child has its copies

std::size_t units_of(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit; }

}  // namespace

// A child writes to its memory without anybody else's seeing it, and sees what was there at the fork: so it needs
// copies of its own, and the parent goes on when they are made. Nothing here allocates.
struct Forks {
  static inline int ends[2] = {-1, -1};  // of a pipe that is closed, on the child's side, when it has its copies

  static void before() {
    mutex.lock();
    const bool any = std::any_of(std::begin(arenas), std::end(arenas),
                                 [](const Arena* arena) { return arena != nullptr && arena->lent_.any(); });
    // Without descriptors left nobody waits.
    if (!any || pipe2(ends, O_CLOEXEC) != 0) ends[0] = ends[1] = -1;
  }
  static void in_parent() {
    if (ends[0] >= 0) {
      constexpr int kLongestMs = 60'000;
      ::close(ends[1]);  // the last, if there is no child
      pollfd copied{ends[0], POLLIN, 0};
      while (poll(&copied, 1, kLongestMs) < 0 && errno == EINTR) {
      }
      ::close(ends[0]);
    }
    mutex.unlock();
  }
  static void in_child() {
    for (Arena*& arena : arenas) {
      if (arena != nullptr) arena->leave_to_child();
      arena = nullptr;
    }
    for (int end : ends)
      if (end >= 0) ::close(end);
    mutex.unlock();
  }
};

namespace {

[[maybe_unused]] const int registered = pthread_atfork(&Forks::before, &Forks::in_parent, &Forks::in_child);

}  // namespace

Arena::Arena() : memory_(SharedMemory::reserve(kBytes)) {
  std::lock_guard lock(mutex);
  Arena** place = std::find(std::begin(arenas), std::end(arenas), nullptr);
  if (place == std::end(arenas)) throw Failure(Code::no_memory, "too many arenas in one process");
  *place = this;
}

Arena::~Arena() {
  std::lock_guard lock(mutex);
  std::replace(std::begin(arenas), std::end(arenas), this, static_cast<Arena*>(nullptr));
}

std::byte* Arena::lend(std::size_t bytes) {
  const std::size_t units = units_of(bytes, kUnit);
  std::lock_guard lock(mutex);
  if (!memory_.file() || units == 0 || units > kUnits) return nullptr;
  const std::size_t first = find(units);
  if (first == kUnits || !fill(first, units)) return nullptr;
  for (std::size_t unit = first; unit < first + units; ++unit) lent_.set(unit);
  return memory_.data() + first * kUnit;
}

// The lowest that fits: what was used before is used again.
std::size_t Arena::find(std::size_t units) const {
  std::size_t run = 0;
  for (std::size_t unit = 0; unit < kUnits; ++unit) {
    run = lent_[unit] ? 0 : run + 1;
    if (run == units) return unit + 1 - units;
  }
  return kUnits;
}

bool Arena::fill(std::size_t first, std::size_t units) {
  for (std::size_t unit = first; unit < first + units; ++unit) {
    if (filled_[unit]) continue;
    if (memory_.fill(unit * kUnit, kUnit) != 0) {
      empty(first, units);  // others need what little there is
      return false;
    }
    filled_.set(unit);
  }
  return true;
}

void Arena::take_back(const std::byte* block, std::size_t bytes) {
  const auto first = static_cast<std::size_t>(block - memory_.data()) / kUnit;
  const std::size_t units = units_of(bytes, kUnit);
  std::lock_guard lock(mutex);
  for (std::size_t unit = first; unit < first + units; ++unit) lent_.reset(unit);
  if (!memory_.file() || (filled_ & ~lent_).count() > kKept) empty(first, units);
}

void Arena::empty(std::size_t first, std::size_t units) {
  if (madvise(memory_.data() + first * kUnit, units * kUnit, MADV_REMOVE) != 0) return;
  for (std::size_t unit = first; unit < first + units; ++unit) filled_.reset(unit);
}

bool Arena::idle() const {
  std::lock_guard lock(mutex);
  return lent_.none();
}

void Arena::close() {
  std::lock_guard lock(mutex);
  memory_.close_file();
  for (std::size_t unit = 0; unit < kUnits; ++unit)
    if (filled_[unit] && !lent_[unit]) empty(unit, 1);
}

void Arena::leave_to_child() {
  std::byte* data = memory_.data();
  for (std::size_t unit = 0; unit < kUnits; ++unit) {
    std::byte* place = data + unit * kUnit;
    if (!lent_[unit]) {
      munmap(place, kUnit);
      continue;
    }
    void* copy = mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) continue;  // better shared than gone
    std::memcpy(copy, place, kUnit);
    if (mremap(copy, kUnit, kUnit, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) munmap(copy, kUnit);
  }
}

}  // namespace farandole::os
