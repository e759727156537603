// The messages to and from one peer: which bytes belong to which receive, who waits for a grant, what came too early.
// Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "link/message.h"
#include "link/outbox.h"
#include "link/queue.h"
#include "wire/frame.h"

namespace farandole::link {

// Messages of one tag keep their order, and order alone decides which message meets which receive. Small ones (up to
// eager_bytes) are sent at once and wait here when nobody has asked for them yet. A large receive sends a grant of its
// size ahead; a large message takes such a grant and goes out. One that finds none is announced by an empty frame that
// tells its size, and goes out when the answer says the same size: so both sides notice a disagreement.
class Mailbox {
 public:
  // `early_bytes`: of all mailboxes of the peer.
  Mailbox(int peer, bool self, const MessengerOptions& options, Outbox& outbox, std::uint64_t& early_bytes)
      : peer_(peer), self_(self), options_(options), outbox_(outbox), early_bytes_(early_bytes) {}
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void send(Message& message);
  void receive(Message& message);
  void withdraw(Message& message);  // its owner dropped it
  void sent(Message& message);      // all of it is in the kernel's hands

  // Whether a message with this tag has come, or been announced, that no receive has asked for.
  bool early(const Tag& tag) const;

  bool granted(const wire::Frame& frame);  // false: too much waits
  void ungranted(const wire::Frame& frame);
  bool answered(const wire::Frame& frame);  // false: nothing was announced
  bool data_begins(const wire::Frame& frame);
  const char* fault() const { return fault_; }  // after it has said false: in words that go on from "rank 3"; or null
  Pieces place(const wire::Frame& frame, std::size_t offset);
  void data_arrived(const wire::Frame& frame);

  void fail(const Error& why);
  // No more will come: unsatisfied receives fail; sends count as done.
  void peer_left();
  void peer_lost(const Error& why);

 private:
  struct Posted {
    Message* message = nullptr;  // null: withdrawn or failed, its bytes are not wanted any more
    std::uint64_t bytes = 0;
    bool granted = false;
    std::uint64_t moved = 0;
  };
  struct Early {
    std::uint64_t total = 0;
    std::vector<std::byte> bytes;  // of whole frames, and room for the one that is being read
    std::uint64_t moved = 0;       // of whole frames
    bool begun = false;            // some of its bytes have come
    bool announced = false;        // and the announcement was not answered yet
    bool complete() const { return begun && moved == total; }
  };
  struct Channel {
    Queue<Message*> sends;        // only the first is under way
    Queue<std::uint64_t> grants;  // that came before their message
    bool unanswered = false;      // the first send is announced
    Queue<Posted> receives;
    Queue<Early> early;      // only the last may be incomplete
    bool truncated = false;  // a message was dropped half-sent: the peer could not tell the next one from it
    bool empty() const {
      return sends.empty() && grants.empty() && !unanswered && receives.empty() && early.empty() && !truncated;
    }
  };
  static_assert(sizeof(Channel) <= 144, "a frame of 48 bytes can make one");
  using Channels = std::map<Tag, Channel>;

  bool large(std::uint64_t bytes) const { return bytes > options_.eager_bytes; }
  void tell(wire::FrameType type, Tag tag, std::uint64_t total);
  Error wrong_size(const Message& message, std::uint64_t other) const;
  void start(Channel& channel);
  void ungrant(Posted& posted, const Tag& tag);
  void answer(Early& early, const Tag& tag, std::uint64_t expected);
  void abandon(Channel& channel, Message& message);
  void end_all(const Error* why);
  void match(Channel& channel, const Tag& tag);
  void reject(Posted& posted, std::uint64_t other);
  void refuse(Channel& channel, const Tag& tag);
  void match_self(Channel& channel);
  void forget_if_empty(const Tag& tag);
  bool begin_early(Channel& channel, const wire::Frame& frame);
  void end_early(Channel& channel);  // the first
  bool was_granted(const wire::Frame& frame);
  bool room();  // for what waits
  static void remove(Queue<Message*>& sends, const Message& message);

  const int peer_;
  const bool self_;
  const MessengerOptions& options_;
  Outbox& outbox_;
  std::uint64_t& early_bytes_;
  const char* fault_ = nullptr;
  Channels channels_;
  // Sizes of grants that a message of another size has made void: one that took such a grant before it heard of that
  // may still come. Each belongs to a receive that has failed.
  std::map<std::pair<Tag, std::uint64_t>, std::size_t> void_grants_;
  Channel* filling_ = nullptr;  // a frame of this channel is being read ...
  bool filling_early_ = false;  // ... into its last early message, or into its first receive
  enum class Peer { here, left, lost } state_ = Peer::here;
  Error lost_;
};

}  // namespace farandole::link
