// Rings: how the members of a group on one host pass chunks through shared memory. A member writes only its own file.
// Touches base/ and os/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "link/status_page.h"
#include "os/memory.h"

namespace farandole::link {

// A writer has one ring per local member, which that member alone reads, and one ring `everyone` that all others read.
// A ring has `slots` slots of `slot_bytes`. Both sides know from their collective what a slot holds, so only the bytes,
// a counter and a stamp are published: the stamp says what the writer has written, and a reader that expects something
// else fails. Counters grow over all collectives of the group.
struct RingShape {
  int members = 1;  // on this host
  std::size_t slot_bytes = 64 << 10;
  int slots = 4;
  std::size_t file_bytes() const;
};

// The packed plan states (engine/plan_state.h), published in front of the rings.
struct PlanStates {
  alignas(64) std::atomic<std::uint64_t> own;     // of this member
  alignas(64) std::atomic<std::uint64_t> remote;  // of all other hosts, written by the first member of a host
};

class Rings {
 public:
  static constexpr int everyone = -1;

  Rings(RingShape shape, int me);  // creates this member's file; needs at least two members
  ~Rings();
  const os::SharedMemory& memory() const;
  // Adds a local peer's file. All are needed before the first claim; plan states can be used earlier.
  void attach(int member, os::Descriptor file, const LocalPeer* local_peer);
  bool attached(int member) const {
    return member == me_ || static_cast<bool>(files_[static_cast<std::size_t>(member)]);
  }
  bool complete() const;
  void close_file();  // when every member has mapped it

  int members() const { return shape_.members; }
  int me() const { return me_; }
  std::size_t slot_bytes() const { return shape_.slot_bytes; }
  int slots() const { return shape_.slots; }

  // Each counter of a peer is read once and then checked: both sides throw Failure(peer_lost) when it went back, or
  // moved by more than the ring's length.
  // Writing: claim(reader) returns the next free slot of the ring to that member (or `everyone`), or nullptr while a
  // reader has not caught up. publish(reader) makes the slot visible and wakes sleeping readers. A second claim without
  // publish returns the same slot.
  std::byte* claim(int ring);
  void publish(int ring, std::uint64_t stamp);
  // Reading: the oldest unread slot of `writer`'s ring to this member (`from_everyone` = false) or to all (true), or
  // nullptr. Throws Failure(peer_lost) when its stamp differs.
  const std::byte* peek(int writer, bool from_everyone, std::uint64_t stamp) const;
  void consume(int writer, bool from_everyone);

  PlanStates& own_plan_states();
  const PlanStates& plan_states_of(int member) const;  // zeros until its file has come
  void notify(int member) const;                       // wakes it if it sleeps; issues a fence first
  void notify_all(bool urgent = false) const;

 private:
  Failure broken(int member, const char* what) const;
  RingShape shape_;
  int me_;
  struct Ring;  // cached counters, so that the other side's cache lines are read only when needed
  std::unique_ptr<Ring[]> rings_;
  os::SharedMemory mine_;
  std::vector<os::SharedMemory> files_;
  std::vector<const LocalPeer*> local_peers_;
};

}  // namespace farandole::link
