// The plan: a prediction that a step repeats the last one, bucket by bucket, without negotiation.
// Pure. Touches base/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// A planned bucket and this member's requests in it.
struct Planned {
  Planned(Bucket agreed, std::vector<Request> own)
      : bucket(std::make_shared<const Bucket>(std::move(agreed))), requests(std::move(own)) {}

  std::shared_ptr<const Bucket> bucket;
  std::vector<Request> requests;  // of this member, in the order of bucket.items
};

// Watches the buckets that the group runs and recognises a step. Every member passes it the same buckets in the same
// order, and so gets the same plan at the same bucket: no message is needed. So it decides by what all members know
// (the bucket), never by one member's requests; of these only the sizes of bundles are used, which are equal on all.
//
// A step is recognised when a name is repeated: the tensors recorded since the last cut are then expected from the next
// step. When the tensors recorded after a cut are exactly the expected ones, the step is complete: its buckets are the
// plan, which is active from the next request on. Unnamed tensors repeat within a step, so they make no cut; a run of
// only unnamed tensors is a step when the last buckets hold what the buckets before them held, numbered in the same
// order. Errors, barriers, joins, group changes and buckets with joined members end the recording. A plan never starts
// or ends inside a bundle. Steps of more than `capacity` tensors are not planned; 0 disables plans.
//
// Leaving a plan in its first pass adds to a backoff. Each such plan doubles the repetitions that the next plan needs:
// a program whose steps alternate is negotiated instead of diverting all the time.
class Recorder {
 public:
  explicit Recorder(std::size_t capacity);
  // Records a negotiated bucket. True when a step is complete with it: plan() is the new plan. The caller need not
  // follow it, and may continue to record.
  bool record(Planned planned);
  const std::vector<Planned>& plan() const { return plan_; }
  // The plan was left after `passes` complete passes and `done` buckets of the next one: recording continues from
  // there.
  void diverted(std::size_t done, std::uint64_t passes = 1);
  void reset_backoff() { backoff_ = 0; }  // the plan was left for another reason than a change of the program
  void reset();

 private:
  using Keys = std::map<std::string, std::uint32_t>;  // number of occurrences of each

  void end_recording();
  void cut();
  void append(Planned planned);
  bool repeats_itself(std::size_t& begin) const;
  bool adopt(std::size_t begin);

  std::size_t capacity_;
  std::vector<Planned> plan_;
  Keys expected_;
  std::size_t expected_tensors_ = 0;

  std::vector<Planned> recorded_;
  Keys keys_;                                  // of the recorded tensors
  std::vector<std::size_t> counts_{0};         // tensors in the first i recorded buckets
  std::vector<std::uint64_t> sums_{0};         // of their keys' hashes: equal for equal sets in any order
  std::size_t unnamed_since_ = 0;              // from this recorded bucket on, all tensors are unnamed
  std::map<std::string, std::uint32_t> open_;  // incomplete bundles, and the number of their missing tensors
  unsigned confirmed_ = 0;                     // consecutive steps that were as expected
  unsigned backoff_ = 0;
};

// A member's progress in an active plan. Named requests match by name, unnamed ones by their order within their kind,
// as in negotiation: when a plan starts or ends, all members have run the same buckets, and so have the same unnamed
// requests left. Requests of a bundle count when all of them have been offered, and ready() never stops between two
// buckets that share a bundle: after a divert only whole bundles are left.
class Follower {
 public:
  enum class Match { filled, planned, unplanned };

  explicit Follower(const std::vector<Planned>& plan);
  // planned: the request belongs to a later bucket, of this pass or, when its place in this pass is taken, of the next
  // one. filled: the member's next bucket, and perhaps more after it, are complete with it: ready() has grown.
  // unplanned: its name is not in the plan, or it differs from the planned request: the member must divert. `ticket` is
  // the caller's (the handle); take() returns it.
  Match offer(const Request& request, std::int64_t ticket);
  // The number of buckets, over all passes since the plan became active, that this member is ready to run.
  std::uint64_t ready() const;
  // The next bucket to run (counted as ready() counts), with the tickets in the order of its items.
  const Planned& bucket(std::uint64_t index) const;
  std::vector<std::int64_t> take(std::uint64_t index);
  // True when this ticket waits in a bucket that ready() does not count yet.
  bool incomplete(std::int64_t ticket) const;
  bool anything_incomplete() const;
  // Leaves the plan after `done` buckets (the group's smallest ready()). Returns the tickets of all later ones, in the
  // order in which they were offered. Earlier buckets can still be taken.
  std::vector<std::int64_t> withdraw(std::uint64_t done);

 private:
  struct Place {  // of one tensor in the plan
    std::size_t bucket;
    std::size_t item;
    std::uint64_t taken = 0;  // number of passes for which it is filled
  };
  struct Slot {
    std::int64_t ticket = 0;
    std::uint64_t order = 0;  // of the offer; 0: empty
  };
  struct Run {  // a bucket in one pass
    std::vector<Slot> slots;
    std::size_t missing;
  };
  struct Bundle {
    std::uint32_t offered = 0;
    std::vector<std::uint64_t> runs;
  };

  Place* place_of(const Request& request);
  Run& run_at(std::uint64_t index);
  void fill(std::uint64_t index);
  void advance();

  std::vector<Planned> plan_;
  std::vector<bool> may_stop_;  // before bucket i (of any pass)
  std::unordered_map<std::string, Place> named_;
  std::vector<std::vector<Place>> unnamed_;  // by kind, in the order of their numbers
  std::vector<std::size_t> unnamed_next_;    // by kind
  std::unordered_map<std::string, Bundle> bundles_;
  std::unordered_map<std::int64_t, std::uint64_t> where_;  // ticket -> index of its bucket
  std::deque<Run> runs_;                                   // from first_run_ on
  std::uint64_t first_run_ = 0;                            // all before it have been taken
  std::uint64_t complete_ = 0;                             // number of consecutive complete buckets
  std::uint64_t ready_ = 0;  // the last position, up to complete_, where the member may stop
  std::uint64_t offers_ = 0;
  std::size_t incomplete_ = 0;  // tickets in buckets from ready_ on
};

}  // namespace farandole::negotiate
