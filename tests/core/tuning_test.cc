// Tuning while a job runs: rank 0 changes a value, all ranks apply it at the same point, and no result changes.
// Touches api/ through job.h, and engine/tuning.h.
#include "engine/tuning.h"

#include <array>
#include <atomic>

#include "check.h"
#include "job.h"

using namespace job;

namespace {

constexpr int kAllreduce = 0, kTune = 11;
constexpr int kPlanned = 4, kSteps = 9, kStepNs = 10, kStepBytes = 11;
using Values = std::array<int64_t, 6>;  // fusion_threshold, flush_us, spin_us, chunk_bytes, streams, measuring

farandole_request tune_request(const Values& values) {
  farandole_request made{};
  made.kind = kTune;
  made.peer = made.device = -1;
  made.splits = values.data();
  made.splits_count = static_cast<int32_t>(values.size());
  made.prescale = made.postscale = 1.0;
  return made;
}

int64_t tune(farandole_engine* engine, const Values& values) { return submit(engine, tune_request(values)); }

// One step of tensors of many sizes, all under way at once; every sum is checked.
void step(const Job& job, int rank, int number) {
  std::vector<Tensor> tensors;
  std::vector<int64_t> handles;
  for (std::size_t elements : {1, 300, 20000, 70001, 5})
    tensors.emplace_back(elements, static_cast<float>(rank + number % 7));
  for (std::size_t i = 0; i < tensors.size(); ++i)
    handles.push_back(
        submit(job.engine(rank), request(kAllreduce, ("gradient." + std::to_string(i)).c_str(), tensors[i])));
  const float expected = static_cast<float>(job.size() * (job.size() - 1) / 2 + job.size() * (number % 7));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CHECK_EQUAL(finish(job.engine(rank), handles[i]), 0);
    for (float value : tensors[i].data) CHECK_EQUAL(value, expected);
  }
}

}  // namespace

TEST(tuning_values_are_checked) {
  farandole::Tuning tuning;
  bool measuring = false;
  CHECK(!farandole::Tuning::read({0, 0, 0, 64, 1, 1}, tuning, measuring).failed());
  CHECK(measuring && tuning.fusion_threshold == 0 && tuning.chunk_bytes == 64);
  for (const std::vector<std::int64_t>& bad : std::vector<std::vector<std::int64_t>>{{},
                                                                                     {0, 0, 0, 64, 1},
                                                                                     {-1, 0, 0, 64, 1, 0},
                                                                                     {0, 0, 0, 65, 1, 0},
                                                                                     {0, 0, 0, 0, 1, 0},
                                                                                     {0, 0, 0, 64, 0, 0},
                                                                                     {0, 0, 0, 64, 65, 0},
                                                                                     {0, INT64_MAX, 0, 64, 1, 0}})
    CHECK(farandole::Tuning::read(bad, tuning, measuring).failed());
}

TEST(a_switch_between_any_two_steps_changes_no_sum) {
  const Values candidates[] = {{0, 0, 0, 64, 1, 1},
                               {1 << 20, 100, 50, 4096, 2, 1},
                               {300, 20000, 10, 1 << 20, 1, 0},
                               {128 << 20, 20000, 100, 256 << 10, 2, 1}};
  for (const std::vector<int>& hosts : {std::vector<int>{0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    Job job(hosts);
    job.run([&](int rank) {
      for (int number = 0; number < 48; ++number) {
        int64_t handle = 0;
        if (rank == 0 && number % 3 == 0) handle = tune(job.engine(0), candidates[number / 3 % 4]);
        step(job, rank, number);
        if (handle != 0) CHECK_EQUAL(finish(job.engine(0), handle), 0);
      }
    });
  }
}

// A second thread makes the change: it happens in the middle of steps, at any point of the other ranks.
TEST(a_switch_within_a_step_changes_no_sum) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1}, {0, 0, 1}}) {
    Job job(hosts);
    std::atomic<bool> over{false};
    std::thread tuner([&] {
      for (int64_t turn = 0; !over; ++turn) {
        const Values values{turn % 2 == 0 ? 0 : 64 << 20, 20000, 100, 64 << (turn % 5 * 3), 1 + turn % 2, turn % 2};
        CHECK_EQUAL(finish(job.engine(0), tune(job.engine(0), values)), 0);
      }
    });
    job.run([&](int rank) {
      for (int number = 0; number < 60; ++number) step(job, rank, number);
    });
    over = true;
    tuner.join();
  }
}

TEST(steps_are_measured_and_the_plan_comes_back) {
  Job job({0, 0});
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    for (int turn = 0; turn < 6; ++turn) {
      if (rank == 0) CHECK_EQUAL(finish(engine, tune(engine, {1 << 20, 20000, 100, 4096, 1, 1})), 0);
      const int64_t planned = farandole_counter(engine, kPlanned);
      for (int number = 0; number < 12; ++number) step(job, rank, number);
      CHECK(farandole_counter(engine, kPlanned) - planned >= 6);
    }
    if (rank != 0) return;
    CHECK(farandole_counter(engine, kSteps) >= 11 && farandole_counter(engine, kSteps) <= 13);
    CHECK(farandole_counter(engine, kStepBytes) >= 11 * 4 * 90000);
    CHECK(farandole_counter(engine, kStepNs) > 0);
    CHECK_EQUAL(finish(engine, tune(engine, {1 << 20, 20000, 100, 4096, 1, 0})), 0);
    CHECK_EQUAL(farandole_counter(engine, kSteps), 0);
  });
}

TEST(only_rank_0_tunes_and_only_with_valid_values) {
  Job job({0, 0});
  char error[512];
  int64_t handle = 0;
  Values good{1 << 20, 20000, 100, 4096, 1, 1}, bad{1 << 20, 20000, 100, 100, 1, 1};
  farandole_request asked = tune_request(good);
  CHECK_EQUAL(farandole_submit(job.engine(1), &asked, 1, 0, 0, &handle, error, sizeof error), 2);
  CHECK(std::string(error).find("only rank 0") != std::string::npos);
  asked = tune_request(bad);
  CHECK_EQUAL(farandole_submit(job.engine(0), &asked, 1, 0, 0, &handle, error, sizeof error), 2);
  CHECK(std::string(error).find("multiple of 64") != std::string::npos);
  job.run([&](int rank) { step(job, rank, 1); });
}

TEST(tuning_while_ranks_have_joined) {
  Job job({0, 0, 1});
  job.run([&](int rank) {
    Tensor nothing(0);
    farandole_request join = request(6, nullptr, nothing);
    for (int number = 0; number < 10; ++number) {
      step(job, rank, number);
      if (rank == 0 && number == 5) CHECK_EQUAL(finish(job.engine(0), tune(job.engine(0), {0, 0, 0, 64, 1, 1})), 0);
    }
    if (rank != 2) {
      Tensor more(1000, 1);
      CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "more", more))), 0);
      if (rank == 0) CHECK_EQUAL(finish(job.engine(0), tune(job.engine(0), {9999, 5, 5, 4096, 2, 1})), 0);
    }
    CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), join)), 0);
    for (int number = 0; number < 10; ++number) step(job, rank, number);
  });
}
