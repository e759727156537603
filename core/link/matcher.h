// Matches the messages to and from one peer with this rank's sends and receives. Keeps the messages that arrive before
// their receive is posted (unexpected messages), and the sends that must wait until the peer allows them.
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

// With each tag, the first message matches the first receive, the second message the second receive, and so on. Small
// messages (up to eager_bytes) are sent at once and wait at the receiver until it posts the receive. For a large
// receive, the receiver sends a grant with the size as soon as the receive is posted. A large message is sent at once
// if there is a grant of its size. Without such a grant, the sender announces the message by an empty frame with the
// size. When the receive is posted, the receiver answers with the size that it expects. If that is the size of the
// message, the sender sends it. If the sizes differ, the receive fails. The send fails only for a large message: a
// small one has already completed at the sender.
class Matcher {
 public:
  // `unexpected_bytes`: counts the memory of unexpected messages and grants; all matchers of the peer share it.
  Matcher(int peer, bool self, const MessengerOptions& options, FrameWriter& writer, std::uint64_t& unexpected_bytes)
      : peer_(peer), self_(self), options_(options), writer_(writer), unexpected_bytes_(unexpected_bytes) {}
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  void send(Message& message);
  void receive(Message& message);
  void withdraw(Message& message);  // the owner of the message no longer wants it
  void sent(Message& message);      // the kernel has all bytes of the message

  // Whether a message with this tag has arrived or has been announced, and no receive for it is posted.
  bool has_unexpected(const Tag& tag) const;

  // These handle frames of the peer. They return false if the peer broke the protocol or exceeded a limit.
  bool on_grant(const wire::Frame& frame);
  void on_grant_cancelled(const wire::Frame& frame);
  bool on_answer(const wire::Frame& frame);
  bool on_data_begin(const wire::Frame& frame);
  // Describes what the peer did wrong, as the end of a sentence that begins with "rank N". May be null.
  const char* error_text() const { return error_text_; }
  // Where the bytes of the data frame must be written, from `offset` on. Empty: they are dropped.
  Pieces destination(const wire::Frame& frame, std::size_t offset);
  void on_data_arrived(const wire::Frame& frame);

  void fail(const Error& why);  // fails all pending sends and receives; the link stays
  // The peer has left and sends no more messages: pending receives fail, and pending sends count as done.
  void peer_left();
  void peer_lost(const Error& why);

 private:
  struct Posted {
    Message* message = nullptr;  // null: the receive was withdrawn or has failed; its bytes are dropped on arrival
    std::uint64_t bytes = 0;
    bool granted = false;       // a grant was sent and not cancelled
    std::uint64_t arrived = 0;  // bytes that have arrived in complete frames
  };
  struct Unexpected {
    std::uint64_t total = 0;
    std::vector<std::byte> bytes;  // the complete frames, and space for the frame that is being read
    std::uint64_t arrived = 0;     // bytes that have arrived in complete frames
    bool begun = false;            // its first data frame has begun
    bool announced = false;        // it was announced, and this rank has not answered
    bool complete() const { return begun && arrived == total; }
  };
  // The sends and receives with one tag that wait.
  struct TagQueues {
    Queue<Message*> sends;        // only the first is being sent
    Queue<std::uint64_t> grants;  // the sizes of grants that no send has used yet
    bool unanswered = false;      // this rank announced a send, and the peer has not answered
    Queue<Posted> receives;
    Queue<Unexpected> unexpected;  // only the last may be incomplete
    // A send was dropped after it had been announced or partly sent. Nothing more can be sent with this tag: the peer
    // would take the next message for the dropped one.
    bool send_broken = false;
    bool empty() const {
      return sends.empty() && grants.empty() && !unanswered && receives.empty() && unexpected.empty() && !send_broken;
    }
  };
  static_assert(sizeof(TagQueues) <= 144,
                "a frame of 48 bytes from a peer can make this rank allocate a TagQueues, so it must stay small");

  bool needs_grant(std::uint64_t bytes) const { return bytes > options_.eager_bytes; }
  void send_frame(wire::FrameType type, Tag tag, std::uint64_t total);
  Error wrong_size(const Message& message, std::uint64_t other_bytes) const;
  void start_first_send(TagQueues& queues);
  void cancel_grant(Posted& posted, const Tag& tag);
  void answer(Unexpected& unexpected, const Tag& tag, std::uint64_t expected);
  void detach(TagQueues& queues, Message& message);
  void end_all(const Error* why);
  void match(TagQueues& queues, const Tag& tag);
  void fail_receive(Posted& posted, std::uint64_t sent_bytes);
  void fail_size_mismatch(TagQueues& queues, const Tag& tag);
  void match_self(TagQueues& queues);
  void forget_if_empty(const Tag& tag);
  bool begin_unexpected(TagQueues& queues, const wire::Frame& frame);
  void remove_first_unexpected(TagQueues& queues);
  bool was_granted(const wire::Frame& frame);
  bool within_limit();  // whether the unexpected messages are within the limit
  static void remove(Queue<Message*>& sends, const Message& message);

  const int peer_;
  const bool self_;
  const MessengerOptions& options_;
  FrameWriter& writer_;
  std::uint64_t& unexpected_bytes_;
  const char* error_text_ = nullptr;
  std::map<Tag, TagQueues> queues_;
  // For a tag and a size, the number of grants that this rank cancelled because a message of another size came. The
  // peer may have used such a grant before the cancellation reached it; then one large message without a valid grant is
  // allowed.
  std::map<std::pair<Tag, std::uint64_t>, std::size_t> cancelled_grants_;
  TagQueues* reading_ = nullptr;     // the queues for the data frame that is being read
  bool reading_unexpected_ = false;  // the frame goes to the last unexpected message, not to the first receive
  enum class Peer { active, left, lost } state_ = Peer::active;
  Error lost_;
};

}  // namespace farandole::link
