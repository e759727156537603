// A stand-in for CUDA's driver with its binary interface: memory is shared between processes, streams run in order.
// Touches memory files, threads, the environment: STANDIN_CUDA_VERSION, STANDIN_CUDA_DEVICES, STANDIN_CUDA_NAME,
// STANDIN_CUDA_MPS, STANDIN_CUDA_INIT (the result of cuInit), STANDIN_CUDA_IPC (0: memory of others cannot be opened).
#include <fcntl.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda/driver.h"
#include "cuda_objects.h"
#include "standin.h"

namespace cuda = farandole::cuda;
using cuda::Access;
using cuda::Address;
using cuda::Allocation;
using cuda::AllocationProperties;
using cuda::Context;
using cuda::Device;
using cuda::IpcMemory;
using cuda::Result;
using cuda::Uuid;
using standin::Block;
using standin::Event;
using standin::Mark;
using standin::Stream;

namespace {

constexpr std::size_t kGranularity = 2 << 20;
constexpr Result kNotInitialized = 3, kInvalidHandle = 400;

std::mutex mutex;  // of all that follows
std::map<Address, Block> allocated;
std::map<Address, std::size_t> reserved;
std::map<Address, std::size_t> opened;  // memory of other processes, by IPC handles
std::map<std::string, void (*)(unsigned blocks, unsigned threads, void** parameters)> kernels;
std::atomic<bool> started{false};
thread_local Context current = nullptr;

void* pointer(Address address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }
Address address_of(void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }
std::size_t whole(std::size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
int devices() { return standin::number("STANDIN_CUDA_DEVICES", 1); }

// The stream that a null handle means.
Stream& stream_of(void* handle) {
  static auto* standard = new Stream;  // as long as the process
  return handle == nullptr ? *standard : *static_cast<Stream*>(handle);
}

template <class Body>
Result enqueue(void* stream, Body body) {
  if (!started) return kNotInitialized;
  if (current == nullptr) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  stream_of(stream).put(std::move(body));
  return cuda::kSuccess;
}

Result copy(void* to, const void* from, std::size_t bytes, void* stream) {
  return enqueue(stream, [=] {
    std::memmove(to, from, bytes);
    return true;
  });
}

struct IpcContent {
  int process;
  int file;
  std::uint64_t bytes;
};

}  // namespace

STANDIN Result cuInit(unsigned) {
  const Result result = standin::number("STANDIN_CUDA_INIT", 0);
  started = result == cuda::kSuccess;
  return result;
}
STANDIN Result cuDriverGetVersion(int* version) {
  *version = standin::number("STANDIN_CUDA_VERSION", 13000);
  return cuda::kSuccess;
}
STANDIN Result cuGetErrorName(Result result, const char** name) {
  const std::map<Result, const char*> names = {{0, "CUDA_SUCCESS"},
                                               {1, "CUDA_ERROR_INVALID_VALUE"},
                                               {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                               {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                               {100, "CUDA_ERROR_NO_DEVICE"},
                                               {600, "CUDA_ERROR_NOT_READY"},
                                               {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}};
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? cuda::kInvalidValue : cuda::kSuccess;
}
STANDIN Result cuDeviceGetCount(int* count) {
  *count = devices();
  return started ? cuda::kSuccess : kNotInitialized;
}
STANDIN Result cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < devices() ? cuda::kSuccess : 101;
}
STANDIN Result cuDeviceGetName(char* name, int capacity, Device) {
  const char* wanted = std::getenv("STANDIN_CUDA_NAME");
  std::snprintf(name, static_cast<std::size_t>(capacity), "%s", wanted == nullptr ? "NVIDIA H200" : wanted);
  return cuda::kSuccess;
}
STANDIN Result cuDeviceTotalMem_v2(std::size_t* bytes, Device) {
  *bytes = std::size_t{140} << 30;
  return cuda::kSuccess;
}
STANDIN Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(16 * device + i);
  return cuda::kSuccess;
}
STANDIN Result cuDeviceGetAttribute(int* value, int attribute, Device) {
  const std::map<int, int> values = {
      {cuda::kMultiprocessors, 132}, {cuda::kMajor, 9},       {cuda::kMinor, 0},
      {cuda::kVirtualMemory, 1},     {cuda::kDescriptors, 1}, {cuda::kStreamOperations64, 1},
  };
  const int mps = standin::number("STANDIN_CUDA_MPS", 0);  // -1: a driver that does not know the attribute
  if (attribute == cuda::kMps && mps >= 0) return *value = mps, cuda::kSuccess;
  const auto found = values.find(attribute);
  if (found == values.end()) return cuda::kInvalidValue;
  *value = found->second;
  return cuda::kSuccess;
}

STANDIN Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  *context = reinterpret_cast<Context>(static_cast<std::uintptr_t>(device) + 1);
  return started ? cuda::kSuccess : kNotInitialized;
}
STANDIN Result cuDevicePrimaryCtxRelease_v2(Device) { return cuda::kSuccess; }
STANDIN Result cuCtxSetCurrent(Context context) {
  current = context;
  return cuda::kSuccess;
}
STANDIN Result cuCtxGetCurrent(Context* context) {
  *context = current;
  return cuda::kSuccess;
}

STANDIN Result cuMemAlloc_v2(Address* address, std::size_t bytes) {
  const std::size_t size = whole(bytes);
  const int file = standin::make_file(size);
  void* memory = file < 0 ? nullptr : standin::map_file(file, size);
  if (memory == nullptr) return cuda::kOutOfMemory;
  *address = address_of(memory);
  std::lock_guard lock(mutex);
  static std::uint64_t made = 0;
  allocated[*address] = {file, size, ++made};
  return cuda::kSuccess;
}
STANDIN Result cuMemFree_v2(Address address) {
  std::lock_guard lock(mutex);
  const auto found = allocated.find(address);
  if (found == allocated.end()) return cuda::kInvalidValue;
  ::munmap(pointer(address), found->second.bytes);
  ::close(found->second.file);
  allocated.erase(found);
  return cuda::kSuccess;
}
STANDIN Result cuMemGetAddressRange_v2(Address* base, std::size_t* bytes, Address address) {
  std::lock_guard lock(mutex);
  for (const auto& [at, block] : allocated)
    if (at <= address && address < at + block.bytes) return *base = at, *bytes = block.bytes, cuda::kSuccess;
  for (const auto& [at, size] : opened)
    if (at <= address && address < at + size) return *base = at, *bytes = size, cuda::kSuccess;
  return cuda::kInvalidValue;
}
STANDIN Result cuPointerGetAttribute(void* value, int attribute, Address address) {
  std::lock_guard lock(mutex);
  if (attribute != cuda::kBufferId) return cuda::kInvalidValue;
  for (const auto& [at, block] : allocated)
    if (at <= address && address < at + block.bytes)
      return *static_cast<std::uint64_t*>(value) = block.id, cuda::kSuccess;
  return cuda::kInvalidValue;
}
STANDIN Result cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned) {
  return memory == nullptr || bytes == 0 ? cuda::kInvalidValue : cuda::kSuccess;
}
STANDIN Result cuMemHostUnregister(void*) { return cuda::kSuccess; }
STANDIN Result cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
  *address = address_of(memory);
  return cuda::kSuccess;
}
STANDIN Result cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, void* stream) {
  return copy(pointer(to), from, bytes, stream);
}
STANDIN Result cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, void* stream) {
  return copy(to, pointer(from), bytes, stream);
}
STANDIN Result cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void* stream) {
  return copy(pointer(to), pointer(from), bytes, stream);
}

STANDIN Result cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int mine = 0;
  std::swap(mine, *mode);
  return cuda::kSuccess;
}

STANDIN Result cuStreamCreate(void** stream, unsigned) {
  *stream = new Stream;
  return cuda::kSuccess;
}
STANDIN Result cuStreamDestroy_v2(void* stream) {
  delete static_cast<Stream*>(stream);
  return cuda::kSuccess;
}
STANDIN Result cuStreamQuery(void* stream) { return stream_of(stream).idle() ? cuda::kSuccess : cuda::kNotReady; }
STANDIN Result cuStreamSynchronize(void* stream) {
  stream_of(stream).drain();
  return cuda::kSuccess;
}
STANDIN Result cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return cuda::kSuccess;
}
STANDIN Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue(stream, [=] {
    function(data);
    return true;
  });
}

STANDIN Result cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return cuda::kSuccess;
}
STANDIN Result cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return cuda::kSuccess;
}
STANDIN Result cuEventRecord(void* event, void* stream) {
  auto mark = std::make_shared<Mark>();
  {
    std::lock_guard lock(static_cast<Event*>(event)->mutex);
    static_cast<Event*>(event)->mark = mark;
  }
  return enqueue(stream, [mark] { return mark->reach(), true; });
}
STANDIN Result cuEventQuery(void* event) {
  const std::shared_ptr<Mark> mark = static_cast<Event*>(event)->last();
  return mark == nullptr || mark->look() ? cuda::kSuccess : cuda::kNotReady;
}
STANDIN Result cuEventSynchronize(void* event) {
  if (const std::shared_ptr<Mark> mark = static_cast<Event*>(event)->last()) mark->wait();
  return cuda::kSuccess;
}
STANDIN Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::shared_ptr<Mark> mark = static_cast<Event*>(event)->last();
  return enqueue(stream, [mark] { return mark == nullptr || mark->look(); });
}
STANDIN Result cuStreamWaitValue64_v2(void* stream, Address address, std::uint64_t value, unsigned flags) {
  if (flags > cuda::kWaitEqual) return cuda::kInvalidValue;
  return enqueue(stream, [=] {
    const auto seen = std::atomic_ref(*static_cast<std::uint64_t*>(pointer(address))).load();
    return flags == cuda::kWaitEqual ? seen == value : static_cast<std::int64_t>(seen - value) >= 0;
  });
}
STANDIN Result cuStreamWriteValue64_v2(void* stream, Address address, std::uint64_t value, unsigned) {
  return enqueue(stream, [=] {
    std::atomic_ref(*static_cast<std::uint64_t*>(pointer(address))).store(value);
    return true;
  });
}

STANDIN Result cuMemGetAllocationGranularity(std::size_t* bytes, const AllocationProperties*, int) {
  *bytes = kGranularity;
  return cuda::kSuccess;
}
// An allocation is the number of its memory file, plus one.
STANDIN Result cuMemCreate(Allocation* made, std::size_t bytes, const AllocationProperties* wanted,
                           unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0 || wanted->type != cuda::kPinned) return cuda::kInvalidValue;
  const int file = standin::make_file(bytes);
  *made = static_cast<Allocation>(file) + 1;
  return file < 0 ? cuda::kOutOfMemory : cuda::kSuccess;
}
STANDIN Result cuMemRelease(Allocation allocation) {
  return ::close(static_cast<int>(allocation - 1)) == 0 ? cuda::kSuccess : cuda::kInvalidValue;
}
STANDIN Result cuMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address, unsigned long long) {
  if (bytes == 0 || bytes % kGranularity != 0) return cuda::kInvalidValue;
  void* at = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return cuda::kOutOfMemory;
  *address = address_of(at);
  std::lock_guard lock(mutex);
  reserved[*address] = bytes;
  return cuda::kSuccess;
}
STANDIN Result cuMemAddressFree(Address address, std::size_t bytes) {
  std::lock_guard lock(mutex);
  const auto found = reserved.find(address);
  if (found == reserved.end() || found->second != bytes) return cuda::kInvalidValue;
  ::munmap(pointer(address), bytes);
  reserved.erase(found);
  return cuda::kSuccess;
}
STANDIN Result cuMemMap(Address address, std::size_t bytes, std::size_t offset, Allocation made, unsigned long long) {
  void* at = ::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, static_cast<int>(made - 1),
                    static_cast<off_t>(offset));
  return at == MAP_FAILED ? cuda::kInvalidValue : cuda::kSuccess;
}
STANDIN Result cuMemUnmap(Address address, std::size_t bytes) {
  void* at = ::mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? cuda::kInvalidValue : cuda::kSuccess;
}
STANDIN Result cuMemSetAccess(Address address, std::size_t bytes, const Access* access, std::size_t count) {
  if (count != 1) return cuda::kInvalidValue;
  const int allowed = access->flags == cuda::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  return ::mprotect(pointer(address), bytes, allowed) == 0 ? cuda::kSuccess : cuda::kInvalidValue;
}
STANDIN Result cuMemExportToShareableHandle(void* handle, Allocation allocation, int type, unsigned long long) {
  if (type != cuda::kPosixDescriptor) return cuda::kNotSupported;
  const int file = ::fcntl(static_cast<int>(allocation - 1), F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(handle) = file;
  return file < 0 ? cuda::kInvalidValue : cuda::kSuccess;
}
// The descriptor itself is passed as the pointer, as in CUDA; it stays the caller's.
STANDIN Result cuMemImportFromShareableHandle(Allocation* allocation, void* handle, int type) {
  if (type != cuda::kPosixDescriptor) return cuda::kNotSupported;
  const int file = ::fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(handle)), F_DUPFD_CLOEXEC, 0);
  *allocation = static_cast<Allocation>(file) + 1;
  return file < 0 ? cuda::kInvalidValue : cuda::kSuccess;
}

STANDIN Result cuIpcGetMemHandle(IpcMemory* handle, Address address) {
  std::lock_guard lock(mutex);
  const auto found = allocated.find(address);
  if (found == allocated.end()) return cuda::kInvalidValue;
  const IpcContent content{::getpid(), found->second.file, found->second.bytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &content, sizeof content);
  return cuda::kSuccess;
}
STANDIN Result cuIpcOpenMemHandle_v2(Address* address, IpcMemory handle, unsigned) {
  IpcContent content{};
  std::memcpy(&content, &handle, sizeof content);
  if (content.process == ::getpid()) return kInvalidHandle;  // CUDA refuses a process's own memory
  if (standin::number("STANDIN_CUDA_IPC", 1) == 0) return kInvalidHandle;
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", content.process, content.file);
  const int file = ::open(path, O_RDWR | O_CLOEXEC);
  void* memory = file < 0 ? nullptr : standin::map_file(file, content.bytes);
  if (file >= 0) ::close(file);
  if (memory == nullptr) return kInvalidHandle;
  *address = address_of(memory);
  std::lock_guard lock(mutex);
  opened[*address] = content.bytes;
  return cuda::kSuccess;
}
STANDIN Result cuIpcCloseMemHandle(Address address) {
  std::lock_guard lock(mutex);
  const auto found = opened.find(address);
  if (found == opened.end()) return cuda::kInvalidValue;
  ::munmap(pointer(address), found->second);
  opened.erase(found);
  return cuda::kSuccess;
}

// Kernels: a test says which function of the host a name stands for. An image is text with the names that it has, one
// per line, as the stand-in for NVRTC makes it.
STANDIN void standin_kernel(const char* name, void (*body)(unsigned blocks, unsigned threads, void** parameters)) {
  std::lock_guard lock(mutex);
  kernels[name] = body;
}
STANDIN Result cuModuleLoadData(void** made, const void* image) {
  const std::string text = static_cast<const char*>(image);
  if (text.rfind("standin\n", 0) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
  *made = new std::string(text);
  return cuda::kSuccess;
}
STANDIN Result cuModuleUnload(void* made) {
  delete static_cast<std::string*>(made);
  return cuda::kSuccess;
}
STANDIN Result cuModuleGetFunction(void** function, void* made, const char* name) {
  std::lock_guard lock(mutex);
  const auto found = kernels.find(name);
  if (static_cast<std::string*>(made)->find("\n" + std::string(name) + "\n") == std::string::npos ||
      found == kernels.end())
    return 500;  // CUDA_ERROR_NOT_FOUND
  *function = reinterpret_cast<void*>(found->second);
  return cuda::kSuccess;
}
#ifndef STANDIN_LACKING
// Parameters are copied when the kernel is launched, as CUDA does it; here each has eight bytes, and there are sixteen
// at most, of which a null ends the list.
STANDIN Result cuLaunchKernel(void* function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                              unsigned, void* stream, void** parameters, void**) {
  auto body = reinterpret_cast<void (*)(unsigned, unsigned, void**)>(function);
  auto values = std::make_shared<std::vector<std::uint64_t>>();
  for (int i = 0; i < 16 && parameters[i] != nullptr; ++i)
    values->push_back(*static_cast<std::uint64_t*>(parameters[i]));
  return enqueue(stream, [=] {
    std::vector<void*> places;
    for (std::uint64_t& value : *values) places.push_back(&value);
    body(grid_x, block_x, places.data());
    return true;
  });
}
#endif
