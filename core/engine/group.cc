// A group's requests, the answers to them, and the buckets that it runs. The plan is in follow.cc.
// Touches base/, os/, negotiate/, collective/, link/ and trace/.
#include "engine/group.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "base/failpoint.h"
#include "negotiate/messages.h"
#include "negotiate/verify.h"
#include "os/clock.h"

namespace farandole {

using negotiate::Bucket;
using negotiate::Request;

namespace {

constexpr const char* kTooManyRequests = "sent more requests at once than any program does";
constexpr std::size_t kMaxHeldAnswers = 1024;  // kept until the plan has been left
// An answer that a member had before it left was sent to this one too, and arrives within this time.
constexpr std::int64_t kLatestAnswer = 10'000'000'000;

std::unique_ptr<link::Rings> make_rings(const Options& options, const Topology& topology) {
  const int locals = static_cast<int>(topology.my_host().size());
  if (locals == 1) return nullptr;
  return std::make_unique<link::Rings>(link::RingShape{locals, options.slot_bytes, options.slots}, topology.my_local());
}

}  // namespace

Group::Group(Services& services, std::uint32_t id, Topology topology)
    : services_(services),
      id_(id),
      topology_(std::move(topology)),
      rings_(make_rings(services.options(), topology_)),
      stalls_(services),
      recorder_(services.options().plan_capacity),
      plan_exchange_(services, id, topology_, rings_.get()),
      // Members create a group at different moments: some could tune before it, some after.
      nccl_(id),
      chunk_bytes_((id >= kFirstMemberGroup ? services.options().tuning : services.tuning()).chunk_bytes) {
  if (topology_.me == 0)
    coordinator_ = std::make_unique<negotiate::Coordinator>(
        topology_.ranks,
        negotiate::CoordinatorOptions{services_.tuning().fusion_threshold, services_.options().fuse_bundles});
}

void Group::submit(const OperationPtr& operation, std::int64_t now) {
  FARANDOLE_FAILPOINT(&services_, operation->request.kind, "enqueue");
  if (closed_.failed()) return services_.finish(*operation, closed_);
  if (join_ != nullptr)
    return services_.finish(*operation, {Code::precondition,
                                         "this rank has joined; it can submit again after join() "
                                         "has returned"});
  operation->phase = "negotiate";
  services_.trace().negotiate_begin(operation->request.name, operation->request.kind);
  FARANDOLE_FAILPOINT(&services_, operation->request.kind, "negotiate");
  if (following())
    offer(operation, now);
  else
    negotiate(operation, now);
}

void Group::negotiate(const OperationPtr& operation, std::int64_t now) {
  const Request& request = operation->request;
  if (request.kind == Kind::join) join_ = operation;
  pending_[request.name] = operation;
  if (coordinator_ == nullptr) {
    outbox_.push_back(request);
    return;
  }
  coordinator_->submit(0, request, now);
  services_.trace().negotiate_tick(request.name, topology_.ranks[0]);
  stalls_.submitted(now);
}

void Group::flush() {
  if (outbox_.empty()) return;
  for (negotiate::Bytes& message : negotiate::encode_requests(id_, epoch_, outbox_))
    services_.send_control(topology_.ranks[0], Control::requests, std::move(message));
  outbox_.clear();
}

Failure Group::violation(int member, const std::string& what) const {
  if (member == topology_.me) return Failure(Code::internal, "this rank itself " + what);
  return control::violation(topology_.ranks[static_cast<std::size_t>(member)],
                            what + " (process set " + std::to_string(id_) + ")");
}

void Group::on_plan_state(int member, std::uint64_t bits) {
  if (!plan_exchange_.receive(member, bits))
    throw violation(member,
                    "sent a plan state, which only the first rank of a host sends to the first rank of another");
}

void Group::on_requests(int member, std::uint32_t epoch, std::vector<Request> requests, std::int64_t now) {
  if (coordinator_ == nullptr) throw violation(member, "sent requests to a rank that is not the first one");
  if (closed_.failed()) return;
  if (epoch > epoch_) {
    // It has left the plan that this member will leave next.
    if (epoch != epoch_ + 1 || !following()) throw violation(member, "sent requests of an epoch that does not exist");
    if (held_.empty()) held_loads_.clear();
    negotiate::PendingLoad& load = held_loads_[member];
    for (const Request& request : requests) load.add(request);
    if (load.over_limit()) throw violation(member, kTooManyRequests);
    held_.push_back({member, epoch, std::move(requests)});
    return;
  }
  if (epoch < epoch_) return;  // its sender will see that a plan has started, and follow it
  for (Request& request : requests) {
    services_.trace().negotiate_tick(request.name, topology_.ranks[static_cast<std::size_t>(member)]);
    coordinator_->submit(member, std::move(request), now);
    if (coordinator_->asks_too_much(member)) throw violation(member, kTooManyRequests);
  }
  stalls_.submitted(now);
}

// Answers everything that is ready. While two buckets wait to run, more tensors collect and are fused.
bool Group::emit() {
  if (coordinator_ == nullptr || following() || queue_.size() >= 2) return false;
  std::vector<Bucket> buckets = coordinator_->take_ready();
  if (buckets.empty()) return false;
  const bool alike = negotiate::same_for_all(buckets);
  std::vector<negotiate::Bytes> messages;
  for (int member = 1; member < topology_.size(); ++member) {
    if (messages.empty() || !alike) messages = negotiate::encode_answer(id_, buckets, member, topology_.size());
    for (const negotiate::Bytes& message : messages)
      services_.messenger().control(topology_.ranks[static_cast<std::size_t>(member)],
                                    static_cast<std::uint32_t>(Control::buckets), message);
  }
  if (!alike)
    for (Bucket& bucket : buckets) bucket = negotiate::answer_for(bucket, 0, topology_.size());
  on_buckets(std::move(buckets), true);
  return true;
}

void Group::on_buckets(std::vector<Bucket> buckets, bool last) {
  if (closed_.failed()) return;
  if (following()) {
    // Rank 0, which does not wait for anyone when it tunes, has left the plan, and this member will leave it too. What
    // comes after the plan must also be recorded after it.
    const bool tunes = std::all_of(buckets.begin(), buckets.end(), [](const Bucket& bucket) {
      return bucket.kind == Kind::tune && !bucket.error.failed();
    });
    if (!tunes || held_answers_.size() + buckets.size() > kMaxHeldAnswers)
      throw violation(0, "answered requests while this rank follows a plan and has sent none");
    std::move(buckets.begin(), buckets.end(), std::back_inserter(held_answers_));
    return;
  }
  bool complete = false;
  for (Bucket& bucket : buckets) complete = agree(std::move(bucket));
  // Only the last bucket of an answer may start a plan: the buckets after the others are agreed on already.
  if (complete && last && !closed_.failed()) activate();
}

OperationPtr Group::take_pending(const std::string& name) {
  auto found = pending_.find(name);
  if (found == pending_.end()) return nullptr;
  OperationPtr operation = std::move(found->second);
  pending_.erase(found);
  return operation;
}

const char* Group::fault_in(const Bucket& bucket, const std::vector<OperationPtr>& operations) const {
  if (bucket.kind == Kind::tune && id_ != 0) return "tunes a process set other than the first one";
  const negotiate::Requester requester{topology_.ranks, topology_.me, join_ != nullptr};
  const char* fault = negotiate::fault_in(bucket, requester);
  for (std::size_t i = 0; i < operations.size() && fault == nullptr; ++i) {
    const Request* own = operations[i] == nullptr ? nullptr : &operations[i]->request;
    fault = negotiate::fault_in(bucket, bucket.items[i], own, requester);
  }
  return fault;
}

bool Group::agree(Bucket agreed) {
  std::vector<OperationPtr> operations;
  negotiate::Planned planned{std::move(agreed), {}};
  const std::shared_ptr<const Bucket> shared = planned.bucket;
  const Bucket& bucket = *shared;
  for (const negotiate::Item& item : bucket.items) {
    const bool asked = bucket.kind != Kind::tune || coordinator_ != nullptr;
    operations.push_back(asked ? take_pending(item.name) : nullptr);
    stalls_.agreed(item.name);
    services_.trace().negotiate_end(item.name);
    if (operations.back() != nullptr) planned.requests.push_back(operations.back()->request);
  }
  FARANDOLE_FAILPOINT(&services_, bucket.kind, "agree");
  if (const char* fault = fault_in(bucket, operations); fault != nullptr) {
    const std::string names = bucket.items.empty() ? "" : " (tensor '" + bucket.items.front().name + "')";
    const Failure failure = violation(0, std::string("answered with a bucket that ") + fault + names);
    for (const OperationPtr& operation : operations)
      if (operation != nullptr) services_.finish(*operation, failure.error());
    throw failure;
  }
  ++progress_.agreed;
  services_.counters().add(Counter::negotiated);
  bool complete = recorder_.record(std::move(planned));
  if (bucket.error.failed()) {
    for (const OperationPtr& operation : operations)
      if (operation != nullptr) services_.finish(*operation, bucket.error);
  } else if (bucket.kind <= Kind::reducescatter) {
    enqueue(shared, std::move(operations));
  } else {
    finish_agreed(bucket, operations);
  }
  return complete;
}

// Kinds that are complete when all members have agreed on them.
void Group::finish_agreed(const Bucket& bucket, const std::vector<OperationPtr>& operations) {
  if (bucket.kind == Kind::join) {
    OperationPtr join = std::move(join_);
    join_ = nullptr;
    if (join == nullptr) return;
    pending_.erase(join->request.name);
    join->value = bucket.last_joined;
    services_.restart_unnamed_numbers(
        id_);  // ranks that joined early did not count the operations that others still ran
    FARANDOLE_FAILPOINT(&services_, Kind::join, "complete");
    return services_.finish(*join, {});
  }
  if (bucket.kind == Kind::tune) tune(bucket);
  for (const OperationPtr& operation : operations) {
    if (operation == nullptr) continue;
    Error error;
    try {
      if (bucket.kind == Kind::add_group) operation->value = services_.add_groups(operation->request.splits);
      if (bucket.kind == Kind::remove_group)
        services_.remove_group(static_cast<std::uint32_t>(operation->request.splits.at(0)));
    } catch (const Failure& failure) {
      error = failure.error();
      // The arguments are equal on all ranks. Any other error is this rank's own, and the others have the group.
      if (error.code != Code::invalid_argument) return services_.revoke(error);
    }
    FARANDOLE_FAILPOINT(&services_, bucket.kind, "complete");
    services_.recorder().ready(operation->record, 0, services_.now());
    services_.finish(*operation, error);
  }
}

// Collectives that were agreed on before keep their values, whether they run or wait, as on the other members.
void Group::tune(const Bucket& bucket) {
  Tuning tuning = services_.tuning();
  bool measuring = false;
  Error error = Tuning::read(bucket.items.front().splits, tuning, measuring);
  if (error.failed()) throw violation(0, "sent invalid tuning values: " + error.message);
  chunk_bytes_ = tuning.chunk_bytes;
  recorder_.reset_backoff();  // this divert does not mean that the program has changed
  services_.tune(tuning, sequence_ + 1);
  if (coordinator_ == nullptr) return;
  coordinator_->fuse_up_to(tuning.fusion_threshold);
  step_timer_.begin(measuring);
  for (Counter counter : {Counter::steps, Counter::step_ns, Counter::step_bytes}) services_.counters().set(counter, 0);
}

void Group::note_pace(const Job& job) {
  const negotiate::Item& first = job.bucket->items.front();
  if (!step_timer_.reduced(first.unnamed ? "" : first.name, job.bucket->bytes())) return;
  Counters& counters = services_.counters();
  counters.set(Counter::step_ns, os::now_ns());
  counters.set(Counter::step_bytes, step_timer_.bytes());
  counters[Counter::steps].store(step_timer_.steps(), std::memory_order_release);
}

void Group::enqueue(std::shared_ptr<const Bucket> bucket, std::vector<OperationPtr> operations) {
  if (services_.trace().on()) services_.trace().mark(os::now_ns());
  auto job = std::make_unique<Job>();
  job->bucket = std::move(bucket);
  job->operations = std::move(operations);
  job->sequence = ++sequence_;
  job->chunk_bytes = chunk_bytes_;
  for (const OperationPtr& operation : job->operations) {
    if (operation == nullptr) continue;
    operation->phase = job->phase;
    services_.recorder().ready(operation->record, job->sequence, services_.now());
    services_.trace().begin(operation->request.name, operation->request.kind);
    services_.trace().activity_begin(operation->request.name, "QUEUE");
  }
  queue_.push_back(std::move(job));
}

bool Group::run_jobs() {
  bool moved = false;
  while (!queue_.empty() && ready()) {
    Job& job = *queue_.front();
    try {
      if (job.running == nullptr) {
        collective::Context context;
        context.topology = &topology_;
        context.messenger = &services_.messenger();
        context.rings = rings_.get();
        context.regions = &services_.regions();
        context.group = id_;
        context.algorithm = services_.options().algorithm;
        context.chunk_bytes = job.chunk_bytes;
        context.engine = &services_;
        job.results = &services_.results();
        job.lane = lane_for(job);
        if (job.bucket->device >= 0) nccl_.use(services_.nccl());
        job.nccl = &nccl_;
        prepare(job, context);
        moved = true;
        const std::int64_t now = os::now_ns();
        for (const OperationPtr& operation : job.operations)
          if (operation != nullptr) services_.recorder().begun(operation->record, now);
        if (services_.trace().on())
          for (const OperationPtr& operation : job.operations) {
            if (operation == nullptr) continue;
            services_.trace().activity_end(operation->request.name);
            services_.trace().activity_begin(
                operation->request.name,
                std::string(topology_.host_count() > 1 ? "TCP_" : "SHM_") + name_of(operation->request.kind));
          }
      }
      if (!job.running->advance(moved)) return moved;
    } catch (const Failure& failure) {
      if (failure.error().code == Code::shut_down)
        close(failure.error());
      else
        services_.revoke(failure.error());
      return true;
    } catch (const std::bad_alloc&) {
      throw;  // the driver handles it
    } catch (const std::exception& exception) {
      services_.revoke({Code::internal, std::string("a collective failed: ") + exception.what()});
      return true;
    }
    complete(job);
    queue_.pop_front();
  }
  return moved;
}

void Group::complete(Job& job) {
  FARANDOLE_FAILPOINT(&services_, job.bucket->kind, "complete");
  progress_.completed = job.sequence;
  services_.counters().add(Counter::collectives);
  services_.counters().add(Counter::in_place, job.in_place);
  services_.counters().add(Counter::on_device, job.on_device);
  services_.counters().add(Counter::by_nccl, job.by_nccl);
  if (job.bucket->device >= 0) note_way(job);
  if (step_timer_.on() && job.bucket->kind == Kind::allreduce) note_pace(job);
  const auto way = topology_.host_count() == 1 ? Recorder::kInsideHost : static_cast<std::uint8_t>(job.algorithm);
  const std::int64_t now = os::now_ns();
  for (std::size_t i = 0; i < job.operations.size(); ++i) {
    Operation* operation = job.operations[i].get();
    if (operation == nullptr) continue;
    services_.recorder().done(operation->record, Code::ok, way, now);
    if (services_.trace().on()) {
      services_.trace().activity_end(operation->request.name);
      services_.trace().end(operation->request.name, operation->request.dtype, operation->shape);
    }
    services_.finish(*operation, {});
    FARANDOLE_FAILPOINT(&services_, job.bucket->kind, "finished");
  }
}

// The lane of the device on which this member's first tensor lies.
cuda::Lane* Group::lane_for(const Job& job) {
  for (const OperationPtr& operation : job.operations) {
    if (operation == nullptr || operation->ready == nullptr) continue;
    if (lane_ == nullptr || &lane_->gpu() != operation->ready->gpu().get())
      lane_ = std::make_unique<cuda::Lane>(operation->ready->gpu(), services_.waker());
    return lane_.get();
  }
  return nullptr;
}

void Group::note_way(const Job& job) {
  if (job.obstacle == obstacle_ && (job.by_nccl > 0) == by_nccl_) return;
  obstacle_ = job.obstacle;
  by_nccl_ = job.by_nccl > 0;
  const std::string who = "GPU tensors of process set " + std::to_string(id_);
  const std::string trouble = job.lane == nullptr ? "" : job.lane->gpu().trouble();
  services_.log(Level::info, job.obstacle == nullptr ? who + (by_nccl_ ? " go through NCCL" : " are reduced on the GPU")
                                                     : who + " go through host memory: " + job.obstacle +
                                                           (trouble.empty() ? "" : " (" + trouble + ")"));
}

bool Group::advance(std::int64_t now) {
  bool moved = false;
  if (following()) moved = follow(now);
  moved = emit() || moved;
  moved = run_jobs() || moved;
  if (!departed_.empty()) moved = part_with_departed(now) || moved;
  flush();
  return moved;
}

void Group::check_stalls(std::int64_t now) {
  if (coordinator_ != nullptr) stalls_.check(*coordinator_, now);
}

bool Group::busy() const { return !queue_.empty() || !pending_.empty() || !planned_.empty() || !waiting_.empty(); }

bool Group::expects_frames() const {
  if (!pending_.empty() && topology_.size() > 1) return true;
  return topology_.host_count() > 1 && busy();
}

std::int64_t Group::deadline() const {
  std::int64_t next = coordinator_ != nullptr && coordinator_->anything_pending() ? stalls_.next_check() : kNever;
  if (following() && !diverting_ && !planned_since_.empty()) {
    std::int64_t patience = follower_->anything_incomplete() ? services_.tuning().flush_ns : 1'000'000'000;
    next = std::min(next, planned_since_.front().second + patience);
  }
  for (const auto& [member, departed] : departed_)
    if (!closed_.failed()) next = std::min(next, departed.since + kLatestAnswer);
  return next;
}

void Group::fail_queue_after(std::uint64_t sequence, const Error& error) {
  while (!queue_.empty() && queue_.back()->sequence > sequence) {
    std::unique_ptr<Job> job = std::move(queue_.back());
    queue_.pop_back();
    job->running.reset();  // before its operations' memory is released
    for (const OperationPtr& operation : job->operations) {
      // When complete() failed half-way, some operations are done and their waiters have continued.
      if (operation == nullptr || operation->done.load(std::memory_order_relaxed) != 0) continue;
      operation->phase = job->phase;
      services_.finish(*operation, error);
    }
  }
}

void Group::member_left(int member, Progress progress) {
  // The coordinator knows all answers, and has sent them before it leaves. Other members can be ahead by answers that
  // are under way and, in a plan, as far as all members are ready.
  const std::uint64_t known = progress_.agreed + held_answers_.size(),
                      in_plan = following() ? follower_->ready() - run_ : 0;
  const std::uint64_t under_way = progress.agreed > known ? progress.agreed - known : 0;
  const bool knows_all = coordinator_ != nullptr || member == 0;
  if (!closed_.failed() && ((knows_all && under_way > 0) || progress.completed > sequence_ + in_plan + under_way))
    return services_.revoke(violation(member, "left and claims more progress than any member can have").error());
  departed_[member] = {progress, os::now_ns()};
}

// A member that left has finished everything it took part in, but messages about that may still be under way from
// others. When this member has made the same progress, the rest cannot complete.
bool Group::part_with_departed(std::int64_t now) {
  auto found = std::find_if(departed_.begin(), departed_.end(), [&](const auto& entry) {
    const Progress& progress = entry.second.progress;
    return progress_.agreed >= progress.agreed && sequence_ >= progress.completed;
  });
  for (const auto& [member, departed] : departed_)
    if (found == departed_.end() && now - departed.since > kLatestAnswer && !closed_.failed())
      throw violation(member, "left and claims to have had answers that this rank never received");
  if (found == departed_.end()) return false;
  const int member = found->first;
  const Progress progress = found->second.progress;
  departed_.erase(found);
  Error error{Code::shut_down,
              "rank " + std::to_string(topology_.ranks[static_cast<std::size_t>(member)]) +
                  " has been shut down; operations that need it cannot be finished",
              topology_.ranks[static_cast<std::size_t>(member)]};
  fail_queue_after(progress.completed, error);
  // What that member took part in still completes; nothing new can be agreed on.
  std::deque<std::unique_ptr<Job>> kept = std::move(queue_);
  queue_.clear();
  close(error);
  queue_ = std::move(kept);
  return true;
}

void Group::close(const Error& error) {
  if (!closed_.failed()) closed_ = error;
  fail_queue_after(0, error);
  std::vector<OperationPtr> left;
  left.reserve(pending_.size() + planned_.size() + waiting_.size());  // a failure later would lose operations
  for (auto& [name, operation] : pending_) left.push_back(std::move(operation));
  for (auto& [ticket, operation] : planned_) left.push_back(std::move(operation));
  for (OperationPtr& operation : waiting_) left.push_back(std::move(operation));
  pending_.clear();
  planned_.clear();
  planned_since_.clear();
  waiting_.clear();
  outbox_.clear();
  held_.clear();
  held_answers_.clear();
  join_ = nullptr;
  follower_.reset();
  diverting_ = false;
  recorder_.reset();
  if (coordinator_ != nullptr) coordinator_->forget_pending();
  for (const OperationPtr& operation : left)
    if (operation != nullptr && operation->done.load(std::memory_order_relaxed) == 0)
      services_.finish(*operation, error);
}

}  // namespace farandole
