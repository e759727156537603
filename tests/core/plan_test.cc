// Plans: recognising a step, following it, leaving it.
// Touches only negotiate/.
#include "negotiate/plan.h"

#include <functional>

#include "check.h"
#include "requests.h"

namespace farandole::negotiate {
namespace {

Planned planned(const std::vector<Request>& requests) {
  Bucket bucket;
  bucket.kind = requests.front().kind;
  for (const Request& request : requests) {
    Item item;
    item.name = request.name;
    item.unnamed = request.unnamed;
    item.shape = request.shape;
    bucket.items.push_back(item);
  }
  return {bucket, requests};
}

// The same with its bucket changed.
Planned changed(const Planned& planned, const std::function<void(Bucket&)>& change) {
  Bucket bucket = *planned.bucket;
  change(bucket);
  return {bucket, planned.requests};
}

using Match = Follower::Match;

TEST(a_repeated_step_becomes_a_plan_in_any_order) {
  Recorder recorder(100);
  CHECK(!recorder.record(planned({named("a"), named("b")})));
  CHECK(!recorder.record(planned({named("c")})));
  CHECK(!recorder.record(planned({named("c"), named("a")})));
  CHECK(recorder.record(planned({named("b")})));
  CHECK_EQUAL(recorder.plan().size(), 2u);
  recorder.diverted(1);
  CHECK(recorder.record(planned({named("b")})));
  recorder.diverted(0);
  CHECK(!recorder.record(planned({named("a")})));
  CHECK(!recorder.record(planned({named("b")})));  // a step of two so far
  CHECK(!recorder.record(planned({named("a")})));
  CHECK(recorder.record(planned({named("b")})));
}

TEST(an_operation_that_cannot_be_planned_ends_the_recording) {
  Recorder none(0), small(1), recorder(100);
  for (int i = 0; i < 4; ++i) {
    CHECK(!none.record(planned({named("a")})));
    CHECK(!small.record(planned({named("a"), named("b")})));
  }
  Planned barrier = changed(planned({named("barrier")}), [](Bucket& bucket) { bucket.kind = Kind::barrier; });
  Planned joined = changed(planned({named("a")}), [](Bucket& bucket) { bucket.joined = 1; });
  joined.requests.clear();
  Planned failed = changed(planned({named("a")}), [](Bucket& bucket) { bucket.error = {Code::precondition, "no"}; });
  for (const Planned& fence : {barrier, joined, failed}) {
    recorder.reset();
    CHECK(!recorder.record(planned({named("a")})));
    CHECK(!recorder.record(fence));
    CHECK(!recorder.record(planned({named("a")})));
    CHECK(recorder.record(planned({named("a")})));
  }
}

TEST(unnamed_tensors_repeat_within_a_step) {
  Recorder loop(100);
  CHECK(!loop.record(planned({unnamed(1)})));
  CHECK(loop.record(planned({unnamed(2)})));
  CHECK_EQUAL(loop.plan().size(), 1u);

  Recorder metrics(100);
  int number = 0;
  for (int step = 0; step < 2; ++step) {
    CHECK(!metrics.record(planned({named("a")})));
    CHECK(!metrics.record(planned({unnamed(++number)})));
    CHECK_EQUAL(metrics.record(planned({unnamed(++number)})), step == 1);
  }
  CHECK_EQUAL(metrics.plan().size(), 3u);

  // A A B: the plan of A alone is left at once, and the next one is the whole step.
  Recorder recorder(100);
  std::size_t length = 0;
  for (int step = 0; step < 6 && length != 3; ++step) {
    for (std::int64_t rows : {4, 4, 5}) {
      if (!recorder.record(planned({unnamed(++number, rows)}))) continue;
      length = recorder.plan().size();
      if (length != 3) recorder.diverted(0, 0);
    }
  }
  CHECK_EQUAL(length, 3u);
}

TEST(alternating_steps_stop_being_planned) {
  Recorder recorder(100);
  int plans = 0;
  for (int step = 0; step < 200; ++step) {
    std::vector<std::string> names = {"a", "b"};
    if (step % 2 == 0) names.push_back("c");
    for (const std::string& name : names) {
      if (!recorder.record(planned({named(name)}))) continue;
      ++plans;
      recorder.diverted(0, 0);
    }
  }
  CHECK(plans < 8);
}

TEST(a_plan_holds_whole_bundles) {
  Recorder recorder(100);
  const auto part = [&](const char* name, const char* bundle) {
    return recorder.record(planned({bundled(name, bundle, 2)}));
  };
  CHECK(!part("a", "x1"));
  CHECK(!part("b", "x1"));
  CHECK(!part("b", "x2"));
  CHECK(part("a", "x2"));
  // Recording that began within a bundle: the step is complete only when the next bundle is.
  recorder.reset();
  CHECK(!part("b", "y0"));
  CHECK(!part("a", "y1"));
  CHECK(!part("b", "y1"));
  CHECK(!part("a", "y2"));
}

TEST(a_follower_fills_buckets_of_this_and_the_next_step) {
  const std::vector<Planned> plan = {planned({named("a"), named("b")}), planned({named("c")})};
  Follower follower(plan);
  CHECK(follower.offer(named("c"), 1) == Match::planned);
  CHECK(follower.offer(named("b"), 2) == Match::planned);
  CHECK(follower.incomplete(1));
  CHECK(follower.offer(named("a"), 3) == Match::filled);
  CHECK_EQUAL(follower.ready(), 2u);
  CHECK(!follower.anything_incomplete());
  CHECK(follower.offer(named("a"), 4) == Match::planned);  // of the next pass
  CHECK(follower.anything_incomplete());
  CHECK(follower.take(0) == (std::vector<std::int64_t>{3, 2}));
  CHECK(follower.take(1) == (std::vector<std::int64_t>{1}));
  CHECK(follower.offer(named("c"), 5) == Match::planned);
  CHECK(follower.offer(named("b"), 6) == Match::filled);
  CHECK_EQUAL(follower.ready(), 4u);
  CHECK(follower.offer(named("d"), 7) == Match::unplanned);
  CHECK(follower.offer(named("a", 5), 7) == Match::unplanned);
  CHECK(follower.take(2) == (std::vector<std::int64_t>{4, 6}));
  CHECK(follower.withdraw(3) == (std::vector<std::int64_t>{5}));
  CHECK_THROWS(follower.take(3), Failure);
}

TEST(withdrawn_requests_keep_their_order) {
  Follower follower({planned({named("a")}), planned({named("b")}), planned({named("c"), named("d")})});
  follower.offer(named("c"), 30);
  follower.offer(named("b"), 20);
  follower.offer(named("a"), 10);
  CHECK_EQUAL(follower.ready(), 2u);
  CHECK(follower.withdraw(1) == (std::vector<std::int64_t>{30, 20}));
  CHECK(follower.take(0) == (std::vector<std::int64_t>{10}));
}

TEST(unnamed_requests_match_by_order_within_their_kind) {
  Follower follower({planned({unnamed(8, 5)}), planned({unnamed(7, 4), named("a")})});
  CHECK(follower.offer(unnamed(9, 5), 1) == Match::unplanned);
  CHECK(follower.offer(unnamed(9, 4), 1) == Match::planned);
  CHECK(follower.offer(unnamed(10, 5), 2) == Match::filled);
  CHECK(follower.offer(named("a"), 3) == Match::filled);
  CHECK_EQUAL(follower.ready(), 2u);
  CHECK(follower.take(0) == (std::vector<std::int64_t>{2}));
  CHECK(follower.take(1) == (std::vector<std::int64_t>{1, 3}));
}

TEST(bundles_are_never_split) {
  Follower follower({planned({bundled("a", "x", 2)}), planned({bundled("b", "x", 2), named("c")})});
  CHECK(follower.offer(bundled("a", "y", 2), 1) == Match::planned);
  CHECK(follower.offer(bundled("b", "y", 2), 2) == Match::planned);
  CHECK_EQUAL(follower.ready(), 0u);  // stopping after a would leave b without its bundle
  CHECK(follower.incomplete(1));
  CHECK(follower.offer(named("c"), 3) == Match::filled);
  CHECK_EQUAL(follower.ready(), 2u);
  CHECK(follower.offer(named("a"), 4) == Match::unplanned);
}

}  // namespace
}  // namespace farandole::negotiate
