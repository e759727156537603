// Collectives on tensors in the memory of GPUs by NCCL, among members that have a GPU each, on any hosts.
// Touches base/, cuda/, link/ and group/.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/device.h"
#include "collective/launch_order.h"
#include "cuda/communicators.h"

namespace farandole::collective {

// The values are part of the C interface.
enum class NcclUse : int {
  automatic = 0,  // between hosts, and on one host whose ranks cannot open each other's memory
  on = 1,         // also on one host whose ranks can
  off = 2,
};

struct NcclOptions {
  NcclUse use = NcclUse::automatic;
  std::vector<cuda::Place> places;  // of the library
  std::chrono::milliseconds start_limit{30000};
  std::uint32_t generation = 0;
};

// What the groups of an engine share. Used only by the driver.
class Nccl {
 public:
  Nccl(NcclOptions options, std::shared_ptr<cuda::Gpus> gpus, std::shared_ptr<cuda::Waker> waker);

  NcclUse use() const { return options_.use; }
  std::uint32_t generation() const { return options_.generation; }
  // Why this process cannot use it; "" it can. The library is opened by the first call.
  const std::string& refusal();
  int version() const { return version_; }
  cuda::Communicators& communicators();  // refusal() was ""
  LaunchOrder& order() { return order_; }
  const std::shared_ptr<cuda::Waker>& waker() const { return waker_; }
  void end(const Error& error);  // the generation is over: begins to abort what runs
  // A cancelled operation could not be stopped.
  void note_hang() { hangs_ = true; }
  bool hangs() const { return hangs_; }

 private:
  void open();

  const NcclOptions options_;
  const std::shared_ptr<cuda::Gpus> gpus_;
  const std::shared_ptr<cuda::Waker> waker_;
  bool opened_ = false, hangs_ = false;
  std::string refusal_;
  int version_ = 0;
  cuda::Nccl functions_;
  LaunchOrder order_;
  std::unique_ptr<cuda::Communicators> communicators_;
};

// A group's communicator, and what its members have agreed on.
class NcclGroup {
 public:
  explicit NcclGroup(std::uint32_t group) : group_(group) {}
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // `shared`: null on a rank that uses no GPUs.
  void use(std::shared_ptr<Nccl> shared) { shared_ = std::move(shared); }
  // Whether it is worth asking the other members; the same on all members.
  bool possible(const DeviceJob& job, const Topology& topology) const;
  // Whether this rank wants it rather than memory that is mapped.
  bool preferred() const { return shared_ != nullptr && shared_->use() == NcclUse::on; }

 private:
  friend class NcclCollective;
  using Device = std::array<std::uint64_t, 2>;

  const std::uint32_t group_;
  std::shared_ptr<Nccl> shared_;
  bool refused_ = false;         // one of the members never can; all know it
  std::vector<Device> devices_;  // of the communicator, by member; empty: there is none
  cuda::CommKey key_;
};

// `met` is the same on all members; when it is not `none`, no result was written.
Task by_nccl(const Context& context, const DeviceJob& job, NcclGroup& group, Obstacle& met);

}  // namespace farandole::collective
