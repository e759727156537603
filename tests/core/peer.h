// A rank that is no engine: it has the links, the memory and the messages of one, and says what a test wants it to say.
// Touches api/, engine/control.h, link/, negotiate/ and sockets.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/farandole.h"
#include "engine/control.h"
#include "link/board.h"
#include "link/rings.h"
#include "negotiate/messages.h"
#include "os/socket.h"
#include "wire/frame.h"

namespace peer {

using namespace farandole;
using Bytes = std::vector<std::byte>;

struct Heard {
  wire::Frame frame;
  Bytes payload;
};

class Peer {
 public:
  Peer(int rank, std::vector<int> hosts, const farandole_options& options)
      : rank_(rank),
        hosts_(std::move(hosts)),
        generation_(static_cast<std::uint32_t>(options.generation)),
        board_(generation_, rank, kNonce) {
    int neighbours = 0;
    for (std::size_t other = 0; other < hosts_.size(); ++other) {
      if (hosts_[other] != hosts_[static_cast<std::size_t>(rank)]) continue;
      if (static_cast<int>(other) < rank) ++local_;
      locals_[static_cast<int>(other)] = neighbours++;
    }
    if (neighbours > 1)
      rings_ = std::make_unique<link::Rings>(
          link::RingShape{neighbours, static_cast<std::size_t>(options.slot_bytes), options.slots}, local_);
  }

  // Gives the engine of rank `other` a link to this one.
  void connect(int other, farandole_engine* engine) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    Link& link = links_[other];
    link.socket = os::Descriptor(ends[0]);
    link.local = neighbour(other);
    farandole_add_link(engine, rank_, ends[1], link.local ? 0 : 1);
  }

  // What an engine says first: who it is, and where its memory lies.
  void greet(int other) {
    if (!neighbour(other)) return;
    std::vector<os::Descriptor> files;
    files.push_back(board_.memory().file().duplicate());
    files.push_back(rope());
    say(other, Control::hello, control::encode(control::Hello{generation_, rank_, kNonce}), std::move(files));
    std::vector<os::Descriptor> file;
    file.push_back(rings_->memory().file().duplicate());
    say(other, Control::segment, control::encode(control::Segment{0}), std::move(file));
  }

  void say(int other, Control type, const Bytes& payload, std::vector<os::Descriptor> files = {}) {
    wire::Frame frame;
    frame.type = wire::FrameType::control;
    frame.tag.step = static_cast<std::uint32_t>(type);
    frame.total = files.size();
    send(other, frame, payload, std::move(files));
  }

  // Two in one write: who reads the first reads the second with it.
  void say_both(int other, Control first, const Bytes& one, Control second, const Bytes& two) {
    wire::Frame frame;
    frame.type = wire::FrameType::control;
    frame.tag.step = static_cast<std::uint32_t>(first);
    Bytes bytes = framed(other, frame, one);
    frame.tag.step = static_cast<std::uint32_t>(second);
    const Bytes more = framed(other, frame, two);
    bytes.insert(bytes.end(), more.begin(), more.end());
    write(other, std::move(bytes), {});
  }

  // With a right header and right checksums, whatever the rest is. False when the engine does not read any more.
  bool send(int other, const wire::Frame& frame, const Bytes& payload, std::vector<os::Descriptor> files = {}) {
    return write(other, framed(other, frame, payload), std::move(files));
  }

  bool write(int other, Bytes bytes, std::vector<os::Descriptor> files) {
    Link& link = links_.at(other);
    for (std::size_t sent = 0; sent < bytes.size();) {
      const iovec part{bytes.data() + sent, bytes.size() - sent};
      const os::Moved moved = os::send_some(link.socket.get(), {&part, 1}, files);
      pollfd room{link.socket.get(), POLLOUT, 0};
      if (moved.what == os::Moved::What::would_block && poll(&room, 1, kLongestMs) > 0) continue;
      if (moved.what != os::Moved::What::bytes) return false;
      sent += moved.bytes;
      files.clear();
    }
    return true;
  }

  // The next control frame of this type; waits for it. False when the link ends first.
  bool hear(int other, Control type, Bytes& payload, int longest_ms = kLongestMs) {
    Link& link = links_.at(other);
    for (;;) {
      while (!link.heard.empty()) {
        Heard heard = std::move(link.heard.front());
        link.heard.pop_front();
        if (heard.frame.type != wire::FrameType::control || heard.frame.tag.step != static_cast<std::uint32_t>(type))
          continue;
        payload = std::move(heard.payload);
        return true;
      }
      if (!listen(other, longest_ms)) return false;
    }
  }

  // Until the engine's memory has come, so that this rank can take part in what goes through it.
  bool meet(int other) {
    Link& link = links_.at(other);
    if (!link.local) return true;
    while (!rings_->attached(locals_.at(other)))
      if (!listen(other)) return false;
    return true;
  }

  void hang_up() { links_.clear(); }
  bool neighbour(int other) const {
    return hosts_[static_cast<std::size_t>(other)] == hosts_[static_cast<std::size_t>(rank_)];
  }
  link::Rings* rings() { return rings_.get(); }
  const link::Board& board() const { return board_; }
  os::Descriptor rope() { return bells_.emplace_back().give_rope(); }  // of a bell of this rank's
  std::uint32_t generation() const { return generation_; }
  static constexpr std::uint64_t kNonce = 0x1234567;
  static constexpr int kLongestMs = 10'000;  // that an engine may take to read or to say something

 private:
  struct Link {
    os::Descriptor socket;
    bool local = true;
    Bytes bytes;  // read, and not yet a whole frame
    std::vector<os::Descriptor> files;
    std::deque<Heard> heard;
  };

  Bytes framed(int other, wire::Frame frame, const Bytes& payload) const {
    frame.generation = generation_;
    frame.length = static_cast<std::uint32_t>(payload.size());
    frame.crc = links_.at(other).local ? 0 : wire::crc32c(0, payload.data(), payload.size());
    Bytes bytes(wire::kFrameBytes);
    wire::encode(frame, std::span<std::byte, wire::kFrameBytes>(bytes.data(), wire::kFrameBytes));
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return bytes;
  }

  bool listen(int other, int longest_ms = kLongestMs) {
    Link& link = links_.at(other);
    pollfd ready{link.socket.get(), POLLIN, 0};
    if (poll(&ready, 1, longest_ms) <= 0) return false;
    std::array<std::byte, 4096> buffer;
    const iovec part{buffer.data(), buffer.size()};
    const os::Moved moved = os::receive_some(link.socket.get(), {&part, 1}, &link.files);
    if (moved.what != os::Moved::What::bytes) return false;
    link.bytes.insert(link.bytes.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(moved.bytes));
    while (link.bytes.size() >= wire::kFrameBytes) {
      const auto frame = wire::decode(std::span<const std::byte>(link.bytes).first<wire::kFrameBytes>());
      if (!frame) throw std::runtime_error("an engine sent a frame that cannot be read");
      if (link.bytes.size() < wire::kFrameBytes + frame->length) break;
      const auto begin = link.bytes.begin() + wire::kFrameBytes, end = begin + frame->length;
      arrived(other, *frame, Bytes(begin, end));
      link.bytes.erase(link.bytes.begin(), end);
    }
    return true;
  }

  void arrived(int other, const wire::Frame& frame, Bytes payload) {
    Link& link = links_.at(other);
    if (frame.type == wire::FrameType::control) {
      const auto last = link.files.begin() + static_cast<std::ptrdiff_t>(frame.total);
      std::vector<os::Descriptor> files(std::make_move_iterator(link.files.begin()), std::make_move_iterator(last));
      link.files.erase(link.files.begin(), last);
      control::Hello hello;
      if (frame.tag.step == static_cast<std::uint32_t>(Control::hello) && decode(payload, hello))
        neighbours_[other] = std::make_unique<link::Neighbour>(std::move(files.at(0)), std::move(files.at(1)),
                                                               generation_, other, hello.nonce);
      control::Segment segment;
      if (frame.tag.step == static_cast<std::uint32_t>(Control::segment) && decode(payload, segment) &&
          segment.group == 0)
        rings_->attach(locals_.at(other), std::move(files.at(0)), neighbours_.at(other).get());
    }
    link.heard.push_back({frame, std::move(payload)});
  }

  const int rank_;
  const std::vector<int> hosts_;
  const std::uint32_t generation_;
  int local_ = 0;
  std::map<int, int> locals_;  // rank -> place on this host
  link::Board board_;
  std::deque<os::Farbell> bells_;
  std::map<int, std::unique_ptr<link::Neighbour>> neighbours_;
  std::unique_ptr<link::Rings> rings_;
  std::map<int, Link> links_;
};

}  // namespace peer
