// A rank that has proven the secret, and makes another take memory as long as it is let: it is named before that hurts.
// Touches api/ through job.h, and what peer.h touches.
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "check.h"
#include "job.h"
#include "negotiate/plan.h"
#include "os/memory.h"
#include "peer.h"

namespace {

using namespace farandole;
using peer::Bytes;

enum { kAllreduce = 0, kBroadcast = 2, kJoin = 6 };
enum { kPeerLost = 6, kNoMemory = 9 };

// The engine of one rank, and the other, which is none.
class Prey {
 public:
  explicit Prey(bool neighbours, int rank = 0)
      : rank_(rank),
        hosts_{0, neighbours ? 0 : 1},
        options_(options_of()),
        liar(1 - rank, {hosts_[0], hosts_[1]}, options_) {
    char text[512];
    CHECK_EQUAL(farandole_create(&options_, &engine_, text, sizeof text), 0);
    liar.connect(rank_, engine_);
    liar.greet(rank_);
    int code = 1;
    for (int turn = 0; code == 1 && turn < 100; ++turn) code = farandole_start(engine_, 100, text, sizeof text);
    CHECK_EQUAL(code, 0);
  }
  Prey(const Prey&) = delete;
  Prey& operator=(const Prey&) = delete;
  ~Prey() {
    liar.hang_up();
    farandole_leave(engine_, 100);
    farandole_destroy(engine_);
  }

  void begin_broadcast() {
    farandole_request made = job::request(kBroadcast, "again", tensor_);
    made.peer = 0;
    broadcast_ = job::submit(engine_, made);
  }
  void end_broadcast() { CHECK_EQUAL(end(broadcast_), 0); }
  int64_t join() {
    job::Tensor none(0);
    farandole_request made = job::request(kJoin, "join", none);
    made.dimensions = 0;
    return job::submit(engine_, made);
  }
  int end(int64_t handle, std::string* text = nullptr) { return job::finish(engine_, handle, text); }

  // An operation that needs the other rank ends with these words, and its number.
  void blames(const std::string& words) {
    job::Tensor tensor(10, 1);
    const int64_t handle = job::submit(engine_, job::request(kAllreduce, "mine", tensor));
    std::string text;
    CHECK_EQUAL(job::finish(engine_, handle, &text), kPeerLost);
    const std::string start = "rank " + std::to_string(1 - rank_) + " ";
    if (text.find(start + words) == std::string::npos) check::fail(__FILE__, __LINE__, text);
  }

 private:
  farandole_options options_of() const {
    farandole_options options = job::default_options();
    options.hosts = hosts_;
    options.size = 2;
    options.rank = rank_;
    options.tcp_streams = 1;
    return options;
  }

  const int rank_;
  const int32_t hosts_[2];
  farandole_options options_;
  farandole_engine* engine_ = nullptr;
  job::Tensor tensor_{10, 1};
  int64_t broadcast_ = 0;

 public:
  peer::Peer liar;
};

std::vector<negotiate::Request> many_requests() {
  std::vector<negotiate::Request> requests((1 << 19) + 1);
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].name = std::to_string(i);
  return requests;
}

TEST(row_40_requests_that_never_end) {
  Prey prey(false);
  for (const Bytes& message : negotiate::encode_requests(0, 0, many_requests()))
    prey.liar.say(0, Control::requests, message);
  prey.blames("asked for more at once than any program does");
}

TEST(row_40_requests_for_groups_that_never_come) {
  Prey prey(false);
  for (const Bytes& message : negotiate::encode_requests(kFirstFounded, 0, many_requests()))
    prey.liar.say(0, Control::requests, message);
  prey.blames("asked for more at once than any program does, of process sets");
}

// Enough rounds of one broadcast that the engine follows a plan; then requests of who has left it already.
TEST(row_40_requests_of_who_is_ahead) {
  Prey prey(false);
  negotiate::Request request;
  request.kind = Kind::broadcast;
  request.name = "again";
  request.shape = {10};
  request.root = 0;
  negotiate::Recorder recorder(1024);
  for (bool planned = false; !planned;) {
    prey.begin_broadcast();
    prey.liar.say(0, Control::requests, negotiate::encode_requests(0, 0, std::span(&request, 1)).front());
    Bytes payload;
    negotiate::Answer answer;
    CHECK(prey.liar.hear(0, Control::buckets, payload) && decode(payload, answer));
    for (const negotiate::Bucket& bucket : answer.buckets) planned = recorder.record({bucket, {request}});
    prey.end_broadcast();
  }
  for (const Bytes& message : negotiate::encode_requests(0, 2, many_requests()))
    prey.liar.say(0, Control::requests, message);
  prey.blames("asked for more at once than any program does (");
}

os::Descriptor small_file(std::size_t bytes = 4096) {
  os::Descriptor file(memfd_create("greedy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQUAL(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  return file;
}

std::vector<os::Descriptor> one(os::Descriptor file) {
  std::vector<os::Descriptor> files;
  files.push_back(std::move(file));
  return files;
}

TEST(row_40_memory_for_groups_that_never_come) {
  Prey prey(true);
  const os::Descriptor file = small_file();
  const std::size_t half = os::most_descriptors() / 2;
  const std::size_t most = std::clamp<std::size_t>(half, 64, 4096);
  for (std::size_t i = 0; i <= most; ++i)
    prey.liar.say(0, Control::segment, control::encode(control::Segment{kFirstFounded + static_cast<std::uint32_t>(i)}),
                  one(file.duplicate()));
  prey.blames("sent memory for more than " + std::to_string(most) + " process sets");
}

std::size_t mapped(const std::string& name) {
  std::ifstream table("/proc/self/maps");
  std::size_t found = 0;
  for (std::string line; std::getline(table, line);) found += line.find(name) == std::string::npos ? 0 : 1;
  return found;
}

TEST(row_40_shared_memory_without_end) {
  constexpr std::uint64_t kShared = 4200, kMost = 4096;
  Prey prey(true);
  const std::size_t machine = os::machine_bytes();
  prey.liar.say(0, Control::share, control::encode(control::Share{1, machine + 4096}), one(small_file(machine + 4096)));
  const os::Descriptor file = small_file();
  for (std::uint64_t i = 0; i < kShared; ++i)
    prey.liar.say(0, Control::share, control::encode(control::Share{2 + i, 4096}), one(file.duplicate()));
  prey.liar.say(0, static_cast<Control>(99), {});
  prey.blames("sent a control frame of an unknown type");
  CHECK_EQUAL(mapped("memfd:greedy"), kMost);
}

TEST(row_40_zeros_for_others_are_counted_together) {
  constexpr std::int64_t kElements = 10 << 20;  // 40 MiB
  os::largest_allocation = 64 << 20;
  Prey prey(false, 1);
  const int64_t handle = prey.join();
  Bytes payload;
  CHECK(prey.liar.hear(1, Control::requests, payload));
  negotiate::Bucket bucket;
  bucket.joined = 1;
  for (int i = 0; i < 4; ++i) bucket.items.push_back({std::to_string(i), false, DType::float32, {kElements}, {}, {}});
  for (const Bytes& message : negotiate::encode_answer(0, std::span(&bucket, 1), 1, 2))
    prey.liar.say(1, Control::buckets, message);
  std::string text;
  CHECK_EQUAL(prey.end(handle, &text), kNoMemory);
  CHECK(text.find("167772160 bytes") != std::string::npos);
  os::largest_allocation = std::numeric_limits<std::size_t>::max();
}

wire::Frame of_message(std::uint32_t group, std::uint64_t sequence, std::uint64_t total,
                       wire::FrameType type = wire::FrameType::data) {
  wire::Frame frame;
  frame.type = type;
  frame.tag = {group, sequence, 0};
  frame.total = total;
  return frame;
}

TEST(row_40_large_messages_that_nobody_asked_for) {
  Prey prey(false);
  prey.liar.send(0, of_message(0, 7, 1 << 20), Bytes(1000));
  prey.blames("sent a large message that this rank was not ready for");
}

TEST(row_40_large_messages_that_were_announced_and_not_answered) {
  Prey prey(false);
  prey.liar.send(0, of_message(0, 7, 1 << 20), {});
  prey.liar.send(0, of_message(0, 7, 1 << 20), Bytes(1000));
  prey.blames("sent a corrupted frame (impossible header)");
}

TEST(row_40_messages_of_groups_that_cannot_be) {
  using enum wire::FrameType;
  for (wire::FrameType type : {data, grant, ungrant}) {
    Prey prey(false);
    prey.liar.send(0, of_message(kLastFounded, 7, 10, type), Bytes(type == data ? 10 : 0));
    prey.blames("exchanges messages of a process set that it and this rank are not both in");
  }
}

}  // namespace
