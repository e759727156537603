// Member groups: only their members create, leave and end them. Other ranks are not told, and nothing is negotiated.
// Touches link/, negotiate/ and the parts of engine/ that it includes.
#include "engine/groups.h"

namespace farandole {

void Groups::change_member_group(Operation& operation) {
  try {
    if (operation.request.kind == Kind::add_group) {
      create_member_group(operation);
    } else {
      auto id = static_cast<std::uint32_t>(operation.request.splits.at(0));
      if (mine_.count(id) == 0)
        throw Failure(Code::invalid_argument,
                      "process set " + std::to_string(id) + " does not exist, so it cannot be removed");
      if (operation.tag == kAbandon)
        abandon_group(
            id, {Code::revoked,
                 "rank " + std::to_string(services_.options().rank) + " has aborted process set " + std::to_string(id),
                 services_.options().rank});
      else
        drop_group(id);
    }
  } catch (const Failure& failure) {
    return services_.finish(operation, failure.error());
  }
  services_.finish(operation, {});
}

// The members have agreed on the ID themselves. What faster members send is kept until the group is created here.
void Groups::create_member_group(Operation& operation) {
  std::vector<Topology> sets = read_sets(operation.request.splits);
  if (sets.size() != 1 || sets[0].me < 0)
    throw Failure(Code::invalid_argument, "only a member can create a process set by its ID, and only one at a time");
  auto id = static_cast<std::uint32_t>(operation.tag);
  if (all_.count(id) != 0 || dropped_.count(id) != 0)
    throw Failure(Code::invalid_argument,
                  "the process set ID " + std::to_string(id) + " is or was in use: choose a new one");
  std::vector<int> members = sets[0].ranks;
  try {
    create(id, std::move(sets[0]));
  } catch (const Failure& failure) {
    // The other members may have created theirs and must not wait for one that does not exist.
    all_.erase(id);
    mine_.erase(id);
    dropped_.insert(id);
    commands_.remove_group(static_cast<std::int32_t>(id));
    send_abandon(id, members,
                 "rank " + std::to_string(services_.options().rank) + " could not make process set " +
                     std::to_string(id) + ": " + failure.error().message);
    throw;
  }
  operation.value = id;
}

// Other members may still run what this rank has finished: their memory is their own.
void Groups::drop_group(std::uint32_t id) {
  transfers_.end(static_cast<std::int32_t>(id),
                 {Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
  remove(id);
  dropped_.insert(id);
  early_.forget(id);
}

// Ends every operation of the group with the error, on every member, now and later; other groups continue.
void Groups::abandon_group(std::uint32_t id, const Error& error) {
  Group& group = *mine_.at(id);
  send_abandon(id, group.topology().ranks, error.message);
  group.close(error);
  transfers_.end(static_cast<std::int32_t>(id), error);
}

void Groups::send_abandon(std::uint32_t id, const std::vector<int>& members, const std::string& why) {
  const control::Bytes message = control::encode(control::Abandon{id, why});
  for (int rank : members)
    if (rank != services_.options().rank && services_.messenger().has(rank))
      services_.send_control(rank, Control::abandon, message);
}

}  // namespace farandole
