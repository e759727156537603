// What the parts of an engine share: its options and counters, and what they ask of it.
// Touches link/, trace/, cuda/, group/ and collective/. Used only by the driver.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "collective/nccl.h"
#include "cuda/gpu.h"
#include "engine/control.h"
#include "engine/events.h"
#include "engine/operation.h"
#include "engine/tuning.h"
#include "group/topology.h"
#include "link/messenger.h"
#include "link/regions.h"
#include "trace/recorder.h"
#include "trace/trace.h"

namespace farandole {

struct Options {
  int rank = 0;
  int size = 1;
  std::vector<int> hosts;  // by rank
  std::uint32_t generation = 0;
  collective::Algorithm algorithm = collective::Algorithm::automatic;
  std::size_t plan_capacity = 1024;
  std::int64_t stall_note_ns = 0;  // 0: never, here and below
  std::int64_t stall_warning_ns = 0;
  std::int64_t stall_shutdown_ns = 0;
  std::size_t slot_bytes = 64 << 10;
  int slots = 4;
  bool fuse_bundles = true;
  int tcp_streams = 1;  // between two ranks on different hosts
  Tuning tuning;        // the first values

  bool on_my_host(int peer) const {
    return hosts[static_cast<std::size_t>(peer)] == hosts[static_cast<std::size_t>(rank)];
  }
};

// The values are part of the C interface.
enum class Counter {
  sent,
  received,
  frames,
  negotiated,
  planned,
  diverts,
  in_place,
  collectives,
  wake_ups,
  steps,
  step_ns,
  step_bytes,
  waited_ns,  // by threads of the user, for operations that were not done when they called
  on_device,  // bytes of device tensors that did not leave the device
  by_nccl     // bytes of device tensors that NCCL has moved
};
inline constexpr int kCounters = 15;
class Counters {
 public:
  std::atomic<std::int64_t>& operator[](Counter counter) { return values_[static_cast<std::size_t>(counter)]; }
  void add(Counter counter, std::int64_t count = 1) { (*this)[counter].fetch_add(count, std::memory_order_relaxed); }
  void set(Counter counter, std::int64_t value) { (*this)[counter].store(value, std::memory_order_relaxed); }

 private:
  std::array<std::atomic<std::int64_t>, kCounters> values_{};
};

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();  // as a time

// The engine, as its groups and its transfers use it.
class Services {
 public:
  virtual ~Services() = default;
  virtual const Options& options() const = 0;
  virtual link::Messenger& messenger() = 0;
  virtual const link::Regions& regions() const = 0;
  virtual Counters& counters() = 0;
  virtual Trace& trace() = 0;
  virtual Recorder& recorder() = 0;
  virtual std::int64_t now() const = 0;  // when the current pass began
  virtual Results& results() = 0;
  virtual const std::shared_ptr<cuda::Waker>& waker() const = 0;  // of the driver
  virtual std::shared_ptr<collective::Nccl> nccl() = 0;           // null: this rank uses no GPUs
  virtual void log(Level level, std::string text) = 0;
  virtual void finish(Operation& operation, const Error& error) = 0;
  virtual void revoke(const Error& error) = 0;  // takes effect at the end of the current pass
  // Null when there is no such process set; also of those without this rank.
  virtual const Topology* topology(std::uint32_t group) const = 0;
  // Changes of groups that all ranks have agreed on. Returns the first new ID.
  virtual std::int64_t add_groups(const std::vector<std::int64_t>& sets) = 0;
  virtual void remove_group(std::uint32_t id) = 0;
  virtual void restart_unnamed_numbers(std::uint32_t id) = 0;
  virtual const Tuning& tuning() const = 0;
  // Called by the first group, from its collective `sequence` on; groups that are created later start with it.
  virtual void tune(const Tuning& tuning, std::uint64_t sequence) = 0;

  void send_control(int peer, Control type, control::Bytes message, std::vector<os::Descriptor> descriptors = {}) {
    messenger().control(peer, static_cast<std::uint32_t>(type), std::move(message), std::move(descriptors));
  }
};

}  // namespace farandole
