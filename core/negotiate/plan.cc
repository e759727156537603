// Follower: a member's progress in an active plan.
// Pure. Touches base/.
#include "negotiate/plan.h"

#include <algorithm>
#include <utility>

namespace farandole::negotiate {

Follower::Follower(const std::vector<Planned>& plan)
    : plan_(plan), may_stop_(plan.size() + 1, true), unnamed_(kKinds), unnamed_next_(kKinds, 0) {
  std::unordered_map<std::string, std::size_t> first_bucket;  // of each bundle
  for (std::size_t b = 0; b < plan_.size(); ++b) {
    for (std::size_t i = 0; i < plan_[b].requests.size(); ++i) {
      const Request& request = plan_[b].requests[i];
      if (plan_[b].bucket->items[i].unnamed) {
        unnamed_[static_cast<std::size_t>(request.kind)].push_back({b, i});
      } else {
        named_[request.name] = {b, i};
      }
      if (request.bundle.empty()) continue;
      const std::size_t first = first_bucket.try_emplace(request.bundle, b).first->second;
      for (std::size_t stop = first + 1; stop <= b; ++stop) may_stop_[stop] = false;
    }
  }
  const auto number = [this](const Place& place) { return number_of(plan_[place.bucket].requests[place.item].name); };
  for (std::vector<Place>& places : unnamed_) {
    std::stable_sort(places.begin(), places.end(),
                     [&](const Place& a, const Place& b) { return number(a) < number(b); });
  }
}

Follower::Place* Follower::place_of(const Request& request) {
  if (!request.unnamed) {
    const auto found = named_.find(request.name);
    return found == named_.end() ? nullptr : &found->second;
  }
  const auto kind = static_cast<std::size_t>(request.kind);
  return unnamed_[kind].empty() ? nullptr : &unnamed_[kind][unnamed_next_[kind]];
}

Follower::Match Follower::offer(const Request& request, std::int64_t ticket) {
  Place* place = place_of(request);
  if (place == nullptr || !request.same_but_name(plan_[place->bucket].requests[place->item])) return Match::unplanned;
  if (request.unnamed) {
    std::size_t& next = unnamed_next_[static_cast<std::size_t>(request.kind)];
    next = (next + 1) % unnamed_[static_cast<std::size_t>(request.kind)].size();
  }
  const std::uint64_t index = place->taken++ * plan_.size() + place->bucket;
  run_at(index).slots[place->item] = {ticket, ++offers_};
  where_.emplace(ticket, index);
  ++incomplete_;

  const std::uint64_t before = ready_;
  if (request.bundle.empty()) {
    fill(index);
  } else {
    Bundle& bundle = bundles_[request.bundle];
    bundle.runs.push_back(index);
    if (++bundle.offered == request.bundle_size) {
      const std::vector<std::uint64_t> runs = std::move(bundle.runs);
      bundles_.erase(request.bundle);
      for (std::uint64_t run : runs) fill(run);
    }
  }
  return ready_ > before ? Match::filled : Match::planned;
}

Follower::Run& Follower::run_at(std::uint64_t index) {
  while (first_run_ + runs_.size() <= index) {
    const std::size_t items = plan_[(first_run_ + runs_.size()) % plan_.size()].requests.size();
    runs_.push_back({std::vector<Slot>(items), items});
  }
  return runs_[index - first_run_];
}

void Follower::fill(std::uint64_t index) {
  if (--run_at(index).missing == 0 && index == complete_) advance();
}

void Follower::advance() {
  while (complete_ < first_run_ + runs_.size() && runs_[complete_ - first_run_].missing == 0) {
    ++complete_;
    if (!may_stop_[complete_ % plan_.size()]) continue;
    for (; ready_ < complete_; ++ready_) incomplete_ -= runs_[ready_ - first_run_].slots.size();
  }
}

std::uint64_t Follower::ready() const { return ready_; }

const Planned& Follower::bucket(std::uint64_t index) const { return plan_[index % plan_.size()]; }

std::vector<std::int64_t> Follower::take(std::uint64_t index) {
  if (index < first_run_ || index >= ready_ || runs_[index - first_run_].slots.empty()) {
    throw Failure(Code::internal,
                  "bucket " + std::to_string(index) + " of the plan is not the next one, or not complete");
  }
  std::vector<std::int64_t> tickets;
  tickets.reserve(runs_[index - first_run_].slots.size());
  for (const Slot& slot : runs_[index - first_run_].slots) {
    tickets.push_back(slot.ticket);
    where_.erase(slot.ticket);
  }
  runs_[index - first_run_].slots.clear();
  while (!runs_.empty() && first_run_ < ready_ && runs_.front().slots.empty()) {
    runs_.pop_front();
    ++first_run_;
  }
  return tickets;
}

bool Follower::incomplete(std::int64_t ticket) const {
  const auto found = where_.find(ticket);
  return found != where_.end() && found->second >= ready_;
}

bool Follower::anything_incomplete() const { return incomplete_ > 0; }

std::vector<std::int64_t> Follower::withdraw(std::uint64_t done) {
  std::vector<Slot> left;
  for (std::uint64_t index = std::max(done, first_run_); index < first_run_ + runs_.size(); ++index) {
    for (const Slot& slot : runs_[index - first_run_].slots) {
      if (slot.order == 0) continue;
      left.push_back(slot);
      where_.erase(slot.ticket);
    }
  }
  if (done < first_run_ + runs_.size()) runs_.resize(std::max(done, first_run_) - first_run_);
  ready_ = complete_ = done;
  incomplete_ = 0;
  bundles_.clear();
  std::sort(left.begin(), left.end(), [](const Slot& a, const Slot& b) { return a.order < b.order; });
  std::vector<std::int64_t> tickets;
  for (const Slot& slot : left) tickets.push_back(slot.ticket);
  return tickets;
}

}  // namespace farandole::negotiate
