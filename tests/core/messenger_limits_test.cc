// A peer may send messages, announcements and grants before this rank posts its side, but only up to a limit.
// Touches link/ and sockets.
#include "check.h"
#include "pair.h"

using namespace pair;

namespace {

constexpr std::uint64_t kLimit = 1 << 20;

link::MessengerOptions options() {
  link::MessengerOptions options;
  options.max_unexpected_bytes = kLimit;
  return options;
}

void expect_lost(Pair& pair, const std::string& text) {
  pair.until([&] { return !pair.b.lost.empty(); });
  CHECK_EQUAL(pair.b.lost[0].first, 0);
  CHECK_EQUAL(pair.b.lost[0].second.code, Code::peer_lost);
  CHECK_EQUAL(pair.b.lost[0].second.message, "rank 0 " + text);
}

constexpr const char* kTooFarAhead =
    "is too far ahead: its messages that wait for receives of this rank fill more than 2 GiB";

}  // namespace

TEST(row_40_too_many_small_messages) {
  for (bool same_tag : {true, false}) {
    Pair pair(StreamKind::local, options());
    auto out = pattern(10'000);
    std::vector<char> in(out.size());
    std::vector<TransferPtr> sends;
    for (std::uint64_t i = 0; i < 90; ++i)
      sends.push_back(pair.a.messenger.send(1, {1, same_tag ? 0 : i, 0}, all(out)));
    pair.run_until_idle();
    CHECK(pair.b.lost.empty());
    for (std::uint64_t i = 0; i < 90; ++i) {  // all have arrived; the received ones no longer count
      CHECK(pair.b.messenger.receive(0, {1, same_tag ? 0 : i, 0}, all(in))->done());
      CHECK(in == out);
    }
    for (std::uint64_t i = 0; i < 110; ++i)
      sends.push_back(pair.a.messenger.send(1, {1, same_tag ? 0 : i, 0}, all(out)));
    expect_lost(pair, kTooFarAhead);
  }
}

TEST(row_40_too_many_grants_and_announcements) {
  for (bool grants : {true, false}) {
    Pair pair(StreamKind::local, options());
    auto large = pattern(kLarge);
    std::vector<TransferPtr> transfers;
    for (std::uint64_t i = 0; i <= kLimit / 512; ++i)
      transfers.push_back(grants ? pair.a.messenger.receive(1, {1, i, 0}, all(large))
                                 : pair.a.messenger.send(1, {1, i, 0}, all(large)));
    expect_lost(pair, kTooFarAhead);
  }
}

TEST(row_40_received_messages_no_longer_count) {
  Pair pair(StreamKind::local, options());
  auto small = pattern(5000), large = pattern(kLarge), other = pattern(100);
  std::vector<char> small_in(small.size()), large_in(large.size());
  for (std::uint64_t i = 0; i < 240; ++i) {
    auto unexpected = pair.a.messenger.send(1, {1, i, 0}, all(small));
    auto announced = pair.a.messenger.send(1, {1, i, 1}, all(large));
    auto granted = pair.a.messenger.receive(1, {1, i, 2}, all(large_in));
    auto dropped = pair.a.messenger.receive(1, {1, i, 3}, all(small_in));
    auto wrong_size = pair.a.messenger.send(1, {1, i, 4}, all(other));
    pair.run_until_idle();
    dropped.reset();
    auto small_receive = pair.b.messenger.receive(0, {1, i, 0}, all(small_in));
    auto large_receive = pair.b.messenger.receive(0, {1, i, 1}, all(large_in));
    auto large_send = pair.b.messenger.send(0, {1, i, 2}, all(large));
    auto refused = pair.b.messenger.receive(0, {1, i, 4}, all(small_in));
    pair.until([&] {
      return small_receive->done() && large_receive->done() && large_send->done() && granted->done() &&
             announced->done();
    });
    CHECK_EQUAL(code_of(refused), Code::precondition);
  }
  CHECK(pair.a.lost.empty() && pair.b.lost.empty());
}

// A small message ends the large receive, while the grant for this receive is on its way to the sender. The sender may
// still use that grant.
TEST(row_40_a_large_message_may_use_a_grant_before_its_cancellation_arrives) {
  Pair pair;
  auto small = pattern(10), large = pattern(kLarge);
  std::vector<char> first(large.size()), second(large.size());
  auto refused = pair.b.messenger.receive(0, {1, 0, 0}, all(first));
  pair.b.messenger.flush();
  auto small_send = pair.a.messenger.send(1, {1, 0, 0}, all(small));
  pair.a.step();  // rank 0 sends the small message and reads the grant
  auto large_send = pair.a.messenger.send(1, {1, 0, 0}, all(large));
  pair.until([&] { return large_send->done(); });
  pair.run_until_idle();
  CHECK_EQUAL(code_of(refused), Code::precondition);
  CHECK(pair.b.lost.empty());
  CHECK(pair.b.messenger.receive(0, {1, 0, 0}, all(second))->done());
  CHECK(second == large);
}
