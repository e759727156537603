// What the engine does when something fails where nobody expects it: no memory, an exception at the driver's seat, a
// full queue of events. Touches api/ through job.h, and engine/events.h.
#include "check.h"
#include "engine/events.h"
#include "job.h"

using job::finish;
using job::Job;
using job::request;
using job::submit;
using job::Tensor;

namespace {

enum { kAllreduce = 0 };
enum { kRevoked = 7, kNoMemory = 9, kInternal = 10 };

struct Fault {
  Fault(farandole_engine* engine, const char* point, const char* action) : engine_(engine), point_(point) {
    CHECK_EQUAL(farandole_chaos_set(engine, point, action, 0), 0);
  }
  ~Fault() { farandole_chaos_set(engine_, point_, "off", 0); }
  int64_t fired() const { return farandole_chaos_fired(engine_, point_); }

 private:
  farandole_engine* engine_;
  const char* point_;
};

}  // namespace

TEST(no_memory_inside_a_collective_is_the_rule_for_no_memory) {
  Job job({0, 0});
  Fault fault(job.engine(1), "allreduce.reduce", "no_memory");
  std::vector<int> codes(2);
  std::vector<std::string> texts(2);
  job.run([&](int rank) {
    Tensor tensor(1000, 1);
    const auto index = static_cast<std::size_t>(rank);
    codes[index] = finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "x", tensor)), &texts[index]);
  });
  CHECK_EQUAL(fault.fired(), 1);
  CHECK_EQUAL(codes[1], kNoMemory);
  // Rank 0 may have had its result before; what it asks for next ends with the other's lack of memory.
  Tensor tensor(1000, 1);
  CHECK_EQUAL(finish(job.engine(0), submit(job.engine(0), request(kAllreduce, "y", tensor)), &texts[0]), kRevoked);
  CHECK(texts[0].find("rank 1 out of memory") != std::string::npos);
}

TEST(an_exception_while_the_seat_is_left_does_not_keep_it_taken) {
  for (const char* action : {"error", "no_memory"}) {
    Job job({0, 0});
    Fault fault(job.engine(0), "allreduce.settle", action);
    Tensor tensor(1000, 1);
    const int code = finish(job.engine(0), submit(job.engine(0), request(kAllreduce, "x", tensor)));
    CHECK(code == kInternal || code == kNoMemory);
    CHECK_EQUAL(fault.fired(), 1);
    int64_t values[5];
    CHECK_EQUAL(farandole_tuning(job.engine(0), values), 0);  // waits for the seat
  }
}

TEST(a_full_queue_loses_no_wish_for_a_link) {
  farandole::Events events;
  constexpr int kLines = 10'000, kWishes = 300;
  for (int i = 0; i < kLines; ++i) events.push({farandole::EventKind::log, -1, farandole::Level::info, "line"});
  for (int peer = 0; peer < kWishes; ++peer)
    events.push({farandole::EventKind::link_wanted, peer, farandole::Level::info, ""});
  int lines = 0, wishes = 0;
  farandole::BindingEvent event;
  while (events.next(event, 0) == farandole::Events::Next::event) {
    if (event.kind == farandole::EventKind::log) {
      ++lines;
    } else {
      CHECK_EQUAL(event.peer, wishes);
      ++wishes;
    }
  }
  CHECK(lines < kLines);
  CHECK_EQUAL(wishes, kWishes);
}
