// The messenger: peers, their sockets and streams, and the callbacks of its owner.
// Touches base/, os/ and wire/.
#include "link/messenger.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "link/frame_reader.h"
#include "link/frame_writer.h"
#include "link/matcher.h"
#include "link/message.h"
#include "os/failure.h"
#include "os/socket.h"

namespace farandole::link {

namespace {

constexpr int kMaxDrainReads = 64;
// What a dead rank has sent is in the kernel's buffers. A rank that sends more than this is not dead.
constexpr int kMaxFinalReads = 1 << 16;
constexpr std::uint64_t kMaxFinalBytes = std::uint64_t{1} << 30;

constexpr const char* kForeignGroup = "sent a message for a process set in which it and this rank are not both members";

// close() with unread bytes would reset a TCP connection, and what was sent last could be lost.
void close_without_reset(os::Descriptor& socket) {
  os::shutdown_write(socket.get());
  std::vector<std::byte> discarded(64 << 10);
  const iovec part{discarded.data(), discarded.size()};
  for (int i = 0; i < kMaxDrainReads; ++i) {
    std::vector<os::Descriptor> descriptors;
    if (os::receive_some(socket.get(), {&part, 1}, &descriptors).status != os::IoResult::Status::bytes) break;
  }
  socket.reset();
}

}  // namespace

struct Messenger::Impl {
  enum class State { active, left, lost };
  struct Peer;

  // One stream to a peer, and the messages that use it.
  struct Stream final : FrameHandler {
    Stream(Impl& owner, Peer& whose, int number)
        : impl(owner),
          peer(whose),
          key(number),
          writer(owner.options, number, owner.waiting),
          matcher(whose.rank, whose.rank == owner.rank, owner.options, writer, whose.unexpected_bytes) {}

    bool on_data_begin(const wire::Frame& frame) override {
      const bool foreign = !impl.may_send(peer, frame);
      if (!foreign && matcher.on_data_begin(frame)) return true;
      error_text = foreign ? kForeignGroup : matcher.error_text();
      return false;
    }
    Pieces destination(const wire::Frame& frame, std::size_t offset) override {
      return matcher.destination(frame, offset);
    }
    void on_data_arrived(const wire::Frame& frame) override { matcher.on_data_arrived(frame); }
    bool on_frame(const wire::Frame& frame, std::vector<std::byte> payload,
                  std::vector<os::Descriptor> descriptors) override {
      return impl.handle(*this, frame, std::move(payload), std::move(descriptors));
    }

    Impl& impl;
    Peer& peer;
    const int key;  // in the poller, in `waiting` and in `streams`
    FrameWriter writer;
    Matcher matcher;
    std::unique_ptr<FrameReader> reader;  // set by add()
    os::Descriptor socket;
    bool writing = false;              // the poller watches for space to write
    bool reading = false;              // its frames are being handled; callbacks may call the messenger again
    bool left = false;                 // the peer sent `leave` on it
    const char* error_text = nullptr;  // of a message that was refused; null when its frame was invalid
    bool ended = false;                // it ended or failed: anything that follows is ignored
  };

  struct Peer {
    explicit Peer(int number) : rank(number) {}
    Stream& first() const { return *streams.front(); }

    const int rank;
    std::vector<Stream*> streams;
    StreamKind kind = StreamKind::local;
    State state = State::active;
    bool link_requested = false;         // `request_link` was called
    std::uint64_t unexpected_bytes = 0;  // of unexpected messages and grants
    std::uint64_t known_group = ~0ull;   // the group of the last message
    std::optional<Error> pending_loss;   // it has died: after the last bytes are read it is lost
  };

  // A control frame from this rank to itself, kept until flush().
  struct SelfMessage {
    std::uint32_t type;
    std::vector<std::byte> payload;
    std::vector<os::Descriptor> descriptors;
  };

  Impl(int my_rank, int size, os::Poller& the_poller, Listener& the_listener, MessengerOptions the_options)
      : rank(my_rank), options(std::move(the_options)), poller(the_poller), listener(the_listener) {
    peers.reserve(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) {
      Peer& peer = *peers.emplace_back(std::make_unique<Peer>(i));
      const int count = options.streams.empty() ? 1 : options.streams[static_cast<std::size_t>(i)];
      for (int number = 0; number < count; ++number) {
        streams.push_back(std::make_unique<Stream>(*this, peer, static_cast<int>(streams.size())));
        peer.streams.push_back(streams.back().get());
      }
    }
  }

  // Messages of one tag must keep their order, so they share a stream; neighbouring chunks use different streams.
  Stream& stream_of(const Peer& peer, const Tag& tag) const {
    std::size_t count = peer.streams.size();
    if (auto found = stream_limits.find(tag.group); found != stream_limits.end() && count > 1) {
      auto limit = found->second.rbegin();  // messages of an earlier sequence may still be under way
      while (limit != found->second.rend() && limit->first > tag.sequence) ++limit;
      if (limit != found->second.rend()) count = std::min(count, limit->second);
    }
    return *peer.streams[(tag.sequence + tag.step) % count];
  }

  Peer& at(int peer) const {
    if (peer < 0 || peer >= static_cast<int>(peers.size())) {
      throw Failure(Code::invalid_argument, "rank " + std::to_string(peer) + " does not exist: ranks are 0 to " +
                                                std::to_string(peers.size() - 1));
    }
    return *peers[static_cast<std::size_t>(peer)];
  }

  void request_link(Peer& peer, const std::function<void(int)>& callback) {
    if (peer.first().socket || peer.link_requested || peer.rank == rank || peer.state != State::active || !callback)
      return;
    peer.link_requested = true;
    callback(peer.rank);
  }

  bool may_send(Peer& peer, const wire::Frame& frame) {
    if (frame.tag.group == peer.known_group) return true;
    if (!listener.may_send(peer.rank, frame.tag.group)) return false;
    peer.known_group = frame.tag.group;
    return true;
  }

  static Error refused(const Peer& peer, const char* what);
  static bool writable(const Stream& stream) {
    return stream.socket && !stream.left && stream.peer.state == State::active;
  }
  bool handle(Stream& stream, const wire::Frame& frame, std::vector<std::byte> payload,
              std::vector<os::Descriptor> descriptors);
  FrameReader::Result read(Stream& stream, bool to_the_end);
  void read_to_the_end(Peer& peer);
  void ready_to_read(Stream& stream);
  void connection_ended(Peer& peer, Error why);
  void connection_failed(Stream& stream);
  bool write(Stream& stream);
  void watch_writing(Stream& stream, bool on);
  void stream_left(Stream& stream);
  void peer_left(Peer& peer);
  void peer_lost(Peer& peer, Error why);
  bool deliver_self_messages();

  const int rank;
  const MessengerOptions options;
  os::Poller& poller;
  Listener& listener;
  std::vector<int> waiting;  // streams with something to write
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::unique_ptr<Stream>> streams;  // of all peers
  std::unordered_map<std::uint32_t, std::vector<std::pair<std::uint64_t, std::size_t>>>
      stream_limits;  // first sequence, streams
  std::vector<Message*> finished;
  std::deque<SelfMessage> self_messages;
  Traffic traffic;
  bool leaving = false;
};

Error Messenger::Impl::refused(const Peer& peer, const char* what) {
  return {Code::peer_lost, "rank " + std::to_string(peer.rank) + " " + what, peer.rank};
}

// False when nothing more may be read from this stream.
bool Messenger::Impl::handle(Stream& stream, const wire::Frame& frame, std::vector<std::byte> payload,
                             std::vector<os::Descriptor> descriptors) {
  const bool of_group = frame.type == wire::FrameType::grant || frame.type == wire::FrameType::cancel_grant;
  if (of_group && !may_send(stream.peer, frame)) {
    connection_ended(stream.peer, refused(stream.peer, kForeignGroup));
  } else if (frame.type == wire::FrameType::grant) {
    if (!stream.matcher.on_grant(frame))
      connection_ended(stream.peer, refused(stream.peer, stream.matcher.error_text()));
  } else if (frame.type == wire::FrameType::cancel_grant) {
    stream.matcher.on_grant_cancelled(frame);
  } else if (frame.type == wire::FrameType::answer) {
    if (!stream.matcher.on_answer(frame))
      connection_ended(stream.peer, refused(stream.peer, "answered an announcement that this rank did not send"));
  } else if (frame.type == wire::FrameType::leave) {
    stream_left(stream);
  } else {
    listener.on_control(stream.peer.rank, frame.tag.step, payload, std::move(descriptors));
  }
  return stream.peer.state == State::active && !stream.left;
}

// Also returns `stopped` when there is nothing to read from, or a caller on the stack is reading it already.
FrameReader::Result Messenger::Impl::read(Stream& stream, bool to_the_end) {
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  };
  FrameReader::Result result = FrameReader::Result::stopped;
  if (stream.reading || stream.left || stream.ended || !stream.socket || stream.peer.state != State::active)
    return result;
  stream.reading = true;
  const Guard guard{stream.reading};
  int reads = 0;
  const std::uint64_t before = stream.reader->bytes();
  do {
    result = stream.reader->read(stream.socket.get(), stream, traffic);
  } while ((to_the_end || stream.peer.pending_loss) && result == FrameReader::Result::more &&
           ++reads < kMaxFinalReads && stream.reader->bytes() - before < kMaxFinalBytes);
  stream.ended = result == FrameReader::Result::ended || result == FrameReader::Result::failed;
  return result;
}

// Reads all bytes that have arrived on any stream of the peer.
void Messenger::Impl::read_to_the_end(Peer& peer) {
  for (Stream* stream : peer.streams) read(*stream, true);
}

void Messenger::Impl::ready_to_read(Stream& stream) {
  Peer& peer = stream.peer;
  const FrameReader::Result result = read(stream, false);
  if (peer.state != State::active || stream.reading) return;
  if (peer.pending_loss) return connection_ended(peer, *peer.pending_loss);
  const std::string name = "rank " + std::to_string(peer.rank);
  if (result == FrameReader::Result::ended) {
    connection_ended(peer, {Code::peer_lost, name + " closed its connection without leaving", peer.rank});
  } else if (result == FrameReader::Result::failed && stream.reader->error() == 0 && stream.error_text != nullptr) {
    connection_ended(peer, refused(peer, stream.error_text));
  } else if (result == FrameReader::Result::failed && stream.reader->error() == 0) {
    connection_ended(peer, {Code::peer_lost, name + " sent " + stream.reader->reason(), peer.rank});
  } else if (result == FrameReader::Result::failed) {
    connection_failed(stream);
  }
}

void Messenger::Impl::connection_failed(Stream& stream) {
  try {
    os::fail("the connection to rank " + std::to_string(stream.peer.rank) + " broke", stream.reader->error());
  } catch (const Failure& failure) {
    const bool mine = failure.error().code == Code::no_memory;
    connection_ended(stream.peer,
                     {mine ? Code::no_memory : Code::peer_lost, failure.error().message, stream.peer.rank});
  }
}

// One of the peer's streams cannot be read any more, or the peer has died. First reads the other streams: they may hold
// `leave`.
void Messenger::Impl::connection_ended(Peer& peer, Error why) {
  peer.pending_loss = why;
  read_to_the_end(peer);
  if (peer.state != State::active) return;
  for (const Stream* stream : peer.streams) {
    if (stream->reading) return;  // the reader below on the stack handles pending_loss
  }
  if (leaving) return peer_left(peer);  // this rank sent `leave` first, so the peer need not
  peer_lost(peer, std::move(why));
}

void Messenger::Impl::watch_writing(Stream& stream, bool on) {
  if (stream.writing == on) return;
  poller.change(stream.socket.get(), static_cast<std::uint64_t>(stream.key), on);
  stream.writing = on;
}

bool Messenger::Impl::write(Stream& stream) {
  bool moved = false;
  int error = 0;
  finished.clear();
  const FrameWriter::Result result = stream.writer.write(stream.socket.get(), finished, traffic, moved, error);
  for (Message* message : finished) stream.matcher.sent(*message);
  if (result == FrameWriter::Result::failed) {
    stream.writer.clear();
    const std::string name = "rank " + std::to_string(stream.peer.rank);
    connection_ended(stream.peer, {Code::peer_lost, "the connection to " + name + " broke: " + os::errno_text(error),
                                   stream.peer.rank});
    return true;
  }
  if (result == FrameWriter::Result::written && !stream.writer.empty()) stream.writer.schedule();
  watch_writing(stream, !stream.writer.empty());
  return moved;
}

// Nothing more comes on this stream. The socket stays open: closing it could cut off what the peer still writes.
void Messenger::Impl::stream_left(Stream& stream) {
  stream.left = true;
  poller.remove(stream.socket.get());
  stream.writing = false;
  for (const Stream* other : stream.peer.streams) {
    if (!other->left) return;
  }
  peer_left(stream.peer);
}

void Messenger::Impl::peer_left(Peer& peer) {
  peer.state = State::left;
  for (Stream* stream : peer.streams) {
    if (stream->socket && !stream->left) poller.remove(stream->socket.get());
    stream->left = true;
    stream->writer.clear();
    stream->matcher.peer_left();
  }
  listener.on_left(peer.rank);
}

void Messenger::Impl::peer_lost(Peer& peer, Error why) {
  if (why.rank < 0) why.rank = peer.rank;
  peer.state = State::lost;
  for (Stream* stream : peer.streams) {
    if (stream->socket && !stream->left) poller.remove(stream->socket.get());
    stream->socket.reset();
    stream->writer.clear();
    stream->matcher.peer_lost(why);
  }
  listener.on_lost(peer.rank, why);
}

bool Messenger::Impl::deliver_self_messages() {
  const std::size_t count = self_messages.size();  // one that is added meanwhile waits for the next call
  for (std::size_t i = 0; i < count; ++i) {
    SelfMessage message = std::move(self_messages.front());
    self_messages.pop_front();
    listener.on_control(rank, message.type, message.payload, std::move(message.descriptors));
  }
  return count > 0;
}

Messenger::Messenger(int rank, int size, os::Poller& poller, Listener& listener, MessengerOptions options)
    : impl_(std::make_unique<Impl>(rank, size, poller, listener, std::move(options))) {}

Messenger::~Messenger() {
  for (const auto& stream : impl_->streams) {
    if (!stream->socket) continue;
    if (!stream->left) impl_->poller.remove(stream->socket.get());
    if (impl_->leaving) close_without_reset(stream->socket);
  }
}

void Messenger::add(int peer, os::Descriptor stream, StreamKind kind) {
  Impl::Peer& to = impl_->at(peer);
  Impl::Stream* free = nullptr;
  for (Impl::Stream* candidate : to.streams) {
    if (free == nullptr && !candidate->socket) free = candidate;
  }
  if (peer == impl_->rank || free == nullptr || to.state != Impl::State::active) {
    throw Failure(Code::invalid_argument,
                  "cannot add a link to rank " + std::to_string(peer) + ": it has all its links, or has left", peer);
  }
  os::make_nonblocking(stream.get());
  const bool checksums = kind == StreamKind::tcp || impl_->options.checksum_local;
  kind == StreamKind::tcp ? os::tune_tcp(stream.get()) : os::tune_local(stream.get());
  free->reader = std::make_unique<FrameReader>(impl_->options);
  free->reader->expect(kind, checksums);
  free->writer.use_checksums(checksums);
  to.kind = kind;
  impl_->poller.add(stream.get(), static_cast<std::uint64_t>(free->key));
  free->socket = std::move(stream);
  if (impl_->leaving) free->writer.send_leave();
  if (!free->writer.empty()) free->writer.schedule();
}

bool Messenger::has(int peer) const { return peer == impl_->rank || static_cast<bool>(impl_->at(peer).first().socket); }

TransferPtr Messenger::post(int peer, Tag tag, Pieces bytes, bool sending) {
  Impl::Peer& other = impl_->at(peer);
  auto message = std::make_shared<Message>(tag, std::move(bytes), sending);
  Matcher& matcher = impl_->stream_of(other, tag).matcher;
  sending ? matcher.send(*message) : matcher.receive(*message);
  impl_->request_link(other, request_link);
  return message;
}

TransferPtr Messenger::send(int peer, Tag tag, Pieces bytes) { return post(peer, tag, std::move(bytes), true); }

TransferPtr Messenger::receive(int peer, Tag tag, Pieces bytes) { return post(peer, tag, std::move(bytes), false); }

bool Messenger::has_unexpected(int peer, Tag tag) {
  return impl_->stream_of(impl_->at(peer), tag).matcher.has_unexpected(tag);
}

void Messenger::limit_streams(std::uint32_t group, std::uint64_t sequence, int streams) {
  impl_->stream_limits[group].emplace_back(sequence, static_cast<std::size_t>(std::max(1, streams)));
}

void Messenger::forget_group(std::uint32_t group) { impl_->stream_limits.erase(group); }

void Messenger::control(int peer, std::uint32_t type, std::vector<std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  Impl::Peer& to = impl_->at(peer);
  if (payload.size() > wire::kMaxControlPayload || descriptors.size() > wire::kMaxDescriptors ||
      (!descriptors.empty() && to.first().socket && to.kind == StreamKind::tcp)) {
    throw Failure(Code::invalid_argument, "cannot send a control message of " + std::to_string(payload.size()) +
                                              " bytes and " + std::to_string(descriptors.size()) +
                                              " descriptors to rank " + std::to_string(peer) + ": the limits are " +
                                              std::to_string(wire::kMaxControlPayload) + " bytes and " +
                                              std::to_string(wire::kMaxDescriptors) + " descriptors (none ended TCP)");
  }
  if (peer == impl_->rank) {
    impl_->self_messages.push_back({type, std::move(payload), std::move(descriptors)});
    return;
  }
  if (to.state != Impl::State::active) return;
  wire::Frame frame;
  frame.type = wire::FrameType::control;
  frame.tag.step = type;
  frame.total = descriptors.size();
  to.first().writer.push(frame, std::move(payload), std::move(descriptors));
  impl_->request_link(to, request_link);
}

void Messenger::ready(const os::Event& event) {
  if (event.key >= impl_->streams.size()) return;
  Impl::Stream& stream = *impl_->streams[static_cast<std::size_t>(event.key)];
  if (event.readable || event.hung_up) impl_->ready_to_read(stream);
  if (event.writable && impl_->writable(stream)) impl_->write(stream);
}

bool Messenger::flush() {
  bool moved = impl_->deliver_self_messages();
  std::vector<int> scheduled;
  scheduled.swap(impl_->waiting);
  for (int number : scheduled) impl_->streams[static_cast<std::size_t>(number)]->writer.unschedule();
  for (int number : scheduled) {
    Impl::Stream& stream = *impl_->streams[static_cast<std::size_t>(number)];
    if (!impl_->writable(stream) || stream.writing) continue;
    moved = impl_->write(stream) || moved;
  }
  return moved;
}

void Messenger::leave() {
  impl_->leaving = true;
  for (const auto& stream : impl_->streams) {
    if (impl_->writable(*stream)) stream->writer.send_leave();
  }
}

bool Messenger::flushed() const {
  for (const auto& stream : impl_->streams) {
    if (impl_->writable(*stream) && !stream->writer.empty()) return false;
  }
  return true;
}

void Messenger::peer_died(int peer, const Error& why) {
  Impl::Peer& dead = impl_->at(peer);
  if (dead.state == Impl::State::active && peer != impl_->rank) impl_->connection_ended(dead, why);
}

void Messenger::fail_all(const Error& why) {
  for (const auto& stream : impl_->streams) stream->matcher.fail(why);
}

const Traffic& Messenger::traffic() const { return impl_->traffic; }

int Messenger::local_pid(int peer) const {
  const Impl::Peer& other = impl_->at(peer);
  const os::Descriptor& socket = other.first().socket;
  return socket && other.kind == StreamKind::local ? os::peer_process(socket.get()) : 0;
}

}  // namespace farandole::link
