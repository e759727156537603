// Tests of the messenger under faults: invalid bytes, frames of another generation, injected corruption, one byte at a
// time.
// Touches link/ and sockets.
#include <array>

#include "api/farandole.h"
#include "base/failpoint.h"
#include "link/messenger.h"
#include "pair.h"

using namespace farandole;
using namespace pair;

namespace {

std::array<std::byte, wire::kFrameBytes> header(wire::FrameType type, Tag tag, std::uint64_t total,
                                                std::uint32_t length, std::uint32_t generation = 0,
                                                std::uint32_t crc = 0) {
  std::array<std::byte, wire::kFrameBytes> bytes;
  wire::encode({type, generation, tag, total, length, crc}, bytes);
  return bytes;
}

}  // namespace

TEST(invalid_bytes_end_the_link) {
  const Tag tag{1, 1, 1};
  using enum wire::FrameType;
  std::vector<std::vector<std::byte>> cases;
  const auto add = [&](auto... headers) {
    std::vector<std::byte> bytes;
    (bytes.insert(bytes.end(), headers.begin(), headers.end()), ...);
    cases.push_back(bytes);
  };
  add(std::vector<std::byte>(48, std::byte{0x41}));
  add(header(data, tag, 100'000, 0), header(data, tag, 100'000, 0));  // announced twice
  add(header(data, tag, 3, 2), std::vector<std::byte>(2), header(data, tag, 4, 2), std::vector<std::byte>(2));
  add(header(data, tag, 3, 2), std::vector<std::byte>(2), header(data, tag, 3, 2), std::vector<std::byte>(2));
  add(header(control, tag, 2, 0));  // descriptors that did not arrive
  for (const auto& bytes : cases) {
    Side b(1, 2);
    auto [mine, theirs] = connected(StreamKind::local);
    b.messenger.add(0, std::move(theirs), StreamKind::local);
    raw_write(mine.get(), bytes.data(), bytes.size());
    for (int i = 0; i < 100 && b.lost.empty(); ++i) b.step(1);
    CHECK_EQUAL(b.lost.size(), 1u);
    CHECK(b.lost[0].second.message.find("corrupted frame") != std::string::npos);
  }
}

TEST(a_wrong_checksum_ends_a_tcp_link) {
  Side b(1, 2);
  auto [mine, theirs] = connected(StreamKind::tcp);
  b.messenger.add(0, std::move(theirs), StreamKind::tcp);
  std::vector<char> in(5);
  auto receive = b.messenger.receive(0, {1, 1, 1}, all(in));
  const auto head = header(wire::FrameType::data, {1, 1, 1}, 5, 5, 0, wire::crc32c(0, "hello", 5));
  raw_write(mine.get(), head.data(), head.size());
  raw_write(mine.get(), "hellO", 5);
  for (int i = 0; i < 100 && b.lost.empty(); ++i) b.step(1);
  CHECK_EQUAL(code_of(receive), Code::peer_lost);
  CHECK(b.lost[0].second.message.find("checksum") != std::string::npos);
}

TEST(frames_of_another_generation_are_dropped) {
  link::MessengerOptions options;
  options.generation = 7;
  Side b(1, 2, options);
  auto [mine, theirs] = connected(StreamKind::local);
  b.messenger.add(0, std::move(theirs), StreamKind::local);
  std::vector<char> in(5);
  auto receive = b.messenger.receive(0, {1, 1, 1}, all(in));
  using enum wire::FrameType;
  const Tag tag{1, 1, 1};
  int round = 0;
  for (const auto& head : {header(data, tag, 5, 5, 6), header(control, tag, 0, 5, 6), header(data, tag, 5, 5, 7)}) {
    raw_write(mine.get(), head.data(), head.size());
    raw_write(mine.get(), (std::to_string(round++) + "abcd").data(), 5);
  }
  const auto stale = header(leave, {}, 0, 0, 6);
  raw_write(mine.get(), stale.data(), stale.size());
  for (int i = 0; i < 10; ++i) b.step(1);
  CHECK(receive->done());
  CHECK_EQUAL(std::string(in.data(), 5), "2abcd");
  CHECK(b.controls.empty() && b.left.empty() && b.lost.empty());
}

TEST(messages_arrive_one_byte_at_a_time) {
  link::MessengerOptions options;
  options.checksum_local = true;
  CHECK_EQUAL(farandole_chaos_set(nullptr, "stream.short", "short", 3), 0);
  {
    Pair pair(StreamKind::local, options);
    auto out = pattern(70'000), small = pattern(100);
    std::vector<char> in(out.size()), small_in(100);
    auto receive = pair.b.messenger.receive(0, {0, 1, 0}, crumbs(in, 100));
    auto send = pair.a.messenger.send(1, {0, 1, 0}, all(out));
    auto second = pair.a.messenger.send(1, {0, 2, 0}, crumbs(small, 10));
    os::Wakeup wakeup;
    std::vector<os::Descriptor> descriptors;
    descriptors.push_back(wakeup.descriptor().duplicate());
    pair.a.send_control(1, 1, "with a wakeup", std::move(descriptors));
    pair.until([&] { return send->done() && receive->done() && !pair.b.controls.empty(); });
    pair.until([&] { return second->done(); });
    auto late = pair.b.messenger.receive(0, {0, 2, 0}, all(small_in));
    pair.until([&] { return late->done(); });
    CHECK(in == out && small_in == small);
    CHECK_EQUAL(pair.b.controls[0].payload, "with a wakeup");
    CHECK_EQUAL(pair.b.controls[0].descriptors.size(), 1u);
  }
  CHECK(farandole_chaos_fired(nullptr, "stream.short") > 1000);
  CHECK_EQUAL(farandole_chaos_set(nullptr, "stream.short", "off", 0), 0);
}

TEST(injected_corruption_and_truncation_are_noticed) {
  int engine = 0;
  auto* name = reinterpret_cast<farandole_engine*>(&engine);
  for (const char* point : {"corrupt", "truncate"}) {
    const std::string full = std::string("stream.") + point;
    link::MessengerOptions options;
    options.engine = &engine;
    Side a(0, 2), b(1, 2, options);
    auto [one, two] = connected(StreamKind::tcp);
    a.messenger.add(1, std::move(one), StreamKind::tcp);
    b.messenger.add(0, std::move(two), StreamKind::tcp);
    CHECK_EQUAL(farandole_chaos_set(name, full.c_str(), point, 4), 0);
    auto out = pattern(kLarge);
    std::vector<char> in(kLarge);
    auto receive = b.messenger.receive(0, {0, 1, 0}, all(in));
    auto send = a.messenger.send(1, {0, 1, 0}, all(out));
    for (int i = 0; i < 100'000 && b.lost.empty(); ++i) b.step(), a.step();
    CHECK_EQUAL(b.lost.size(), 1u);
    CHECK_EQUAL(code_of(receive), Code::peer_lost);
    CHECK_EQUAL(farandole_chaos_fired(name, full.c_str()), 1);
    CHECK_EQUAL(farandole_chaos_set(name, full.c_str(), "off", 0), 0);
  }
  CHECK_EQUAL(farandole_chaos_set(nullptr, "allreduce.pack", "explode", 0), 2);
  CHECK_EQUAL(farandole_chaos_set(nullptr, "allreduce.pack", "corrupt", 0), 2);
}

TEST(failpoints_fire_once_after_the_skipped_passes) {
  int engine = 0;
  auto* name = reinterpret_cast<farandole_engine*>(&engine);
  CHECK_EQUAL(farandole_chaos_set(name, "*.pack", "error", 2), 0);
  failpoint(&engine, Kind::allreduce, "pack");
  failpoint(&engine, Kind::allreduce, "send");
  failpoint(name, Kind::broadcast, "pack");
  failpoint(nullptr, Kind::broadcast, "pack");  // another engine
  CHECK_EQUAL(farandole_chaos_fired(name, "*.pack"), 0);
  CHECK_THROWS(failpoint(&engine, Kind::allreduce, "pack"), Failure);
  failpoint(&engine, Kind::allreduce, "pack");
  CHECK_EQUAL(farandole_chaos_fired(name, "*.pack"), 1);
  farandole_chaos_set(name, "*.pack", "off", 0);
}

// The last bytes of a rank that is reported dead are read up to a limit: a rank that is alive would never stop sending.
TEST(a_dead_peer_whose_stream_never_ends_is_lost) {
  Side b(1, 2);
  auto [mine, theirs] = connected(StreamKind::local);
  b.messenger.add(0, std::move(theirs), StreamKind::local);
  const auto head = header(wire::FrameType::control, {0, 0, 1}, 0, 0);
  int written = 0;
  b.hook = [&] {
    ++written;
    b.controls.clear();
    if (b.lost.empty()) raw_write(mine.get(), head.data(), head.size());
  };
  raw_write(mine.get(), head.data(), head.size());
  b.messenger.peer_died(0, {Code::peer_lost, "it is reported dead", 0});
  CHECK_EQUAL(b.lost.size(), 1u);
  CHECK(written > 1000);
}
