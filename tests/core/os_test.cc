// Tests of os/: descriptors in forked children, sealed memory, poller, wake-ups, futex, threads.
// Touches os/.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "check.h"
#include "os/arena.h"
#include "os/clock.h"
#include "os/descriptor.h"
#include "os/fork.h"
#include "os/memory.h"
#include "os/poller.h"
#include "os/quota.h"

using namespace farandole;
using namespace farandole::os;

namespace {

// The body's return value becomes the exit status of a forked child.
int in_child(int (*body)()) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

bool open_here(int fd) { return fcntl(fd, F_GETFD) >= 0; }

}  // namespace

TEST(descriptor_closes_itself) {
  int raw = -1;
  {
    Wakeup wakeup;
    raw = wakeup.descriptor().get();
    CHECK(open_here(raw));
    CHECK((fcntl(raw, F_GETFD) & FD_CLOEXEC) != 0);
    Descriptor copy = wakeup.descriptor().duplicate();
    CHECK(copy.get() != raw);
    CHECK((fcntl(copy.get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK(!open_here(raw));
}

TEST(forked_children_close_registered_descriptors) {
  static int watched, plain;
  static unsigned depth;
  Wakeup wakeup;
  watched = wakeup.descriptor().get();
  plain = dup(watched);
  depth = fork_depth();
  const int result = in_child([] {
    if (open_here(watched)) return 1;
    if (!open_here(plain)) return 2;
    if (fork_depth() != depth + 1) return 3;
    return 0;
  });
  close(plain);
  CHECK_EQUAL(result, 0);
  CHECK_EQUAL(fork_depth(), depth);
  CHECK(open_here(watched));
}

TEST(a_child_does_not_close_a_reused_number) {
  static Descriptor* inherited;
  int ends[2];
  CHECK(pipe(ends) == 0);
  Descriptor first(ends[0]), second(ends[1]);
  inherited = &first;
  const int result = in_child([] {
    const int number = inherited->get();
    const int mine = open("/dev/null", O_RDONLY);  // takes the lowest free number
    if (mine != number && dup2(mine, number) != number) return 1;
    inherited->reset();  // as a destructor in the child would
    return open_here(number) ? 0 : 2;
  });
  CHECK_EQUAL(result, 0);
}

TEST(memory_is_shared_sealed_and_not_inherited) {
  static SharedMemory mine;
  mine = SharedMemory::create(8192);
  CHECK_EQUAL(mine.bytes(), 8192u);
  for (std::size_t i = 0; i < 8192; ++i) CHECK(mine.data()[i] == std::byte{0});
  SharedMemory seen = SharedMemory::open_read_only(mine.file().duplicate(), 8192);
  mine.data()[8191] = std::byte{7};
  CHECK(seen.data()[8191] == std::byte{7});
  CHECK(ftruncate(mine.file().get(), 0) != 0);
  CHECK(ftruncate(mine.file().get(), 16384) != 0);
  void* writable = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, mine.file().get(), 0);
  CHECK(writable == MAP_FAILED);  // F_SEAL_FUTURE_WRITE: Linux 5.1
  CHECK_THROWS(SharedMemory::open_read_only(mine.file().duplicate(), 4096), Failure);
  const int result = in_child([] {
    unsigned char resident = 0;
    return mincore(mine.data(), 4096, &resident) != 0 ? 0 : 1;  // ENOMEM: nothing is mapped there
  });
  CHECK_EQUAL(result, 0);
  mine = SharedMemory();
  CHECK(!mine);
}

namespace {

constexpr std::size_t kMebibyte = 1 << 20;

std::size_t allocated(const Arena& arena) {
  struct stat status{};
  CHECK_EQUAL(fstat(arena.memory().file().get(), &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

bool all_are(const std::byte* block, std::size_t bytes, int value) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (block[i] != std::byte(value)) return false;
  return true;
}

}  // namespace

TEST(an_arena_allocates_and_releases) {
  Arena arena;
  CHECK(arena.idle());
  std::byte* one = arena.allocate(3 * kMebibyte + 1);
  std::byte* two = arena.allocate(5 * kMebibyte);
  CHECK(one != nullptr && two != nullptr && arena.owns(one) && arena.owns(two));
  CHECK_EQUAL(static_cast<std::size_t>(two - one), 4 * kMebibyte);
  CHECK_EQUAL(allocated(arena) / kMebibyte, 9u);
  arena.release(one, 3 * kMebibyte + 1);
  CHECK(arena.allocate(5 * kMebibyte) > two);
  CHECK(arena.allocate(4 * kMebibyte) == one);
  CHECK(arena.allocate(0) == nullptr);
  CHECK(arena.allocate(300 * kMebibyte) == nullptr);
  CHECK(arena.allocate(243 * kMebibyte) == nullptr);  // 14 are allocated already
  CHECK(!arena.idle());
}

TEST(an_arena_keeps_some_memory_and_returns_the_rest_to_the_system) {
  Arena arena;
  std::byte* blocks[5];
  for (std::byte*& block : blocks) {
    block = arena.allocate(40 * kMebibyte);
    std::memset(block, 1, 40 * kMebibyte);
  }
  CHECK_EQUAL(allocated(arena) / kMebibyte, 200u);
  for (std::byte* block : blocks) arena.release(block, 40 * kMebibyte);
  CHECK_EQUAL(allocated(arena) / kMebibyte, 40u);
  std::byte* kept = arena.allocate(2 * kMebibyte);
  std::memset(kept, 2, 2 * kMebibyte);
  const Descriptor file = arena.memory().file().duplicate();
  arena.close();
  CHECK(!arena.memory().file());
  CHECK(all_are(kept, 2 * kMebibyte, 2));
  CHECK(arena.allocate(kMebibyte) == nullptr);
  struct stat status{};
  CHECK_EQUAL(fstat(file.get(), &status), 0);
  CHECK_EQUAL(static_cast<std::size_t>(status.st_blocks) * 512 / kMebibyte, 2u);
}

TEST(blocks_are_copied_for_a_forked_child) {
  int to_child[2], to_parent[2];
  constexpr std::size_t kBytes = 3 * kMebibyte;
  Arena arena;
  std::byte* block = arena.allocate(kBytes);
  std::byte* idle = arena.allocate(kMebibyte);
  arena.release(idle, kMebibyte);
  std::memset(block, 1, kBytes);
  CHECK_EQUAL(pipe(to_child), 0);
  CHECK_EQUAL(pipe(to_parent), 0);
  const pid_t child = fork();
  if (child == 0) {
    char word = 0;
    if (read(to_child[0], &word, 1) != 1) _exit(1);
    if (!all_are(block, kBytes, 1)) _exit(2);  // later writes of the parent must not show here
    unsigned char resident = 0;
    if (mincore(idle, 4096, &resident) == 0) _exit(3);
    std::memset(block, 3, kBytes);
    if (write(to_parent[1], "x", 1) != 1 || read(to_child[0], &word, 1) != 1) _exit(4);
    _exit(all_are(block, kBytes, 3) ? 0 : 5);
  }
  std::memset(block, 2, kBytes);
  char word = 0;
  CHECK_EQUAL(write(to_child[1], "x", 1), 1);
  CHECK_EQUAL(read(to_parent[0], &word, 1), 1);
  CHECK(all_are(block, kBytes, 2));
  arena.release(block, kBytes);  // and allocate it again
  std::memset(arena.allocate(kBytes), 4, kBytes);
  CHECK_EQUAL(write(to_child[1], "x", 1), 1);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  for (int end : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(end);
}

TEST(quotas_of_control_groups_count_as_cores) {
  std::string root = std::filesystem::temp_directory_path() / "farandole-quota-XXXXXX";
  CHECK(mkdtemp(root.data()) != nullptr);
  auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + "/" + file).parent_path());
    std::ofstream(root + "/" + file) << text << "\n";
  };
  auto cores = [&] { return quota_cores(root + "/cgroup", root); };
  CHECK(cores() == 0);  // no quota is set
  write("cgroup", "5:memory:/a\n0::/box/inner");
  write("box/inner/cpu.max", "max 100000");
  CHECK(cores() == 0);
  write("box/cpu.max", "250000 100000");
  CHECK(cores() == 2);
  write("cpu.max", "50000 100000");  // the smallest of all groups above counts
  CHECK(cores() == 1);
  write("cgroup", "5:cpu,cpuacct:/box\n1:cpuset:/other");
  write("cpu/box/cpu.cfs_quota_us", "-1");
  write("cpu/box/cpu.cfs_period_us", "100000");
  CHECK(cores() == 0);
  write("cpu/box/cpu.cfs_quota_us", "300000");
  CHECK(cores() == 3);
  std::filesystem::remove_all(root);
}

// A process that has an arena's file can punch holes into it, but cannot shrink it: mappings stay valid.
TEST(an_arena_cannot_shrink) {
  Arena arena;
  const Descriptor file = arena.memory().file().duplicate();
  CHECK(ftruncate(file.get(), 0) != 0 && ftruncate(file.get(), 1 << 30) != 0);
  std::byte* block = arena.allocate(kMebibyte);
  SharedMemory seen = SharedMemory::open_shared(file.duplicate(), arena.memory().bytes(), true);
  block[7] = std::byte{7};
  CHECK(seen.data()[7] == std::byte{7});
  CHECK_EQUAL(madvise(seen.data(), kMebibyte, MADV_REMOVE), 0);
  CHECK(block[7] == std::byte{0});
}

TEST(open_shared_accepts_memory_and_checks_its_seals) {
  const Descriptor file(memfd_create("test", MFD_CLOEXEC));
  CHECK(ftruncate(file.get(), 4096) == 0);
  CHECK_THROWS(SharedMemory::open_shared(file.duplicate(), 4096, true), Failure);
  CHECK(static_cast<bool>(SharedMemory::open_shared(file.duplicate(), 4096, false)));
  // Reading a file of a file system may block, so it is refused.
  const int own = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  struct stat status{};
  CHECK_EQUAL(fstat(own, &status), 0);
  try {
    SharedMemory::open_shared(Descriptor(own), static_cast<std::size_t>(status.st_size), false);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.error().code == Code::precondition);
    CHECK(std::string(failure.what()).find("is not memory") != std::string::npos);
  }
}

TEST(an_unsealed_file_is_refused) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(ftruncate(fd, 4096) == 0);
  CHECK_THROWS(SharedMemory::open_read_only(Descriptor(fd), 4096), Failure);
}

// In a child whose kernel seems to have no memfd_create, files in /dev/shm are used instead.
TEST(memory_without_memfd) {
  const int result = in_child([] {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program{4, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
      return 0;  // this sandbox allows no seccomp filters: nothing to test
    }
    if (access("/dev/shm", W_OK) != 0) return 0;
    try {
      SharedMemory mine = SharedMemory::create(4096);
      SharedMemory seen = SharedMemory::open_read_only(mine.file().duplicate(), 4096);
      mine.data()[5] = std::byte{9};
      return seen.data()[5] == std::byte{9} ? 0 : 1;
    } catch (const Failure&) {
      return 2;
    }
  });
  CHECK_EQUAL(result, 0);
}

TEST(running_out_of_descriptors_names_the_limit) {
  const int result = in_child([] {
    const rlimit none{3, 3};
    setrlimit(RLIMIT_NOFILE, &none);
    try {
      Poller poller;
    } catch (const Failure& failure) {
      const std::string text = failure.what();
      return failure.error().code == Code::no_memory && text.find("ulimit -n") != std::string::npos ? 0 : 1;
    }
    return 2;
  });
  CHECK_EQUAL(result, 0);
}

TEST(too_much_memory_says_what_to_do) {
  try {
    SharedMemory::create(std::size_t{1} << 60);
    CHECK(false);
  } catch (const Failure& failure) {
    CHECK(failure.error().code == Code::no_memory);
    CHECK(std::string(failure.what()).find("/dev/shm") != std::string::npos);
  }
}

TEST(an_allocation_fits_into_what_the_machine_has) {
  CHECK(can_allocate(0) && can_allocate(1 << 20));
  CHECK(!can_allocate(std::size_t{1} << 60));
  max_allocation = 4096;
  CHECK(can_allocate(4096) && !can_allocate(4097));
  max_allocation = std::numeric_limits<std::size_t>::max();
  CHECK(can_allocate(4097));
}

TEST(poller_reports_readable_and_writable) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  Descriptor mine(ends[0]), other(ends[1]);
  Poller poller;
  std::vector<Event> events;
  poller.add(mine.get(), 77);
  CHECK(poller.wait(0, events).empty());
  poller.change(mine.get(), 77, true);
  CHECK_EQUAL(poller.wait(0, events).size(), 1u);
  CHECK(events[0].key == 77 && events[0].writable && !events[0].readable);
  poller.change(mine.get(), 77, false);
  CHECK(write(other.get(), "x", 1) == 1);
  poller.wait(0, events);
  CHECK(events.size() == 1 && events[0].readable && !events[0].writable);
  other.reset();
  poller.wait(0, events);
  CHECK(events.size() == 1 && events[0].hung_up);
  poller.remove(mine.get());
  CHECK(poller.wait(0, events).empty());
}

TEST(a_wakeup_stays_readable_until_drained) {
  Poller poller;
  Wakeup wakeup;
  poller.add(wakeup.descriptor().get(), 1);
  std::vector<Event> events;
  wakeup.notify();
  wakeup.notify();
  CHECK_EQUAL(poller.wait(0, events).size(), 1u);
  wakeup.drain();
  CHECK(poller.wait(0, events).empty());
  wakeup.drain();  // nothing to drain; does not block
}

// Each side has its own socket: flags that one side sets do not affect the other.
TEST(a_wakeup_sender_never_blocks) {
  Poller poller;
  PeerWakeup wakeup;
  WakeupSender sender(wakeup.take_sender());
  poller.add(wakeup.descriptor().get(), 1);
  std::vector<Event> events;
  CHECK(poller.wait(0, events).empty());
  for (int i = 0; i < 1000; ++i) sender.notify();  // nobody drains: the buffer is full, and notify() does not wait
  CHECK_EQUAL(poller.wait(0, events).size(), 1u);
  wakeup.drain();
  CHECK(poller.wait(0, events).empty());  // all notifications were drained
  for (const int fd : {wakeup.descriptor().get(), sender.descriptor().get()})
    CHECK_EQUAL(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK), 0);
  wakeup.drain();  // nothing to drain; does not block
  for (int i = 0; i < 1000; ++i) sender.notify();
  CHECK_EQUAL(poller.wait(0, events).size(), 1u);
  wakeup.drain();
  shutdown(sender.descriptor().get(), SHUT_RDWR);
  sender.notify();  // raises no signal
  CHECK(poller.wait(0, events).empty());
  wakeup = PeerWakeup();
  sender.notify();
}

TEST(a_wakeup_sender_must_be_a_datagram_socket) {
  int pipe_ends[2], stream_ends[2];
  CHECK_EQUAL(pipe(pipe_ends), 0);
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, stream_ends), 0);
  Wakeup eventfd;
  for (const int fd : {dup(eventfd.descriptor().get()), pipe_ends[0], pipe_ends[1], stream_ends[0], stream_ends[1]})
    CHECK_THROWS(WakeupSender(Descriptor(fd)), Failure);
}

TEST(a_process_can_be_watched) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  Descriptor watched = watch_process(child);
  if (watched) {
    Poller poller;
    poller.add(watched.get(), 3);
    std::vector<Event> events;
    CHECK(poller.wait(0, events).empty());
    kill(child, SIGKILL);
    CHECK_EQUAL(poller.wait(5000, events).size(), 1u);
  } else {
    kill(child, SIGKILL);
  }
  waitpid(child, nullptr, 0);
}

TEST(threads_block_signals_and_futex_wakes) {
  std::atomic<std::uint32_t> word{0};
  std::atomic<bool> blocked{false};
  std::thread thread = start_thread("a name that is too long", [&] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGSEGV) == 0;
    word = 1;
    futex_wake_all(&word);
  });
  const std::int64_t begin = now_ns();
  while (word.load() == 0) futex_wait(&word, 0, 1'000'000'000);
  thread.join();
  CHECK(blocked);
  CHECK(now_ns() - begin < 5'000'000'000);
  futex_wait(&word, 1, 1'000'000);          // ends by its timeout
  futex_wait(&word, 0, 1'000'000'000'000);  // another value: returns at once
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  CHECK(sigismember(&mask, SIGINT) == 0);
  CHECK(usable_cores() >= 1);
}
