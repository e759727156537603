// A hostile rank of the job makes another rank use more and more memory. The other rank ends the generation with an
// error that names the hostile rank, before the memory runs out: row 40 of docs/faults.md.
// Touches api/ through job.h, and what fake_peer.h touches.
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "check.h"
#include "fake_peer.h"
#include "job.h"
#include "negotiate/plan.h"
#include "os/memory.h"

namespace {

using namespace farandole;
using fake_peer::Bytes;

enum { kAllreduce = 0, kBroadcast = 2, kJoin = 6 };
enum { kPeerLost = 6, kNoMemory = 9 };

// A job of two ranks. The victim has an engine; the hostile rank is a fake peer.
class Victim {
 public:
  explicit Victim(bool same_host, int rank = 0)
      : rank_(rank),
        hosts_{0, same_host ? 0 : 1},
        options_(options_of()),
        hostile(1 - rank, {hosts_[0], hosts_[1]}, options_) {
    char text[512];
    CHECK_EQUAL(farandole_create(&options_, &engine_, text, sizeof text), 0);
    hostile.connect(rank_, engine_);
    hostile.send_hello(rank_);
    int code = 1;
    for (int turn = 0; code == 1 && turn < 100; ++turn) code = farandole_start(engine_, 100, text, sizeof text);
    CHECK_EQUAL(code, 0);
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  ~Victim() {
    hostile.close_links();
    farandole_leave(engine_, 100);
    farandole_destroy(engine_);
  }

  void begin_broadcast() {
    farandole_request request = job::request(kBroadcast, "again", tensor_);
    request.peer = 0;
    broadcast_ = job::submit(engine_, request);
  }
  void end_broadcast() { CHECK_EQUAL(end(broadcast_), 0); }
  int64_t join() {
    job::Tensor none(0);
    farandole_request request = job::request(kJoin, "join", none);
    request.dimensions = 0;
    return job::submit(engine_, request);
  }
  int end(int64_t handle, std::string* text = nullptr) { return job::finish(engine_, handle, text); }

  // Submits an operation that needs the other rank. Its error must begin with the other rank, followed by `words`.
  void expect_lost(const std::string& words) {
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
  fake_peer::FakePeer hostile;
};

// One more than an engine accepts at once.
std::vector<negotiate::Request> too_many_requests() {
  std::vector<negotiate::Request> requests((1 << 19) + 1);
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].name = std::to_string(i);
  return requests;
}

TEST(row_40_too_many_requests_at_once) {
  Victim victim(false);
  for (const Bytes& message : negotiate::encode_requests(0, 0, too_many_requests()))
    victim.hostile.send_control(0, Control::requests, message);
  victim.expect_lost("sent more requests at once than any program does");
}

TEST(row_40_too_many_requests_for_unknown_groups) {
  Victim victim(false);
  for (const Bytes& message : negotiate::encode_requests(kFirstMemberGroup, 0, too_many_requests()))
    victim.hostile.send_control(0, Control::requests, message);
  victim.expect_lost("sent more requests at once than any program does, for process sets");
}

// Both ranks repeat a broadcast until the engine follows a plan. Then the hostile rank sends requests as if it had left
// the plan.
TEST(row_40_too_many_requests_after_a_plan) {
  Victim victim(false);
  negotiate::Request request;
  request.kind = Kind::broadcast;
  request.name = "again";
  request.shape = {10};
  request.root = 0;
  negotiate::Recorder recorder(1024);
  for (bool planned = false; !planned;) {
    victim.begin_broadcast();
    victim.hostile.send_control(0, Control::requests, negotiate::encode_requests(0, 0, std::span(&request, 1)).front());
    Bytes payload;
    negotiate::Answer answer;
    CHECK(victim.hostile.wait_for(0, Control::buckets, payload) && decode(payload, answer));
    for (const negotiate::Bucket& bucket : answer.buckets) planned = recorder.record({bucket, {request}});
    victim.end_broadcast();
  }
  for (const Bytes& message : negotiate::encode_requests(0, 2, too_many_requests()))
    victim.hostile.send_control(0, Control::requests, message);
  victim.expect_lost("sent more requests at once than any program does (");
}

os::Descriptor small_file(std::size_t bytes = 4096) {
  os::Descriptor file(memfd_create("hostile-limits", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQUAL(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  return file;
}

std::vector<os::Descriptor> list_of(os::Descriptor file) {
  std::vector<os::Descriptor> files;
  files.push_back(std::move(file));
  return files;
}

TEST(row_40_too_much_memory_for_unknown_groups) {
  Victim victim(true);
  const os::Descriptor file = small_file();
  const std::size_t half = os::max_descriptors() / 2;
  const std::size_t limit = std::clamp<std::size_t>(half, 64, 4096);
  for (std::size_t i = 0; i <= limit; ++i)
    victim.hostile.send_control(0, Control::segment,
                                control::encode(control::Segment{kFirstMemberGroup + static_cast<std::uint32_t>(i)}),
                                list_of(file.duplicate()));
  victim.expect_lost("sent memory for more than " + std::to_string(limit) + " process sets");
}

// How many mappings of files with this name the process has.
std::size_t count_mappings(const std::string& name) {
  std::ifstream table("/proc/self/maps");
  std::size_t found = 0;
  for (std::string line; std::getline(table, line);) found += line.find(name) == std::string::npos ? 0 : 1;
  return found;
}

TEST(row_40_too_much_shared_memory) {
  constexpr std::uint64_t kSent = 4200, kAccepted = 4096;
  Victim victim(true);
  const std::size_t machine = os::machine_memory();
  victim.hostile.send_control(0, Control::share, control::encode(control::Share{1, machine + 4096}),
                              list_of(small_file(machine + 4096)));
  const os::Descriptor file = small_file();
  for (std::uint64_t i = 0; i < kSent; ++i)
    victim.hostile.send_control(0, Control::share, control::encode(control::Share{2 + i, 4096}),
                                list_of(file.duplicate()));
  victim.hostile.send_control(0, static_cast<Control>(99), {});  // is refused after all frames before it were read
  victim.expect_lost("sent a control frame of an unknown type");
  CHECK_EQUAL(count_mappings("memfd:hostile-limits"), kAccepted);
}

TEST(row_40_too_many_zeros_for_a_joined_rank) {
  constexpr std::int64_t kElements = 10 << 20;  // 40 MiB
  os::max_allocation = 64 << 20;
  Victim victim(false, 1);
  const int64_t handle = victim.join();
  Bytes payload;
  CHECK(victim.hostile.wait_for(1, Control::requests, payload));
  negotiate::Bucket bucket;
  bucket.joined = 1;
  for (int i = 0; i < 4; ++i) bucket.items.push_back({std::to_string(i), false, DType::float32, {kElements}, {}, {}});
  for (const Bytes& message : negotiate::encode_answer(0, std::span(&bucket, 1), 1, 2))
    victim.hostile.send_control(1, Control::buckets, message);
  std::string text;
  CHECK_EQUAL(victim.end(handle, &text), kNoMemory);
  CHECK(text.find("167772160 bytes") != std::string::npos);
  os::max_allocation = std::numeric_limits<std::size_t>::max();
}

wire::Frame frame_of(std::uint32_t group, std::uint64_t sequence, std::uint64_t total,
                     wire::FrameType type = wire::FrameType::data) {
  wire::Frame frame;
  frame.type = type;
  frame.tag = {group, sequence, 0};
  frame.total = total;
  return frame;
}

TEST(row_40_large_message_without_a_grant) {
  Victim victim(false);
  victim.hostile.send(0, frame_of(0, 7, 1 << 20), Bytes(1000));
  victim.expect_lost("sent a large message without a grant from this rank");
}

TEST(row_40_large_message_before_the_grant) {
  Victim victim(false);
  victim.hostile.send(0, frame_of(0, 7, 1 << 20), {});
  victim.hostile.send(0, frame_of(0, 7, 1 << 20), Bytes(1000));
  victim.expect_lost("sent a corrupted frame (impossible header)");
}

TEST(row_40_messages_of_impossible_groups) {
  using enum wire::FrameType;
  for (wire::FrameType type : {data, grant, cancel_grant}) {
    Victim victim(false);
    victim.hostile.send(0, frame_of(kLastMemberGroup, 7, 10, type), Bytes(type == data ? 10 : 0));
    victim.expect_lost("sent a message for a process set in which it and this rank are not both members");
  }
}

}  // namespace
