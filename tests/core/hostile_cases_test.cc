// Row 40 of the fault table, one attack at a time: a hostile rank 0, which knows the secret, against one engine.
// Touches what fake_peer.h and job.h touch.
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <optional>

#include "check.h"
#include "engine/plan_state.h"
#include "fake_peer.h"
#include "job.h"
#include "negotiate/coordinator.h"

namespace {

using namespace farandole;
using fake_peer::Bytes;

enum { kNegotiated = 3 };  // a counter

// Rank 1 is an engine on the hostile rank's host; other ranks have no link.
class HostileJob {
 public:
  explicit HostileJob(std::vector<int> hosts = {0, 0}) : hosts_(hosts.begin(), hosts.end()) {
    farandole_options options = job::default_options();
    options.hosts = hosts_.data();
    options.size = static_cast<int32_t>(hosts.size());
    options.rank = 1;
    char text[512];
    if (farandole_create(&options, &engine_, text, sizeof text) != 0) throw std::runtime_error(text);
    hostile_.emplace(0, std::move(hosts), options);
    hostile_->connect(1, engine_);
  }
  HostileJob(const HostileJob&) = delete;
  HostileJob& operator=(const HostileJob&) = delete;
  ~HostileJob() {
    hostile_->close_links();
    farandole_leave(engine_, 100);
    farandole_destroy(engine_);
  }

  int start(std::string* why = nullptr) {
    char text[512] = "";
    int code = 1;
    for (int slices = 0; code == 1 && slices < 100; ++slices) code = farandole_start(engine_, 100, text, sizeof text);
    if (why != nullptr) *why = text;
    return code;
  }
  // As an engine would start.
  void begin() {
    hostile_->send_hello(1);
    CHECK_EQUAL(start(), 0);
    CHECK(hostile_->wait_for_rings(1));
  }

  // The engine's next requests of a group, as buckets for which all members have submitted the same.
  std::vector<negotiate::Bucket> hear(std::size_t members, std::size_t count = 1) {
    std::vector<int> ranks;
    for (std::size_t member = 0; member < members; ++member) ranks.push_back(static_cast<int>(member));
    negotiate::Coordinator coordinator(ranks, {0, true});
    for (std::size_t received = 0; received < count;) {
      Bytes payload;
      negotiate::Requests message;
      CHECK(hostile_->wait_for(1, Control::requests, payload) && decode(payload, message));
      received += message.requests.size();
      for (const negotiate::Request& request : message.requests)
        for (int member : ranks) coordinator.submit(member, request, 0);
    }
    return coordinator.take_ready();
  }
  static Bytes answer(std::uint32_t group, negotiate::Bucket bucket, int members) {
    return negotiate::encode_answer(group, std::span(&bucket, 1), 1, members).at(0);
  }
  void ask(int kind, const std::vector<std::int64_t>& splits = {}, std::int64_t tag = 0) {
    job::Tensor nothing(0);
    const std::string name = std::to_string(++asked_);
    farandole_request made = job::request(kind, name.c_str(), nothing);
    made.splits = splits.data();
    made.splits_count = static_cast<int32_t>(splits.size());
    made.tag = tag;
    handle_ = job::submit(engine_, made);
  }
  std::int64_t finish() {
    std::int64_t value = -1;
    std::string text;
    if (job::finish(engine_, handle_, &text, &value) != 0) throw std::runtime_error(text);
    return value;
  }

  // The generation ends with this error text, and the hostile rank is named.
  void expect_lost(const std::string& words) {
    job::Tensor tensor(4);
    const std::int64_t handle = job::submit(engine_, job::request(0, "after the lie", tensor));
    int code = 1;
    for (int slices = 0; code == 1 && slices < 100; ++slices) code = farandole_wait(engine_, handle, 100);
    farandole_outcome outcome{};
    CHECK_EQUAL(farandole_outcome_of(engine_, handle, &outcome), 0);
    CHECK_EQUAL(outcome.code, static_cast<int>(Code::peer_lost));
    CHECK_EQUAL(outcome.rank, 0);
    if (std::string(outcome.message).find(words) == std::string::npos) throw std::runtime_error(outcome.message);
  }
  void expect_log(const std::string& words) {
    farandole_event event{};
    for (int slices = 0; slices < 100; ++slices)
      if (farandole_next_event(engine_, &event, 100) == 0 && std::string(event.text).find(words) != std::string::npos)
        return;
    throw std::runtime_error("nothing was said of '" + words + "'");
  }

  farandole_engine* engine() { return engine_; }
  fake_peer::FakePeer& hostile() { return *hostile_; }

 private:
  std::vector<int32_t> hosts_;
  farandole_engine* engine_ = nullptr;
  std::optional<fake_peer::FakePeer> hostile_;
  std::int64_t handle_ = 0;
  int asked_ = 0;
};

std::vector<os::Descriptor> one(os::Descriptor file) {
  std::vector<os::Descriptor> files;
  files.push_back(std::move(file));
  return files;
}

os::Descriptor memory_of(std::size_t bytes) {
  os::Descriptor file(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQUAL(ftruncate(file.get(), static_cast<off_t>(bytes)), 0);
  return file;
}

template <class Condition>
void until(Condition condition) {
  for (int looks = 0; !condition(); ++looks) {
    if (looks > 10'000) check::fail(__FILE__, __LINE__, "it never came");
    usleep(1000);  // sleep: between two looks
  }
}

enum { kAllreduce = 0, kBroadcast = 2, kBarrier = 5, kAddGroup = 7, kRemoveGroup = 8 };

}  // namespace

// Answers alone can start a plan; the shared memory through which it is followed may arrive later.
TEST(row_40_a_plan_begins_before_the_shared_memory_arrives) {
  HostileJob job;
  job.begin();
  job.ask(kAddGroup, {2, 0, 1}, kFirstMemberGroup);
  job.finish();
  job::Tensor tensor(4, 7);
  farandole_request made = job::request(kBroadcast, nullptr, tensor, kFirstMemberGroup);
  made.peer = 1;
  const std::int64_t first = job::submit(job.engine(), made), second = job::submit(job.engine(), made);
  for (negotiate::Bucket& bucket : job.hear(2, 2))
    job.hostile().send_control(1, Control::buckets, HostileJob::answer(kFirstMemberGroup, std::move(bucket), 2));
  until([&] { return farandole_counter(job.engine(), kNegotiated) == 2; });
  const std::int64_t third = job::submit(job.engine(), made);  // which the plan contains
  CHECK_EQUAL(farandole_wait(job.engine(), first, 1), 1);
  const farandole_options options = job::default_options();
  link::Rings late({2, static_cast<std::size_t>(options.slot_bytes), options.slots}, 0);
  late.own_plan_states().own.store(PlanState{1, false, false, 1}.pack());
  job.hostile().send_control(1, Control::segment, control::encode(control::Segment{kFirstMemberGroup}),
                             one(late.memory().file().duplicate()));
  for (const std::int64_t handle : {first, second, third}) CHECK_EQUAL(job::finish(job.engine(), handle), 0);
}

TEST(row_40_plan_states_for_a_group_that_was_just_removed) {
  HostileJob job({0, 0, 1});
  job.begin();
  job.ask(kAddGroup, {2, 0, 1});
  job.hostile().send_control(1, Control::buckets, HostileJob::answer(0, job.hear(3).at(0), 3));
  const auto group = static_cast<std::uint32_t>(job.finish());
  job.ask(kRemoveGroup, {group});
  job.hostile().send_both(1, Control::buckets, HostileJob::answer(0, job.hear(3).at(0), 3), Control::plan_state,
                          control::encode(control::PlanState{group, 0}));
  job.finish();
  job.ask(kBarrier);  // the generation still works
  job.hostile().send_control(1, Control::buckets, HostileJob::answer(0, job.hear(3).at(0), 3));
  job.finish();
}

// With an eventfd, the hostile rank could block the engine that writes to it.
TEST(row_40_a_wakeup_descriptor_of_the_wrong_kind) {
  HostileJob job;
  std::vector<os::Descriptor> files;
  files.push_back(job.hostile().status_page().memory().file().duplicate());
  files.emplace_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const control::Hello hello{job.hostile().generation(), 0, fake_peer::FakePeer::kNonce};
  job.hostile().send_control(1, Control::hello, control::encode(hello), std::move(files));
  std::string why;
  CHECK_EQUAL(job.start(&why), static_cast<int>(Code::peer_lost));
  CHECK(why.find("rank 0") == 0 && why.find("waking a local peer") != std::string::npos);
}

TEST(row_40_results_that_could_shrink) {
  HostileJob job;
  job.begin();
  job.hostile().send_control(1, Control::share, control::encode(control::Share{1, 4096, true}), one(memory_of(4096)));
  job.expect_log("is not sealed against shrinking");
}

TEST(row_40_too_many_shared_regions) {
  HostileJob job;
  job.begin();
  const os::Descriptor file = memory_of(4096);
  for (std::uint64_t region = 1; region <= 4097; ++region)
    job.hostile().send_control(1, Control::share, control::encode(control::Share{region, 4096}), one(file.duplicate()));
  job.expect_log("it has shared more than the machine has");
}

TEST(row_40_descriptors_without_a_frame) {
  for (const auto type : {wire::FrameType::data, wire::FrameType::grant, wire::FrameType::control}) {
    HostileJob job;
    job.begin();
    wire::Frame frame;
    frame.type = type;
    frame.tag = {0, 1 << 20, 0};
    if (type == wire::FrameType::control) frame.tag.step = static_cast<std::uint32_t>(Control::unshare);
    Bytes payload;
    if (type == wire::FrameType::control) payload = control::encode(control::Unshare{1});
    if (type == wire::FrameType::data) payload.resize(100);
    frame.total = type == wire::FrameType::data ? payload.size() : 0;
    job.hostile().send(1, frame, payload, one(memory_of(100)));
    job.expect_lost("descriptors that belong to nothing");
  }
}

TEST(row_40_a_revocation_for_no_memory_without_a_rank) {
  HostileJob job;
  job.begin();
  job.hostile().send_control(1, Control::revoke,
                             control::encode(control::Revocation{{Code::no_memory, "I have none", -1}}));
  job.expect_lost("sent a revocation that cannot be read");
}

namespace {

// Whether the engine accepts the hostile rank's tensor at these addresses of its shared memory.
bool takes(const std::vector<std::uint64_t>& places, bool as_results) {
  constexpr std::size_t kElements = 1 << 20;
  HostileJob job;
  job.begin();
  const os::Descriptor mine = memory_of(kElements * sizeof(float));
  void* data = mmap(nullptr, kElements * sizeof(float), PROT_READ | PROT_WRITE, MAP_SHARED, mine.get(), 0);
  CHECK(data != MAP_FAILED);
  CHECK(farandole_share(job.engine(), dup(mine.get()), data, kElements * sizeof(float)) > 0);
  os::SharedMemory theirs = os::SharedMemory::reserve(kElements * sizeof(float));
  job.hostile().send_control(1, Control::share,
                             control::encode(control::Share{7, kElements * sizeof(float), as_results}),
                             one(theirs.file().duplicate()));
  job::Tensor shape(0);
  shape.shape = {kElements};
  farandole_request made = job::request(kAllreduce, "x", shape);
  made.input = made.output = data;
  job::submit(job.engine(), made);
  job.hostile().send_control(1, Control::buckets, HostileJob::answer(0, job.hear(2).at(0), 2));
  link::Rings& rings = *job.hostile().rings();
  constexpr std::uint64_t kStamp = 1ull << 32 | 0xffffffff;  // of the first collective, for any number of addresses
  const std::uint64_t count = places.size();
  std::byte* slot = rings.claim(link::Rings::everyone);
  std::memcpy(slot, &count, sizeof count);
  std::memcpy(slot + sizeof count, places.data(), count * sizeof count);
  rings.publish(link::Rings::everyone, kStamp);
  std::uint64_t shown = 0;
  for (const bool last : {false, true}) {
    const std::byte* words = nullptr;
    until([&] { return (words = rings.peek(1, true, kStamp)) != nullptr; });
    std::memcpy(&shown, words, sizeof shown);
    if (!last) CHECK_EQUAL(shown, 3u);  // its own address
    rings.consume(1, true);
  }
  job.hostile().close_links();
  farandole_leave(job.engine(), 100);
  munmap(data, kElements * sizeof(float));
  return shown > 0;
}

}  // namespace

TEST(row_40_tensors_cut_inside_an_element) {
  constexpr std::uint64_t kBytes = 4 << 20;
  CHECK(takes({7, 0, kBytes}, false));
  CHECK(takes({7, 0, 400, 7, 400, kBytes - 400}, false));
  CHECK(!takes({7, 0, 402, 7, 402, kBytes - 402}, false));
  CHECK(!takes({7, 2, 400, 7, 400, kBytes - 400}, false));
  CHECK(!takes({7, 0, kBytes}, true));  // memory for results holds no tensors
}
