// One order of launches for groups that share ranks: whoever launches two of them does so in the same order.
// Pure. Touches nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>

namespace farandole::collective {

// Each member proposes a time for a launch, later than all that it has seen; the members take the latest of their
// proposals as its time. A launch comes first on a rank when nothing that is known there can get an earlier time.
// Equal times are ordered by group. Two launches wait for each other never: the one with the earlier time goes first on
// every rank that has both.
class LaunchOrder {
  struct Entry {
    std::uint64_t time;
    std::uint32_t group;
    bool agreed;
  };

 public:
  using Time = std::uint64_t;

  // One launch of a group, from the proposal until it is over. Lives no longer than the order.
  class Turn {
   public:
    Turn(LaunchOrder& order, std::uint32_t group) : order_(order) {
      order.entries_.push_back({++order.latest_, group, false});
      entry_ = std::prev(order.entries_.end());
    }
    ~Turn() { order_.entries_.erase(entry_); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    Time proposed() const { return entry_->time; }
    // The latest of all members' proposals.
    void agree(Time time) {
      order_.latest_ = std::max(order_.latest_, time);
      *entry_ = {std::max(entry_->time, time), entry_->group, true};
    }
    bool first() const {
      const auto behind = [this](const Entry& other) {
        return other.time > entry_->time || (other.time == entry_->time && other.group >= entry_->group);
      };
      return entry_->agreed && std::all_of(order_.entries_.begin(), order_.entries_.end(), behind);
    }

   private:
    LaunchOrder& order_;
    std::list<Entry>::iterator entry_;
  };

 private:
  Time latest_ = 0;
  std::list<Entry> entries_;
};

}  // namespace farandole::collective
