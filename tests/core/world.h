// A world of members that are threads of this process: links are socket pairs, rings are attached by duplicated files.
// Touches link/, group/, collective/ and os/.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/collective.h"
#include "os/clock.h"

namespace world {

using namespace farandole;

// These tests lose no peer: whatever the messenger reports besides data is a failure.
struct FailOnLoss : link::Listener {
  void on_control(int, std::uint32_t, std::span<const std::byte>, std::vector<os::Descriptor>) override {}
  void on_lost(int peer, const Error& why) override { lost = "lost " + std::to_string(peer) + ": " + why.message; }
  void on_left(int) override {}
  std::string lost;
};

struct Options {
  std::size_t slot_bytes = 4096;
  int slots = 2;
  std::size_t chunk_bytes = 4096;
  std::size_t eager_bytes = 1024;
  collective::Algorithm algorithm = collective::Algorithm::automatic;
};

struct Member {
  int rank = 0;
  Topology topology;
  os::Poller poller;
  FailOnLoss listener;
  std::unique_ptr<link::Messenger> messenger;
  std::unique_ptr<link::Rings> rings;
  std::mt19937 shared;  // draws the same numbers on all members: sizes, roots
  std::mt19937 own;     // draws where this member's memory is divided
  std::uint64_t sequence = 0;
  Options options;

  collective::Context context(Kind kind) {
    collective::Context result;
    result.topology = &topology;
    result.messenger = messenger.get();
    result.rings = rings.get();
    result.group = 3;
    result.sequence = ++sequence;
    result.algorithm = options.algorithm;
    result.chunk_bytes = options.chunk_bytes;
    result.kind = kind;
    return result;
  }

  // Drives one collective to its end.
  void finish(Task task) {
    Running running(std::move(task));
    auto condition = [&](bool& moved) { return running.advance(moved); };
    drive(condition);
  }
  // Drives a collective (if any) for some turns, then destroys it.
  void abandon(Task task, int turns) {
    std::unique_ptr<Running> running;
    if (task) running = std::make_unique<Running>(std::move(task));
    auto condition = [&](bool& moved) { return (running && running->advance(moved)) || turns-- == 0; };
    drive(condition);
  }
  void flush() {
    auto condition = [&](bool&) { return messenger->flushed(); };
    drive(condition);
  }

 private:
  template <class Condition>
  void drive(Condition& condition) {
    std::int64_t deadline = os::now_ns() + 60'000'000'000;
    std::vector<os::Event> events;
    while (true) {
      bool moved = false;
      if (condition(moved)) return;
      moved = messenger->flush() || moved;
      for (const os::Event& event : poller.wait(0, events)) {
        messenger->ready(event);
        moved = true;
      }
      if (!listener.lost.empty()) check::fail(__FILE__, __LINE__, listener.lost);
      if (!moved) std::this_thread::yield();
      if (os::now_ns() > deadline) check::fail(__FILE__, __LINE__, "it hangs");
    }
  }
};

class World {
 public:
  // hosts: the host number of each rank.
  World(const std::vector<int>& hosts, Options options) {
    int size = static_cast<int>(hosts.size());
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) ranks.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      auto member = std::make_unique<Member>();
      member->rank = rank;
      member->options = options;
      member->topology = Topology::make(ranks, hosts, rank);
      member->shared.seed(static_cast<unsigned>(size));
      member->own.seed(static_cast<unsigned>(1000 + rank));
      link::MessengerOptions messenger;
      messenger.generation = 1;
      messenger.eager_bytes = options.eager_bytes;
      messenger.frame_bytes = 3000;
      member->messenger = std::make_unique<link::Messenger>(rank, size, member->poller, member->listener, messenger);
      int local = static_cast<int>(member->topology.my_host().size());
      if (local > 1) {
        link::RingShape shape{local, options.slot_bytes, options.slots};
        member->rings = std::make_unique<link::Rings>(shape, member->topology.my_local());
      }
      members_.push_back(std::move(member));
    }
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b < size; ++b) {
        if (a < b) connect(a, b, hosts);
        if (a != b && hosts[at(a)] == hosts[at(b)]) {
          const link::Rings& theirs = *members_[at(b)]->rings;
          members_[at(a)]->rings->attach(theirs.me(), theirs.memory().file().duplicate(), nullptr);
        }
      }
    }
  }

  // Every member runs the body in its own thread; the first failure is thrown here.
  void run(const std::function<void(Member&)>& body) {
    std::vector<std::string> failures(members_.size());
    std::vector<std::thread> threads;
    for (std::size_t m = 0; m < members_.size(); ++m) {
      threads.emplace_back([&, m] {
        try {
          body(*members_[m]);
          members_[m]->flush();
        } catch (const std::exception& error) {
          failures[m] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t m = 0; m < failures.size(); ++m) {
      if (!failures[m].empty()) throw std::runtime_error("member " + std::to_string(m) + ": " + failures[m]);
    }
  }
  Member& operator[](int rank) { return *members_[at(rank)]; }
  int size() const { return static_cast<int>(members_.size()); }

 private:
  static std::size_t at(int value) { return static_cast<std::size_t>(value); }
  void connect(int a, int b, const std::vector<int>& hosts) {
    int ends[2];
    CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    auto kind = hosts[at(a)] == hosts[at(b)] ? link::StreamKind::local : link::StreamKind::tcp;
    members_[at(a)]->messenger->add(b, os::Descriptor(ends[0]), kind);
    members_[at(b)]->messenger->add(a, os::Descriptor(ends[1]), kind);
  }

  std::vector<std::unique_ptr<Member>> members_;
};

// Memory in several pieces with gaps between them. The gaps must not change.
class Buffer {
 public:
  static constexpr std::byte kGap{0x5a};

  Buffer(std::size_t bytes, std::size_t element, std::mt19937& random) {
    std::vector<std::size_t> cuts;
    std::size_t elements = bytes / element;
    int pieces = elements < 2 ? 1 : static_cast<int>(random() % 4) + 1;
    std::size_t left = elements;
    for (int i = 0; i < pieces; ++i) {
      std::size_t take = i + 1 == pieces ? left : random() % (left + 1);
      cuts.push_back(take * element);
      left -= take;
    }
    memory_.resize(bytes + 64 * cuts.size() + 64, kGap);
    std::size_t offset = 0;
    for (std::size_t cut : cuts) {
      offset += 64;
      pieces_.add(memory_.data() + offset, cut);
      offset += cut;
      offset = (offset + 7) / 8 * 8;
    }
    CHECK(offset <= memory_.size());
    bytes_ = bytes;
  }
  const Pieces& pieces() const { return pieces_; }
  void fill(const std::vector<std::byte>& from) { pieces_.copy_in(0, from.data(), from.size()); }
  std::vector<std::byte> contents() const {
    std::vector<std::byte> result(bytes_);
    pieces_.copy_out(0, result.data(), bytes_);
    return result;
  }
  bool gaps_untouched() const {
    std::vector<std::byte> copy = memory_;
    for (const Piece& piece : pieces_.list()) {
      std::fill_n(copy.begin() + (piece.data - memory_.data()), piece.bytes, kGap);
    }
    return std::all_of(copy.begin(), copy.end(), [](std::byte value) { return value == kGap; });
  }

 private:
  std::vector<std::byte> memory_;
  Pieces pieces_;
  std::size_t bytes_ = 0;
};

}  // namespace world
