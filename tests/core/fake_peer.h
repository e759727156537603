// A fake peer: a rank without an engine. It has an engine's links, memory and messages, and sends what a test wants.
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
#include "link/rings.h"
#include "link/status_page.h"
#include "negotiate/messages.h"
#include "os/socket.h"
#include "wire/frame.h"

namespace fake_peer {

using namespace farandole;
using Bytes = std::vector<std::byte>;

struct Received {
  wire::Frame frame;
  Bytes payload;
};

class FakePeer {
 public:
  FakePeer(int rank, std::vector<int> hosts, const farandole_options& options)
      : rank_(rank),
        hosts_(std::move(hosts)),
        generation_(static_cast<std::uint32_t>(options.generation)),
        status_page_(generation_, rank, kNonce) {
    int locals = 0;
    for (std::size_t other = 0; other < hosts_.size(); ++other) {
      if (hosts_[other] != hosts_[static_cast<std::size_t>(rank)]) continue;
      if (static_cast<int>(other) < rank) ++local_;
      locals_[static_cast<int>(other)] = locals++;
    }
    if (locals > 1)
      rings_ = std::make_unique<link::Rings>(
          link::RingShape{locals, static_cast<std::size_t>(options.slot_bytes), options.slots}, local_);
  }

  // Connects this rank to the engine of rank `other`.
  void connect(int other, farandole_engine* engine) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    Link& link = links_[other];
    link.socket = os::Descriptor(ends[0]);
    link.local = is_local(other);
    farandole_add_link(engine, rank_, ends[1], link.local ? 0 : 1);
  }

  // What an engine sends first: who it is, and its shared memory.
  void send_hello(int other) {
    if (!is_local(other)) return;
    std::vector<os::Descriptor> files;
    files.push_back(status_page_.memory().file().duplicate());
    files.push_back(wakeup_sender());
    send_control(other, Control::hello, control::encode(control::Hello{generation_, rank_, kNonce}), std::move(files));
    std::vector<os::Descriptor> file;
    file.push_back(rings_->memory().file().duplicate());
    send_control(other, Control::segment, control::encode(control::Segment{0}), std::move(file));
  }

  void send_control(int other, Control type, const Bytes& payload, std::vector<os::Descriptor> files = {}) {
    wire::Frame frame;
    frame.type = wire::FrameType::control;
    frame.tag.step = static_cast<std::uint32_t>(type);
    frame.total = files.size();
    send(other, frame, payload, std::move(files));
  }

  // Two frames in one write, so that a reader gets both at once.
  void send_both(int other, Control first, const Bytes& one, Control second, const Bytes& two) {
    wire::Frame frame;
    frame.type = wire::FrameType::control;
    frame.tag.step = static_cast<std::uint32_t>(first);
    Bytes bytes = framed(other, frame, one);
    frame.tag.step = static_cast<std::uint32_t>(second);
    const Bytes more = framed(other, frame, two);
    bytes.insert(bytes.end(), more.begin(), more.end());
    write(other, std::move(bytes), {});
  }

  // With a valid header and checksums, whatever the rest is. False when the engine does not read any more.
  bool send(int other, const wire::Frame& frame, const Bytes& payload, std::vector<os::Descriptor> files = {}) {
    return write(other, framed(other, frame, payload), std::move(files));
  }

  bool write(int other, Bytes bytes, std::vector<os::Descriptor> files) {
    Link& link = links_.at(other);
    for (std::size_t sent = 0; sent < bytes.size();) {
      const iovec part{bytes.data() + sent, bytes.size() - sent};
      const os::IoResult moved = os::send_some(link.socket.get(), {&part, 1}, files);
      pollfd room{link.socket.get(), POLLOUT, 0};
      if (moved.status == os::IoResult::Status::would_block && poll(&room, 1, kTimeoutMs) > 0) continue;
      if (moved.status != os::IoResult::Status::bytes) return false;
      sent += moved.bytes;
      files.clear();
    }
    return true;
  }

  // Waits for the next control frame of this type. False when the link ends first.
  bool wait_for(int other, Control type, Bytes& payload, int timeout_ms = kTimeoutMs) {
    Link& link = links_.at(other);
    for (;;) {
      while (!link.received.empty()) {
        Received message = std::move(link.received.front());
        link.received.pop_front();
        if (message.frame.type != wire::FrameType::control ||
            message.frame.tag.step != static_cast<std::uint32_t>(type))
          continue;
        payload = std::move(message.payload);
        return true;
      }
      if (!receive_some(other, timeout_ms)) return false;
    }
  }

  // Waits until the engine's rings have arrived, so that this rank can take part in what goes through them.
  bool wait_for_rings(int other) {
    Link& link = links_.at(other);
    if (!link.local) return true;
    while (!rings_->attached(locals_.at(other)))
      if (!receive_some(other)) return false;
    return true;
  }

  void close_links() { links_.clear(); }
  bool is_local(int other) const {
    return hosts_[static_cast<std::size_t>(other)] == hosts_[static_cast<std::size_t>(rank_)];
  }
  link::Rings* rings() { return rings_.get(); }
  const link::StatusPage& status_page() const { return status_page_; }
  os::Descriptor wakeup_sender() { return wakeups_.emplace_back().take_sender(); }  // of a new wake-up of this rank
  std::uint32_t generation() const { return generation_; }
  static constexpr std::uint64_t kNonce = 0x1234567;
  static constexpr int kTimeoutMs = 10'000;  // for an engine to read or to send something

 private:
  struct Link {
    os::Descriptor socket;
    bool local = true;
    Bytes bytes;  // read, but not a whole frame yet
    std::vector<os::Descriptor> files;
    std::deque<Received> received;
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

  bool receive_some(int other, int timeout_ms = kTimeoutMs) {
    Link& link = links_.at(other);
    pollfd ready{link.socket.get(), POLLIN, 0};
    if (poll(&ready, 1, timeout_ms) <= 0) return false;
    std::array<std::byte, 4096> buffer;
    const iovec part{buffer.data(), buffer.size()};
    const os::IoResult moved = os::receive_some(link.socket.get(), {&part, 1}, &link.files);
    if (moved.status != os::IoResult::Status::bytes) return false;
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
        local_peers_[other] = std::make_unique<link::LocalPeer>(std::move(files.at(0)), std::move(files.at(1)),
                                                                generation_, other, hello.nonce);
      control::Segment segment;
      if (frame.tag.step == static_cast<std::uint32_t>(Control::segment) && decode(payload, segment) &&
          segment.group == 0)
        rings_->attach(locals_.at(other), std::move(files.at(0)), local_peers_.at(other).get());
    }
    link.received.push_back({frame, std::move(payload)});
  }

  const int rank_;
  const std::vector<int> hosts_;
  const std::uint32_t generation_;
  int local_ = 0;
  std::map<int, int> locals_;  // rank -> local index
  link::StatusPage status_page_;
  std::deque<os::PeerWakeup> wakeups_;
  std::map<int, std::unique_ptr<link::LocalPeer>> local_peers_;
  std::unique_ptr<link::Rings> rings_;
  std::map<int, Link> links_;
};

}  // namespace fake_peer
