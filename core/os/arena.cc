// Arenas: allocation of blocks, and copies for forked children.
// Touches the operating system. The registry is global because the handlers of pthread_atfork have no arguments.
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

constexpr std::size_t kMaxArenas = 64;  // of one process; tests run many engines in one process
Arena* arenas[kMaxArenas];
std::mutex mutex;  // guards all arenas and the registry; held from before a fork until the child has its copies

std::size_t units_of(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit; }

}  // namespace

// A child must not write to memory that other ranks see, and must keep the contents of the time of the fork. So it
// copies the blocks, and the parent waits until the copies exist. Nothing here allocates on the heap.
struct ForkHandlers {
  static inline int ends[2] = {-1, -1};  // of a pipe; the child closes its ends when it has its copies

  static void before() {
    mutex.lock();
    const bool any_block = std::any_of(std::begin(arenas), std::end(arenas),
                                       [](const Arena* arena) { return arena != nullptr && arena->allocated_.any(); });
    // Without a free descriptor the parent does not wait.
    if (!any_block || pipe2(ends, O_CLOEXEC) != 0) ends[0] = ends[1] = -1;
  }
  static void in_parent() {
    if (ends[0] >= 0) {
      constexpr int kTimeoutMs = 60'000;
      ::close(ends[1]);  // so that the poll ends at once if the fork has failed
      pollfd copied{ends[0], POLLIN, 0};
      while (poll(&copied, 1, kTimeoutMs) < 0 && errno == EINTR) {
      }
      ::close(ends[0]);
    }
    mutex.unlock();
  }
  static void in_child() {
    for (Arena*& arena : arenas) {
      if (arena != nullptr) arena->copy_for_child();
      arena = nullptr;
    }
    for (int end : ends)
      if (end >= 0) ::close(end);
    mutex.unlock();
  }
};

namespace {

[[maybe_unused]] const int registered =
    pthread_atfork(&ForkHandlers::before, &ForkHandlers::in_parent, &ForkHandlers::in_child);

}  // namespace

Arena::Arena() : memory_(SharedMemory::reserve(kBytes)) {
  std::lock_guard lock(mutex);
  Arena** free_entry = std::find(std::begin(arenas), std::end(arenas), nullptr);
  if (free_entry == std::end(arenas))
    throw Failure(Code::no_memory, "a process can have at most " + std::to_string(kMaxArenas) +
                                       " engines: shut one down before you start another");
  *free_entry = this;
}

Arena::~Arena() {
  std::lock_guard lock(mutex);
  std::replace(std::begin(arenas), std::end(arenas), this, static_cast<Arena*>(nullptr));
}

std::byte* Arena::allocate(std::size_t bytes) {
  const std::size_t units = units_of(bytes, kUnit);
  std::lock_guard lock(mutex);
  if (!memory_.file() || units == 0 || units > kUnits) return nullptr;
  const std::size_t first = find_free(units);
  if (first == kUnits || !populate(first, units)) return nullptr;
  for (std::size_t unit = first; unit < first + units; ++unit) allocated_.set(unit);
  return memory_.data() + first * kUnit;
}

// The first unit of the lowest free run, so that memory that was used before is reused first. kUnits if there is none.
std::size_t Arena::find_free(std::size_t units) const {
  std::size_t run = 0;
  for (std::size_t unit = 0; unit < kUnits; ++unit) {
    run = allocated_[unit] ? 0 : run + 1;
    if (run == units) return unit + 1 - units;
  }
  return kUnits;
}

bool Arena::populate(std::size_t first, std::size_t units) {
  for (std::size_t unit = first; unit < first + units; ++unit) {
    if (populated_[unit]) continue;
    if (memory_.populate(unit * kUnit, kUnit) != 0) {
      depopulate(first, units);  // memory is low: others may use these pages
      return false;
    }
    populated_.set(unit);
  }
  return true;
}

void Arena::release(const std::byte* block, std::size_t bytes) {
  const auto first = static_cast<std::size_t>(block - memory_.data()) / kUnit;
  const std::size_t units = units_of(bytes, kUnit);
  std::lock_guard lock(mutex);
  for (std::size_t unit = first; unit < first + units; ++unit) allocated_.reset(unit);
  if (!memory_.file() || (populated_ & ~allocated_).count() > kMaxIdle) depopulate(first, units);
}

void Arena::depopulate(std::size_t first, std::size_t units) {
  if (madvise(memory_.data() + first * kUnit, units * kUnit, MADV_REMOVE) != 0) return;
  for (std::size_t unit = first; unit < first + units; ++unit) populated_.reset(unit);
}

bool Arena::idle() const {
  std::lock_guard lock(mutex);
  return allocated_.none();
}

void Arena::close() {
  std::lock_guard lock(mutex);
  memory_.close_file();
  for (std::size_t unit = 0; unit < kUnits; ++unit)
    if (populated_[unit] && !allocated_[unit]) depopulate(unit, 1);
}

void Arena::copy_for_child() {
  std::byte* data = memory_.data();
  for (std::size_t unit = 0; unit < kUnits; ++unit) {
    std::byte* address = data + unit * kUnit;
    if (!allocated_[unit]) {
      munmap(address, kUnit);
      continue;
    }
    void* copy = mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) continue;  // then the child shares this unit with its parent, which is better than none
    std::memcpy(copy, address, kUnit);
    if (mremap(copy, kUnit, kUnit, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) munmap(copy, kUnit);
  }
}

}  // namespace farandole::os
