// One group on this rank: its requests, its plan, and the buckets that it runs in the agreed order.
// Touches negotiate/, collective/, link/ and trace/. Used only by the driver.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/execute.h"
#include "engine/plan_exchange.h"
#include "engine/services.h"
#include "engine/stalls.h"
#include "link/rings.h"
#include "negotiate/coordinator.h"
#include "negotiate/plan.h"

namespace farandole {

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
  cuda::Lane* lane_for(const Job& job);
  void note_way(const Job& job);
  void activate();
  void divert();
  void publish();
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
  Stalls stalls_;

  // The plan.
  negotiate::Recorder recorder_;
  PlanExchange plan_exchange_;
  std::optional<negotiate::Follower> follower_;
  std::uint32_t epoch_ = 0;  // number of starts and ends of plans
  bool diverting_ = false;
  std::uint64_t run_ = 0;                                            // planned buckets put into the queue in this epoch
  std::unordered_map<std::int64_t, OperationPtr> planned_;           // ticket -> operation
  std::deque<std::pair<std::int64_t, std::int64_t>> planned_since_;  // (ticket, time), in order of submission
  std::vector<OperationPtr> waiting_;                                // submitted while the plan is being left

  // Execution.
  std::unique_ptr<cuda::Lane> lane_;  // for device tensors; used by the first of the queue
  collective::NcclGroup nccl_;        // likewise
  const char* obstacle_ = nullptr;    // the last reason why they went through host memory
  bool by_nccl_ = false;              // they went through NCCL the last time
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
