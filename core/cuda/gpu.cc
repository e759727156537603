// Devices: contexts, events, and allocations that processes open of each other.
// Touches base/, os/ and cuda/.
#include "cuda/gpu.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "base/error.h"
#include "os/fork.h"

namespace farandole::cuda {

namespace {

constexpr std::size_t kMostMapped = 1024;  // allocations of others that stay open
constexpr unsigned kBlocksPerMultiprocessor = 8;

}  // namespace

std::uint64_t process_nonce() {
  static const std::uint64_t base = std::uint64_t{std::random_device()()} << 32 | std::random_device()();
  return base + os::fork_depth();
}

void Gpu::check(Result result, const char* call) const {
  if (result != kSuccess)
    throw Failure(Code::internal, std::string(call) + " fails with " + error_name(driver_, result));
}

void Gpu::enter() const { check(driver_.set_current(context_), "cuCtxSetCurrent"); }

Gpu::Current::Current(const Gpu& gpu) : driver_(gpu.driver_) {
  driver_.get_current(&before_);
  driver_.set_current(gpu.context_);  // after a failure the next call says so
  driver_.exchange_capture_mode(&mode_);
}

Gpu::Current::~Current() {
  driver_.exchange_capture_mode(&mode_);
  driver_.set_current(before_);
}

namespace {

int attribute(const Driver& driver, Device device, int which) {
  int value = 0;
  return driver.device_get_attribute(&value, which, device) == kSuccess ? value : 0;
}

int architecture_of(const Driver& driver, int ordinal) {
  Device device = 0;
  const Result result = driver.device_get(&device, ordinal);
  if (result != kSuccess)
    throw Failure(Code::precondition,
                  "there is no CUDA device " + std::to_string(ordinal) + " (" + error_name(driver, result) + ")");
  return attribute(driver, device, kMajor) * 10 + attribute(driver, device, kMinor);
}

}  // namespace

Gpu::Gpu(std::shared_ptr<const Libraries> libraries, int ordinal, const std::string& folder)
    : libraries_(std::move(libraries)),
      driver_(libraries_->driver),
      ordinal_(ordinal),
      kernels_(driver_, libraries_->nvrtc, libraries_->nvrtc_version, architecture_of(driver_, ordinal), folder) {
  Device device = 0;
  check(driver_.device_get(&device, ordinal), "cuDeviceGet");
  Uuid uuid{};
  if (driver_.device_get_uuid == nullptr || driver_.device_get_uuid(&uuid, device) != kSuccess)
    throw Failure(Code::precondition, "the driver does not tell the identity of its devices");
  std::memcpy(uuid_.data(), &uuid, sizeof uuid);
  blocks_ = static_cast<unsigned>(std::max(1, attribute(driver_, device, kMultiprocessors))) * kBlocksPerMultiprocessor;
  check(driver_.primary_retain(&context_, device), "cuDevicePrimaryCtxRetain");
}

Gpu::~Gpu() {
  {
    const Current current(*this);
    for (const auto& [key, mapped] : mapped_) driver_.ipc_close(mapped.at);
    for (Event event : events_) driver_.event_destroy(event);
  }
  Device device = 0;
  if (driver_.primary_release != nullptr && driver_.device_get(&device, ordinal_) == kSuccess)
    driver_.primary_release(device);
}

Event Gpu::take_event() {
  std::lock_guard lock(mutex_);
  if (events_.empty()) {
    Event event = nullptr;
    check(driver_.event_create(&event, kEventDisableTiming), "cuEventCreate");
    return event;
  }
  const Event event = events_.back();
  events_.pop_back();
  return event;
}

MomentPtr Gpu::mark(Stream stream) {
  const Current current(*this);
  auto moment = std::make_shared<const Moment>(shared_from_this(), take_event(), ++moments_);
  check(driver_.event_record(moment->event(), stream), "cuEventRecord");
  return moment;
}

Moment::~Moment() {
  std::lock_guard lock(gpu_->mutex_);
  gpu_->events_.push_back(event_);
}

bool Moment::reached() const {
  const Gpu::Current current(*gpu_);
  const Result result = gpu_->driver().event_query(event_);
  if (result == kNotReady) return false;
  gpu_->check(result, "an operation on the GPU");
  return true;
}

std::string Gpu::trouble() const {
  std::lock_guard lock(mutex_);
  return trouble_;
}

void Gpu::note_trouble(std::string words) {
  std::lock_guard lock(mutex_);
  trouble_ = std::move(words);
}

Segment Gpu::segment_of(Address address, std::size_t bytes) {
  std::uint64_t id = 0;
  if (driver_.pointer_attribute(&id, kBufferId, address) != kSuccess || id == 0) return {};
  std::lock_guard lock(mutex_);
  const auto found = own_.upper_bound(address);
  if (found != own_.end() && found->second.id == id && found->second.base <= address && address + bytes <= found->first)
    return found->second;
  Segment segment;
  std::size_t size = 0;
  if (driver_.mem_range(&segment.base, &size, address) != kSuccess || address + bytes > segment.base + size) return {};
  segment.bytes = size;
  IpcMemory handle{};
  // Memory of cuMemCreate has no such handle: torch's expandable segments, for one.
  if (driver_.ipc_get == nullptr || driver_.ipc_get(&handle, segment.base) != kSuccess) return {};
  segment.id = id;
  std::memcpy(segment.handle.data(), &handle, sizeof handle);
  // What lay there before has been freed.
  for (auto old = own_.upper_bound(segment.base); old != own_.end() && old->second.base < segment.base + size;)
    old = own_.erase(old);
  own_[segment.base + size] = segment;
  return segment;
}

Address Gpu::open(std::uint64_t process, const Segment& segment) {
  std::lock_guard lock(mutex_);
  ++uses_;
  if (const auto found = mapped_.find({process, segment.id}); found != mapped_.end()) {
    found->second.used = uses_;
    const Segment& known = found->second.segment;
    return known.base == segment.base && known.bytes >= segment.bytes ? found->second.at : 0;
  }
  if (driver_.ipc_open == nullptr || driver_.ipc_close == nullptr) return 0;
  auto oldest = mapped_.end();
  for (auto at = mapped_.begin(); at != mapped_.end();) {
    const Segment& old = at->second.segment;
    // Its owner has freed it: something else lies there now.
    if (at->first.first == process && old.base < segment.base + segment.bytes && segment.base < old.base + old.bytes) {
      driver_.ipc_close(at->second.at);
      at = mapped_.erase(at);
      continue;
    }
    if (oldest == mapped_.end() || at->second.used < oldest->second.used) oldest = at;
    ++at;
  }
  if (mapped_.size() >= kMostMapped && oldest != mapped_.end() && oldest->second.used + kMostMapped < uses_) {
    driver_.ipc_close(oldest->second.at);
    mapped_.erase(oldest);
  }
  IpcMemory handle{};
  std::memcpy(&handle, segment.handle.data(), sizeof handle);
  Address at = 0, base = 0;
  if (const Result result = driver_.ipc_open(&at, handle, kEnablePeerAccess); result != kSuccess) {
    trouble_ = "cuIpcOpenMemHandle fails with " + error_name(driver_, result);
    return 0;
  }
  std::size_t bytes = 0;  // as the driver knows it, whatever the peer says
  if (driver_.mem_range(&base, &bytes, at) != kSuccess || base != at || bytes < segment.bytes) {
    trouble_ =
        "memory of another process has " + std::to_string(bytes) + " bytes, not " + std::to_string(segment.bytes);
    driver_.ipc_close(at);
    return 0;
  }
  mapped_[{process, segment.id}] = {segment, at, uses_};
  return at;
}

Gpus::Gpus(std::span<const Place> driver, std::span<const Place> nvrtc, std::string folder)
    : libraries_(std::make_shared<Libraries>()), folder_(std::move(folder)) {
  Report report = cuda::open(driver_library, driver, &libraries_->driver);
  if (!report.usable) throw Failure(Code::precondition, report.why);
  report = cuda::open(nvrtc_library, nvrtc, &libraries_->nvrtc);
  if (!report.usable) throw Failure(Code::precondition, report.why);
  libraries_->nvrtc_version = report.version;
  const Driver& functions = libraries_->driver;
  if (const Result result = functions.init(0); result != kSuccess)
    throw Failure(Code::precondition, "cuInit fails with " + error_name(functions, result));
}

std::shared_ptr<Gpu> Gpus::at(int ordinal) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Gpu>& gpu = made_[ordinal];
  if (gpu == nullptr) gpu = std::make_shared<Gpu>(libraries_, ordinal, folder_);
  return gpu;
}

}  // namespace farandole::cuda
