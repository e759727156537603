// Two or more messengers in one process, joined by socket pairs or TCP over loopback, for tests.
// Touches link/ and sockets.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "link/messenger.h"

namespace pair {

using namespace farandole;
using link::Messenger;
using link::StreamKind;
using link::Tag;
using link::TransferPtr;

inline std::pair<os::Descriptor, os::Descriptor> connected(StreamKind kind) {
  int ends[2] = {-1, -1};
  if (kind == StreamKind::local) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    return {os::Descriptor(ends[0]), os::Descriptor(ends[1])};
  }
  os::Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener.get(), 1) == 0);
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(ends[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
  ends[1] = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
  return {os::Descriptor(ends[0]), os::Descriptor(ends[1])};
}

struct Control {
  int peer;
  std::uint32_t type;
  std::string payload;
  std::vector<os::Descriptor> descriptors;
};

// One rank.
struct Side final : link::Listener {
  Side(int rank, int size, link::MessengerOptions options = {}) : messenger(rank, size, poller, *this, options) {}

  void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                  std::vector<os::Descriptor> descriptors) override {
    controls.push_back({peer, type, std::string(reinterpret_cast<const char*>(payload.data()), payload.size()),
                        std::move(descriptors)});
    if (hook) hook();
  }
  void on_lost(int peer, const Error& why) override {
    lost.push_back({peer, why});
    if (hook) hook();
  }
  void on_left(int peer) override {
    left.push_back(peer);
    if (hook) hook();
  }

  bool step(int timeout_ms = 0) {
    bool moved = messenger.flush();
    poller.wait(moved ? 0 : timeout_ms, events);
    for (const os::Event& event : events) messenger.ready(event);
    return moved || !events.empty();
  }
  void send_control(int peer, std::uint32_t type, const std::string& text,
                    std::vector<os::Descriptor> descriptors = {}) {
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    messenger.control(peer, type, {bytes, bytes + text.size()}, std::move(descriptors));
  }

  os::Poller poller;
  std::vector<Control> controls;
  std::vector<std::pair<int, Error>> lost;
  std::vector<int> left;
  std::function<void()> hook;
  std::vector<os::Event> events;
  Messenger messenger;
};

struct Pair {
  explicit Pair(StreamKind kind = StreamKind::local, link::MessengerOptions options = {})
      : a(0, 2, options), b(1, 2, options) {
    const int streams = options.streams.empty() ? 1 : options.streams[0];
    for (int stream = 0; stream < streams; ++stream) connect(kind);
  }
  void connect(StreamKind kind) {
    auto [one, two] = connected(kind);
    a.messenger.add(1, std::move(one), kind);
    b.messenger.add(0, std::move(two), kind);
  }
  // Until nothing moves any more.
  void run_until_idle() {
    for (int idle = 0; idle < 3;) {
      const bool moved = a.step() | b.step(1);
      idle = moved ? 0 : idle + 1;
    }
  }
  void until(const std::function<bool()>& condition) {
    for (int rounds = 0; !condition(); ++rounds) {
      if (rounds > 2'000'000) check::fail(__FILE__, __LINE__, "it never came");
      if (!(a.step() | b.step())) usleep(50);  // sleep: between two looks
    }
  }
  Side a, b;
};

inline Code code_of(const TransferPtr& transfer) {
  try {
    return transfer->done() ? Code::ok : Code::in_progress;
  } catch (const Failure& failure) {
    return failure.error().code;
  }
}
inline std::string text_of(const TransferPtr& transfer) {
  try {
    (void)transfer->done();
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

inline constexpr std::size_t kLarge = 3 << 20;

inline std::vector<char> pattern(std::size_t bytes, unsigned seed = 1) {
  std::vector<char> data(bytes);
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (char& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return data;
}

inline Pieces all(std::vector<char>& data) { return Pieces(data.data(), data.size()); }

// The same memory in pieces of growing, odd sizes.
inline Pieces crumbs(std::vector<char>& data, std::size_t step) {
  Pieces pieces;
  for (std::size_t at = 0, size = 1; at < data.size(); at += size, size = size * 3 % step + 1) {
    size = std::min(size, data.size() - at);
    pieces.add(data.data() + at, size);
  }
  return pieces;
}

inline void raw_write(int fd, const void* data, std::size_t bytes) {
  CHECK(write(fd, data, bytes) == static_cast<ssize_t>(bytes));
}

}  // namespace pair

namespace farandole {
inline std::ostream& operator<<(std::ostream& out, Code code) { return out << static_cast<int>(code); }
}  // namespace farandole
