// Time, threads and futexes on Linux.
// Touches the operating system.
#include "os/clock.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "os/quota.h"

namespace farandole::os {

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::int64_t epoch_us() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return std::int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
}

void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected, std::int64_t timeout_ns) {
  if (timeout_ns <= 0) return;
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000);
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &timeout, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

std::thread start_thread(const char* name, std::function<void()> body) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  // A fault of this thread itself must reach the crash reporters.
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);  // the new thread inherits the mask from its first instruction
  try {
    std::thread thread([label = std::string(name).substr(0, 15), run = std::move(body)] {
      pthread_setname_np(pthread_self(), label.c_str());
      run();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Failure(Code::no_memory, std::string("cannot start a thread: ") + error.what() +
                                       ": raise `ulimit -u` or the container's limit of processes");
  }
}

namespace {

// The affinity mask of the calling thread, whatever its size in the kernel.
class Mask {
 public:
  Mask() {
    for (int cores = 1024; cores <= (1 << 18); cores *= 4) {
      mask_.reset(CPU_ALLOC(cores));
      bytes_ = CPU_ALLOC_SIZE(cores);
      if (mask_ == nullptr || sched_getaffinity(0, bytes_, mask_.get()) == 0) return;
    }
    mask_.reset();
  }
  int count() const { return mask_ == nullptr ? 0 : CPU_COUNT_S(bytes_, mask_.get()); }
  void clear(int core) {
    if (mask_ != nullptr && core >= 0) CPU_CLR_S(static_cast<std::size_t>(core), bytes_, mask_.get());
  }
  bool apply() const { return sched_setaffinity(0, bytes_, mask_.get()) == 0; }

 private:
  struct Free {
    void operator()(cpu_set_t* mask) const { CPU_FREE(mask); }
  };
  std::unique_ptr<cpu_set_t, Free> mask_;
  std::size_t bytes_ = 0;
};

}  // namespace

int usable_cores() {
  int count = Mask().count();
  if (count <= 0) count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int quota = quota_cores();
  return quota > 0 ? std::min(count, quota) : count;
}

int current_core() { return sched_getcpu(); }

bool avoid_cores(const std::vector<int>& taken) {
  const Mask all;
  Mask free;
  for (int core : taken) free.clear(core);
  return free.count() > 0 && free.apply() && all.apply();
}

}  // namespace farandole::os
