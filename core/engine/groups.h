// The process sets of an engine: creating, changing and removing them, and the frames of peers that belong to one.
// Touches link/, negotiate/ and the parts of engine/ that it includes. Used only by the driver.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/commands.h"
#include "engine/driver.h"
#include "engine/early_frames.h"
#include "engine/group.h"
#include "engine/transfers.h"
#include "negotiate/messages.h"

namespace farandole {

class Groups {
 public:
  using ById = std::map<std::uint32_t, std::unique_ptr<Group>>;

  Groups(Services& services, Commands& commands, Transfers& transfers, const LocalPeers& local_peers)
      : services_(services), commands_(commands), transfers_(transfers), local_peers_(local_peers) {}

  // The groups that this rank is a member of.
  ById::const_iterator begin() const { return mine_.begin(); }
  ById::const_iterator end() const { return mine_.end(); }
  Group* find(std::uint32_t id) const;  // null: it does not exist, or this rank is no member
  Group& everyone() const { return *mine_.at(0); }
  const Topology* topology(std::uint32_t id) const;  // null: it does not exist
  bool may_send(int peer, std::uint32_t id) const;   // whether the peer may send data of this group

  void create_everyone();
  // Changes that all ranks have agreed on.
  std::int64_t add(const std::vector<std::int64_t>& sets);
  void remove(std::uint32_t id);
  void erase_removed();  // at the end of a pass
  void clear();
  // Member groups: only their members create, leave and end them (member_groups.cc). Ends the operation.
  void change_member_group(Operation& operation);

  void send_segments(int peer);  // this rank's memory of all groups, over a new link
  // Frames of peers. These throw when a frame is not allowed now.
  void on_segment(int peer, const control::Segment& segment, os::Descriptor file);
  void on_requests(int peer, negotiate::Requests message);
  void on_answer(int peer, negotiate::Answer message);
  void on_plan_state(int peer, const control::PlanState& state);
  void on_abandon(int peer, const control::Abandon& abandon);
  void on_leaving(int peer, control::Leaving leaving);
  bool announced_leave(int peer) const { return left_.count(peer) != 0; }
  void on_left(int peer);  // nothing more comes from this peer

 private:
  void create(std::uint32_t id, Topology topology);
  std::vector<Topology> read_sets(const std::vector<std::int64_t>& sets) const;
  void send_segment(Group& group, int peer);
  void attach_segment(Group& group, int peer, os::Descriptor file);
  void take_early(Group& group);
  // Null when the group is not created yet, or removed. Throws when this rank and the peer are not both members.
  Group* group_with(std::uint32_t id, int peer, const char* what) const;
  bool may_be_created(std::uint32_t id) const { return id >= next_ && dropped_.count(id) == 0; }
  void create_member_group(Operation& operation);
  void drop_group(std::uint32_t id);
  void abandon_group(std::uint32_t id, const Error& error);
  void send_abandon(std::uint32_t id, const std::vector<int>& members, const std::string& why);

  Services& services_;
  Commands& commands_;
  Transfers& transfers_;
  const LocalPeers& local_peers_;
  ById mine_;
  std::map<std::uint32_t, Topology> all_;  // also those without this rank
  std::uint32_t next_ = 1;                 // the ID of the next group that all ranks agree on
  EarlyFrames early_;
  std::map<int, std::map<std::uint32_t, Progress>> left_;  // rank -> group -> its progress when it left
  std::vector<std::uint32_t> removed_;                     // in this pass
  std::set<std::uint32_t> dropped_;                        // IDs of member groups that ended: they are never used again
};

}  // namespace farandole
