// Failures in unusual places of the engine: no memory, an exception in the progress loop, a full queue of events.
// Touches api/ through job.h, and engine/events.h.
#include "check.h"
#include "engine/events.h"
#include "job.h"

using namespace job;

namespace {

enum { kAllreduce = 0 };
enum { kRevoked = 7, kNoMemory = 9, kInternal = 10 };

struct Failpoint {
  Failpoint(farandole_engine* engine, const char* point, const char* action) : engine_(engine), point_(point) {
    CHECK_EQUAL(farandole_chaos_set(engine, point, action, 0), 0);
  }
  ~Failpoint() { farandole_chaos_set(engine_, point_, "off", 0); }
  int64_t fired() const { return farandole_chaos_fired(engine_, point_); }

 private:
  farandole_engine* engine_;
  const char* point_;
};

}  // namespace

TEST(no_memory_inside_a_collective_names_the_rank_without_memory) {
  Job job({0, 0});
  Failpoint failpoint(job.engine(1), "allreduce.reduce", "no_memory");
  std::vector<int> codes(2);
  std::vector<std::string> texts(2);
  job.run([&](int rank) {
    Tensor tensor(1000, 1);
    const auto index = static_cast<std::size_t>(rank);
    codes[index] = finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "x", tensor)), &texts[index]);
  });
  CHECK_EQUAL(failpoint.fired(), 1);
  CHECK_EQUAL(codes[1], kNoMemory);
  // Rank 0 may have its result already; then its next operation ends with the other rank's lack of memory.
  Tensor tensor(1000, 1);
  CHECK_EQUAL(finish(job.engine(0), submit(job.engine(0), request(kAllreduce, "y", tensor)), &texts[0]), kRevoked);
  CHECK(texts[0].find("rank 1 out of memory") != std::string::npos);
}

TEST(an_exception_in_the_progress_loop_releases_its_lock) {
  for (const char* action : {"error", "no_memory"}) {
    Job job({0, 0});
    Failpoint failpoint(job.engine(0), "allreduce.sleep", action);
    Tensor tensor(1000, 1);
    const int code = finish(job.engine(0), submit(job.engine(0), request(kAllreduce, "x", tensor)));
    CHECK(code == kInternal || code == kNoMemory);
    CHECK_EQUAL(failpoint.fired(), 1);
    int64_t values[5];
    CHECK_EQUAL(farandole_tuning(job.engine(0), values), 0);  // waits for the lock of the progress loop
  }
}

TEST(no_memory_after_negotiation_before_queueing_fails_the_agreed_operations) {
  Job job({0, 0});
  Failpoint failpoint(job.engine(1), "allreduce.agree", "no_memory");
  std::vector<int> codes(2);
  job.run([&](int rank) {
    Tensor tensor(1000, 1);
    const auto index = static_cast<std::size_t>(rank);
    codes[index] =
        finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "x", tensor)), nullptr, nullptr, 20);
  });
  CHECK_EQUAL(failpoint.fired(), 1);
  CHECK_EQUAL(codes[1], kNoMemory);
  CHECK_EQUAL(codes[0], kRevoked);
}

TEST(no_memory_when_a_plan_starts_fails_operations_still_in_negotiation) {
  Job job({0, 0});
  Failpoint failpoint(job.engine(1), "allreduce.activate", "no_memory");
  Tensor only_here(10, 1);
  const int64_t in_negotiation = submit(job.engine(1), request(kAllreduce, "only here", only_here));
  job.run([&](int rank) {
    Tensor tensor(1000, 1);
    for (int step = 0, code = 0; step < 100 && code == 0; ++step)
      code = finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "x", tensor)), nullptr, nullptr, 20);
  });
  CHECK_EQUAL(failpoint.fired(), 1);
  CHECK_EQUAL(finish(job.engine(1), in_negotiation, nullptr, nullptr, 20), kNoMemory);
}

TEST(no_memory_in_the_middle_of_a_bucket_completes_every_operation_exactly_once) {
  Job job({0, 0});
  const int64_t queue = farandole_open_queue(job.engine(1));
  Failpoint failpoint(job.engine(1), "allreduce.finished", "no_memory");
  std::vector<std::size_t> ended(2);
  job.run([&](int rank) {
    Tensor one(100, 1), two(100, 1);
    const farandole_request both[] = {request(kAllreduce, "a", one), request(kAllreduce, "b", two)};
    int64_t handles[2];
    char error[512];
    CHECK_EQUAL(farandole_submit(job.engine(rank), both, 2, 1, rank == 1 ? queue : 0, handles, error, sizeof error), 0);
    const int first = finish(job.engine(rank), handles[0]), second = finish(job.engine(rank), handles[1]);
    if (rank == 1) {
      CHECK_EQUAL(first, 0);
      CHECK_EQUAL(second, kNoMemory);
    }
  });
  CHECK_EQUAL(failpoint.fired(), 1);
  int completions = 0;
  while (farandole_next_completion(job.engine(1), queue, 100) > 0) ++completions;
  CHECK_EQUAL(completions, 2);
}

TEST(no_memory_while_submitting_leaves_nothing_behind) {
  Job job({0, 0});
  constexpr const char* kNames[2][2] = {{"x", "y"}, {nullptr, nullptr}};
  for (const auto& names : kNames) {
    Failpoint failpoint(job.engine(1), "allreduce.submit", "no_memory");
    Tensor one(100, 1), two(100, 1);
    const farandole_request both[] = {request(kAllreduce, names[0], one), request(kAllreduce, names[1], two)};
    int64_t handles[2];
    char error[512];
    CHECK_EQUAL(farandole_submit(job.engine(1), both, 2, 0, 0, handles, error, sizeof error), kNoMemory);
    CHECK_EQUAL(failpoint.fired(), 1);
    job.run([&](int rank) {
      Tensor again(100, 1), more(100, 1);
      const int64_t first = submit(job.engine(rank), request(kAllreduce, names[0], again));
      const int64_t second = submit(job.engine(rank), request(kAllreduce, names[1], more));
      CHECK_EQUAL(finish(job.engine(rank), first, nullptr, nullptr, 20), 0);
      CHECK_EQUAL(finish(job.engine(rank), second, nullptr, nullptr, 20), 0);
      CHECK_EQUAL(again.data[0], 2.0f);
    });
  }
}

TEST(a_full_event_queue_loses_no_link_request) {
  farandole::Events events;
  constexpr int kLines = 10'000, kLinkRequests = 300;
  for (int i = 0; i < kLines; ++i) events.push({farandole::EventKind::log, -1, farandole::Level::info, "line"});
  for (int peer = 0; peer < kLinkRequests; ++peer)
    events.push({farandole::EventKind::link_wanted, peer, farandole::Level::info, ""});
  int lines = 0, link_requests = 0;
  farandole::BindingEvent event;
  while (events.next(event, 0) == farandole::Events::Next::event) {
    if (event.kind == farandole::EventKind::log) {
      ++lines;
    } else {
      CHECK_EQUAL(event.peer, link_requests);
      ++link_requests;
    }
  }
  CHECK(lines < kLines);
  CHECK_EQUAL(link_requests, kLinkRequests);
}
