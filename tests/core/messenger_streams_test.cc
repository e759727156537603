// Several streams between two ranks: messages are spread over them, and a peer leaves or is lost on all of them at
// once.
// Touches link/ and sockets.
#include <linux/tcp.h>
#include <netinet/in.h>

#include "pair.h"

namespace {

using namespace pair;

constexpr int kStreams = 3;

link::MessengerOptions several() {
  link::MessengerOptions options;
  options.streams = {kStreams, kStreams};
  return options;
}

std::uint64_t received_by(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  CHECK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0);
  return info.tcpi_bytes_received;
}

// Two sides. The test holds duplicates of b's sockets, to see on which stream bytes arrive.
struct WatchedPair {
  WatchedPair() : a(0, 2, several()), b(1, 2, several()) {
    for (int stream = 0; stream < kStreams; ++stream) {
      auto [one, two] = connected(StreamKind::tcp);
      duplicates.push_back(two.duplicate());
      a.messenger.add(1, std::move(one), StreamKind::tcp);
      b.messenger.add(0, std::move(two), StreamKind::tcp);
    }
  }
  Side a, b;
  std::vector<os::Descriptor> duplicates;  // of b's ends
};

TEST(messages_spread_over_the_streams_and_keep_their_order) {
  WatchedPair pair;
  std::vector<std::vector<char>> out, in;
  std::vector<TransferPtr> transfers;
  for (unsigned i = 0; i < 60; ++i) {
    out.push_back(pattern(i % 3 == 0 ? 200'000 + i : 10 + i, i + 1));
    in.emplace_back(out.back().size());
  }
  for (unsigned i = 0; i < 60; ++i) {
    const Tag tag{0, 7 + i / 20, i % 10};  // each tag twice
    transfers.push_back(pair.a.messenger.send(1, tag, all(out[i])));
    transfers.push_back(pair.b.messenger.receive(0, tag, all(in[i])));
  }
  auto over = [&] { return std::all_of(transfers.begin(), transfers.end(), [](auto& one) { return one->done(); }); };
  for (int i = 0; i < 1'000'000 && !over(); ++i) pair.a.step(), pair.b.step();
  CHECK(over());
  CHECK(in == out);
  for (const os::Descriptor& eye : pair.duplicates) CHECK(received_by(eye.get()) > 500'000);
}

TEST(no_more_streams_than_agreed) {
  Pair pair(StreamKind::tcp, several());
  auto [one, two] = connected(StreamKind::tcp);
  CHECK_THROWS(pair.a.messenger.add(1, std::move(one), StreamKind::tcp), Failure);
}

TEST(a_peer_has_left_when_it_left_on_every_stream) {
  Pair pair(StreamKind::tcp, several());
  std::vector<std::vector<char>> out, in;
  std::vector<TransferPtr> transfers;
  for (unsigned i = 0; i < 9; ++i) {
    out.push_back(pattern(40'000, i + 1));  // eager, so that they are under way when the sender leaves
    in.emplace_back(out.back().size());
    transfers.push_back(pair.a.messenger.send(1, {0, i, 0}, all(out[i])));
  }
  pair.a.send_control(1, 5, "goodbye");
  pair.a.messenger.leave();
  pair.until([&] { return !pair.b.left.empty(); });
  CHECK_EQUAL(pair.b.left.size(), 1u);
  CHECK(pair.b.lost.empty());
  CHECK_EQUAL(pair.b.controls.size(), 1u);
  for (unsigned i = 0; i < 9; ++i) {
    auto receive = pair.b.messenger.receive(0, {0, i, 0}, all(in[i]));
    CHECK(receive->done());
  }
  CHECK(in == out);
}

TEST(a_peer_is_lost_once_with_any_of_its_streams_and_after_its_last_frames) {
  for (int broken = 0; broken < kStreams; ++broken) {
    Side b(1, 2, several());
    std::vector<os::Descriptor> ends;
    for (int stream = 0; stream < kStreams; ++stream) {
      auto [one, two] = connected(StreamKind::tcp);
      ends.push_back(std::move(one));
      b.messenger.add(0, std::move(two), StreamKind::tcp);
    }
    {
      wire::Frame words;
      words.type = wire::FrameType::control;
      words.tag.step = 9;
      std::array<std::byte, wire::kFrameBytes> header;
      wire::encode(words, header);
      raw_write(ends[0].get(), header.data(), header.size());
    }
    std::vector<char> in(10);
    std::vector<TransferPtr> receives;
    for (unsigned i = 0; i < kStreams; ++i) receives.push_back(b.messenger.receive(0, {0, i, 0}, all(in)));
    ends[static_cast<std::size_t>(broken)].reset();
    for (int i = 0; i < 1000 && b.lost.empty(); ++i) b.step(1);
    CHECK_EQUAL(b.lost.size(), 1u);
    CHECK_EQUAL(b.controls.size(), 1u);
    CHECK_EQUAL(b.controls[0].type, 9u);
    for (const TransferPtr& receive : receives) CHECK_EQUAL(code_of(receive), Code::peer_lost);
    for (int i = 0; i < 5; ++i) b.step(1);
    CHECK_EQUAL(b.lost.size(), 1u);
    CHECK(b.left.empty());
  }
}

}  // namespace
