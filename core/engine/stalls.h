// Stalls: tensors that some ranks have submitted and others have not, for too long. They are reported, and end the job
// where the user wants it.
// Touches negotiate/ and engine/services.h. Used only by the driver.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "engine/services.h"
#include "negotiate/coordinator.h"

namespace farandole {

class Stalls {
 public:
  explicit Stalls(Services& services) : services_(services) {}
  void submitted(std::int64_t now) {  // something is pending
    if (next_check_ == kNever) next_check_ = now;
  }
  void agreed(const std::string& name) { reported_.erase(name); }
  void check(const negotiate::Coordinator& coordinator, std::int64_t now);
  std::int64_t next_check() const { return next_check_; }

 private:
  Services& services_;
  std::int64_t next_check_ = kNever;
  std::unordered_map<std::string, int> reported_;  // name -> 1 noted, 2 warned
};

}  // namespace farandole
