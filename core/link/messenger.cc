// The messenger: peers, their sockets, and who is told what.
// Touches os/ and wire/.
#include "link/messenger.h"

#include <array>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "link/inbox.h"
#include "link/mailbox.h"
#include "link/message.h"
#include "link/outbox.h"
#include "os/failure.h"
#include "os/socket.h"

namespace farandole::link {

namespace {

constexpr int kDrainReads = 64;

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

  struct Peer final : Recipient {
    Peer(Impl& owner, int number, bool self)
        : impl(owner),
          rank(number),
          outbox(owner.options, number, owner.waiting),
          mailbox(number, self, owner.options, outbox) {}

    bool data_begins(const wire::Frame& frame) override { return mailbox.data_begins(frame); }
    Pieces place(const wire::Frame& frame, std::size_t offset) override { return mailbox.place(frame, offset); }
    void data_arrived(const wire::Frame& frame) override { mailbox.data_arrived(frame); }
    bool frame_arrived(const wire::Frame& frame, std::vector<std::byte> payload,
                       std::vector<os::Descriptor> descriptors) override {
      return impl.handle(*this, frame, std::move(payload), std::move(descriptors));
    }

    Impl& impl;
    const int rank;
    Outbox outbox;
    Mailbox mailbox;
    std::unique_ptr<Inbox> inbox;  // from add() on
    os::Descriptor socket;
    StreamKind kind = StreamKind::local;
    State state = State::here;
    bool asked_for = false;       // `wanted` was called
    bool writing = false;         // the poller watches for room to write
    bool reading = false;         // its frames are being handled: callbacks may come back here
    std::optional<Error> burial;  // it has died: after what is left to read it is lost
  };

  // A control frame of this rank to itself, until flush().
  struct Note {
    std::uint32_t type;
    std::vector<std::byte> payload;
    std::vector<os::Descriptor> descriptors;
  };

  Impl(int my_rank, int size, os::Poller& the_poller, Listener& the_listener, MessengerOptions the_options)
      : rank(my_rank), options(the_options), poller(the_poller), listener(the_listener) {
    peers.reserve(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) peers.push_back(std::make_unique<Peer>(*this, i, i == rank));
  }

  Peer& at(int peer) const {
    if (peer < 0 || peer >= static_cast<int>(peers.size())) {
      throw Failure(Code::invalid_argument, "there is no rank " + std::to_string(peer));
    }
    return *peers[static_cast<std::size_t>(peer)];
  }

  void want(Peer& peer, const std::function<void(int)>& tell) {
    if (peer.socket || peer.asked_for || peer.rank == rank || peer.state != State::here || !tell) return;
    peer.asked_for = true;
    tell(peer.rank);
  }

  bool handle(Peer& peer, const wire::Frame& frame, std::vector<std::byte> payload,
              std::vector<os::Descriptor> descriptors);
  void read(Peer& peer, bool to_the_end);
  void read_ended(Peer& peer, Inbox::Result result);
  bool write(Peer& peer);
  void watch_writing(Peer& peer, bool on);
  void close(Peer& peer);
  void gone(Peer& peer);
  void lost(Peer& peer, Error why);
  bool deliver_notes();

  const int rank;
  const MessengerOptions options;
  os::Poller& poller;
  Listener& listener;
  std::vector<int> waiting;  // peers with something to write
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<Message*> finished;
  std::deque<Note> notes;
  Traffic traffic;
  bool leaving = false;
};

// False when nothing more of this peer is to be read.
bool Messenger::Impl::handle(Peer& peer, const wire::Frame& frame, std::vector<std::byte> payload,
                             std::vector<os::Descriptor> descriptors) {
  if (frame.type == wire::FrameType::grant) {
    peer.mailbox.granted(frame);
  } else if (frame.type == wire::FrameType::leave) {
    gone(peer);
  } else {
    listener.on_control(peer.rank, frame.tag.step, payload, std::move(descriptors));
  }
  return peer.state == State::here;
}

void Messenger::Impl::read(Peer& peer, bool to_the_end) {
  if (peer.reading || !peer.socket || peer.state != State::here) return;
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  };
  Inbox::Result result;
  {
    peer.reading = true;
    const Guard guard{peer.reading};
    do {
      result = peer.inbox->read(peer.socket.get(), peer, traffic);
    } while ((to_the_end || peer.burial) && result == Inbox::Result::more);
  }
  read_ended(peer, result);
}

void Messenger::Impl::read_ended(Peer& peer, Inbox::Result result) {
  if (peer.state != State::here) return;
  if (peer.burial) return lost(peer, *peer.burial);
  const std::string name = "rank " + std::to_string(peer.rank);
  if (result == Inbox::Result::ended || (result == Inbox::Result::failed && leaving)) {
    if (leaving) return gone(peer);  // it was told first and need not answer
    lost(peer, {Code::peer_lost, name + " closed its connection without leaving", peer.rank});
  } else if (result == Inbox::Result::failed) {
    if (peer.inbox->error() == 0) {
      return lost(peer, {Code::peer_lost, name + " sent " + peer.inbox->reason(), peer.rank});
    }
    try {
      os::fail("the connection to " + name + " broke", peer.inbox->error());
    } catch (const Failure& failure) {
      const bool mine = failure.error().code == Code::no_memory;
      lost(peer, {mine ? Code::no_memory : Code::peer_lost, failure.error().message, peer.rank});
    }
  }
}

void Messenger::Impl::watch_writing(Peer& peer, bool on) {
  if (peer.writing == on) return;
  poller.change(peer.socket.get(), static_cast<std::uint64_t>(peer.rank), on);
  peer.writing = on;
}

bool Messenger::Impl::write(Peer& peer) {
  bool moved = false;
  int error = 0;
  finished.clear();
  const Outbox::Result result = peer.outbox.write(peer.socket.get(), finished, traffic, moved, error);
  for (Message* message : finished) peer.mailbox.sent(*message);
  if (result == Outbox::Result::failed) {
    // The peer is gone; what it said before may still be there, `leave` among it.
    peer.outbox.clear();
    read(peer, true);
    if (peer.state == State::here && !peer.reading) {
      const std::string text = "the connection to rank " + std::to_string(peer.rank) + " broke: " + os::text_of(error);
      if (leaving) {
        gone(peer);
      } else {
        lost(peer, {Code::peer_lost, text, peer.rank});
      }
    }
    return true;
  }
  if (result == Outbox::Result::written && !peer.outbox.empty()) peer.outbox.note();
  watch_writing(peer, !peer.outbox.empty());
  return moved;
}

void Messenger::Impl::close(Peer& peer) {
  if (!peer.socket) return;
  poller.remove(peer.socket.get());
  peer.socket.reset();
}

// It left. The socket stays open, unwatched: closing it could cut off what the peer still writes.
void Messenger::Impl::gone(Peer& peer) {
  peer.state = State::left;
  if (peer.socket) poller.remove(peer.socket.get());
  peer.outbox.clear();
  peer.mailbox.peer_left();
  listener.on_left(peer.rank);
}

void Messenger::Impl::lost(Peer& peer, Error why) {
  if (why.rank < 0) why.rank = peer.rank;
  peer.state = State::lost;
  close(peer);
  peer.outbox.clear();
  peer.mailbox.peer_lost(why);
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
    : impl_(std::make_unique<Impl>(rank, size, poller, listener, options)) {}

Messenger::~Messenger() {
  for (const auto& peer : impl_->peers) {
    if (!peer->socket) continue;
    impl_->poller.remove(peer->socket.get());
    if (impl_->leaving) close_in_good_order(peer->socket);
  }
}

void Messenger::add(int peer, os::Descriptor stream, StreamKind kind) {
  Impl::Peer& to = impl_->at(peer);
  if (peer == impl_->rank || to.socket || to.state != Impl::State::here) {
    throw Failure(Code::invalid_argument, "a link to rank " + std::to_string(peer) + " is not wanted any more", peer);
  }
  os::make_nonblocking(stream.get());
  const bool checksums = kind == StreamKind::tcp || impl_->options.checksum_local;
  kind == StreamKind::tcp ? os::tune_tcp(stream.get()) : os::tune_local(stream.get());
  to.inbox = std::make_unique<Inbox>(impl_->options);
  to.inbox->expect(kind, checksums);
  to.outbox.use_checksums(checksums);
  to.kind = kind;
  impl_->poller.add(stream.get(), static_cast<std::uint64_t>(peer));
  to.socket = std::move(stream);
  if (impl_->leaving) to.outbox.say_leave();
  if (!to.outbox.empty()) to.outbox.note();
}

bool Messenger::has(int peer) const { return peer == impl_->rank || static_cast<bool>(impl_->at(peer).socket); }

TransferPtr Messenger::send(int peer, Tag tag, Pieces bytes) {
  Impl::Peer& to = impl_->at(peer);
  auto message = std::make_shared<Message>(tag, std::move(bytes), true);
  to.mailbox.send(*message);
  impl_->want(to, wanted);
  return message;
}

TransferPtr Messenger::receive(int peer, Tag tag, Pieces bytes) {
  Impl::Peer& from = impl_->at(peer);
  auto message = std::make_shared<Message>(tag, std::move(bytes), false);
  from.mailbox.receive(*message);
  impl_->want(from, wanted);
  return message;
}

void Messenger::control(int peer, std::uint32_t type, std::vector<std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  Impl::Peer& to = impl_->at(peer);
  if (payload.size() > wire::kLargestControl || descriptors.size() > wire::kMostDescriptors ||
      (!descriptors.empty() && to.socket && to.kind == StreamKind::tcp)) {
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
  to.outbox.push(frame, std::move(payload), std::move(descriptors));
  impl_->want(to, wanted);
}

void Messenger::ready(const os::Event& event) {
  if (event.key >= impl_->peers.size()) return;
  Impl::Peer& peer = *impl_->peers[static_cast<std::size_t>(event.key)];
  if (event.readable || event.hung_up) impl_->read(peer, false);
  if (event.writable && peer.socket && peer.state == Impl::State::here) impl_->write(peer);
}

bool Messenger::flush() {
  bool moved = impl_->deliver_notes();
  std::vector<int> now;
  now.swap(impl_->waiting);
  for (int number : now) impl_->at(number).outbox.taken_off_the_list();
  for (int number : now) {
    Impl::Peer& peer = impl_->at(number);
    if (!peer.socket || peer.state != Impl::State::here || peer.writing) continue;
    moved = impl_->write(peer) || moved;
  }
  return moved;
}

void Messenger::leave() {
  impl_->leaving = true;
  for (const auto& peer : impl_->peers) {
    if (peer->socket && peer->state == Impl::State::here) peer->outbox.say_leave();
  }
}

bool Messenger::flushed() const {
  for (const auto& peer : impl_->peers) {
    if (peer->socket && peer->state == Impl::State::here && !peer->outbox.empty()) return false;
  }
  return true;
}

void Messenger::bury(int peer, const Error& why) {
  Impl::Peer& dead = impl_->at(peer);
  if (dead.state != Impl::State::here || peer == impl_->rank) return;
  dead.burial = why;
  if (dead.reading) return;
  impl_->read(dead, true);
  if (dead.state == Impl::State::here) impl_->lost(dead, why);  // there was no socket
}

void Messenger::fail_all(const Error& why) {
  for (const auto& peer : impl_->peers) peer->mailbox.fail(why);
}

const Traffic& Messenger::traffic() const { return impl_->traffic; }

int Messenger::local_pid(int peer) const {
  const Impl::Peer& other = impl_->at(peer);
  return other.socket && other.kind == StreamKind::local ? os::process_behind(other.socket.get()) : 0;
}

}  // namespace farandole::link
