// What faster peers send for process sets that this rank does not have yet, until it creates them.
// Touches base/, os/, negotiate/ and engine/control.h. Used only by the driver.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/control.h"
#include "negotiate/messages.h"
#include "os/descriptor.h"

namespace farandole {

class EarlyFrames {
 public:
  // These throw when a peer sends more than any program does, or one thing twice.
  void keep_requests(int peer, negotiate::Requests message);
  void keep_segment(int peer, std::uint32_t group, os::Descriptor file, int local_peers);
  void keep_end(int peer, std::uint32_t group, const Error& error);

  // What was kept for the group, with its senders.
  std::vector<std::pair<int, negotiate::Requests>> take_requests(std::uint32_t group);
  std::vector<std::pair<int, os::Descriptor>> take_segments(std::uint32_t group);
  std::vector<std::pair<int, Error>> take_ends(std::uint32_t group);
  void forget(std::uint32_t group);
  void forget_segments() { segments_.clear(); }

 private:
  template <class Kept>
  using ByGroup = std::map<std::pair<std::uint32_t, int>, Kept>;  // (group, rank)
  std::vector<std::pair<int, negotiate::Requests>> requests_;     // by peer
  std::map<int, negotiate::PendingLoad> loads_;                   // of these requests, by peer
  ByGroup<os::Descriptor> segments_;
  ByGroup<Error> ends_;
};

}  // namespace farandole
