// A lane: copies, kernels and moments on a stream of our own; its device memory and its host memory.
// Touches base/, os/ and cuda/.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "cuda/gpu.h"

namespace farandole::cuda {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::chrono::milliseconds kLinger(200);
constexpr std::size_t kLeast = 1 << 20;   // of memory that grows
constexpr std::size_t kReadInPlace = 16;  // rows of a table that the kernel reads in host memory

// Room for the next larger operations too, but not twice as much as a large one needs.
std::size_t roomy(std::size_t bytes) {
  const std::size_t step = std::max(kLeast, std::bit_floor(bytes) / 8);
  return (bytes + step - 1) / step * step;
}

}  // namespace

void Waker::wake() {
  std::lock_guard lock(mutex_);
  if (wake_) wake_();
}

void Waker::close() {
  std::lock_guard lock(mutex_);
  wake_ = nullptr;
}

void Work::add_row(std::size_t elements) {
  const std::size_t per_tile = kTileBytes / size_of(dtype);
  table.push_back(tiles);
  table.push_back(elements);
  tiles += (elements + per_tile - 1) / per_tile;
  ++rows;
}

Lane::Lane(std::shared_ptr<Gpu> gpu, std::shared_ptr<Waker> waker) : gpu_(std::move(gpu)), waker_(std::move(waker)) {
  const Gpu::Current current(*gpu_);
  gpu_->check(gpu_->driver().stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
  gpu_->check(gpu_->driver().stream_create(&bell_, kStreamNonBlocking), "cuStreamCreate");
}

// The stream may still wait for a stream of the caller, which may never end, for example after the death of a rank.
// Then the memory stays: whatever comes of it must find it there.
Lane::~Lane() {
  const Gpu::Current current(*gpu_);
  const Driver& driver = gpu_->driver();
  const auto deadline = std::chrono::steady_clock::now() + kLinger;
  while (driver.stream_query(stream_) == kNotReady || driver.stream_query(bell_) == kNotReady) {
    if (std::chrono::steady_clock::now() > deadline) {
      static_cast<void>(pinned_.memory.release());
      for (Table& table : tables_) static_cast<void>(table.rows.memory.release());
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (arena_ != 0) driver.mem_free(arena_);
  drop(pinned_);
  for (Table& table : tables_) {
    if (table.address != 0) driver.mem_free(table.address);
    drop(table.rows);
  }
  driver.stream_destroy(stream_);
  driver.stream_destroy(bell_);
}

void Lane::after(const Moment& moment) {
  const Gpu::Current current(*gpu_);
  gpu_->check(gpu_->driver().stream_wait_event(stream_, moment.event(), 0), "cuStreamWaitEvent");
}

void Lane::copy(Address to, Address from, std::size_t bytes) {
  const Gpu::Current current(*gpu_);
  gpu_->check(gpu_->driver().copy_on_device(to, from, bytes, stream_), "cuMemcpyDtoDAsync");
}

void Lane::to_host(void* to, Address from, std::size_t bytes) {
  const Gpu::Current current(*gpu_);
  gpu_->check(gpu_->driver().copy_to_host(to, from, bytes, stream_), "cuMemcpyDtoHAsync");
}

void Lane::to_device(Address to, const void* from, std::size_t bytes) {
  const Gpu::Current current(*gpu_);
  gpu_->check(gpu_->driver().copy_to_device(to, from, bytes, stream_), "cuMemcpyHtoDAsync");
}

bool Lane::loads(const Work& work) {
  const Gpu::Current current(*gpu_);
  try {
    gpu_->kernels().reduce(work.dtype, work.op, work.ins, work.scaled);
    return true;
  } catch (const Failure& failure) {
    gpu_->note_trouble(failure.what());
    return false;
  }
}

void Lane::run(const Work& work) {
  if (work.tiles == 0) return;
  const Gpu::Current current(*gpu_);
  const Driver& driver = gpu_->driver();
  const Function function = gpu_->kernels().reduce(work.dtype, work.op, work.ins, work.scaled);
  const std::size_t bytes = work.table.size() * sizeof(std::uint64_t);
  Table& kept = tables_[runs_++ % tables_.size()];
  grow(kept.rows, bytes);
  std::memcpy(kept.rows.at, work.table.data(), bytes);
  Address table = 0;
  if (work.rows <= kReadInPlace) {
    gpu_->check(driver.host_address(&table, kept.rows.at, 0), "cuMemHostGetDevicePointer");
  } else {
    if (bytes > kept.bytes) {
      if (kept.address != 0) driver.mem_free(kept.address);
      kept.address = 0;
      gpu_->check(driver.mem_alloc(&kept.address, roomy(bytes)), "cuMemAlloc");
      kept.bytes = roomy(bytes);
    }
    table = kept.address;
    to_device(table, kept.rows.at, bytes);
  }
  std::uint64_t rows = work.rows, tiles = work.tiles, ins = work.ins, outs = work.outs;
  double prescale = work.prescale, postscale = work.postscale;
  std::int64_t divisor = work.divisor;
  void* parameters[] = {&table, &rows, &tiles, &ins, &outs, &prescale, &postscale, &divisor, nullptr};
  const auto blocks = static_cast<unsigned>(std::min<std::size_t>(work.tiles, gpu_->blocks()));
  gpu_->check(driver.launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream_, parameters, nullptr), "cuLaunchKernel");
}

MomentPtr Lane::mark() { return gpu_->mark(stream_); }

bool Lane::reached(const Moment& moment) {
  if (moment.reached()) return true;
  if (rung_for_ == moment.number()) return false;
  rung_for_ = moment.number();
  const Gpu::Current current(*gpu_);
  const Driver& driver = gpu_->driver();
  gpu_->check(driver.stream_wait_event(bell_, moment.event(), 0), "cuStreamWaitEvent");
  auto* told = new std::shared_ptr<Waker>(waker_);
  const auto tell = [](void* data) {
    auto* waker = static_cast<std::shared_ptr<Waker>*>(data);
    (*waker)->wake();
    delete waker;
  };
  const Result result = driver.launch_host(bell_, tell, told);
  if (result != kSuccess) delete told;
  gpu_->check(result, "cuLaunchHostFunc");
  return false;
}

bool Lane::idle() const {
  const Gpu::Current current(*gpu_);
  return gpu_->driver().stream_query(stream_) != kNotReady;
}

void Lane::settle() {
  const Gpu::Current current(*gpu_);
  gpu_->driver().stream_synchronize(stream_);
}

Address Lane::arena(std::size_t bytes) {
  if (bytes <= arena_bytes_) return arena_;
  const Gpu::Current current(*gpu_);
  if (arena_ != 0) gpu_->driver().mem_free(arena_);
  arena_ = 0;
  arena_bytes_ = 0;
  const Result result = gpu_->driver().mem_alloc(&arena_, roomy(bytes));
  if (result == kOutOfMemory) return arena_ = 0;
  gpu_->check(result, "cuMemAlloc");
  arena_bytes_ = roomy(bytes);
  return arena_;
}

std::byte* Lane::pinned(std::size_t bytes) {
  grow(pinned_, bytes);
  return pinned_.at;
}

void Lane::grow(Pinned& pinned, std::size_t bytes) {
  if (bytes <= pinned.bytes) return;
  const Gpu::Current current(*gpu_);
  drop(pinned);
  const std::size_t size = roomy(bytes);
  pinned.memory.reset(new std::byte[size + kPage]);
  const auto address = reinterpret_cast<std::uintptr_t>(pinned.memory.get());
  pinned.at = pinned.memory.get() + (kPage - address % kPage) % kPage;
  gpu_->check(gpu_->driver().host_register(pinned.at, size, kHostRegisterPortable | kHostRegisterMapped),
              "cuMemHostRegister");
  pinned.bytes = size;
}

void Lane::drop(Pinned& pinned) {
  if (pinned.bytes != 0) gpu_->driver().host_unregister(pinned.at);
  pinned = {};
}

}  // namespace farandole::cuda
