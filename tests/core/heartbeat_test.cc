// The heartbeat: counts while the process runs, detects that its agent's counter has stopped, calls its guard once.
// Touches os/ and group/.
#include "group/heartbeat.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "os/clock.h"

namespace {

using farandole::Heartbeat;
using farandole::os::Descriptor;

struct File {
  explicit File(bool sealed = true) : fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    CHECK(ftruncate(fd, Heartbeat::kBytes) == 0);
    if (sealed) CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    word = static_cast<std::atomic<std::uint64_t>*>(
        mmap(nullptr, Heartbeat::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  }
  ~File() {
    munmap(word, Heartbeat::kBytes);
    close(fd);
  }
  Descriptor copy() const { return Descriptor(dup(fd)); }
  int fd;
  std::atomic<std::uint64_t>* word;
};

template <class Done>
bool within(int ms, Done done) {
  for (int waited = 0; waited < ms && !done(); waited += 2) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: between two looks
  }
  return done();
}

}  // namespace

TEST(a_heartbeat_counts_up_and_ends_with_zero) {
  File mine, theirs;
  {
    Heartbeat heartbeat(mine.copy(), theirs.copy(), 5);
    CHECK(within(5000, [&] { return *mine.word >= 3; }));
  }
  CHECK(*mine.word == 0);
}

TEST(the_guard_is_called_once_when_the_agent_is_silent) {
  File mine, theirs;
  std::atomic<int> called{0};
  std::atomic<bool> beat{true};
  std::thread agent([&] {
    while (beat) {
      *theirs.word = farandole::os::now_ns() / 1'000'000;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: the agent's beat
    }
  });
  Heartbeat heartbeat(mine.copy(), theirs.copy(), 20);
  const std::uint64_t began = *mine.word;
  heartbeat.guard(1000, [&] { ++called; });
  CHECK(within(30'000, [&] { return *mine.word >= began + 75; }));  // it has checked for 1.5 s
  CHECK(called == 0);
  beat = false;
  agent.join();
  CHECK(within(10'000, [&] { return called == 1; }));
  CHECK(heartbeat.silence_ms() >= 1000);
  const std::uint64_t then = *mine.word;
  CHECK(within(30'000, [&] { return *mine.word >= then + 5; }));  // it has checked again
  CHECK(called == 1);
  heartbeat.guard(0, nullptr);
  *theirs.word = farandole::os::now_ns() / 1'000'000 + 1000;
  CHECK(within(5000, [&] { return heartbeat.silence_ms() < 1000; }));
}

TEST(a_removed_guard_is_not_called) {
  File mine, theirs;
  std::atomic<int> called{0};
  Heartbeat heartbeat(mine.copy(), theirs.copy(), 5);
  heartbeat.guard(100'000, [&] { ++called; });
  heartbeat.guard(0, nullptr);
  const std::uint64_t then = *mine.word;
  CHECK(within(30'000, [&] { return *mine.word >= then + 10; }));  // it has checked several times
  CHECK(called == 0);
}

TEST(without_an_agent_the_guard_is_not_called) {
  File mine;
  std::atomic<int> called{0};
  Heartbeat heartbeat(mine.copy(), Descriptor(), 5);
  heartbeat.guard(10, [&] { ++called; });
  CHECK(within(5000, [&] { return *mine.word >= 5; }));
  CHECK(called == 0 && heartbeat.silence_ms() == 0);
}

TEST(a_file_that_could_shrink_is_refused) {
  File mine(false);
  bool refused = false;
  try {
    Heartbeat heartbeat(mine.copy(), Descriptor(), 5);
  } catch (const farandole::Failure&) {
    refused = true;
  }
  CHECK(refused);
}
