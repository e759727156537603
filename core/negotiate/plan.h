// The plan: a step that repeats the last one is predicted, bucket by bucket, without asking anybody.
// Pure. Touches base/.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// A planned bucket and the requests by which this member took part in it.
struct Planned {
  Bucket bucket;
  std::vector<Request> requests;  // mine, in the order of bucket.items
};

// Watches the buckets that the group runs and recognises a step. Every member feeds it the same buckets in the same order
// and so comes to the same plan at the same bucket: no message is needed.
//
// A step is recognised when a key (Request::key) comes again: what was recorded since the last cut is the expected set of
// keys. When the keys recorded after a cut are exactly the expected set, the step is complete: its buckets are the plan,
// which is active from the next request on. Errors, barriers, joins, group changes and buckets with joined members end
// the recording. Steps of more than `capacity` tensors are not planned; 0 switches plans off.
class Recorder {
 public:
  explicit Recorder(std::size_t capacity);
  // Records a negotiated bucket. True when with it a step is complete: plan() is the new plan.
  bool record(Planned planned);
  const std::vector<Planned>& plan() const;
  // The plan was left after `done` of its buckets in the current pass: recording goes on from there.
  void diverted(std::size_t done);
  void reset();

 private:
  // (the agent who fills this room adds what it needs)
};

// A member's way through an active plan.
class Follower {
 public:
  enum class Match { filled, planned, unplanned };

  explicit Follower(const std::vector<Planned>& plan);
  // planned: the request belongs to a bucket ahead (within this pass or, when its place in this pass is taken, the next).
  // filled: with it the member's next bucket, and perhaps more after it, are complete: go() has grown.
  // unplanned: its name is not in the plan, or it differs from what was planned: the member must divert.
  // `ticket` is the caller's (the handle); it comes back in take().
  Match offer(const Request& request, std::int64_t ticket);
  // How many buckets, counted over all passes since the plan became active, this member is ready to run.
  std::uint64_t go() const;
  // The next bucket to run (counted as go() counts), with the tickets in the order of its items.
  const Planned& bucket(std::uint64_t index) const;
  std::vector<std::int64_t> take(std::uint64_t index);
  // True when this ticket waits in a bucket that is not complete.
  bool incomplete(std::int64_t ticket) const;
  bool anything_incomplete() const;
  // Leaves the plan after `done` buckets (the group's smallest go()): the tickets of all later ones, in the order in which
  // they were offered. The follower is finished.
  std::vector<std::int64_t> withdraw(std::uint64_t done);

 private:
  // (the agent who fills this room adds what it needs)
};

}  // namespace farandole::negotiate
