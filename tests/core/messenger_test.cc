// Tests of the messenger: matching, grants, order, cancelling, leaving, lost peers.
// Touches link/ and sockets.
#include "link/messenger.h"

#include <fcntl.h>

#include <atomic>
#include <numeric>
#include <random>

#include "os/clock.h"
#include "pair.h"

using namespace farandole;
using namespace pair;

TEST(messages_of_all_sizes_on_both_kinds_of_stream) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    for (std::size_t bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{65536}, std::size_t{65537}, kLarge}) {
      for (bool receive_first : {true, false}) {
        Pair pair(kind);
        auto out = pattern(bytes), back = pattern(bytes, 2);
        std::vector<char> in(bytes), in_back(bytes);
        TransferPtr receive, receive_back;
        if (receive_first) receive = pair.b.messenger.receive(0, {1, 2, 3}, crumbs(in, 5000));
        auto send = pair.a.messenger.send(1, {1, 2, 3}, crumbs(out, 700));
        auto send_back = pair.b.messenger.send(0, {1, 2, 3}, all(back));
        if (!receive_first) pair.run_until_idle();
        if (!receive_first) receive = pair.b.messenger.receive(0, {1, 2, 3}, crumbs(in, 5000));
        receive_back = pair.a.messenger.receive(1, {1, 2, 3}, all(in_back));
        pair.until([&] { return send->done() && receive->done() && send_back->done() && receive_back->done(); });
        CHECK(in == out);
        CHECK(in_back == back);
        CHECK_EQUAL(pair.a.messenger.traffic().sent, bytes);
        CHECK_EQUAL(pair.a.messenger.traffic().received, bytes);
      }
    }
  }
}

TEST(a_large_message_waits_for_its_receive) {
  Pair pair;
  auto out = pattern(kLarge);
  std::vector<char> in(kLarge);
  auto send = pair.a.messenger.send(1, {0, 1, 0}, all(out));
  pair.run_until_idle();
  CHECK(!send->done());
  CHECK_EQUAL(pair.a.messenger.traffic().sent, 0u);
  auto receive = pair.b.messenger.receive(0, {0, 1, 0}, all(in));
  pair.until([&] { return send->done() && receive->done(); });
  CHECK(in == out);
}

TEST(no_message_waits_behind_a_larger_one) {
  Pair pair;
  auto large = pattern(64 << 20), small = pattern(5000);
  std::vector<char> large_in(large.size()), small_in(small.size());
  auto first = pair.b.messenger.receive(0, {0, 1, 0}, all(large_in));
  auto second = pair.b.messenger.receive(0, {0, 2, 0}, all(small_in));
  auto send_large = pair.a.messenger.send(1, {0, 1, 0}, all(large));
  auto send_small = pair.a.messenger.send(1, {0, 2, 0}, all(small));
  pair.a.send_control(1, 9, "urgent");
  pair.until([&] { return second->done() && !pair.b.controls.empty(); });
  CHECK(!first->done());
  CHECK(small_in == small);
}

TEST(messages_of_one_tag_keep_their_order) {
  Pair pair;
  const std::vector<std::size_t> sizes{10, 200'000, 0, 70'000, 30, 300'000};
  std::vector<std::vector<char>> out, in;
  std::vector<TransferPtr> transfers;
  for (std::size_t size : sizes) out.push_back(pattern(size, static_cast<unsigned>(size + 1)));
  for (std::size_t size : sizes) in.emplace_back(size);
  for (auto& data : out) transfers.push_back(pair.a.messenger.send(1, {4, 4, 4}, all(data)));
  pair.run_until_idle();
  for (auto& data : in) {
    transfers.push_back(pair.b.messenger.receive(0, {4, 4, 4}, all(data)));
    pair.run_until_idle();
  }
  for (const auto& transfer : transfers) CHECK(transfer->done());
  CHECK(in == out);
}

TEST(different_sizes_fail_on_the_sides_that_know_both) {
  struct Case {
    std::size_t sent, expected;
    bool receive_first;
  };
  for (const Case& now : std::vector<Case>{{10, 20, true},
                                           {10, 20, false},
                                           {10, 100'000, true},
                                           {10, 100'000, false},
                                           {100'000, 10, true},
                                           {100'000, 10, false},
                                           {100'000, 200'000, true},
                                           {100'000, 200'000, false},
                                           {0, 5, true},
                                           {5, 0, false}}) {
    Pair pair;
    auto out = pattern(now.sent);
    std::vector<char> in(now.expected);
    TransferPtr receive;
    if (now.receive_first) receive = pair.b.messenger.receive(0, {1, 1, 1}, all(in));
    pair.run_until_idle();
    auto send = pair.a.messenger.send(1, {1, 1, 1}, all(out));
    pair.run_until_idle();
    if (!now.receive_first) receive = pair.b.messenger.receive(0, {1, 1, 1}, all(in));
    pair.run_until_idle();
    CHECK_EQUAL(text_of(receive), "receive expected " + std::to_string(now.expected) +
                                      " bytes from rank 0, but the message has " + std::to_string(now.sent));
    CHECK_EQUAL(code_of(receive), Code::precondition);
    CHECK_EQUAL(code_of(send), now.sent > 65536 ? Code::precondition : Code::ok);
    // The link still works.
    auto again = pattern(80'000);
    std::vector<char> again_in(80'000);
    auto next_receive = pair.b.messenger.receive(0, {1, 2, 1}, all(again_in));
    auto next = pair.a.messenger.send(1, {1, 2, 1}, all(again));
    pair.until([&] { return next->done() && next_receive->done(); });
    CHECK(again == again_in);
  }
}

// Sends and receives of one tag, posted in any order: the n-th send matches the n-th receive, also after pairs of
// different sizes, and nothing stays behind that a later message could match.
TEST(many_messages_of_one_tag_in_any_order_of_posting) {
  const std::vector<std::size_t> sizes{0, 10, 65'536, 65'537, 100'000};
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t below) { return random() % below; };
    Pair pair;
    const std::size_t count = 1 + draw(12), wrong = draw(3);
    std::vector<std::vector<char>> out, in;
    std::vector<TransferPtr> sends, receives;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t size = sizes[draw(sizes.size())];
      out.push_back(pattern(size, static_cast<unsigned>(i + 1)));
      in.emplace_back(draw(6) < wrong ? sizes[draw(sizes.size())] : size);
    }
    while (sends.size() + receives.size() < 2 * count) {
      const bool send = receives.size() == count || (sends.size() < count && draw(2) == 0);
      if (send) {
        sends.push_back(pair.a.messenger.send(1, {4, 4, 4}, all(out[sends.size()])));
      } else {
        receives.push_back(pair.b.messenger.receive(0, {4, 4, 4}, all(in[receives.size()])));
      }
      for (std::size_t steps = draw(4); steps > 0; --steps) draw(2) == 0 ? pair.a.step() : pair.b.step();
    }
    pair.run_until_idle();
    for (std::size_t i = 0; i < count; ++i) {
      const bool same = in[i].size() == out[i].size();
      CHECK_EQUAL(code_of(receives[i]), same ? Code::ok : Code::precondition);
      if (same) CHECK(receives[i]->done() && sends[i]->done() && in[i] == out[i]);
      if (!same && out[i].size() <= 65'536) CHECK(sends[i]->done());
    }
    auto last = pattern(70'000);
    std::vector<char> last_in(last.size());
    auto send = pair.a.messenger.send(1, {4, 4, 4}, all(last));
    pair.run_until_idle();
    CHECK(!send->done());  // no grant is left
    auto receive = pair.b.messenger.receive(0, {4, 4, 4}, all(last_in));
    pair.run_until_idle();
    CHECK(send->done() && receive->done() && last == last_in);
  }
}

TEST(control_frames_carry_descriptors_in_order) {
  Pair pair;
  for (int i = 0; i < 20; ++i) {
    std::vector<os::Descriptor> descriptors;
    for (int k = 0; k < i % 4; ++k) {
      int ends[2];
      CHECK(pipe(ends) == 0);
      const char name[2] = {static_cast<char>('a' + i), static_cast<char>('0' + k)};
      raw_write(ends[1], name, 2);
      close(ends[1]);
      descriptors.emplace_back(ends[0]);
    }
    pair.a.send_control(1, static_cast<std::uint32_t>(i), std::string(static_cast<std::size_t>(i * 997), 'x'),
                        std::move(descriptors));
  }
  pair.until([&] { return pair.b.controls.size() == 20; });
  for (int i = 0; i < 20; ++i) {
    const Control& control = pair.b.controls[static_cast<std::size_t>(i)];
    CHECK_EQUAL(control.type, static_cast<std::uint32_t>(i));
    CHECK_EQUAL(control.payload.size(), static_cast<std::size_t>(i * 997));
    CHECK_EQUAL(control.descriptors.size(), static_cast<std::size_t>(i % 4));
    for (int k = 0; k < i % 4; ++k) {
      char name[2] = {};
      const int fd = control.descriptors[static_cast<std::size_t>(k)].get();
      CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
      CHECK(read(fd, name, 2) == 2);
      CHECK(name[0] == 'a' + i && name[1] == '0' + k);
    }
  }
}

TEST(a_large_control_frame_arrives) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    Pair pair(kind);
    const std::string text(9'000'001, 'q');
    pair.a.send_control(1, 5, text);
    pair.a.send_control(0, 6, "to myself");
    pair.until([&] { return pair.b.controls.size() == 1 && pair.a.controls.size() == 1; });
    CHECK(pair.b.controls[0].payload == text);
    CHECK_EQUAL(pair.a.controls[0].payload, "to myself");
  }
}

TEST(messages_to_oneself) {
  Side side(0, 1);
  auto small = pattern(100), large = pattern(kLarge);
  std::vector<char> small_in(100), large_in(kLarge), wrong(5);
  auto send = side.messenger.send(0, {0, 0, 0}, all(small));
  CHECK(send->done());  // from a copy
  CHECK(side.messenger.receive(0, {0, 0, 0}, all(small_in))->done());
  CHECK(small_in == small);
  auto send_large = side.messenger.send(0, {0, 0, 1}, all(large));
  CHECK(!send_large->done());
  auto receive = side.messenger.receive(0, {0, 0, 1}, crumbs(large_in, 9999));
  CHECK(receive->done() && send_large->done());
  CHECK(large_in == large);
  auto early = side.messenger.receive(0, {0, 0, 2}, all(wrong));
  auto mismatch = side.messenger.send(0, {0, 0, 2}, all(small));
  CHECK_EQUAL(code_of(early), Code::precondition);
  CHECK_EQUAL(code_of(mismatch), Code::precondition);
}

TEST(transfers_wait_for_their_link) {
  Pair pair;
  Side c(0, 3), d(2, 3);
  std::vector<int> wanted;
  c.messenger.request_link = [&](int peer) { wanted.push_back(peer); };
  auto out = pattern(kLarge), small = pattern(9);
  std::vector<char> in(kLarge), small_in(9);
  auto send = c.messenger.send(2, {0, 0, 0}, all(out));
  auto receive_small = c.messenger.receive(2, {0, 0, 1}, all(small_in));
  c.send_control(2, 1, "hello");
  CHECK(wanted == std::vector<int>{2});
  CHECK(!c.messenger.has(2) && c.messenger.has(0));
  auto receive = d.messenger.receive(0, {0, 0, 0}, all(in));
  auto send_small = d.messenger.send(0, {0, 0, 1}, all(small));
  c.step();
  auto [one, two] = connected(StreamKind::local);
  c.messenger.add(2, std::move(one), StreamKind::local);
  d.messenger.add(0, std::move(two), StreamKind::local);
  CHECK(c.messenger.has(2));
  CHECK_EQUAL(c.messenger.local_pid(2), getpid());
  while (!(send->done() && receive->done() && receive_small->done() && !d.controls.empty())) c.step(), d.step();
  CHECK(in == out && small_in == small);
  auto [three, four] = connected(StreamKind::local);
  CHECK_THROWS(c.messenger.add(2, std::move(three), StreamKind::local), Failure);
  CHECK_THROWS(c.messenger.send(3, {}, {}), Failure);
}

TEST(a_dropped_receive_leaves_its_memory_alone) {
  Pair pair;
  auto out = pattern(8 << 20);
  auto in = std::make_unique<std::vector<char>>(out.size());
  auto receive = pair.b.messenger.receive(0, {0, 1, 0}, all(*in));
  auto send = pair.a.messenger.send(1, {0, 1, 0}, all(out));
  while (pair.b.messenger.traffic().received < (1 << 20)) pair.a.step(), pair.b.step();
  CHECK(!receive->done());
  receive.reset();
  in.reset();  // the address sanitizer would see a later write
  pair.until([&] { return send->done(); });
  pair.run_until_idle();
  pair.a.send_control(1, 1, "still here");
  pair.run_until_idle();
  CHECK_EQUAL(pair.b.controls.size(), 1u);
  CHECK_EQUAL(pair.b.messenger.traffic().received, out.size());
}

TEST(a_dropped_send_does_not_break_the_link) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    Pair pair(kind);
    auto out = std::make_unique<std::vector<char>>(pattern(64 << 20));
    std::vector<char> in(out->size());
    auto receive = pair.b.messenger.receive(0, {0, 1, 0}, all(in));
    auto send = pair.a.messenger.send(1, {0, 1, 0}, all(*out));
    pair.b.step();  // grants
    for (int i = 0; i < 5; ++i) pair.a.step();
    CHECK(!send->done());
    send.reset();
    out.reset();
    pair.a.send_control(1, 1, "still here");
    pair.run_until_idle();
    CHECK_EQUAL(pair.b.controls.size(), 1u);
    CHECK(pair.b.lost.empty());
    CHECK(!receive->done());
    std::vector<char> again(10);
    CHECK_EQUAL(code_of(pair.a.messenger.send(1, {0, 1, 0}, all(again))), Code::aborted);
    auto ungranted = pair.a.messenger.send(1, {0, 2, 0}, all(in));
    pair.run_until_idle();
    ungranted.reset();
    pair.run_until_idle();
  }
}

TEST(fail_all_ends_transfers_but_not_control) {
  Pair pair;
  auto out = pattern(64 << 20), small = pattern(10);
  std::vector<char> in(out.size()), small_in(10);
  auto receive = pair.b.messenger.receive(0, {0, 1, 0}, all(in));
  auto other = pair.b.messenger.receive(0, {0, 2, 0}, all(small_in));
  auto send = pair.a.messenger.send(1, {0, 1, 0}, all(out));
  for (int i = 0; i < 5; ++i) pair.b.step(), pair.a.step();
  pair.a.messenger.fail_all({Code::revoked, "enough", -1});
  pair.b.messenger.fail_all({Code::revoked, "enough", -1});
  CHECK_EQUAL(code_of(send), Code::revoked);
  CHECK_EQUAL(code_of(receive), Code::revoked);
  CHECK_EQUAL(code_of(other), Code::revoked);
  pair.a.send_control(1, 1, "bye");
  pair.run_until_idle();
  CHECK_EQUAL(pair.b.controls.size(), 1u);
}

TEST(a_peer_that_leaves_is_reported) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    auto pair = std::make_unique<Pair>(kind);
    auto out = pattern(1000), large = pattern(kLarge);
    std::vector<char> in(1000), nothing(10);
    auto send = pair->a.messenger.send(1, {0, 1, 0}, all(out));
    auto never = pair->b.messenger.receive(0, {0, 2, 0}, all(nothing));
    auto unread = pair->b.messenger.send(0, {0, 3, 0}, all(large));
    pair->a.send_control(1, 1, "last words");
    pair->a.messenger.leave();
    CHECK(!pair->a.messenger.flushed());
    while (!pair->a.messenger.flushed()) pair->a.messenger.flush();
    pair->a.send_control(1, 2, "not after leave");
    Side& b = pair->b;
    pair->until([&] { return !b.left.empty(); });
    CHECK_EQUAL(b.controls.size(), 1u);
    CHECK_EQUAL(code_of(never), Code::shut_down);
    CHECK_EQUAL(text_of(never), "rank 0 has left");
    CHECK(unread->done());
    auto early = b.messenger.receive(0, {0, 1, 0}, all(in));  // had arrived before
    CHECK(early->done() && in == out);
    CHECK_EQUAL(code_of(b.messenger.receive(0, {0, 9, 0}, all(in))), Code::shut_down);
    CHECK(b.messenger.send(0, {0, 9, 0}, all(in))->done());
    b.messenger.peer_died(0, {Code::peer_lost, "its process died", 0});
    b.messenger.leave();
    CHECK(b.messenger.flushed());
    pair->run_until_idle();
    CHECK(b.left == std::vector<int>{0});
    CHECK(b.lost.empty());
  }
}

TEST(both_leave_and_close_at_once) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    Side b(1, 2);
    {
      Side a(0, 2);
      auto [one, two] = connected(kind);
      a.messenger.add(1, std::move(one), kind);
      b.messenger.add(0, std::move(two), kind);
      b.send_control(0, 1, std::string(100'000, 'x'));  // unread: a plain close() would reset the connection
      b.step();
      a.messenger.leave();
      while (!a.messenger.flushed()) a.messenger.flush();
    }
    b.messenger.leave();
    for (int i = 0; i < 1000 && b.left.empty(); ++i) b.step(1);
    CHECK(b.left == std::vector<int>{0} && b.lost.empty());
  }
}

TEST(the_death_of_a_peer_is_reported) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    Side b(1, 2);
    auto large = pattern(kLarge), early = pattern(10);
    std::vector<char> in(10);
    TransferPtr send, receive;
    {
      Side a(0, 2);
      auto [one, two] = connected(kind);
      a.messenger.add(1, std::move(one), kind);
      b.messenger.add(0, std::move(two), kind);
      send = b.messenger.send(0, {0, 1, 0}, all(large));
      receive = b.messenger.receive(0, {0, 2, 0}, all(in));
      auto gift = a.messenger.send(1, {0, 3, 0}, all(early));
      a.step();
    }
    std::string called;
    b.hook = [&] {  // callbacks may call the messenger again
      called += 'x';
      b.messenger.fail_all({Code::revoked, "x", -1});
      b.send_control(0, 1, "nobody hears");
      b.messenger.flush();
    };
    for (int i = 0; i < 1000 && b.lost.empty(); ++i) b.step(1);
    CHECK_EQUAL(b.lost.size(), 1u);
    CHECK_EQUAL(b.lost[0].second.code, Code::peer_lost);
    CHECK_EQUAL(b.lost[0].second.rank, 0);
    CHECK_EQUAL(code_of(send), Code::peer_lost);
    CHECK_EQUAL(code_of(receive), Code::peer_lost);
    CHECK_EQUAL(code_of(b.messenger.send(0, {0, 1, 0}, all(large))), Code::peer_lost);
    CHECK(b.messenger.receive(0, {0, 3, 0}, all(in))->done());
    b.messenger.peer_died(0, {Code::peer_lost, "again", 0});
    CHECK_EQUAL(b.lost.size(), 1u);
  }
}

TEST(peer_died_reads_what_is_left_and_keeps_its_reason) {
  Pair pair;
  pair.a.send_control(1, 1, "one");
  pair.a.send_control(1, 2, "two");
  pair.a.messenger.flush();
  pair.b.hook = [&] { pair.b.messenger.peer_died(0, {Code::peer_lost, "from within", 0}); };
  pair.b.messenger.peer_died(0, {Code::peer_lost, "its process died", -1});
  CHECK_EQUAL(pair.b.controls.size(), 2u);
  CHECK_EQUAL(pair.b.lost.size(), 1u);
  CHECK_EQUAL(pair.b.lost[0].second.rank, 0);
}

// Two threads, each with its own messenger: many messages of many sizes, posted in different orders.
TEST(many_messages_between_two_threads) {
  for (StreamKind kind : {StreamKind::local, StreamKind::tcp}) {
    auto [one, two] = connected(kind);
    constexpr int kMessages = 300;
    std::vector<std::size_t> sizes;
    std::mt19937 random(5);
    for (int i = 0; i < kMessages; ++i) sizes.push_back(random() % (i % 10 == 0 ? 700'000 : i % 3 == 0 ? 90'000 : 500));
    const auto run = [&](int rank, os::Descriptor socket, bool& right) {
      Side side(rank, 2);
      side.messenger.add(1 - rank, std::move(socket), kind);
      std::vector<std::vector<char>> out, in;
      std::vector<TransferPtr> transfers;
      for (int i = 0; i < kMessages; ++i) {
        out.push_back(pattern(sizes[static_cast<std::size_t>(i)], static_cast<unsigned>(i * 2 + rank)));
        in.emplace_back(sizes[static_cast<std::size_t>(i)]);
      }
      std::mt19937 order(static_cast<unsigned>(rank));
      std::vector<std::size_t> turns(kMessages), later;
      std::iota(turns.begin(), turns.end(), 0);
      std::shuffle(turns.begin(), turns.end(), order);
      for (std::size_t k : turns) {
        if (order() % 2 == 0) {
          transfers.push_back(side.messenger.receive(1 - rank, {1, k, 0}, crumbs(in[k], 3000)));
        } else {
          later.push_back(k);
        }
        transfers.push_back(side.messenger.send(1 - rank, {1, k, 0}, crumbs(out[k], 20'000)));
        side.step();
      }
      for (std::size_t k : later) transfers.push_back(side.messenger.receive(1 - rank, {1, k, 0}, all(in[k])));
      const auto finished = [&] {
        for (const auto& transfer : transfers) {
          if (!transfer->done()) return false;
        }
        return true;
      };
      while (!finished()) side.step(1);
      right = true;
      for (int i = 0; i < kMessages; ++i) {
        const auto k = static_cast<std::size_t>(i);
        right = right && in[k] == pattern(sizes[k], static_cast<unsigned>(i * 2 + 1 - rank));
      }
      side.messenger.leave();
      while (!side.messenger.flushed() || side.left.empty()) side.step(1);
    };
    bool right_a = false, right_b = false;
    std::thread other = os::start_thread("other", [&, socket = &two] { run(1, std::move(*socket), right_b); });
    run(0, std::move(one), right_a);
    other.join();
    CHECK(right_a && right_b);
  }
}
