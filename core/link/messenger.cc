// The messenger: peers, their sockets, and who is told what.
// Touches os/ and wire/.
#include "link/messenger.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "link/inbox.h"
#include "link/mailbox.h"
#include "link/message.h"
#include "link/outbox.h"
#include "os/failure.h"
#include "os/socket.h"

namespace farandole::link {

namespace {

constexpr int kDrainReads = 64;
// What has left a rank that is said to be dead is in buffers of the kernel. One that goes on writing is not dead.
constexpr int kMostReadsToTheEnd = 1 << 16;
constexpr std::uint64_t kMostBytesToTheEnd = std::uint64_t{1} << 30;

constexpr const char* kStrange = "exchanges messages of a process set that it and this rank are not both in";

// Bytes that nobody reads would make close() reset a TCP connection, and what was sent last could be lost with it.
void close_in_good_order(os::Descriptor& socket) {
  os::stop_writing(socket.get());
  std::vector<std::byte> nowhere(64 << 10);
  const iovec part{nowhere.data(), nowhere.size()};
  for (int i = 0; i < kDrainReads; ++i) {
    std::vector<os::Descriptor> descriptors;
    if (os::receive_some(socket.get(), {&part, 1}, &descriptors).what != os::Moved::What::bytes) break;
  }
  socket.reset();
}

}  // namespace

struct Messenger::Impl {
  enum class State { here, left, lost };
  struct Peer;

  // One stream to a peer, and the messages that go over it.
  struct Lane final : Recipient {
    Lane(Impl& owner, Peer& whose, int number)
        : impl(owner),
          peer(whose),
          key(number),
          outbox(owner.options, number, owner.waiting),
          mailbox(whose.rank, whose.rank == owner.rank, owner.options, outbox, whose.early_bytes) {}

    bool data_begins(const wire::Frame& frame) override {
      const bool strange = !impl.may_send(peer, frame);
      if (!strange && mailbox.data_begins(frame)) return true;
      fault = strange ? kStrange : mailbox.fault();
      return false;
    }
    Pieces place(const wire::Frame& frame, std::size_t offset) override { return mailbox.place(frame, offset); }
    void data_arrived(const wire::Frame& frame) override { mailbox.data_arrived(frame); }
    bool frame_arrived(const wire::Frame& frame, std::vector<std::byte> payload,
                       std::vector<os::Descriptor> descriptors) override {
      return impl.handle(*this, frame, std::move(payload), std::move(descriptors));
    }

    Impl& impl;
    Peer& peer;
    const int key;  // in the poller, in `waiting` and in `lanes`
    Outbox outbox;
    Mailbox mailbox;
    std::unique_ptr<Inbox> inbox;  // from add() on
    os::Descriptor socket;
    bool writing = false;         // the poller watches for room to write
    bool reading = false;         // its frames are being handled: callbacks may come back here
    bool left = false;            // the peer said `leave` on it
    const char* fault = nullptr;  // of a message, once one was refused; null when its frame is impossible
    bool over = false;            // it ended or broke: what follows, if anything, is not to be believed
  };

  struct Peer {
    explicit Peer(int number) : rank(number) {}
    Lane& first() const { return *lanes.front(); }

    const int rank;
    std::vector<Lane*> lanes;
    StreamKind kind = StreamKind::local;
    State state = State::here;
    bool asked_for = false;             // `wanted` was called
    std::uint64_t early_bytes = 0;      // of messages and grants that wait for this rank
    std::uint64_t known_group = ~0ull;  // the last one that a message was of
    std::optional<Error> burial;        // it has died: after what is left to read it is lost
  };

  // A control frame of this rank to itself, until flush().
  struct Note {
    std::uint32_t type;
    std::vector<std::byte> payload;
    std::vector<os::Descriptor> descriptors;
  };

  Impl(int my_rank, int size, os::Poller& the_poller, Listener& the_listener, MessengerOptions the_options)
      : rank(my_rank), options(std::move(the_options)), poller(the_poller), listener(the_listener) {
    peers.reserve(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) {
      Peer& peer = *peers.emplace_back(std::make_unique<Peer>(i));
      const int streams = options.streams.empty() ? 1 : options.streams[static_cast<std::size_t>(i)];
      for (int stream = 0; stream < streams; ++stream) {
        lanes.push_back(std::make_unique<Lane>(*this, peer, static_cast<int>(lanes.size())));
        peer.lanes.push_back(lanes.back().get());
      }
    }
  }

  // Messages of one tag keep their order, so they share a lane; neighbouring chunks take different ones.
  Lane& lane_of(const Peer& peer, const Tag& tag) const {
    std::size_t count = peer.lanes.size();
    if (auto found = spreads.find(tag.group); found != spreads.end() && count > 1) {
      auto spread = found->second.rbegin();  // messages of an earlier sequence may still be on their way
      while (spread != found->second.rend() && spread->first > tag.sequence) ++spread;
      if (spread != found->second.rend()) count = std::min(count, spread->second);
    }
    return *peer.lanes[(tag.sequence + tag.step) % count];
  }

  Peer& at(int peer) const {
    if (peer < 0 || peer >= static_cast<int>(peers.size())) {
      throw Failure(Code::invalid_argument, "there is no rank " + std::to_string(peer));
    }
    return *peers[static_cast<std::size_t>(peer)];
  }

  void want(Peer& peer, const std::function<void(int)>& tell) {
    if (peer.first().socket || peer.asked_for || peer.rank == rank || peer.state != State::here || !tell) return;
    peer.asked_for = true;
    tell(peer.rank);
  }

  bool may_send(Peer& peer, const wire::Frame& frame) {
    if (frame.tag.group == peer.known_group) return true;
    if (!listener.may_send(peer.rank, frame.tag.group)) return false;
    peer.known_group = frame.tag.group;
    return true;
  }

  static Error refused(const Peer& peer, const char* what);
  static bool writable(const Lane& lane) { return lane.socket && !lane.left && lane.peer.state == State::here; }
  bool handle(Lane& lane, const wire::Frame& frame, std::vector<std::byte> payload,
              std::vector<os::Descriptor> descriptors);
  Inbox::Result read(Lane& lane, bool to_the_end);
  void read_all(Peer& peer);
  void ready_to_read(Lane& lane);
  void ended(Peer& peer, Error why);
  void broken(Lane& lane);
  bool write(Lane& lane);
  void watch_writing(Lane& lane, bool on);
  void left(Lane& lane);
  void gone(Peer& peer);
  void lost(Peer& peer, Error why);
  bool deliver_notes();

  const int rank;
  const MessengerOptions options;
  os::Poller& poller;
  Listener& listener;
  std::vector<int> waiting;  // lanes with something to write
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<Lane>> lanes;                                                       // of all peers
  std::unordered_map<std::uint32_t, std::vector<std::pair<std::uint64_t, std::size_t>>> spreads;  // from, lanes
  std::vector<Message*> finished;
  std::deque<Note> notes;
  Traffic traffic;
  bool leaving = false;
};

Error Messenger::Impl::refused(const Peer& peer, const char* what) {
  return {Code::peer_lost, "rank " + std::to_string(peer.rank) + " " + what, peer.rank};
}

// False when nothing more of this lane is to be read.
bool Messenger::Impl::handle(Lane& lane, const wire::Frame& frame, std::vector<std::byte> payload,
                             std::vector<os::Descriptor> descriptors) {
  const bool of_message = frame.type == wire::FrameType::grant || frame.type == wire::FrameType::ungrant;
  if (of_message && !may_send(lane.peer, frame)) {
    ended(lane.peer, refused(lane.peer, kStrange));
  } else if (frame.type == wire::FrameType::grant) {
    if (!lane.mailbox.granted(frame)) ended(lane.peer, refused(lane.peer, lane.mailbox.fault()));
  } else if (frame.type == wire::FrameType::ungrant) {
    lane.mailbox.ungranted(frame);
  } else if (frame.type == wire::FrameType::answer) {
    if (!lane.mailbox.answered(frame)) ended(lane.peer, refused(lane.peer, "sent an answer to nothing"));
  } else if (frame.type == wire::FrameType::leave) {
    left(lane);
  } else {
    listener.on_control(lane.peer.rank, frame.tag.step, payload, std::move(descriptors));
  }
  return lane.peer.state == State::here && !lane.left;
}

// `stopped` also when there is nothing to read from, or somebody below on the stack is reading it.
Inbox::Result Messenger::Impl::read(Lane& lane, bool to_the_end) {
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  };
  Inbox::Result result = Inbox::Result::stopped;
  if (lane.reading || lane.left || lane.over || !lane.socket || lane.peer.state != State::here) return result;
  lane.reading = true;
  const Guard guard{lane.reading};
  int reads = 0;
  const std::uint64_t before = lane.inbox->bytes();
  do {
    result = lane.inbox->read(lane.socket.get(), lane, traffic);
  } while ((to_the_end || lane.peer.burial) && result == Inbox::Result::more && ++reads < kMostReadsToTheEnd &&
           lane.inbox->bytes() - before < kMostBytesToTheEnd);
  lane.over = result == Inbox::Result::ended || result == Inbox::Result::failed;
  return result;
}

// What the peer has said on any lane, to the last byte that has arrived.
void Messenger::Impl::read_all(Peer& peer) {
  for (Lane* lane : peer.lanes) read(*lane, true);
}

void Messenger::Impl::ready_to_read(Lane& lane) {
  Peer& peer = lane.peer;
  const Inbox::Result result = read(lane, false);
  if (peer.state != State::here || lane.reading) return;
  if (peer.burial) return ended(peer, *peer.burial);
  const std::string name = "rank " + std::to_string(peer.rank);
  if (result == Inbox::Result::ended) {
    ended(peer, {Code::peer_lost, name + " closed its connection without leaving", peer.rank});
  } else if (result == Inbox::Result::failed && lane.inbox->error() == 0 && lane.fault != nullptr) {
    ended(peer, refused(peer, lane.fault));
  } else if (result == Inbox::Result::failed && lane.inbox->error() == 0) {
    ended(peer, {Code::peer_lost, name + " sent " + lane.inbox->reason(), peer.rank});
  } else if (result == Inbox::Result::failed) {
    broken(lane);
  }
}

void Messenger::Impl::broken(Lane& lane) {
  try {
    os::fail("the connection to rank " + std::to_string(lane.peer.rank) + " broke", lane.inbox->error());
  } catch (const Failure& failure) {
    const bool mine = failure.error().code == Code::no_memory;
    ended(lane.peer, {mine ? Code::no_memory : Code::peer_lost, failure.error().message, lane.peer.rank});
  }
}

// No more can be read from one of its streams, or it has died. What it said on the others comes first: `leave` perhaps.
void Messenger::Impl::ended(Peer& peer, Error why) {
  peer.burial = why;
  read_all(peer);
  if (peer.state != State::here) return;
  for (const Lane* lane : peer.lanes) {
    if (lane->reading) return;  // it sees the burial when it comes back
  }
  if (leaving) return gone(peer);  // it was told first and need not answer
  lost(peer, std::move(why));
}

void Messenger::Impl::watch_writing(Lane& lane, bool on) {
  if (lane.writing == on) return;
  poller.change(lane.socket.get(), static_cast<std::uint64_t>(lane.key), on);
  lane.writing = on;
}

bool Messenger::Impl::write(Lane& lane) {
  bool moved = false;
  int error = 0;
  finished.clear();
  const Outbox::Result result = lane.outbox.write(lane.socket.get(), finished, traffic, moved, error);
  for (Message* message : finished) lane.mailbox.sent(*message);
  if (result == Outbox::Result::failed) {
    lane.outbox.clear();
    const std::string name = "rank " + std::to_string(lane.peer.rank);
    ended(lane.peer, {Code::peer_lost, "the connection to " + name + " broke: " + os::text_of(error), lane.peer.rank});
    return true;
  }
  if (result == Outbox::Result::written && !lane.outbox.empty()) lane.outbox.note();
  watch_writing(lane, !lane.outbox.empty());
  return moved;
}

// Nothing more comes on this lane. Its socket stays open: closing it could cut off what the peer still writes.
void Messenger::Impl::left(Lane& lane) {
  lane.left = true;
  poller.remove(lane.socket.get());
  lane.writing = false;
  for (const Lane* other : lane.peer.lanes) {
    if (!other->left) return;
  }
  gone(lane.peer);
}

void Messenger::Impl::gone(Peer& peer) {
  peer.state = State::left;
  for (Lane* lane : peer.lanes) {
    if (lane->socket && !lane->left) poller.remove(lane->socket.get());
    lane->left = true;
    lane->outbox.clear();
    lane->mailbox.peer_left();
  }
  listener.on_left(peer.rank);
}

void Messenger::Impl::lost(Peer& peer, Error why) {
  if (why.rank < 0) why.rank = peer.rank;
  peer.state = State::lost;
  for (Lane* lane : peer.lanes) {
    if (lane->socket && !lane->left) poller.remove(lane->socket.get());
    lane->socket.reset();
    lane->outbox.clear();
    lane->mailbox.peer_lost(why);
  }
  listener.on_lost(peer.rank, why);
}

bool Messenger::Impl::deliver_notes() {
  const std::size_t count = notes.size();  // a note written meanwhile waits for the next time
  for (std::size_t i = 0; i < count; ++i) {
    Note note = std::move(notes.front());
    notes.pop_front();
    listener.on_control(rank, note.type, note.payload, std::move(note.descriptors));
  }
  return count > 0;
}

Messenger::Messenger(int rank, int size, os::Poller& poller, Listener& listener, MessengerOptions options)
    : impl_(std::make_unique<Impl>(rank, size, poller, listener, std::move(options))) {}

Messenger::~Messenger() {
  for (const auto& lane : impl_->lanes) {
    if (!lane->socket) continue;
    if (!lane->left) impl_->poller.remove(lane->socket.get());
    if (impl_->leaving) close_in_good_order(lane->socket);
  }
}

void Messenger::add(int peer, os::Descriptor stream, StreamKind kind) {
  Impl::Peer& to = impl_->at(peer);
  Impl::Lane* free = nullptr;
  for (Impl::Lane* lane : to.lanes) {
    if (free == nullptr && !lane->socket) free = lane;
  }
  if (peer == impl_->rank || free == nullptr || to.state != Impl::State::here) {
    throw Failure(Code::invalid_argument, "a link to rank " + std::to_string(peer) + " is not wanted any more", peer);
  }
  os::make_nonblocking(stream.get());
  const bool checksums = kind == StreamKind::tcp || impl_->options.checksum_local;
  kind == StreamKind::tcp ? os::tune_tcp(stream.get()) : os::tune_local(stream.get());
  free->inbox = std::make_unique<Inbox>(impl_->options);
  free->inbox->expect(kind, checksums);
  free->outbox.use_checksums(checksums);
  to.kind = kind;
  impl_->poller.add(stream.get(), static_cast<std::uint64_t>(free->key));
  free->socket = std::move(stream);
  if (impl_->leaving) free->outbox.say_leave();
  if (!free->outbox.empty()) free->outbox.note();
}

bool Messenger::has(int peer) const { return peer == impl_->rank || static_cast<bool>(impl_->at(peer).first().socket); }

TransferPtr Messenger::send(int peer, Tag tag, Pieces bytes) {
  Impl::Peer& to = impl_->at(peer);
  auto message = std::make_shared<Message>(tag, std::move(bytes), true);
  impl_->lane_of(to, tag).mailbox.send(*message);
  impl_->want(to, wanted);
  return message;
}

TransferPtr Messenger::receive(int peer, Tag tag, Pieces bytes) {
  Impl::Peer& from = impl_->at(peer);
  auto message = std::make_shared<Message>(tag, std::move(bytes), false);
  impl_->lane_of(from, tag).mailbox.receive(*message);
  impl_->want(from, wanted);
  return message;
}

bool Messenger::early(int peer, Tag tag) { return impl_->lane_of(impl_->at(peer), tag).mailbox.early(tag); }

void Messenger::spread(std::uint32_t group, std::uint64_t sequence, int streams) {
  impl_->spreads[group].emplace_back(sequence, static_cast<std::size_t>(std::max(1, streams)));
}

void Messenger::forget(std::uint32_t group) { impl_->spreads.erase(group); }

void Messenger::control(int peer, std::uint32_t type, std::vector<std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  Impl::Peer& to = impl_->at(peer);
  if (payload.size() > wire::kLargestControl || descriptors.size() > wire::kMostDescriptors ||
      (!descriptors.empty() && to.first().socket && to.kind == StreamKind::tcp)) {
    throw Failure(Code::invalid_argument, "a control message to rank " + std::to_string(peer) +
                                              " cannot be sent: " + std::to_string(payload.size()) + " bytes, " +
                                              std::to_string(descriptors.size()) + " descriptors");
  }
  if (peer == impl_->rank) {
    impl_->notes.push_back({type, std::move(payload), std::move(descriptors)});
    return;
  }
  if (to.state != Impl::State::here) return;
  wire::Frame frame;
  frame.type = wire::FrameType::control;
  frame.tag.step = type;
  frame.total = descriptors.size();
  to.first().outbox.push(frame, std::move(payload), std::move(descriptors));
  impl_->want(to, wanted);
}

void Messenger::ready(const os::Event& event) {
  if (event.key >= impl_->lanes.size()) return;
  Impl::Lane& lane = *impl_->lanes[static_cast<std::size_t>(event.key)];
  if (event.readable || event.hung_up) impl_->ready_to_read(lane);
  if (event.writable && impl_->writable(lane)) impl_->write(lane);
}

bool Messenger::flush() {
  bool moved = impl_->deliver_notes();
  std::vector<int> now;
  now.swap(impl_->waiting);
  for (int number : now) impl_->lanes[static_cast<std::size_t>(number)]->outbox.taken_off_the_list();
  for (int number : now) {
    Impl::Lane& lane = *impl_->lanes[static_cast<std::size_t>(number)];
    if (!impl_->writable(lane) || lane.writing) continue;
    moved = impl_->write(lane) || moved;
  }
  return moved;
}

void Messenger::leave() {
  impl_->leaving = true;
  for (const auto& lane : impl_->lanes) {
    if (impl_->writable(*lane)) lane->outbox.say_leave();
  }
}

bool Messenger::flushed() const {
  for (const auto& lane : impl_->lanes) {
    if (impl_->writable(*lane) && !lane->outbox.empty()) return false;
  }
  return true;
}

void Messenger::bury(int peer, const Error& why) {
  Impl::Peer& dead = impl_->at(peer);
  if (dead.state == Impl::State::here && peer != impl_->rank) impl_->ended(dead, why);
}

void Messenger::fail_all(const Error& why) {
  for (const auto& lane : impl_->lanes) lane->mailbox.fail(why);
}

const Traffic& Messenger::traffic() const { return impl_->traffic; }

int Messenger::local_pid(int peer) const {
  const Impl::Peer& other = impl_->at(peer);
  const os::Descriptor& socket = other.first().socket;
  return socket && other.kind == StreamKind::local ? os::process_behind(socket.get()) : 0;
}

}  // namespace farandole::link
