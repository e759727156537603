// How far the members of a group follow a plan: this member's state goes to the others, and theirs are combined.
// Touches link/, group/ and engine/services.h. Used only by the driver.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/plan_state.h"
#include "engine/services.h"
#include "link/rings.h"

namespace farandole {

// Members of one host read each other's state in shared memory. The first member of each host represents it: it sends
// its host's state to the first members of the other hosts, and publishes their combined state to its local peers.
class PlanExchange {
 public:
  // `rings`: null when no other member is on this host.
  PlanExchange(Services& services, std::uint32_t group, const Topology& topology, link::Rings* rings)
      : services_(services), group_(group), topology_(topology), rings_(rings), host_states_(topology.hosts.size()) {}

  void publish(const PlanState& state);     // this member's
  PlanState combined(std::uint32_t epoch);  // of all members
  // A state from the first member of another host; false when that member may not send one to this one.
  bool receive(int member, std::uint64_t bits);
  // A member whose state says that it is ready for fewer than `run` buckets. The states are read again to find it.
  int find_inconsistent_member(std::uint32_t epoch, std::uint64_t run) const;

 private:
  PlanState exchange_host_states(const PlanState& local, std::uint32_t epoch);

  Services& services_;
  const std::uint32_t group_;
  const Topology& topology_;
  link::Rings* const rings_;
  std::uint64_t published_ = 0;
  std::vector<std::uint64_t> host_states_;  // on the first member of a host, by host
  std::uint64_t sent_host_state_ = 0;
};

}  // namespace farandole
