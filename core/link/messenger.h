// Messages between this rank and its peers over connected stream sockets (unix inside a host, TCP between hosts).
// Touches os/ and wire/.
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

// One message under way. Dropping the last reference cancels it: a receive is withdrawn (bytes of it that still arrive
// are discarded), a send that has begun is finished from a copy or truncated with the link.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool done() const = 0;  // throws Failure when it cannot be finished any more
};
using TransferPtr = std::shared_ptr<Transfer>;

// What the messenger tells the engine. Called from inside advance(), never from add(), send() or receive().
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                          std::vector<os::Descriptor> descriptors) = 0;
  // Whether messages of this group (wire::Tag) may come from the peer, or go to it.
  virtual bool may_send(int, std::uint32_t) { return true; }
  virtual void on_lost(int peer, const Error& why) = 0;  // end of file without `leave`, reset, a bad frame
  virtual void on_left(int peer) = 0;                    // `leave` arrived; all its earlier frames have been handled
};

enum class StreamKind : std::uint8_t { local = 0, tcp = 1 };

struct MessengerOptions {
  std::uint32_t generation = 0;
  std::size_t eager_bytes = 64 << 10;  // up to here a message is sent without waiting for its grant
  std::size_t frame_bytes = 256 << 10;
  // Of messages and grants that a peer has sent and nobody has asked for, with what it takes to keep them. It is no
  // program's aim to have that much waiting, and a peer that sends without end must not fill the machine.
  std::uint64_t most_early = 2ull << 30;
  std::vector<int> streams;      // to each peer; empty: one to everybody
  bool checksum_local = false;   // tests may ask for CRCs on unix links too
  const void* engine = nullptr;  // for failpoints
};

struct Traffic {
  std::uint64_t sent = 0;  // payload bytes of data frames, by this rank
  std::uint64_t received = 0;
  std::uint64_t frames = 0;
};

// Owned by one engine and used only by whoever drives it. Never blocks. Control frames overtake data; data messages on
// a stream share it frame by frame, so none waits behind a larger one. Where a peer has several streams, a message's
// tag decides which it takes; control frames take the first.
class Messenger {
 public:
  Messenger(int rank, int size, os::Poller& poller, Listener& listener, MessengerOptions options);
  ~Messenger();

  // Takes a connected, authenticated stream. To a peer with several streams both sides add them in the same order;
  // one more than agreed is refused (invalid_argument).
  void add(int peer, os::Descriptor stream, StreamKind kind);
  bool has(int peer) const;

  // The memory must stay until done(). To and from oneself is allowed. Sizes of both sides must agree, else the
  // receiver fails with precondition. Without a link yet, the transfer waits for add(); `wanted` is called once per
  // peer then.
  TransferPtr send(int peer, Tag tag, Pieces bytes);
  TransferPtr receive(int peer, Tag tag, Pieces bytes);
  // Whether a message with this tag has come from the peer, or been announced, that nobody has asked for.
  bool early(int peer, Tag tag);
  // A group's messages from this sequence on take so many of a peer's streams, or all there are. Both sides say the
  // same before they send or receive such a message.
  void spread(std::uint32_t group, std::uint64_t sequence, int streams);
  void forget(std::uint32_t group);  // it is no more: neither side sends or receives for it
  void control(int peer, std::uint32_t type, std::vector<std::byte> payload,
               std::vector<os::Descriptor> descriptors = {});
  std::function<void(int peer)> wanted;

  // Handles one ready socket. `key` is what the poller reported; keys of the messenger count its streams from 0.
  void ready(const os::Event& event);
  // Writes whatever can be written now. True when anything moved.
  bool flush();
  // Says `leave` to everyone; flushed() tells when it and all earlier frames are in the kernel's hands.
  void leave();
  bool flushed() const;
  // Reads what is still in the socket of a peer known to have died, then reports it lost (unless it left before).
  void bury(int peer, const Error& why);
  // Ends every transfer with this error. Control frames still work.
  void fail_all(const Error& why);

  const Traffic& traffic() const;
  int local_pid(int peer) const;  // the process behind a local stream (SO_PEERCRED), 0 when unknown

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace farandole::link
