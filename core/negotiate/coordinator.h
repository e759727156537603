// The coordinator of one group, on its first member: which requests are ready on all members, do they match, what is
// fused.
// Pure: time comes as an argument. Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiate/request.h"
#include "negotiate/submitted.h"

namespace farandole::negotiate {

struct CoordinatorOptions {
  std::size_t fusion_threshold = 128 << 20;  // bytes of one bucket; 0 fuses nothing
  bool fuse_bundles = true;  // false: a bundle shares its bucket with no other tensors (DISABLE_GROUP_FUSION)
};

// A request that some members have submitted and others have not, for longer than the given time.
struct Stall {
  std::string name;
  std::int64_t since_ns = 0;  // when the first member submitted it
  std::vector<int> present;   // ranks in the job
  std::vector<int> missing;
};

class Coordinator {
 public:
  // `ranks`: member -> rank in the job.
  Coordinator(std::vector<int> ranks, CoordinatorOptions options);

  // Also takes joins. A tune comes from the first member and waits for no other member. A member that has joined and
  // submits again is the caller's mistake.
  void submit(int member, Request request, std::int64_t now_ns);
  // Everything that is ready, validated and fused, in the order in which it became ready. An error may name a tensor of
  // a bundle that some members have not submitted.
  std::vector<Bucket> take_ready();
  // Drops all requests that are not ready, and joins: their members follow a plan again, and will send what it does not
  // contain in the order of submission.
  void forget_pending();
  void fuse_up_to(std::size_t threshold) { options_.fusion_threshold = threshold; }
  std::vector<Stall> stalls(std::int64_t now_ns, std::int64_t older_than_ns) const;
  bool anything_pending() const;
  int joined() const;
  // Whether the member has more requests waiting than any program submits before it waits. Counted are those that it
  // submitted first, or that differ from the others' requests.
  bool asks_too_much(int member) const;

 private:
  struct Pending {
    explicit Pending(std::size_t members) : requests(members) {}
    std::uint64_t order = 0;  // of arrival
    std::int64_t since_ns = 0;
    bool complete = false;  // all members have submitted it; it waits for the rest of its bundle
    std::string bundle;     // when complete: the name of the bundle for which it waits
    Submitted requests;
  };
  struct Ready {
    Bucket bucket;
    std::uint64_t bundle = 0;  // 0: none
  };

  bool covered(const Pending& pending) const;
  void check_ready(const std::string& name);  // it may have become ready
  void check_bundle(const std::string& name);
  void check_all();
  std::vector<std::string> bundled_with(const std::string& name) const;
  void fail_bundle(const std::vector<std::string>& names, Error error);
  Bucket single(const Pending& pending) const;
  void forget(const std::string& name);
  void leave_bundle(const std::string& name, Pending& pending);
  void add_load(const Pending& pending, std::size_t member, int sign);
  void erase(const std::string& name);

  std::vector<int> ranks_;
  CoordinatorOptions options_;
  std::unordered_map<std::string, Pending> pending_;
  // Complete tensors, by the bundle's name on the first member.
  std::unordered_map<std::string, std::vector<std::string>> bundles_;
  std::vector<Ready> ready_;
  std::vector<PendingLoad> loads_;  // by member: requests that are kept as a whole
  std::vector<bool> has_joined_;
  int joined_ = 0;
  int last_joined_ = -1;
  std::uint64_t arrivals_ = 0;
  std::uint64_t bundle_numbers_ = 0;
};

// The messages of Horovod's contract. An empty Error when all agree. `by_member` has each member's request, null for
// joined ones.
Error validate(const std::vector<const Request*>& by_member, const std::vector<int>& ranks);
// What one rank can check alone before anything is sent: dtype and op, shape, splits, root in the group ...
Error validate_one(const Request& request, const std::vector<int>& ranks);
// Buckets in order. Looks ahead past tensors that do not match, as long as fused + skipped bytes are below the
// threshold. A bucket's description of its tensors stays small enough for one frame.
std::vector<Bucket> fuse(std::vector<Bucket> singles, const CoordinatorOptions& options);

}  // namespace farandole::negotiate
