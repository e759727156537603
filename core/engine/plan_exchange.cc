// Plan states: through shared memory on a host, as messages between hosts.
// Touches link/, group/ and engine/services.h.
#include "engine/plan_exchange.h"

namespace farandole {

void PlanExchange::publish(const PlanState& state) {
  const std::uint64_t bits = state.pack();
  if (bits == published_) return;
  published_ = bits;
  if (rings_ == nullptr) return;
  rings_->own_plan_states().own.store(bits, std::memory_order_release);
  rings_->notify_all(state.any);
}

PlanState PlanExchange::combined(std::uint32_t epoch) {
  PlanState state = PlanState::unpack(published_);
  if (rings_ != nullptr)
    for (int member = 0; member < rings_->members(); ++member)
      if (member != rings_->me())
        state = PlanState::combine(
            state, PlanState::unpack(rings_->plan_states_of(member).own.load(std::memory_order_acquire)), epoch);
  return topology_.host_count() > 1 ? exchange_host_states(state, epoch) : state;
}

PlanState PlanExchange::exchange_host_states(const PlanState& local, std::uint32_t epoch) {
  if (topology_.my_local() != 0)
    return PlanState::combine(
        local, PlanState::unpack(rings_->plan_states_of(0).remote.load(std::memory_order_acquire)), epoch);
  auto my_host = static_cast<std::size_t>(topology_.host_of[static_cast<std::size_t>(topology_.me)]);
  if (local.pack() != sent_host_state_) {
    sent_host_state_ = local.pack();
    for (std::size_t host = 0; host < topology_.hosts.size(); ++host) {
      if (host == my_host) continue;
      int leader = topology_.ranks[static_cast<std::size_t>(topology_.hosts[host][0])];
      services_.send_control(leader, Control::plan_state,
                             control::encode(control::PlanState{group_, sent_host_state_}));
    }
  }
  PlanState remote{PlanState::trim(epoch), true, true, (1ull << 42) - 1};
  bool any = false;
  for (std::size_t host = 0; host < topology_.hosts.size(); ++host)
    if (host != my_host) {
      PlanState state = PlanState::unpack(host_states_[host]);
      any = any || (state.epoch == PlanState::trim(epoch) && state.any);
      remote = PlanState::combine(remote, state, epoch);
    }
  remote.any = any;
  if (rings_ != nullptr && rings_->own_plan_states().remote.load(std::memory_order_relaxed) != remote.pack()) {
    rings_->own_plan_states().remote.store(remote.pack(), std::memory_order_release);
    rings_->notify_all(remote.any);
  }
  return PlanState::combine(local, remote, epoch);
}

bool PlanExchange::receive(int member, std::uint64_t bits) {
  const auto host = static_cast<std::size_t>(topology_.host_of[static_cast<std::size_t>(member)]);
  if (topology_.hosts[host][0] != member || topology_.my_local() != 0 || topology_.my_host()[0] == member) return false;
  host_states_[host] = bits;
  return true;
}

int PlanExchange::find_inconsistent_member(std::uint32_t epoch, std::uint64_t run) const {
  const auto went_back = [&](std::uint64_t bits) {
    const PlanState state = PlanState::unpack(bits);
    return state.epoch == PlanState::trim(epoch) && state.ready < run;
  };
  const std::vector<int>& locals = topology_.my_host();
  for (int local = 0; rings_ != nullptr && local < rings_->members(); ++local)
    if (local != rings_->me() && went_back(rings_->plan_states_of(local).own.load(std::memory_order_acquire)))
      return locals[static_cast<std::size_t>(local)];
  for (std::size_t host = 0; topology_.my_local() == 0 && host < host_states_.size(); ++host)
    if (went_back(host_states_[host])) return topology_.hosts[host][0];
  return locals[0];  // it receives the states of the other hosts for this one
}

}  // namespace farandole
