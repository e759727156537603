// Shared memory files: memfd with seals, or an unlinked file in /dev/shm on kernels without it.
// Touches the operating system.
#include "os/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "os/failure.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace farandole::os {

namespace {

int create_memfd() { return static_cast<int>(syscall(SYS_memfd_create, "farandole", MFD_CLOEXEC | MFD_ALLOW_SEALING)); }

// The kernel, or a sandbox around this process, does not offer memory files.
bool memfd_unavailable(int error) { return error == ENOSYS || error == EPERM; }

int create_in_dev_shm() { return open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600); }

[[noreturn]] void fail_to_allocate(std::size_t bytes, int error) {
  const std::string what = "cannot allocate " + std::to_string((bytes + 1023) >> 10) + " KiB of shared memory: ";
  if (error == EMFILE || error == ENFILE) fail("cannot create shared memory", error);
  throw Failure(Code::no_memory, what + std::generic_category().message(error) +
                                     ": raise the memory limit of the container, or the size of /dev/shm "
                                     "(docker run --shm-size)");
}

Descriptor create_file(std::size_t bytes) {
  int fd = create_memfd();
  if (fd < 0 && memfd_unavailable(errno)) fd = create_in_dev_shm();
  if (fd < 0) fail_to_allocate(bytes, errno);
  Descriptor file(fd);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail_to_allocate(bytes, errno);
  return file;
}

std::byte* map(int fd, std::size_t bytes, int protection) {
  void* data = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_to_allocate(bytes, errno);
  return static_cast<std::byte*>(data);
}

std::byte* map_for_this_process(int fd, std::size_t bytes, int protection) {
  std::byte* data = map(fd, bytes, protection);
  madvise(data, bytes, MADV_DONTFORK);
  return data;
}

// Called when the only writable mapping exists. F_SEAL_FUTURE_WRITE needs Linux 5.1. A file that cannot be sealed fails
// with EINVAL or, in /dev/shm, with EPERM.
void seal(int fd) {
  fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL);
}

// Others map this file, so its size may not change; holes can still be punched into it.
void seal_size(int fd) { fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL); }

// A file that is not memory could belong to a file system in another process, which may never answer. Anyone who can
// shrink a mapped file can kill this process with SIGBUS.
const char* problem_with(int fd, bool sealed) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (!sealed || (seals & F_SEAL_SHRINK) != 0)) return nullptr;
  // A file without seals is accepted only where this process could not create sealed files either.
  const int probe = create_memfd();
  if (probe < 0 && memfd_unavailable(errno)) return nullptr;
  close(probe);
  return seals < 0 ? "is not memory" : "is not sealed against shrinking";
}

// The kernel's estimate; without one, all memory of the machine.
std::size_t available_bytes() {
  std::size_t kibibytes = 0;
  std::ifstream table("/proc/meminfo");
  for (std::string line; std::getline(table, line);) {
    std::size_t found = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %zu", &found) == 1 ||
        std::sscanf(line.c_str(), "SwapFree: %zu", &found) == 1)
      kibibytes += found;
  }
  if (kibibytes > 0) return kibibytes << 10;
  return machine_memory();
}

}  // namespace

std::size_t machine_memory() {
  return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

bool can_allocate(std::size_t bytes) {
  constexpr std::size_t kSmall = 64 << 20;  // checking takes longer than the risk is worth
  return bytes <= max_allocation && (bytes <= kSmall || bytes <= available_bytes());
}

SharedMemory SharedMemory::create(std::size_t bytes) {
  // A memory file has no limit of its own. More than the machine has would start the OOM killer.
  if (!can_allocate(bytes)) fail_to_allocate(bytes, ENOMEM);
  SharedMemory memory;
  memory.file_ = create_file(bytes);
  const int error = memory.populate(0, bytes);
  if (error != 0) fail_to_allocate(bytes, error);
  memory.data_ = map_for_this_process(memory.file_.get(), bytes, PROT_READ | PROT_WRITE);
  memory.bytes_ = bytes;
  seal(memory.file_.get());
  return memory;
}

SharedMemory SharedMemory::reserve(std::size_t bytes) {
  SharedMemory memory;
  memory.file_ = create_file(bytes);
  seal_size(memory.file_.get());
  memory.data_ = map(memory.file_.get(), bytes, PROT_READ | PROT_WRITE);
  memory.bytes_ = bytes;
  return memory;
}

int SharedMemory::populate(std::size_t offset, std::size_t bytes) const {
  int error = 0;
  do {
    error = posix_fallocate(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error;
}

SharedMemory SharedMemory::open_read_only(Descriptor file, std::size_t bytes) {
  return adopt(std::move(file), bytes, false);
}

SharedMemory SharedMemory::open_writable(Descriptor file, std::size_t bytes) {
  return adopt(std::move(file), bytes, true);
}

SharedMemory SharedMemory::open_shared(Descriptor file, std::size_t bytes, bool sealed) {
  return adopt(std::move(file), bytes, true, sealed);
}

SharedMemory SharedMemory::adopt(Descriptor file, std::size_t bytes, bool writable, bool sealed) {
  if (const char* problem = problem_with(file.get(), sealed); problem != nullptr)
    throw Failure(Code::precondition, std::string("a shared memory file ") + problem);
  struct stat status{};
  if (fstat(file.get(), &status) != 0) fail("cannot read the size of a shared memory file", errno);
  if (!S_ISREG(status.st_mode) || static_cast<std::size_t>(status.st_size) != bytes) {
    throw Failure(Code::precondition, "a shared memory file has " + std::to_string(status.st_size) + " bytes where " +
                                          std::to_string(bytes) + " were announced");
  }
  SharedMemory memory;
  memory.data_ = map_for_this_process(file.get(), bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
  memory.bytes_ = bytes;
  memory.file_ = std::move(file);
  return memory;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      file_(std::move(other.file_)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    file_ = std::move(other.file_);
  }
  return *this;
}

void prefer_huge_pages(void* memory, std::size_t bytes) {
  // Only a hint: a kernel without huge pages refuses it, and nothing is lost.
  (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
}

void collapse_into_huge_pages(void* memory, std::size_t bytes) {
#ifndef MADV_COLLAPSE
  constexpr int MADV_COLLAPSE = 25;  // missing in older C libraries
#endif
  auto begin = (reinterpret_cast<std::uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);
}

}  // namespace farandole::os
