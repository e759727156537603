// The coordinator of one group, on its first member: which requests are ready everywhere, do they agree, what is fused.
// Pure: time comes as an argument. Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

struct CoordinatorOptions {
  std::size_t fusion_threshold = 128 << 20;  // bytes of one bucket; 0 fuses nothing
  bool fuse_bundles = true;                  // false: a bundle shares its bucket with nobody (DISABLE_GROUP_FUSION)
};

// A request that some members have submitted and others have not, for longer than asked.
struct Stall {
  std::string name;
  std::int64_t since_ns = 0;      // when the first member submitted it
  std::vector<int> present;       // ranks in the job
  std::vector<int> missing;
};

class Coordinator {
 public:
  // `ranks`: member -> rank in the job.
  Coordinator(std::vector<int> ranks, CoordinatorOptions options);

  void submit(int member, Request request, std::int64_t now_ns);  // kind join included
  // Everything that is ready, validated and fused, in the order it became ready.
  std::vector<Bucket> take_ready();
  // Forgets all requests that are not ready: their owners follow a plan again and will send what it does not hold.
  void forget_pending();
  std::vector<Stall> stalls(std::int64_t now_ns, std::int64_t older_than_ns) const;
  bool anything_pending() const;
  int joined() const;

 private:
  // (the agent who fills this room adds what it needs)
};

// The contract's messages. An empty Error when all agree. `by_member` holds each member's request, null for joined ones.
Error validate(const std::vector<const Request*>& by_member, const std::vector<int>& ranks);
// What one rank can check by itself, before anything is sent: dtype against op, shape, splits, root in the group ...
Error validate_alone(const Request& request, const std::vector<int>& ranks);
// Buckets in order; look-ahead past tensors that do not match, as long as fused + skipped bytes stay below the threshold.
std::vector<Bucket> fuse(std::vector<Bucket> singles, const CoordinatorOptions& options);

}  // namespace farandole::negotiate
