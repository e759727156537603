// A process that has opened the stand-ins for CUDA's libraries, and memory that tests share between processes.
// Touches cuda/, os/, memory.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/nccl.h"
#include "cuda/nvrtc.h"
#include "os/descriptor.h"
#include "os/socket.h"

namespace standin {

namespace cuda = farandole::cuda;

template <class Done>
void until(Done done) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!done()) {
    CHECK(std::chrono::steady_clock::now() < limit);
    ::usleep(100);  // sleep: between two looks
  }
}

// The driver and NCCL, with the context of device 0.
struct Libraries {
  cuda::Driver driver;
  cuda::Nccl nccl;
  int nccl_version = 0;

  Libraries() {
    open(cuda::driver_library, "/libcuda.so.1", driver);
    nccl_version = open(cuda::nccl_library, "/libnccl.so.2", nccl);
    cuda::Context context = nullptr;
    CHECK(driver.init(0) == cuda::kSuccess);
    CHECK(driver.primary_retain(&context, 0) == cuda::kSuccess);
    CHECK(driver.set_current(context) == cuda::kSuccess);
  }
  cuda::Nvrtc nvrtc() const {
    cuda::Nvrtc table;
    open(cuda::nvrtc_library, "/libnvrtc.so.13", table);
    return table;
  }
  cuda::Stream stream() const {
    cuda::Stream made = nullptr;
    CHECK(driver.stream_create(&made, cuda::kStreamNonBlocking) == cuda::kSuccess);
    return made;
  }
  // What a kernel's name stands for in this process.
  void kernel(const char* name, void (*body)(unsigned, unsigned, void**)) const {
    void* image = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    const auto tell = reinterpret_cast<void (*)(const char*, decltype(body))>(::dlsym(image, "standin_kernel"));
    CHECK(tell != nullptr);
    tell(name, body);
  }

 private:
  template <class Table>
  static int open(const cuda::LibraryDescription& library, const char* file, Table& table) {
    std::vector<cuda::Place> places(1);
    places[0].source = cuda::Source::setting;
    places[0].path = std::string(FARANDOLE_STANDINS) + file;
    const cuda::Report report = cuda::open(library, places, &table);
    CHECK_EQUAL(report.why, "");
    return report.version;
  }
};

struct OnDevice {
  OnDevice(const cuda::Driver& driver, std::size_t bytes) : driver_(driver) {
    CHECK(driver.mem_alloc(&address, bytes) == cuda::kSuccess);
  }
  ~OnDevice() { driver_.mem_free(address); }
  std::uint64_t* words() const { return reinterpret_cast<std::uint64_t*>(address); }
  cuda::Address address = 0;

 private:
  const cuda::Driver& driver_;
};

// Floats on the device; a stand-in's device memory can be read in place.
class Memory {
 public:
  Memory(const cuda::Driver& driver, std::size_t count) : device_(driver, count * sizeof(float)) {}
  float* data() const { return reinterpret_cast<float*>(device_.address); }
  float& operator[](std::size_t i) const { return data()[i]; }

 private:
  OnDevice device_;
};

constexpr std::size_t kMapped = 2 << 20;

inline cuda::Allocation allocate(const cuda::Driver& driver) {
  const cuda::AllocationProperties properties;
  cuda::Allocation made = 0;
  CHECK(driver.mem_create(&made, kMapped, &properties, 0) == cuda::kSuccess);
  return made;
}

// An allocation, mapped for reading and writing; released with its mapping.
struct Mapped {
  Mapped(const cuda::Driver& driver, cuda::Allocation made) : allocation(made), driver_(driver) {
    const cuda::Access access;
    CHECK(driver.mem_address_reserve(&address, kMapped, 0, 0, 0) == cuda::kSuccess);
    CHECK(driver.mem_map(address, kMapped, 0, allocation, 0) == cuda::kSuccess);
    CHECK(driver.mem_set_access(address, kMapped, &access, 1) == cuda::kSuccess);
  }
  ~Mapped() {
    driver_.mem_unmap(address, kMapped);
    driver_.mem_address_free(address, kMapped);
    driver_.mem_release(allocation);
  }
  std::uint64_t* words() const { return reinterpret_cast<std::uint64_t*>(address); }
  cuda::Allocation allocation;
  cuda::Address address = 0;

 private:
  const cuda::Driver& driver_;
};

// A zero-filled object that forked processes share.
template <class Content>
class SharedPage {
 public:
  SharedPage()
      : content_(static_cast<Content*>(
            ::mmap(nullptr, sizeof(Content), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    CHECK(content_ != MAP_FAILED);
  }
  ~SharedPage() { ::munmap(content_, sizeof(Content)); }
  Content* operator->() const { return content_; }
  Content& operator*() const { return *content_; }

 private:
  Content* content_;
};

// Where rank 0 leaves the id of a communicator.
struct Meeting {
  cuda::UniqueId id;
  std::atomic<int> ready;
};
class Shared {
 public:
  Meeting& memory() { return *page_; }

 private:
  SharedPage<Meeting> page_;
};

inline void send_descriptor(int to, farandole::os::Descriptor file) {
  char byte = 1;
  const iovec part{&byte, 1};
  CHECK_EQUAL(farandole::os::send_some(to, {&part, 1}, {&file, 1}).bytes, std::size_t{1});
}

inline farandole::os::Descriptor receive_descriptor(int from) {
  char byte = 0;
  const iovec part{&byte, 1};
  std::vector<farandole::os::Descriptor> files;
  until([&] { return farandole::os::receive_some(from, {&part, 1}, &files).bytes == 1; });
  CHECK_EQUAL(files.size(), std::size_t{1});
  return std::move(files.front());
}

}  // namespace standin
