// How a group follows its plan and leaves it, and how it reports stalls.
// Touches negotiate/, link/ and trace/.
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
  services_.counters()[static_cast<int>(Counter::diverts)].fetch_add(1, std::memory_order_relaxed);
  publish();
}

void Group::awaited(std::int64_t handle) {
  if (following() && !diverting_ && planned_.count(handle) != 0 && follower_->incomplete(handle)) divert();
}

void Group::publish() {
  std::uint64_t bits = PlanState{epoch_, diverting_, diverting_, follower_->ready()}.pack();
  if (bits == published_) return;
  published_ = bits;
  if (rings_ == nullptr) return;
  rings_->own_plan_states().own.store(bits, std::memory_order_release);
  rings_->notify_all(diverting_);
}

PlanState Group::combined_state() {
  PlanState state = PlanState::unpack(published_);
  if (rings_ != nullptr)
    for (int member = 0; member < rings_->members(); ++member)
      if (member != rings_->me())
        state = PlanState::combine(
            state, PlanState::unpack(rings_->plan_states_of(member).own.load(std::memory_order_acquire)), epoch_);
  return topology_.host_count() > 1 ? exchange_host_states(state) : state;
}

// The first member of each host represents it: it sends its host's state to the first members of the other hosts, and
// publishes their combined state to its local peers.
PlanState Group::exchange_host_states(const PlanState& local) {
  if (topology_.my_local() != 0)
    return PlanState::combine(
        local, PlanState::unpack(rings_->plan_states_of(0).remote.load(std::memory_order_acquire)), epoch_);
  auto my_host = static_cast<std::size_t>(topology_.host_of[static_cast<std::size_t>(topology_.me)]);
  if (local.pack() != sent_host_state_) {
    sent_host_state_ = local.pack();
    for (std::size_t host = 0; host < topology_.hosts.size(); ++host) {
      if (host == my_host) continue;
      int leader = topology_.ranks[static_cast<std::size_t>(topology_.hosts[host][0])];
      services_.messenger().control(leader, static_cast<std::uint32_t>(Control::plan_state),
                                    control::encode(control::PlanState{id_, sent_host_state_}));
    }
  }
  PlanState remote{PlanState::trim(epoch_), true, true, (1ull << 42) - 1};
  bool any = false;
  for (std::size_t host = 0; host < topology_.hosts.size(); ++host)
    if (host != my_host) {
      PlanState state = PlanState::unpack(host_states_[host]);
      any = any || (state.epoch == PlanState::trim(epoch_) && state.any);
      remote = PlanState::combine(remote, state, epoch_);
    }
  remote.any = any;
  if (rings_ != nullptr && rings_->own_plan_states().remote.load(std::memory_order_relaxed) != remote.pack()) {
    rings_->own_plan_states().remote.store(remote.pack(), std::memory_order_release);
    rings_->notify_all(remote.any);
  }
  return PlanState::combine(local, remote, epoch_);
}

bool Group::must_divert() { return following() && !diverting_ && combined_state().any; }

void Group::on_plan_state(int member, std::uint64_t bits) {
  const auto host = static_cast<std::size_t>(topology_.host_of[static_cast<std::size_t>(member)]);
  if (topology_.hosts[host][0] != member || topology_.my_local() != 0 || topology_.my_host()[0] == member)
    throw violation(member,
                    "sent a plan state, which only the first rank of a host sends to the first rank of another");
  host_states_[host] = bits;
}

// A member has taken back the number of buckets that it was ready for. The states are read again, to find that member.
int Group::find_inconsistent_member() const {
  const auto went_back = [this](std::uint64_t bits) {
    const PlanState state = PlanState::unpack(bits);
    return state.epoch == PlanState::trim(epoch_) && state.ready < run_;
  };
  const std::vector<int>& locals = topology_.my_host();
  for (int local = 0; rings_ != nullptr && local < rings_->members(); ++local)
    if (local != rings_->me() && went_back(rings_->plan_states_of(local).own.load(std::memory_order_acquire)))
      return locals[static_cast<std::size_t>(local)];
  for (std::size_t host = 0; topology_.my_local() == 0 && host < host_states_.size(); ++host)
    if (went_back(host_states_[host])) return topology_.hosts[host][0];
  return locals[0];  // it receives the states of the other hosts for this one
}

std::int64_t Group::oldest_planned() {
  while (!planned_since_.empty() && planned_.count(planned_since_.front().first) == 0) planned_since_.pop_front();
  return planned_since_.empty() ? kNever : planned_since_.front().second;
}

bool Group::follow(std::int64_t now) {
  bool moved = false;
  PlanState everyone = combined_state();
  if (everyone.any && !diverting_) {
    divert();
    everyone = combined_state();
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
    services_.counters()[static_cast<int>(Counter::planned)].fetch_add(1, std::memory_order_relaxed);
    enqueue(std::move(bucket), std::move(operations));
    ++run_;
    moved = true;
  }
  if (everyone.all) {
    if (everyone.ready < run_)
      throw violation(find_inconsistent_member(), "took back the number of planned buckets that it was ready for");
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

namespace {

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < 16; ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > 16) text += " and " + std::to_string(ranks.size() - 16) + " more";
  return text;
}

}  // namespace

void Group::check_stalls(std::int64_t now) {
  if (coordinator_ == nullptr || now < next_stall_check_) return;
  const Options& options = services_.options();
  std::int64_t first = std::min({options.stall_note_ns > 0 ? options.stall_note_ns : kNever,
                                 options.stall_warning_ns > 0 ? options.stall_warning_ns : kNever,
                                 options.stall_shutdown_ns > 0 ? options.stall_shutdown_ns : kNever});
  if (!coordinator_->anything_pending() || first == kNever) {
    next_stall_check_ = kNever;
    return;
  }
  next_stall_check_ = now + std::min<std::int64_t>(first, 1'000'000'000);
  std::string report;
  for (const negotiate::Stall& stall : coordinator_->stalls(now, first)) {
    std::int64_t age = now - stall.since_ns;
    std::string line = stall.name + ": waiting for rank " + ranks_text(stall.missing) + " (submitted by rank " +
                       ranks_text(stall.present) + " " + std::to_string(age / 1'000'000'000) + " s ago)";
    if (options.stall_shutdown_ns > 0 && age >= options.stall_shutdown_ns)
      return services_.revoke(
          {Code::shut_down, "stalled for longer than the stall shutdown time: " + line, stall.missing.front()});
    int& level = stall_reports_[stall.name];
    if (options.stall_warning_ns > 0 && age >= options.stall_warning_ns * (level < 2 ? 1 : level)) {
      level = level < 2 ? 2 : level + 1;
      report += "\n  " + line;
    } else if (options.stall_note_ns > 0 && age >= options.stall_note_ns && level == 0) {
      level = 1;
      services_.log(Level::warning, line);
    }
  }
  if (!report.empty())
    services_.log(
        Level::warning,
        "Stalled: some ranks have submitted tensors that others have not. A rank may have left its loop early, "
        "wait for something else, or run another sequence of operations:" +
            report);
}

}  // namespace farandole
