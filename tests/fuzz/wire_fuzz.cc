// Fuzzing of everything that reads bytes from another rank: headers, buffers, requests, buckets, and a whole messenger.
// Touches wire/, negotiate/, engine/control.h and link/. Driven by libFuzzer with -fsanitize=fuzzer, else by driver.h,
// which says how to call it.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "driver.h"
#include "engine/control.h"
#include "link/messenger.h"
#include "negotiate/messages.h"
#include "wire/buffer.h"
#include "wire/frame.h"

using namespace farandole;

namespace {

using Bytes = std::vector<std::byte>;

class IgnoreAll final : public link::Listener {
 public:
  void on_control(int, std::uint32_t, std::span<const std::byte>, std::vector<os::Descriptor>) override {}
  void on_lost(int, const Error&) override {}
  void on_left(int) override {}
};

void must(bool condition) {
  if (!condition) std::abort();
}

template <class Message>
void feed(std::span<const std::byte> bytes) {
  Message message;
  (void)decode(bytes, message);
}

void feed_decoders(std::span<const std::byte> bytes) {
  if (bytes.size() >= wire::kFrameBytes) {
    if (const auto frame = wire::decode(bytes.first<wire::kFrameBytes>())) {
      std::array<std::byte, wire::kFrameBytes> again;
      wire::encode(*frame, again);
      must(std::memcmp(again.data(), bytes.data(), wire::kFrameBytes) == 0);
    }
  }
  wire::Reader reader(bytes);
  while (reader.ok() && !reader.finished()) {
    switch (reader.u8() % 4) {
      case 0:
        reader.text();
        break;
      case 1:
        reader.list();
        break;
      case 2:
        reader.f64();
        break;
      default:
        reader.count(3);
        break;
    }
  }
  wire::Reader requests(bytes), buckets(bytes);
  while (requests.ok() && !requests.finished()) negotiate::decode_request(requests);
  while (buckets.ok() && !buckets.finished()) negotiate::decode_bucket(buckets);
  feed<negotiate::Requests>(bytes);
  feed<negotiate::Answer>(bytes);
  feed<control::Hello>(bytes);
  feed<control::Leaving>(bytes);
  feed<control::Revocation>(bytes);
  feed<control::Abandon>(bytes);
}

// Header checksums would stop most inputs at the first frame. So the input is cut into frames, and valid headers are
// made for them: type, tag, total, length in four bytes, then the payload.
Bytes framed(std::span<const std::byte> bytes) {
  Bytes out;
  while (bytes.size() >= 4) {
    wire::Frame frame;
    frame.type = static_cast<wire::FrameType>(std::to_integer<unsigned>(bytes[0]) % 7);
    frame.tag = {0, 0, std::to_integer<std::uint32_t>(bytes[1]) % 4};
    frame.total = std::to_integer<std::uint64_t>(bytes[2]) << (std::to_integer<unsigned>(bytes[0]) / 7 % 3 * 8);
    frame.length =
        std::min<std::uint32_t>(std::to_integer<std::uint32_t>(bytes[3]), static_cast<std::uint32_t>(bytes.size() - 4));
    std::array<std::byte, wire::kFrameBytes> header;
    wire::encode(frame, header);
    out.insert(out.end(), header.begin(), header.end());
    const auto payload = bytes.subspan(4, frame.length);
    out.insert(out.end(), payload.begin(), payload.end());
    bytes = bytes.subspan(4 + frame.length);
  }
  return out;
}

void feed_messenger(std::span<const std::byte> bytes) {
  int ends[2];
  must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  os::Descriptor attacker(ends[0]);
  os::Poller poller;
  IgnoreAll listener;
  link::MessengerOptions options;
  options.eager_bytes = 64;
  link::Messenger messenger(1, 2, poller, listener, options);
  messenger.add(0, os::Descriptor(ends[1]), link::StreamKind::local);
  std::array<char, 300> small{}, large{}, out{};
  auto first = messenger.receive(0, {0, 0, 0}, Pieces(small.data(), 20));
  auto second = messenger.receive(0, {0, 0, 1}, Pieces(large.data(), 256));
  auto third = messenger.send(0, {0, 0, 2}, Pieces(out.data(), 256));
  std::vector<os::Event> events;
  for (std::size_t sent = 0, round = 0; sent < bytes.size() && round < 1000; ++round) {
    const ssize_t count =
        send(attacker.get(), bytes.data() + sent, std::min<std::size_t>(bytes.size() - sent, 100'000), MSG_NOSIGNAL);
    if (count > 0) sent += static_cast<std::size_t>(count);
    for (const os::Event& event : poller.wait(0, events)) messenger.ready(event);
    messenger.flush();
    if (round == 1) second.reset();
    if (count < 0 && errno == EPIPE) break;
  }
  attacker.reset();
  auto late = messenger.receive(0, {0, 0, 3}, Pieces(small.data() + 100, 10));
  for (int i = 0; i < 4; ++i) {
    for (const os::Event& event : poller.wait(0, events)) messenger.ready(event);
    messenger.flush();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  feed_decoders(bytes);
  feed_messenger(bytes);
  feed_messenger(framed(bytes));
  return 0;
}

#ifndef FARANDOLE_LIBFUZZER

const bool kRunsNear = true;

namespace {

void save(const std::filesystem::path& directory, const char* name, const Bytes& bytes) {
  driver::write(directory / name, std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

Bytes from(std::initializer_list<int> values) {
  Bytes bytes;
  for (int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

}  // namespace

void make_corpus(const std::filesystem::path& directory) {
  negotiate::Request request;
  request.name = "layer.weight";
  request.shape = {3, 5};
  wire::Writer writer;
  negotiate::encode(writer, request);
  save(directory, "request", writer.take());
  negotiate::Bucket bucket;
  negotiate::Item& item = bucket.items.emplace_back();
  item.name = "layer.weight";
  item.shape = {3, 5};
  item.first_dims = {1, 2};
  item.splits = {1, 2, 3, 4};
  wire::Writer second;
  negotiate::encode(second, bucket);
  save(directory, "bucket", second.take());
  wire::Frame frame;
  frame.type = wire::FrameType::control;
  frame.length = 5;
  Bytes stream(wire::kFrameBytes);
  wire::encode(frame, std::span<std::byte, wire::kFrameBytes>(stream.data(), wire::kFrameBytes));
  for (char letter : std::string("hello")) stream.push_back(static_cast<std::byte>(letter));
  save(directory, "control_frame", stream);
  stream.resize(wire::kFrameBytes + 2);
  save(directory, "cut_frame", stream);
  // For framed(): type, step, total, length, payload.
  save(directory, "data_that_fits", from({1, 0, 4, 2, 7, 7, 1, 0, 4, 2, 7, 7}));
  save(directory, "data_of_another_size", from({1, 0, 9, 1, 7, 1, 0, 9, 8, 1, 2, 3, 4, 5, 6, 7, 8}));
  save(directory, "announced_then_granted", from({6, 3, 200, 0, 2, 2, 1, 0, 7, 2, 1, 0}));
  save(directory, "leave_then_more", from({4, 0, 0, 0, 3, 1, 0, 1, 9}));
  save(directory, "descriptors_that_never_came", from({3, 1, 3, 1, 9}));
}

#endif
