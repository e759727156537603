// One group on this rank: its requests, its plan, and the buckets that it runs in the agreed order.
// Touches negotiate/, collective/, link/ and trace/. Used only by the driver.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "collective/collective.h"
#include "engine/control.h"
#include "engine/events.h"
#include "engine/execute.h"
#include "engine/operation.h"
#include "engine/plan_state.h"
#include "engine/tuning.h"
#include "group/topology.h"
#include "link/messenger.h"
#include "link/rings.h"
#include "negotiate/coordinator.h"
#include "negotiate/plan.h"
#include "trace/trace.h"

namespace farandole {

struct Options {
  int rank = 0;
  int size = 1;
  std::vector<int> hosts;  // by rank
  std::uint32_t generation = 0;
  collective::Algorithm algorithm = collective::Algorithm::automatic;
  std::size_t plan_capacity = 1024;
  std::int64_t stall_note_ns = 0;  // 0: never, here and below
  std::int64_t stall_warning_ns = 0;
  std::int64_t stall_shutdown_ns = 0;
  std::size_t slot_bytes = 64 << 10;
  int slots = 4;
  bool fuse_bundles = true;
  int tcp_streams = 1;  // between two ranks on different hosts
  Tuning tuning;        // the first values
};

// The values are part of the C interface.
enum class Counter {
  sent,
  received,
  frames,
  negotiated,
  planned,
  diverts,
  in_place,
  collectives,
  wake_ups,
  steps,
  step_ns,
  step_bytes,
  waited_ns  // by threads of the user, for operations that were not done when they called
};
inline constexpr int kCounters = 13;
using Counters = std::array<std::atomic<std::int64_t>, kCounters>;

// What the groups of an engine share and need from it.
class Services {
 public:
  virtual ~Services() = default;
  virtual const Options& options() const = 0;
  virtual link::Messenger& messenger() = 0;
  virtual const link::Regions& regions() const = 0;
  virtual Counters& counters() = 0;
  virtual Trace& trace() = 0;
  virtual Results& results() = 0;
  virtual void log(Level level, std::string text) = 0;
  virtual void finish(Operation& operation, const Error& error) = 0;
  virtual void revoke(const Error& error) = 0;  // takes effect at the end of the current pass
  // Changes of groups that all ranks have agreed on. Returns the first new ID.
  virtual std::int64_t add_groups(const std::vector<std::int64_t>& sets) = 0;
  virtual void remove_group(std::uint32_t id) = 0;
  virtual void restart_unnamed_numbers(std::uint32_t id) = 0;
  virtual const Tuning& tuning() const = 0;
  // Called by the first group, from its collective `sequence` on; groups that are created later start with it.
  virtual void tune(const Tuning& tuning, std::uint64_t sequence) = 0;
};

class Group {
 public:
  Group(Services& services, std::uint32_t id, Topology topology);

  std::uint32_t id() const { return id_; }
  const Topology& topology() const { return topology_; }
  link::Rings* rings() { return rings_.get(); }
  bool ready() const { return rings_ == nullptr || rings_->complete(); }

  void submit(const OperationPtr& operation, std::int64_t now);
  // The user waits for or polls this handle: its bucket must not wait for other tensors.
  void awaited(std::int64_t handle);
  // These throw when another member has broken the protocol.
  void on_requests(int member, std::uint32_t epoch, std::vector<negotiate::Request> requests, std::int64_t now);
  void on_buckets(std::vector<negotiate::Bucket> buckets, bool last);  // of the coordinator's answer
  void on_plan_state(int member, std::uint64_t bits);

  // Does everything that can be done without waiting. True when anything moved.
  bool advance(std::int64_t now);
  // Sends the requests that submit() has collected.
  void flush();
  bool busy() const;              // a collective runs, or an answer is awaited
  bool must_divert();             // another member has left the plan that this member still follows
  bool expects_frames() const;    // over a stream, not through shared memory
  std::int64_t deadline() const;  // when to check again even without events; kNever
  void check_stalls(std::int64_t now);

  Progress progress() const { return progress_; }
  // A member has shut down with this progress: operations that need more of it fail.
  void member_left(int member, Progress progress);
  // Ends all operations, now and later.
  void close(const Error& error);
  const Error& closed() const { return closed_; }  // the reason

  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

 private:
  struct Held {
    int member;
    std::uint32_t epoch;
    std::vector<negotiate::Request> requests;
  };

  bool following() const { return follower_.has_value(); }
  void negotiate(const OperationPtr& operation, std::int64_t now);
  void offer(const OperationPtr& operation, std::int64_t now);
  bool emit();
  bool agree(negotiate::Bucket bucket);  // true when a step is complete with it
  const char* fault_in(const negotiate::Bucket& bucket, const std::vector<OperationPtr>& operations) const;
  Failure violation(int member, const std::string& what) const;
  void finish_agreed(const negotiate::Bucket& bucket, const std::vector<OperationPtr>& operations);
  void tune(const negotiate::Bucket& bucket);
  void note_pace(const Job& job);
  void enqueue(std::shared_ptr<const negotiate::Bucket> bucket, std::vector<OperationPtr> operations);
  bool run_jobs();
  void complete(Job& job);
  void activate();
  void divert();
  void publish();
  PlanState combined_state();  // the combined state of all members
  PlanState exchange_host_states(const PlanState& local);
  int find_inconsistent_member() const;
  bool follow(std::int64_t now);
  void leave_plan(std::uint64_t done, std::int64_t now);
  std::int64_t oldest_planned();
  OperationPtr take_pending(const std::string& name);
  void fail_queue_after(std::uint64_t sequence, const Error& error);
  bool part_with_departed(std::int64_t now);

  Services& services_;
  std::uint32_t id_;
  Topology topology_;
  std::unique_ptr<link::Rings> rings_;

  // Negotiation. `pending_` has the operations that wait for an answer, by name.
  std::unique_ptr<negotiate::Coordinator> coordinator_;  // on member 0
  std::unordered_map<std::string, OperationPtr> pending_;
  std::vector<negotiate::Request> outbox_;
  std::vector<Held> held_;                            // requests of members that are one epoch ahead
  std::map<int, negotiate::PendingLoad> held_loads_;  // by member
  std::vector<negotiate::Bucket> held_answers_;       // answers of a coordinator that is one epoch ahead
  OperationPtr join_;                                 // set while this member has joined
  std::int64_t next_stall_check_ = kNever;
  std::unordered_map<std::string, int> stall_reports_;  // name -> 1 noted, 2 warned

  // The plan.
  negotiate::Recorder recorder_;
  std::optional<negotiate::Follower> follower_;
  std::uint32_t epoch_ = 0;  // number of starts and ends of plans
  bool diverting_ = false;
  std::uint64_t run_ = 0;  // planned buckets put into the queue in this epoch
  std::uint64_t published_ = 0;
  std::unordered_map<std::int64_t, OperationPtr> planned_;           // ticket -> operation
  std::deque<std::pair<std::int64_t, std::int64_t>> planned_since_;  // (ticket, time), in order of submission
  std::vector<OperationPtr> waiting_;                                // submitted while the plan is being left
  std::vector<std::uint64_t> host_states_;                           // on the first member of a host, by host
  std::uint64_t sent_host_state_ = 0;

  // Execution.
  std::deque<std::unique_ptr<Job>> queue_;
  std::uint64_t sequence_ = 0;
  std::size_t chunk_bytes_;  // for collectives from now on: all members change it at the same point
  StepTimer step_timer_;     // on rank 0, while steps are measured
  Progress progress_;
  struct Departed {
    Progress progress;
    std::int64_t since;
  };
  std::map<int, Departed> departed_;  // members that left, until this member has made the same progress
  Error closed_;
};

}  // namespace farandole
