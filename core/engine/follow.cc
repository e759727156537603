// How a group follows its plan and leaves it.
// Touches base/, negotiate/, trace/ and engine/plan_exchange.h.
#include <algorithm>

#include "base/failpoint.h"
#include "engine/group.h"

namespace farandole {

// All members call this at the same bucket (negotiate/plan.h), so no message is needed. Requests that were sent but not
// answered are matched with the plan; the coordinator drops its copies because their epoch is old.
void Group::activate() {
  std::vector<OperationPtr> unanswered;
  for (auto& [name, operation] : pending_) unanswered.push_back(std::move(operation));
  std::sort(unanswered.begin(), unanswered.end(), [](const auto& a, const auto& b) { return a->handle < b->handle; });
  pending_.clear();
  FARANDOLE_FAILPOINT(&services_, Kind::allreduce, "activate");
  outbox_.clear();
  if (coordinator_ != nullptr) coordinator_->forget_pending();
  join_ = nullptr;
  ++epoch_;
  run_ = 0;
  diverting_ = false;
  follower_.emplace(recorder_.plan());
  publish();
  for (const OperationPtr& operation : unanswered) offer(operation, operation->submitted_ns);
}

void Group::offer(const OperationPtr& operation, std::int64_t now) {
  if (diverting_) {
    waiting_.push_back(operation);
    return;
  }
  negotiate::Follower::Match match = negotiate::Follower::Match::unplanned;
  if (operation->request.kind != Kind::join) match = follower_->offer(operation->request, operation->handle);
  if (match == negotiate::Follower::Match::unplanned) {
    waiting_.push_back(operation);
    divert();
    return;
  }
  planned_.emplace(operation->handle, operation);
  planned_since_.emplace_back(operation->handle, now);
  if (match == negotiate::Follower::Match::filled) publish();
}

void Group::divert() {
  if (diverting_) return;
  diverting_ = true;
  services_.counters().add(Counter::diverts);
  publish();
}

void Group::awaited(std::int64_t handle) {
  if (following() && !diverting_ && planned_.count(handle) != 0 && follower_->incomplete(handle)) divert();
}

void Group::publish() { plan_exchange_.publish({epoch_, diverting_, diverting_, follower_->ready()}); }

bool Group::must_divert() { return following() && !diverting_ && plan_exchange_.combined(epoch_).any; }

std::int64_t Group::oldest_planned() {
  while (!planned_since_.empty() && planned_.count(planned_since_.front().first) == 0) planned_since_.pop_front();
  return planned_since_.empty() ? kNever : planned_since_.front().second;
}

bool Group::follow(std::int64_t now) {
  bool moved = false;
  PlanState everyone = plan_exchange_.combined(epoch_);
  if (everyone.any && !diverting_) {
    divert();
    everyone = plan_exchange_.combined(epoch_);
    moved = true;
  }
  while (run_ < everyone.ready && run_ < follower_->ready()) {
    std::shared_ptr<const negotiate::Bucket> bucket = follower_->bucket(run_).bucket;
    std::vector<OperationPtr> operations;
    operations.reserve(bucket->items.size());
    for (std::int64_t ticket : follower_->take(run_)) {
      auto found = planned_.find(ticket);
      operations.push_back(std::move(found->second));
      planned_.erase(found);
      services_.trace().negotiate_end(operations.back()->request.name);
    }
    services_.counters().add(Counter::planned);
    enqueue(std::move(bucket), std::move(operations));
    ++run_;
    moved = true;
  }
  if (everyone.all) {
    if (everyone.ready < run_)
      throw violation(plan_exchange_.find_inconsistent_member(epoch_, run_),
                      "took back the number of planned buckets that it was ready for");
    leave_plan(everyone.ready, now);
    return true;
  }
  if (!diverting_) {
    std::int64_t oldest = oldest_planned();
    if (oldest != kNever) {
      // A complete bucket that other members do not run is negotiated too, so that the stall is reported.
      bool incomplete = follower_->incomplete(planned_since_.front().first);
      std::int64_t patience = incomplete ? services_.tuning().flush_ns : 1'000'000'000;
      if (now - oldest >= patience) {
        divert();
        moved = true;
      }
    }
  }
  return moved;
}

void Group::leave_plan(std::uint64_t done, std::int64_t now) {
  std::vector<OperationPtr> operations;
  for (std::int64_t ticket : follower_->withdraw(done)) {
    auto found = planned_.find(ticket);
    operations.push_back(std::move(found->second));
    planned_.erase(found);
  }
  operations.insert(operations.end(), std::make_move_iterator(waiting_.begin()),
                    std::make_move_iterator(waiting_.end()));
  std::size_t length = recorder_.plan().size();
  waiting_.clear();
  planned_since_.clear();
  follower_.reset();
  diverting_ = false;
  ++epoch_;
  recorder_.diverted(static_cast<std::size_t>(done % length), done / length);
  for (const OperationPtr& operation : operations) negotiate(operation, now);
  std::vector<Held> held = std::move(held_);
  held_.clear();
  for (Held& early : held) on_requests(early.member, early.epoch, std::move(early.requests), now);
  std::vector<negotiate::Bucket> answers = std::move(held_answers_);
  held_answers_.clear();
  if (!answers.empty()) on_buckets(std::move(answers), true);
}

}  // namespace farandole
