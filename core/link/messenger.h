// Messages between this rank and its peers over connected stream sockets (unix inside a host, TCP between hosts).
// Touches base/, os/ and wire/.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/pieces.h"
#include "os/descriptor.h"
#include "os/poller.h"
#include "wire/frame.h"

namespace farandole::link {

using wire::Tag;

// One message under way. Dropping the last reference cancels it: a receive is withdrawn, and bytes for it that still
// arrive are dropped; a send that has started is completed from a copy, or cut off together with the link.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool done() const = 0;  // throws Failure when it can no longer complete
};
using TransferPtr = std::shared_ptr<Transfer>;

// Callbacks to the engine. Called from flush() and ready(), never from add(), send() or receive().
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                          std::vector<os::Descriptor> descriptors) = 0;
  // Whether messages of this group (wire::Tag) may come from the peer or go to it.
  virtual bool may_send(int, std::uint32_t) { return true; }
  virtual void on_lost(int peer, const Error& why) = 0;  // end of file without `leave`, reset, or an invalid frame
  virtual void on_left(int peer) = 0;                    // `leave` arrived, and all frames before it have been handled
};

enum class StreamKind : std::uint8_t { local = 0, tcp = 1 };

struct MessengerOptions {
  std::uint32_t generation = 0;
  std::size_t eager_bytes = 64 << 10;  // a message up to this size is sent without waiting for a grant
  std::size_t frame_bytes = 256 << 10;
  // The limit for messages and grants that a peer has sent and this rank has not asked for, including the memory to
  // keep them. No program needs so much, and a peer that never stops sending must not fill the machine's memory.
  std::uint64_t max_unexpected_bytes = 2ull << 30;
  std::vector<int> streams;      // number of streams to each peer; empty: one to each
  bool checksum_local = false;   // CRCs also on unix sockets, for tests
  const void* engine = nullptr;  // for failpoints
};

struct Traffic {
  std::uint64_t sent = 0;  // payload bytes of this rank's data frames
  std::uint64_t received = 0;
  std::uint64_t frames = 0;
};

// Owned by one engine and used only by the thread that drives it. Never blocks. Control frames overtake data. Data
// messages share a stream frame by frame, so a small one does not wait behind a large one. With several streams to a
// peer, a message's tag selects its stream; control frames use the first.
class Messenger {
 public:
  Messenger(int rank, int size, os::Poller& poller, Listener& listener, MessengerOptions options);
  ~Messenger();

  // Takes a connected, authenticated stream. With several streams to a peer, both sides must add them in the same
  // order. One stream too many is refused (invalid_argument).
  void add(int peer, os::Descriptor stream, StreamKind kind);
  bool has(int peer) const;

  // The memory must stay valid until done(). Sending to oneself is allowed. When the sizes of both sides differ, the
  // receiver fails with `precondition`. Without a link, the transfer waits for add(), and `request_link` is called once
  // per peer.
  TransferPtr send(int peer, Tag tag, Pieces bytes);
  TransferPtr receive(int peer, Tag tag, Pieces bytes);
  // Whether a message with this tag has arrived or been announced for which no receive is posted.
  bool has_unexpected(int peer, Tag tag);
  // From this sequence on, messages of the group use at most this many of a peer's streams. Both sides must call it
  // before they send or receive such a message.
  void limit_streams(std::uint32_t group, std::uint64_t sequence, int streams);
  void forget_group(std::uint32_t group);  // the group is removed: neither side uses it any more
  void control(int peer, std::uint32_t type, std::vector<std::byte> payload,
               std::vector<os::Descriptor> descriptors = {});
  std::function<void(int peer)> request_link;

  // Handles one ready socket. `key` is what the poller reported; the messenger's keys number its streams from 0.
  void ready(const os::Event& event);
  // Writes what can be written now. True when anything was written.
  bool flush();
  // Sends `leave` to all peers. flushed() is true when the kernel has it and all earlier frames.
  void leave();
  bool flushed() const;
  // Call it when a peer's process has died: reads the last bytes from its sockets, then reports it as lost, unless it
  // left before.
  void peer_died(int peer, const Error& why);
  // Ends every transfer with this error. Control frames still work.
  void fail_all(const Error& why);

  const Traffic& traffic() const;
  int local_pid(int peer) const;  // process ID behind a local stream (SO_PEERCRED), 0 when unknown

 private:
  struct Impl;
  TransferPtr post(int peer, Tag tag, Pieces bytes, bool sending);
  std::unique_ptr<Impl> impl_;
};

}  // namespace farandole::link
