// The coordinator of one group, on its first member: which requests are ready everywhere, do they agree, what is fused.
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
  bool fuse_bundles = true;                  // false: a bundle shares its bucket with nobody (DISABLE_GROUP_FUSION)
};

// A request that some members have submitted and others have not, for longer than asked.
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

  // Kind join included. Kind tune is the first member's, and waits for nobody. A member that has joined and submits
  // again is the caller's mistake.
  void submit(int member, Request request, std::int64_t now_ns);
  // Everything that is ready, validated and fused, in the order it became ready. An error may name a tensor of a bundle
  // that not every member has submitted.
  std::vector<Bucket> take_ready();
  // Forgets all requests that are not ready, joins too: their owners follow a plan again and will send what it does not
  // hold, in the order in which they submitted it.
  void forget_pending();
  void fuse_up_to(std::size_t threshold) { options_.fusion_threshold = threshold; }
  std::vector<Stall> stalls(std::int64_t now_ns, std::int64_t older_than_ns) const;
  bool anything_pending() const;
  int joined() const;
  // What waits because of this member, who asked for it first or for something else than the others, is more than any
  // program asks for before it waits.
  bool asks_too_much(int member) const;

 private:
  struct Pending {
    explicit Pending(std::size_t members) : said(members) {}
    std::uint64_t order = 0;  // of arrival
    std::int64_t since_ns = 0;
    bool complete = false;  // everybody has submitted it; it waits for the rest of its bundle
    std::string bundle;     // of a complete one: the name under which it waits
    Submitted said;
  };
  struct Ready {
    Bucket bucket;
    std::uint64_t bundle = 0;  // 0: alone
  };

  bool covered(const Pending& pending) const;
  void settle(const std::string& name);  // it may have become ready
  void settle_bundle(const std::string& name);
  void settle_everything();
  std::vector<std::string> companions(const std::string& name) const;
  void fail_bundle(const std::vector<std::string>& names, Error error);
  Bucket single(const Pending& pending) const;
  void forget(const std::string& name);
  void leave_bundle(const std::string& name, Pending& pending);
  void weigh(const Pending& pending, std::size_t member, int sign);
  void erase(const std::string& name);

  std::vector<int> ranks_;
  CoordinatorOptions options_;
  std::unordered_map<std::string, Pending> pending_;
  // Tensors that are complete, by the name that their first member gave the bundle.
  std::unordered_map<std::string, std::vector<std::string>> bundles_;
  std::vector<Ready> ready_;
  std::vector<Load> loads_;  // by member: what is kept of it as a whole
  std::vector<bool> has_joined_;
  int joined_ = 0;
  int last_joined_ = -1;
  std::uint64_t arrivals_ = 0;
  std::uint64_t bundle_numbers_ = 0;
};

// The contract's messages. An empty Error when all agree. `by_member` holds each member's request, null for joined
// ones.
Error validate(const std::vector<const Request*>& by_member, const std::vector<int>& ranks);
// What one rank can check by itself, before anything is sent: dtype against op, shape, splits, root in the group ...
Error validate_alone(const Request& request, const std::vector<int>& ranks);
// Buckets in order; look-ahead past tensors that do not match, as long as fused + skipped bytes stay below the
// threshold. What a bucket says about its tensors stays small enough for one frame.
std::vector<Bucket> fuse(std::vector<Bucket> singles, const CoordinatorOptions& options);

}  // namespace farandole::negotiate
