// Matches the messages to and from one peer: which bytes belong to which receive, which send waits for a grant, and
// which messages came before their receive (unexpected messages).
// Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "link/frame_writer.h"
#include "link/message.h"
#include "link/queue.h"
#include "wire/frame.h"

namespace farandole::link {

// Messages of one tag keep their order, and only the order decides which message matches which receive. Small messages
// (up to eager_bytes) are sent at once and wait here as unexpected messages until they are received. A large receive
// sends a grant with its size in advance, and a large message that finds such a grant is sent. Without a grant, the
// sender announces the message by an empty frame with its size, and sends it when the answer has the same size. So both
// sides notice different sizes.
class Matcher {
 public:
  // `unexpected_bytes`: of all matchers of the peer.
  Matcher(int peer, bool self, const MessengerOptions& options, FrameWriter& writer, std::uint64_t& unexpected_bytes)
      : peer_(peer), self_(self), options_(options), writer_(writer), unexpected_bytes_(unexpected_bytes) {}
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  void send(Message& message);
  void receive(Message& message);
  void withdraw(Message& message);  // its owner dropped it
  void sent(Message& message);      // the kernel has all of its bytes

  // Whether a message with this tag has arrived or been announced for which no receive is posted.
  bool has_unexpected(const Tag& tag) const;

  bool granted(const wire::Frame& frame);  // false: too much is waiting
  void grant_cancelled(const wire::Frame& frame);
  bool answered(const wire::Frame& frame);  // false: nothing was announced
  bool data_begins(const wire::Frame& frame);
  const char* error_text() const {
    return error_text_;
  }  // after one of these returned false: the reason, to be put after "rank 3"; may be null
  Pieces destination(const wire::Frame& frame, std::size_t offset);
  void data_arrived(const wire::Frame& frame);

  void fail(const Error& why);
  // No more messages will come: open receives fail, and sends count as done.
  void peer_left();
  void peer_lost(const Error& why);

 private:
  struct Posted {
    Message* message = nullptr;  // null: withdrawn or failed, its bytes are dropped
    std::uint64_t bytes = 0;
    bool granted = false;
    std::uint64_t moved = 0;
  };
  struct Unexpected {
    std::uint64_t total = 0;
    std::vector<std::byte> bytes;  // of complete frames, and room for the one that is being read
    std::uint64_t moved = 0;       // in complete frames
    bool begun = false;            // some of its bytes have arrived
    bool announced = false;        // the announcement is not answered yet
    bool complete() const { return begun && moved == total; }
  };
  struct Channel {
    Queue<Message*> sends;        // only the first is being sent
    Queue<std::uint64_t> grants;  // that arrived before their message
    bool unanswered = false;      // the first send is announced and not answered
    Queue<Posted> receives;
    Queue<Unexpected> unexpected;  // only the last may be incomplete
    bool truncated =
        false;  // a message was dropped after a part was sent: the peer could not separate the next one from it
    bool empty() const {
      return sends.empty() && grants.empty() && !unanswered && receives.empty() && unexpected.empty() && !truncated;
    }
  };
  static_assert(sizeof(Channel) <= 144, "a peer can make this rank allocate one by a frame of 48 bytes");
  using Channels = std::map<Tag, Channel>;

  bool needs_grant(std::uint64_t bytes) const { return bytes > options_.eager_bytes; }
  void send_frame(wire::FrameType type, Tag tag, std::uint64_t total);
  Error wrong_size(const Message& message, std::uint64_t other) const;
  void start(Channel& channel);
  void cancel_grant(Posted& posted, const Tag& tag);
  void answer(Unexpected& unexpected, const Tag& tag, std::uint64_t expected);
  void detach(Channel& channel, Message& message);
  void end_all(const Error* why);
  void match(Channel& channel, const Tag& tag);
  void reject(Posted& posted, std::uint64_t other);
  void refuse(Channel& channel, const Tag& tag);
  void match_self(Channel& channel);
  void forget_if_empty(const Tag& tag);
  bool begin_unexpected(Channel& channel, const wire::Frame& frame);
  void remove_unexpected(Channel& channel);  // removes the first
  bool was_granted(const wire::Frame& frame);
  bool within_limit();  // whether the unexpected messages are within the limit
  static void remove(Queue<Message*>& sends, const Message& message);

  const int peer_;
  const bool self_;
  const MessengerOptions& options_;
  FrameWriter& writer_;
  std::uint64_t& unexpected_bytes_;
  const char* error_text_ = nullptr;
  Channels channels_;
  // Sizes of grants that were cancelled because a message of another size came. A message that used such a grant before
  // the sender knew may still arrive. Each entry belongs to a receive that has failed.
  std::map<std::pair<Tag, std::uint64_t>, std::size_t> void_grants_;
  Channel* filling_ = nullptr;       // a frame of this channel is being read ...
  bool filling_unexpected_ = false;  // ... into its last unexpected message, or into its first receive
  enum class Peer { active, left, lost } state_ = Peer::active;
  Error lost_;
};

}  // namespace farandole::link
