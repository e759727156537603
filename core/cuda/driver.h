// The functions of CUDA's driver (libcuda.so.1) that the core may call, with the versions that brought them.
// Touches base/ and os/; written from the documented binary interface, without CUDA's headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/open.h"

namespace farandole::cuda {

// As in the binary interface: handles are pointers, device memory is a 64-bit address, results are ints.
using Result = int;
using Device = int;
using Address = std::uint64_t;
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Graph = struct GraphObject*;
using Allocation = std::uint64_t;  // made by mem_create

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kNotReady = 600,
                 kNotSupported = 801;
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kVirtualMemory = 102, kDescriptors = 103,
              kStreamOperations64 = 122, kMps = 133;  // attributes of a device
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kEventInterprocess = 4, kHostRegisterPortable = 1,
                   kHostRegisterMapped = 2;
constexpr int kBufferId = 7;               // attribute of a pointer: of its allocation, unique in this process
constexpr int kCaptureRelaxed = 2;         // this thread's calls do not disturb graphs that others capture
constexpr unsigned kEnablePeerAccess = 1;  // of ipc_open
constexpr unsigned kWaitAtLeast = 0, kWaitEqual = 1;  // of stream_wait_value64
constexpr int kPinned = 1, kOnDevice = 1, kReadOnly = 1, kReadWrite = 3, kPosixDescriptor = 1;

struct Uuid {
  unsigned char bytes[16];
};
struct Location {
  int type = kOnDevice;
  int id = 0;
};
struct AllocationProperties {
  int type = kPinned;
  int handles = kPosixDescriptor;
  Location location;
  void* windows = nullptr;
  unsigned char compression = 0, gpu_direct_rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(AllocationProperties) == 32);
struct Access {
  Location location;
  int flags = kReadWrite;
};
struct IpcMemory {
  char reserved[64];
};

// X(member, symbol, the version that brought it, needed, parameters)
/* clang-format off */
#define FARANDOLE_DRIVER_FUNCTIONS(X)                                                                               \
  X(init, cuInit, 10020, true, (unsigned flags))                                                                    \
  X(device_get_count, cuDeviceGetCount, 10020, true, (int* count))                                                  \
  X(device_get, cuDeviceGet, 10020, true, (Device* device, int ordinal))                                            \
  X(device_get_name, cuDeviceGetName, 10020, true, (char* name, int capacity, Device device))                       \
  X(device_total_mem, cuDeviceTotalMem_v2, 10020, true, (std::size_t* bytes, Device device))                        \
  X(device_get_attribute, cuDeviceGetAttribute, 10020, true, (int* value, int attribute, Device device))            \
  X(device_get_uuid, cuDeviceGetUuid_v2, 11040, false, (Uuid* uuid, Device device))                                 \
  X(get_error_name, cuGetErrorName, 10020, true, (Result result, const char** name))                                \
  X(primary_retain, cuDevicePrimaryCtxRetain, 10020, true, (Context* context, Device device))                       \
  X(primary_release, cuDevicePrimaryCtxRelease_v2, 11000, false, (Device device))                                   \
  X(set_current, cuCtxSetCurrent, 10020, true, (Context context))                                                   \
  X(get_current, cuCtxGetCurrent, 10020, true, (Context* context))                                                  \
  X(mem_alloc, cuMemAlloc_v2, 10020, true, (Address* address, std::size_t bytes))                                   \
  X(mem_free, cuMemFree_v2, 10020, true, (Address address))                                                         \
  X(mem_range, cuMemGetAddressRange_v2, 10020, true, (Address* base, std::size_t* bytes, Address address))           \
  X(pointer_attribute, cuPointerGetAttribute, 10020, true, (void* value, int attribute, Address address))            \
  X(host_register, cuMemHostRegister_v2, 10020, true, (void* memory, std::size_t bytes, unsigned flags))            \
  X(host_unregister, cuMemHostUnregister, 10020, true, (void* memory))                                              \
  X(host_address, cuMemHostGetDevicePointer_v2, 10020, true, (Address* address, void* memory, unsigned flags))      \
  X(copy_to_device, cuMemcpyHtoDAsync_v2, 10020, true,                                                              \
    (Address to, const void* from, std::size_t bytes, Stream stream))                                               \
  X(copy_to_host, cuMemcpyDtoHAsync_v2, 10020, true, (void* to, Address from, std::size_t bytes, Stream stream))    \
  X(copy_on_device, cuMemcpyDtoDAsync_v2, 10020, true,                                                              \
    (Address to, Address from, std::size_t bytes, Stream stream))                                                   \
  X(stream_create, cuStreamCreate, 10020, true, (Stream* stream, unsigned flags))                                   \
  X(stream_destroy, cuStreamDestroy_v2, 10020, true, (Stream stream))                                               \
  X(stream_query, cuStreamQuery, 10020, true, (Stream stream))                                                      \
  X(stream_synchronize, cuStreamSynchronize, 10020, true, (Stream stream))                                          \
  X(stream_wait_event, cuStreamWaitEvent, 10020, true, (Stream stream, Event event, unsigned flags))                \
  X(event_create, cuEventCreate, 10020, true, (Event* event, unsigned flags))                                       \
  X(event_destroy, cuEventDestroy_v2, 10020, true, (Event event))                                                   \
  X(event_record, cuEventRecord, 10020, true, (Event event, Stream stream))                                         \
  X(event_query, cuEventQuery, 10020, true, (Event event))                                                          \
  X(event_synchronize, cuEventSynchronize, 10020, true, (Event event))                                              \
  X(stream_wait_value64, cuStreamWaitValue64_v2, 11070, false,                                                      \
    (Stream stream, Address address, std::uint64_t value, unsigned flags))                                          \
  X(stream_write_value64, cuStreamWriteValue64_v2, 11070, false,                                                    \
    (Stream stream, Address address, std::uint64_t value, unsigned flags))                                          \
  X(mem_create, cuMemCreate, 10020, false,                                                                          \
    (Allocation* made, std::size_t bytes, const AllocationProperties* properties, unsigned long long flags))        \
  X(mem_release, cuMemRelease, 10020, false, (Allocation allocation))                                               \
  X(mem_address_reserve, cuMemAddressReserve, 10020, false,                                                         \
    (Address* address, std::size_t bytes, std::size_t alignment, Address wanted, unsigned long long flags))         \
  X(mem_address_free, cuMemAddressFree, 10020, false, (Address address, std::size_t bytes))                         \
  X(mem_map, cuMemMap, 10020, false,                                                                                \
    (Address address, std::size_t bytes, std::size_t offset, Allocation allocation, unsigned long long flags))      \
  X(mem_unmap, cuMemUnmap, 10020, false, (Address address, std::size_t bytes))                                      \
  X(mem_set_access, cuMemSetAccess, 10020, false,                                                                   \
    (Address address, std::size_t bytes, const Access* access, std::size_t count))                                  \
  X(mem_granularity, cuMemGetAllocationGranularity, 10020, false,                                                   \
    (std::size_t* bytes, const AllocationProperties* properties, int option))                                       \
  X(mem_export, cuMemExportToShareableHandle, 10020, false,                                                         \
    (void* handle, Allocation allocation, int type, unsigned long long flags))                                      \
  X(mem_import, cuMemImportFromShareableHandle, 10020, false, (Allocation* allocation, void* handle, int type))     \
  X(ipc_get, cuIpcGetMemHandle, 10020, false, (IpcMemory* handle, Address address))                                 \
  X(ipc_open, cuIpcOpenMemHandle_v2, 11000, false, (Address* address, IpcMemory handle, unsigned flags))            \
  X(ipc_close, cuIpcCloseMemHandle, 10020, false, (Address address))                                                \
  X(module_load, cuModuleLoadData, 10020, true, (Module* module, const void* image))                                \
  X(module_unload, cuModuleUnload, 10020, true, (Module module))                                                    \
  X(module_function, cuModuleGetFunction, 10020, true, (Function* function, Module module, const char* name))       \
  X(launch, cuLaunchKernel, 10020, true,                                                                            \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,      \
     unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))                      \
  X(launch_host, cuLaunchHostFunc, 10020, true, (Stream stream, void (*function)(void*), void* data))               \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, 10020, true, (int* mode))                             \
  X(stream_is_capturing, cuStreamIsCapturing, 10020, false, (Stream stream, int* status))
/* clang-format on */

struct Driver {
#define FARANDOLE_MEMBER(member, symbol, since, needed, parameters) Result(*member) parameters = nullptr;
  FARANDOLE_DRIVER_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER

  bool maps_memory() const { return mem_create && mem_map && mem_set_access && mem_export && mem_import; }
  bool waits_on_streams() const { return stream_wait_value64 && stream_write_value64; }
};

extern const LibraryDescription driver_library;
// "CUDA_ERROR_NO_DEVICE", or the number.
std::string error_name(const Driver& driver, Result result);

}  // namespace farandole::cuda
