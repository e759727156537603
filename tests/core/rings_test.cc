// Rings and status pages: members that are threads pass slots to each other, and sleepers are woken exactly when
// needed. Touches link/ and os/.
#include "link/rings.h"

#include <cstring>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "link/status_page.h"
#include "os/clock.h"

using namespace farandole;
using namespace farandole::link;

namespace {

// The rings of all members of one host, attached to each other through duplicated descriptors; with local peers when
// asked for.
struct Host {
  std::vector<std::unique_ptr<Rings>> rings;
  std::vector<std::unique_ptr<StatusPage>> pages;
  std::vector<std::unique_ptr<os::PeerWakeup>> wakeups;
  std::vector<os::Descriptor> senders;
  std::vector<std::unique_ptr<LocalPeer>> local_peers;

  explicit Host(RingShape shape) {
    for (int m = 0; m < shape.members; ++m) {
      rings.push_back(std::make_unique<Rings>(shape, m));
      pages.push_back(std::make_unique<StatusPage>(7, m, 1000 + static_cast<std::uint64_t>(m)));
      wakeups.push_back(std::make_unique<os::PeerWakeup>());
      senders.push_back(wakeups.back()->take_sender());
    }
    for (int m = 0; m < shape.members; ++m) {
      for (int other = 0; other < shape.members; ++other) {
        if (other == m) continue;
        auto o = static_cast<std::size_t>(other);
        local_peers.push_back(std::make_unique<LocalPeer>(pages[o]->memory().file().duplicate(), senders[o].duplicate(),
                                                          7, other, 1000 + o));
        CHECK(!rings[static_cast<std::size_t>(m)]->complete());
        rings[static_cast<std::size_t>(m)]->attach(other, rings[o]->memory().file().duplicate(),
                                                   local_peers.back().get());
      }
      CHECK(rings[static_cast<std::size_t>(m)]->complete());
    }
    for (auto& one : rings) one->close_file();
  }
};

bool rung(const os::PeerWakeup& wakeup) {
  os::Poller poller;
  poller.add(wakeup.descriptor().get(), 1);
  std::vector<os::Event> events;
  bool any = !poller.wait(0, events).empty();
  wakeup.drain();
  return any;
}

void put(Rings& rings, int ring, std::uint64_t value) {
  std::byte* slot = nullptr;
  while ((slot = rings.claim(ring)) == nullptr) std::this_thread::yield();
  std::memcpy(slot, &value, sizeof value);
  std::memcpy(slot + rings.slot_bytes() - sizeof value, &value, sizeof value);
  rings.publish(ring, value);
}

void take(Rings& rings, int writer, bool from_everyone, std::uint64_t expected) {
  const std::byte* slot = nullptr;
  while ((slot = rings.peek(writer, from_everyone, expected)) == nullptr) std::this_thread::yield();
  std::uint64_t first = 0, last = 0;
  std::memcpy(&first, slot, sizeof first);
  std::memcpy(&last, slot + rings.slot_bytes() - sizeof last, sizeof last);
  CHECK_EQUAL(first, expected);
  CHECK_EQUAL(last, expected);
  rings.consume(writer, from_everyone);
}

}  // namespace

TEST(the_layout_of_rings_is_checked) {
  CHECK_THROWS(Rings(RingShape{1, 4096, 4}, 0), Failure);
  CHECK_THROWS(Rings(RingShape{2, 100, 4}, 0), Failure);
  CHECK_THROWS(Rings(RingShape{2, 4096, 0}, 0), Failure);
  RingShape shape{3, 4096, 2};
  CHECK_EQUAL(shape.file_bytes() % 4096, 0u);
  CHECK(shape.file_bytes() >= 3u * 2 * 4096);
  Rings rings(shape, 1);
  Rings other(RingShape{3, 4096, 3}, 0);
  CHECK_THROWS(rings.attach(1, other.memory().file().duplicate(), nullptr), Failure);
  CHECK_THROWS(rings.attach(0, other.memory().file().duplicate(), nullptr), Failure);  // another size
}

TEST(claims_end_when_the_ring_is_full) {
  Host host(RingShape{3, 4096, 2});
  Rings& writer = *host.rings[1];
  std::byte* first = writer.claim(Rings::everyone);
  CHECK(first != nullptr);
  CHECK_EQUAL(first, writer.claim(Rings::everyone));
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(first) % 4096, 0u);
  put(writer, Rings::everyone, 1);
  put(writer, Rings::everyone, 2);
  CHECK(writer.claim(Rings::everyone) == nullptr);
  CHECK(writer.claim(0) != nullptr);
  take(*host.rings[0], 1, true, 1);
  CHECK(writer.claim(Rings::everyone) == nullptr);  // the slowest reader decides
  take(*host.rings[2], 1, true, 1);
  CHECK(writer.claim(Rings::everyone) == first);
  CHECK(host.rings[0]->peek(1, false, 0) == nullptr);
  put(writer, 0, 9);
  CHECK(host.rings[2]->peek(1, false, 0) == nullptr);
  take(*host.rings[0], 1, false, 9);
}

TEST(rings_pass_all_chunks_in_order) {
  constexpr int kMembers = 4;
  constexpr std::uint64_t kRounds = 400;
  Host host(RingShape{kMembers, 4096, 3});
  std::vector<std::string> failures(kMembers);
  std::vector<std::thread> threads;
  for (int m = 0; m < kMembers; ++m) {
    threads.emplace_back([&, m] {
      try {
        Rings& rings = *host.rings[static_cast<std::size_t>(m)];
        for (std::uint64_t round = 0; round < kRounds; ++round) {
          for (int to = 0; to < kMembers; ++to) {
            if (to != m) put(rings, to, round * 100 + static_cast<std::uint64_t>(m * 10 + to));
          }
          put(rings, Rings::everyone, round * 100 + static_cast<std::uint64_t>(m));
          for (int from = 0; from < kMembers; ++from) {
            if (from == m) continue;
            take(rings, from, true, round * 100 + static_cast<std::uint64_t>(from));
            take(rings, from, false, round * 100 + static_cast<std::uint64_t>(from * 10 + m));
          }
        }
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(m)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) CHECK_EQUAL(failure, std::string());
}

TEST(sleepers_are_woken_only_when_needed) {
  Host host(RingShape{2, 4096, 2});
  put(*host.rings[0], 1, 1);
  CHECK(!rung(*host.wakeups[1]));  // awake: no system call
  host.pages[1]->announce_sleep(Sleep::waiting);
  put(*host.rings[0], 1, 2);
  CHECK(rung(*host.wakeups[1]));
  host.pages[1]->announce_awake();
  host.pages[0]->announce_sleep(Sleep::waiting);
  take(*host.rings[1], 0, false, 1);  // the ring was full: the writer may wait for this slot
  CHECK(rung(*host.wakeups[0]));
  take(*host.rings[1], 0, false, 2);  // it was not full: nobody can wait for it
  CHECK(!rung(*host.wakeups[0]));
}

// Every wait sleeps in the poller: a single lost wake-up would hang this test.
TEST(no_wakeup_is_lost) {
  Host host(RingShape{2, 4096, 2});
  auto member = [&](std::size_t m) {
    Rings& rings = *host.rings[m];
    os::Poller poller;
    poller.add(host.wakeups[m]->descriptor().get(), 1);
    std::vector<os::Event> events;
    int other = 1 - static_cast<int>(m);
    auto wait_for = [&](auto&& condition) {
      while (!condition()) {
        host.pages[m]->announce_sleep(Sleep::waiting);
        if (!condition() && poller.wait(10000, events).empty()) check::fail(__FILE__, __LINE__, "a ring was lost");
        host.wakeups[m]->drain();
        host.pages[m]->announce_awake();
      }
    };
    std::uint64_t read = 0;
    for (std::uint64_t round = 0; round < 3000; ++round) {
      wait_for([&] { return rings.claim(other) != nullptr; });
      rings.publish(other, round);
      if (m == 0 || round % 2 == 1) {  // one side reads in pairs, so that rings fill up
        for (int i = 0; i < (m == 0 ? 1 : 2); ++i) {
          wait_for([&] { return rings.peek(other, false, read) != nullptr; });
          rings.consume(other, false);
          ++read;
        }
      }
    }
  };
  std::string failure;
  std::thread second([&] {
    try {
      member(1);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  member(0);
  second.join();
  CHECK_EQUAL(failure, std::string());
}

TEST(plan_states_and_status_pages) {
  Host host(RingShape{2, 4096, 2});
  host.rings[0]->own_plan_states().own.store(42);
  CHECK_EQUAL(host.rings[1]->plan_states_of(0).own.load(), 42u);
  CHECK_EQUAL(host.rings[0]->plan_states_of(0).own.load(), 42u);
  host.pages[1]->announce_sleep(Sleep::waiting);
  host.rings[0]->notify(1);
  CHECK(rung(*host.wakeups[1]));
  host.rings[0]->notify_all();
  CHECK(rung(*host.wakeups[1]));
  CHECK_THROWS(LocalPeer(host.pages[0]->memory().file().duplicate(), host.senders[0].duplicate(), 7, 0, 1), Failure);
  CHECK_THROWS(LocalPeer(host.pages[0]->memory().file().duplicate(), host.senders[0].duplicate(), 8, 0, 1000), Failure);
}

// A group may follow a plan before the shared memory of all its members has arrived.
TEST(plan_states_of_a_missing_member_are_zero) {
  Rings rings(RingShape{3, 4096, 2}, 1);
  CHECK(!rings.attached(0) && !rings.complete());
  for (int member : {0, 2}) {
    CHECK_EQUAL(rings.plan_states_of(member).own.load(), 0u);
    CHECK_EQUAL(rings.plan_states_of(member).remote.load(), 0u);
  }
  rings.own_plan_states().own.store(42);
  CHECK_EQUAL(rings.plan_states_of(1).own.load(), 42u);
  rings.notify_all(true);
}
