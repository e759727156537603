// The communicators of NCCL and their owner thread, on the stand-ins, in real processes: order, limits, errors, kills.
// Touches cuda/, the stand-ins and processes.
#include "cuda/communicators.h"

#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "processes.h"
#include "standin_process.h"

namespace {

using namespace farandole::cuda;
using farandole::Code;
using farandole::Error;
using processes::alone;
using standin::Libraries;
using standin::Memory;
using standin::until;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kGenerations = 3, kGroups = 3;

// Where the first member of a group leaves the id, for each generation and group.
struct Board {
  standin::Meeting ids[kGenerations][kGroups];
  std::atomic<int> steps, death_known, cut;
};
using Page = standin::SharedPage<Board>;

void set(const char* variable, const char* value) { ::setenv(variable, value, 1); }

// What came back of one call.
struct Answer {
  std::atomic<int> calls{0};
  Error error;
  Communicators::Done done() {
    return [this](const Error& given) {
      error = given;
      ++calls;
    };
  }
  bool here() const { return calls.load() > 0; }
};

class Process {
 public:
  explicit Process(Page& page, int start_ms = 30000, int end_ms = 10000)
      : page_(page), stream_(all_.stream()), comms_(options(start_ms, end_ms)) {}

  void create(const CommKey& key, int rank, int size, Answer& answer) {
    standin::Meeting& place = page_->ids[key.generation][key.group];
    const auto id = [this, &place, rank](UniqueId& found) {
      if (rank == 0 && place.ready == 0) {
        if (all_.nccl.get_unique_id(&place.id) != NcclResult::success) return false;
        place.ready = 1;
      }
      if (place.ready == 0) return false;
      found = place.id;
      return true;
    };
    comms_.create(key, rank, size, id, answer.done());
  }
  // One fused batch: `parts` allreduces of a part of the memory each.
  void reduce(const CommKey& key, const Memory& memory, int parts, Answer& answer) {
    Event event = nullptr;
    CHECK(all_.driver.event_create(&event, kEventDisableTiming) == kSuccess);
    const auto calls = [this, data = memory.data(), parts](const Nccl& nccl, Comm comm) {
      NcclResult result = NcclResult::success;
      for (int i = 0; i < parts && result == NcclResult::success; ++i)
        result = nccl.all_reduce(data + 16 * i, data + 16 * i, 16, NcclType::float32, NcclOp::sum, comm, stream_);
      return result;
    };
    auto recorded = std::make_shared<bool>(false);
    const auto finished = [this, event, recorded] {
      if (!*recorded) *recorded = all_.driver.event_record(event, stream_) == kSuccess;
      return all_.driver.event_query(event) == kSuccess;
    };
    comms_.launch(key, calls, finished, answer.done());
  }
  Communicators& comms() { return comms_; }
  Stream stream() const { return stream_; }
  const Libraries& all() const { return all_; }
  // Communicators of this process; or those that were aborted.
  static int live(bool were_aborted = false) {
    void* image = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    int now = -1, aborted = 0;
    reinterpret_cast<void (*)(int*, int*)>(::dlsym(image, "standin_nccl_counts"))(&now, &aborted);
    return were_aborted ? aborted : now;
  }

 private:
  CommOptions options(int start_ms, int end_ms) {
    CommOptions given;
    given.nccl = all_.nccl;
    given.version = all_.nccl_version;
    given.enter = [this](int device) {
      Context context = nullptr;
      all_.driver.primary_retain(&context, device);
      all_.driver.set_current(context);
    };
    given.start_limit = milliseconds(start_ms);
    given.end_limit = milliseconds(end_ms);
    return given;
  }

  Libraries all_;
  Page& page_;
  Stream stream_;
  Communicators comms_;
};

Error waited(const Answer& answer) {
  until([&] { return answer.here(); });
  CHECK_EQUAL(answer.calls.load(), 1);
  return answer.error;
}

const Error kLost{Code::peer_lost, "rank 2 is lost", 2};

// Reduces until it knows of the death, ends the generation, and goes on with the next one.
void survive(Page& page, int rank) {
  Process process(page);
  Memory memory(process.all().driver, 64);
  const CommKey first{0, 0, 0}, next{1, 0, 0};
  Answer made;
  process.create(first, rank, 3, made);
  std::vector<std::unique_ptr<Answer>> answers;
  while (page->death_known == 0) {
    if (answers.size() < 3 || answers[answers.size() - 3]->here()) {  // some are always under way
      answers.push_back(std::make_unique<Answer>());
      process.reduce(first, memory, 2, *answers.back());
      ++page->steps;
    }
    std::this_thread::yield();
  }
  process.comms().end(0, kLost);
  CHECK(process.comms().ended());
  for (const auto& answer : answers) {
    CHECK_EQUAL(answer->calls.load(), 1);
    CHECK(answer->error.code == Code::ok || answer->error.code == Code::peer_lost);
    if (answer->error.failed()) ++page->cut;
  }
  CHECK_EQUAL(made.calls.load(), 1);
  CHECK_EQUAL(process.live(), 0);
  CHECK(process.all().driver.stream_synchronize(process.stream()) == kSuccess);  // the old sums write no more
  Answer again, sum, late;
  process.create(next, rank, 2, again);
  memory[0] = static_cast<float>(rank + 1);
  process.reduce(next, memory, 1, sum);
  CHECK_EQUAL(waited(again).message, "");
  CHECK_EQUAL(waited(sum).message, "");
  CHECK_EQUAL(memory[0], 3.0f);
  process.reduce(first, memory, 1, late);
  CHECK(waited(late).code == Code::peer_lost);
}

}  // namespace

TEST(batches_of_overlapping_groups_run_in_order_on_one_thread) {
  Page page;
  processes::ranks(3, [&](int rank) {
    set("STANDIN_NCCL_FAULTS", "one_thread");
    Process process(page);
    const CommKey every{0, 0, 0}, low{0, 1, 0}, high{0, 2, 0};  // all; 0 and 1; 1 and 2
    Answer made[3], sums[60];
    process.create(every, rank, 3, made[0]);
    if (rank < 2) process.create(low, rank, 2, made[1]);
    if (rank > 0) process.create(high, rank - 1, 2, made[2]);
    std::vector<Memory> memory;
    memory.reserve(60);
    int count = 0;
    for (int step = 0; step < 20; ++step)
      for (int group = 0; group < 3; ++group) {
        const bool mine = group == 0 || (group == 1 ? rank < 2 : rank > 0);
        memory.emplace_back(process.all().driver, 64);
        for (int i = 0; i < 64; ++i) memory.back()[static_cast<std::size_t>(i)] = static_cast<float>(step + 1);
        if (mine) process.reduce({0, group, 0}, memory.back(), 4, sums[count]);
        ++count;
      }
    count = 0;
    for (int step = 0; step < 20; ++step)
      for (int group = 0; group < 3; ++group, ++count) {
        if (group == 1 ? rank == 2 : group == 2 && rank == 0) continue;
        CHECK_EQUAL(waited(sums[count]).message, "");
        const float members = group == 0 ? 3 : 2;
        CHECK_EQUAL(memory[static_cast<std::size_t>(count)][63], members * static_cast<float>(step + 1));
      }
    process.comms().end(0, {Code::shut_down, "over"});
    CHECK(process.comms().ended());
    CHECK_EQUAL(process.live(), 0);
  });
}

TEST(a_member_that_never_comes_ends_the_creation_in_time) {
  for (const char* faults : {"", "init_never_ends"})
    alone([=] {
      set("STANDIN_NCCL_FAULTS", faults);
      Page page;
      Process process(page, 200);
      Memory memory(process.all().driver, 16);
      Answer made, sum;
      process.create({0, 0, 0}, 0, 2, made);
      process.reduce({0, 0, 0}, memory, 1, sum);
      CHECK(waited(made).code == Code::timed_out && waited(sum).code == Code::timed_out);
      process.comms().end(0, kLost);
      CHECK(process.comms().ended());
      CHECK_EQUAL(process.live(), 0);
    });
  alone([] {  // its id never comes
    Page page;
    Process process(page, 200);
    Answer made;
    process.create({0, 0, 0}, 1, 2, made);
    CHECK(waited(made).code == Code::timed_out);
  });
}

TEST(an_asynchronous_error_ends_what_runs_and_what_waits) {
  alone([] {
    set("STANDIN_NCCL_ASYNC_ERROR_AFTER", "3");
    Page page;
    Process process(page);
    Memory memory(process.all().driver, 64);
    Answer made, answers[5];
    process.create({0, 0, 0}, 0, 1, made);
    for (Answer& answer : answers) process.reduce({0, 0, 0}, memory, 1, answer);
    CHECK_EQUAL(waited(made).message, "");
    CHECK_EQUAL(waited(answers[4]).message, "a communicator of NCCL failed with result 6");
    int failed = 0;
    for (const Answer& answer : answers) failed += waited(answer).failed() ? 1 : 0;
    CHECK(failed >= 2);
    process.comms().end(0, kLost);
    CHECK(process.comms().ended());
    CHECK_EQUAL(process.live(), 0);
  });
}

TEST(what_is_not_needed_any_more_is_finalized_and_destroyed_behind_what_runs) {
  Page page;
  processes::ranks(2, [&](int rank) {
    set("STANDIN_NCCL_FAULTS", "one_thread");
    Answer made, other, sum;
    {
      Process process(page);
      Memory memory(process.all().driver, 64);
      memory[0] = 1;
      process.create({0, 0, 0}, rank, 2, made);
      process.create({0, 1, 0}, rank, 2, other);
      CHECK_EQUAL(waited(made).message, "");
      CHECK_EQUAL(waited(other).message, "");
      process.reduce({0, 0, 0}, memory, 1, sum);
      process.comms().retire({0, 0, 0});
      CHECK_EQUAL(waited(sum).message, "");
      CHECK_EQUAL(memory[0], 2.0f);
      until([&] { return process.live() == 1; });
    }
    CHECK_EQUAL(Process::live(), 0);  // the other one went with its owner
    CHECK_EQUAL(Process::live(true), 0);
  });
}

TEST(an_abort_that_hangs_is_given_up_in_time_and_reported) {
  alone([] {
    set("STANDIN_NCCL_FAULTS", "abort_hangs");
    Page page;
    Answer made, sum, other, later;
    const auto began = steady_clock::now();
    {
      Process process(page, 30000, 200);
      Memory memory(process.all().driver, 64);
      process.create({0, 0, 0}, 0, 1, made);
      CHECK_EQUAL(waited(made).message, "");
      process.create({1, 1, 0}, 1, 2, other);  // of the next generation; its first member never comes
      process.reduce({1, 1, 0}, memory, 1, sum);
      process.comms().end(0, kLost);
      CHECK(!process.comms().ended() && Communicators::abort_hung());
      CHECK(waited(other).code == Code::internal && waited(sum).code == Code::internal);
      process.create({2, 0, 0}, 0, 1, later);
      CHECK(waited(later).message.find("did not return") != std::string::npos);
      process.comms().end(1, kLost);
      CHECK(!process.comms().ended());
    }
    CHECK(steady_clock::now() - began < std::chrono::seconds(5));
    ::_exit(0);  // the thread that was given up is still there
  });
}

TEST(a_hundred_kills_at_random_moments_cause_no_hang) {
  std::mt19937 random(28);
  int cut = 0;  // rounds in which the kill came into work under way
  for (int round = 0; round < 100; ++round) {
    Page page;
    // Every other round without ncclCommRevoke, as before 2.28.7.
    set("STANDIN_NCCL_VERSION", round % 2 == 0 ? "22809" : "22705");
    std::vector<processes::Child> ranks;
    for (int rank = 0; rank < 3; ++rank) ranks.push_back(processes::start([&page, rank] { survive(page, rank); }));
    const int steps = static_cast<int>(random() % 40);
    if (round % 5 != 0) until([&] { return page->steps >= steps; });          // else: at the start
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));  // sleep: the random moment
    ::kill(ranks[2].id, SIGKILL);
    CHECK_EQUAL(processes::result_of(ranks[2]), "killed");
    page->death_known = 1;
    const auto began = steady_clock::now();
    const std::string first = processes::result_of(ranks[0]), second = processes::result_of(ranks[1]);
    if (!first.empty() || !second.empty())
      throw std::runtime_error("round " + std::to_string(round) + ": " + first + "; " + second);
    CHECK(steady_clock::now() - began < std::chrono::seconds(20));
    cut += page->cut > 0 ? 1 : 0;
  }
  CHECK(cut >= 50);
}
