// Groups that only their members make, leave and end: nobody else hears of them, and nothing is negotiated.
// Touches every room below it.
#include "engine/engine.h"

namespace farandole {

void Engine::change_founded(Operation& operation) {
  try {
    if (operation.request.kind == Kind::add_group) {
      found_group(operation);
    } else {
      auto id = static_cast<std::uint32_t>(operation.request.splits.at(0));
      if (groups_.count(id) == 0)
        throw Failure(Code::invalid_argument, "there is no process set " + std::to_string(id) + " to remove");
      if (operation.tag == kAbandon)
        abandon_group(id, {Code::revoked,
                           "rank " + std::to_string(options_.rank) + " has aborted process set " + std::to_string(id),
                           options_.rank});
      else
        drop_group(id);
    }
  } catch (const Failure& failure) {
    return finish(operation, failure.error());
  }
  finish(operation, {});
}

// Under a number that the members have agreed on themselves. What a quicker member sends waits here until the group is
// made.
void Engine::found_group(Operation& operation) {
  std::vector<Topology> sets = read_sets(operation.request.splits);
  if (sets.size() != 1 || sets[0].me < 0)
    throw Failure(Code::invalid_argument, "only a member makes a group by its number, and one at a time");
  auto id = static_cast<std::uint32_t>(operation.tag);
  if (all_groups_.count(id) != 0 || dropped_.count(id) != 0)
    throw Failure(Code::invalid_argument, "there is, or was, a group with the number " + std::to_string(id));
  std::vector<int> members = sets[0].ranks;
  try {
    create_group(id, std::move(sets[0]));
  } catch (const Failure& failure) {
    // The others may be making theirs: they must not wait for a member that has none.
    all_groups_.erase(id);
    groups_.erase(id);
    dropped_.insert(id);
    {
      std::lock_guard lock(inbox_.mutex);
      inbox_.members.erase(static_cast<std::int32_t>(id));
    }
    tell_abandoned(id, members,
                   "rank " + std::to_string(options_.rank) + " could not make process set " + std::to_string(id) +
                       ": " + failure.error().message);
    throw;
  }
  operation.value = id;
}

// The other members may still be at work on what this rank has finished: their memory is their own.
void Engine::drop_group(std::uint32_t id) {
  end_transfers(static_cast<std::int32_t>(id),
                {Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
  remove_group(id);
  dropped_.insert(id);
  forget_early(id);
}

// Every operation of the group ends with the error, on every member, now and for later; other groups go on.
void Engine::abandon_group(std::uint32_t id, const Error& error) {
  Group& group = *groups_.at(id);
  tell_abandoned(id, group.topology().ranks, error.message);
  group.close(error);
  end_transfers(static_cast<std::int32_t>(id), error);
}

void Engine::tell_abandoned(std::uint32_t id, const std::vector<int>& members, const std::string& why) {
  const control::Bytes message = control::encode(control::Abandon{id, why});
  for (int rank : members)
    if (rank != options_.rank && messenger_->has(rank)) tell(rank, Control::abandon, message);
}

}  // namespace farandole
