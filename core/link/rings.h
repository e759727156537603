// Rings: how the members of one group on one host pass chunks through shared memory. Each writes only its own file.
// Touches os/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "link/board.h"
#include "os/memory.h"

namespace farandole::link {

// Lanes of a writer: lane r (r = a local member) is read by that member alone; lane `everyone` by all the others.
// A lane is a ring of `slots` slots of `slot_bytes`; what a slot holds is known to both sides from the collective they
// run. So nothing but the bytes, a count and a stamp is ever published: the stamp says what the writer believes it has
// written, and a reader that believes something else stops. Counts only grow, over all collectives of the group.
struct RingShape {
  int members = 1;  // on this host
  std::size_t slot_bytes = 64 << 10;
  int slots = 4;
  std::size_t file_bytes() const;
};

// The words of the plan (engine/): published beside the rings.
struct Words {
  alignas(64) std::atomic<std::uint64_t> own;     // this member's word
  alignas(64) std::atomic<std::uint64_t> remote;  // the host leader's sum of the other hosts' words
};

class Rings {
 public:
  static constexpr int everyone = -1;

  Rings(RingShape shape, int me);  // creates my file; at least two members
  ~Rings();
  const os::SharedMemory& memory() const;
  // A neighbour's file; all of them are needed before the first claim. Words can be read and written before.
  void attach(int member, os::Descriptor file, const Neighbour* neighbour);
  bool attached(int member) const {
    return member == me_ || static_cast<bool>(files_[static_cast<std::size_t>(member)]);
  }
  bool complete() const;
  void close_file();  // after everyone has my file

  int members() const { return shape_.members; }
  int me() const { return me_; }
  std::size_t slot_bytes() const { return shape_.slot_bytes; }
  int slots() const { return shape_.slots; }

  // A neighbour's counter is read once and then looked at: both sides throw Failure(peer_lost) when it went back, or
  // further than the ring is long.
  // Writing: claim(lane) gives the next free slot of my lane, or nullptr while a reader has not caught up;
  // publish(lane) makes it visible and wakes sleeping readers. Claiming twice without publishing gives the same slot.
  std::byte* claim(int lane);
  void publish(int lane, std::uint64_t stamp);
  // Reading: the oldest unread slot of `writer`'s lane to me (`everyone` = false) or to all (true), or nullptr. Throws
  // Failure(peer_lost) when its stamp is another.
  const std::byte* peek(int writer, bool from_everyone, std::uint64_t stamp) const;
  void consume(int writer, bool from_everyone);

  Words& my_words();
  const Words& words_of(int member) const;  // zeros until its file has come
  void notify(int member) const;            // wakes it if it sleeps; fences first
  void notify_all(bool urgent = false) const;

 private:
  Failure broken(int member, const char* what) const;
  RingShape shape_;
  int me_;
  struct Lane;  // cached counters, to touch the other side's cache lines only when needed
  std::unique_ptr<Lane[]> lanes_;
  os::SharedMemory mine_;
  std::vector<os::SharedMemory> files_;
  std::vector<const Neighbour*> neighbours_;
};

}  // namespace farandole::link
