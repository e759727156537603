// The plan: a step that repeats the last one is predicted, bucket by bucket, without asking anybody.
// Pure. Touches base/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// A planned bucket and the requests by which this member took part in it.
struct Planned {
  Bucket bucket;
  std::vector<Request> requests;  // mine, in the order of bucket.items
};

// Watches the buckets that the group runs and recognises a step. Every member feeds it the same buckets in the same
// order and so comes to the same plan at the same bucket: no message is needed. It therefore decides by what all
// members know (the bucket), never by what one of them asked for; of a member's own requests only the sizes of bundles
// count, which all share.
//
// A step is recognised when a name comes again: what was recorded since the last cut is what is expected of the next
// step. When the tensors recorded after a cut are exactly the expected ones, the step is complete: its buckets are the
// plan, which is active from the next request on. Unnamed tensors come again within a step, so they cut nothing; a run
// of unnamed ones alone is a step when the last buckets hold what the buckets before them held, numbered in the same
// order. Errors, barriers, joins, group changes and buckets with joined members end the recording. A plan never begins
// or ends within a bundle. Steps of more than `capacity` tensors are not planned; 0 switches plans off.
//
// A plan that was left in its first pass raises a doubt, and each doubt doubles what must repeat before the next plan:
// a program whose steps alternate is negotiated instead of diverting all the time.
class Recorder {
 public:
  explicit Recorder(std::size_t capacity);
  // Records a negotiated bucket. True when with it a step is complete: plan() is the new plan. The caller need not
  // follow it; it may just go on recording.
  bool record(Planned planned);
  const std::vector<Planned>& plan() const { return plan_; }
  // The plan was left after `passes` whole passes and `done` buckets of the next one: recording goes on from there.
  void diverted(std::size_t done, std::uint64_t passes = 1);
  void trust() { doubt_ = 0; }  // the plan was left for another reason than that the program changed
  void reset();

 private:
  using Keys = std::map<std::string, std::uint32_t>;  // how often each occurs

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
  Keys keys_;                                  // of what is recorded
  std::vector<std::size_t> counts_{0};         // tensors in the first i recorded buckets
  std::vector<std::uint64_t> sums_{0};         // of their keys' hashes: equal for equal sets in any order
  std::size_t unnamed_since_ = 0;              // the recorded buckets from here on hold unnamed tensors alone
  std::map<std::string, std::uint32_t> open_;  // bundles of which tensors are still to come, and how many
  unsigned confirmed_ = 0;                     // consecutive steps that were as expected
  unsigned doubt_ = 0;
};

// A member's way through an active plan. Named requests match by name; unnamed ones by their order within their kind,
// as they do in negotiation: all members have run the same buckets when a plan begins or ends, and so have the same
// unnamed requests left. Requests of a bundle count when all of them have been offered, and go() never stops between
// two buckets that share a bundle: whatever is left after a divert is whole bundles.
class Follower {
 public:
  enum class Match { filled, planned, unplanned };

  explicit Follower(const std::vector<Planned>& plan);
  // planned: the request belongs to a bucket ahead (within this pass or, when its place in this pass is taken, the
  // next). filled: with it the member's next bucket, and perhaps more after it, are complete: go() has grown.
  // unplanned: its name is not in the plan, or it differs from what was planned: the member must divert.
  // `ticket` is the caller's (the handle); it comes back in take().
  Match offer(const Request& request, std::int64_t ticket);
  // How many buckets, counted over all passes since the plan became active, this member is ready to run.
  std::uint64_t go() const;
  // The next bucket to run (counted as go() counts), with the tickets in the order of its items.
  const Planned& bucket(std::uint64_t index) const;
  std::vector<std::int64_t> take(std::uint64_t index);
  // True when this ticket waits in a bucket that go() does not count.
  bool incomplete(std::int64_t ticket) const;
  bool anything_incomplete() const;
  // Leaves the plan after `done` buckets (the group's smallest go()): the tickets of all later ones, in the order in
  // which they were offered. The follower is finished; earlier buckets can still be taken.
  std::vector<std::int64_t> withdraw(std::uint64_t done);

 private:
  struct Place {  // of one tensor in the plan
    std::size_t bucket;
    std::size_t item;
    std::uint64_t taken = 0;  // passes for which it has been filled
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
  std::uint64_t complete_ = 0;                             // consecutive complete buckets
  std::uint64_t go_ = 0;  // the last place not after complete_ where the member may stop
  std::uint64_t offers_ = 0;
  std::size_t incomplete_ = 0;  // tickets in buckets from go_ on
};

}  // namespace farandole::negotiate
