// Tensors in the memory of GPUs that go through NCCL, on the stand-ins: every collective by value, which way is taken,
// one order of launches, and every failure. Touches api/ through job.h, the stand-ins and processes.
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "collective/launch_order.h"
#include "gpu_job.h"
#include "processes.h"

namespace {

using namespace gpu_job;
using farandole::collective::LaunchOrder;
using std::chrono::steady_clock;

enum { kFloat32 = 8, kFloat64 = 9, kInt32 = 5, kInt16 = 4, kBool = 0 };
constexpr std::size_t kCount = 1000;
constexpr auto kBytes = static_cast<int64_t>(kCount * sizeof(float));

int64_t by_nccl(farandole_engine* engine) { return farandole_counter(engine, kNcclBytes); }

int communicators() {
  void* image = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (image == nullptr) return 0;
  int now = -1, aborted = 0;
  reinterpret_cast<void (*)(int*, int*)>(::dlsym(image, "standin_nccl_counts"))(&now, &aborted);
  return now;
}

// One allreduce in place of elements `first + i`; what the first element is afterwards.
template <class T>
T reduced(farandole_engine* engine, int dtype, int op, T first, double prescale = 1, double postscale = 1) {
  const standin::OnDevice memory(libraries().driver, kCount * sizeof(T));
  T* values = reinterpret_cast<T*>(memory.address);
  for (std::size_t i = 0; i < kCount; ++i) values[i] = first;
  Request request(kAllreduce, values, values, {static_cast<int64_t>(kCount)});
  request.request.dtype = dtype;
  request.request.op = op;
  request.request.prescale = prescale;
  request.request.postscale = postscale;
  request.succeed(engine);
  CHECK(values[0] == values[kCount - 1]);
  return values[0];
}

// An allreduce that has to give the right sums, whatever way it takes.
void check_sums(farandole_engine* engine, int rank, int size, int device = 0) {
  const standin::Memory memory(libraries().driver, kCount), result(libraries().driver, kCount);
  fill(memory.data(), kCount, static_cast<float>(rank));
  Request request(kAllreduce, memory.data(), result.data(), {kCount});
  request.request.device = device;
  request.request.on_device = device + 1;
  request.succeed(engine);
  CHECK(all_sums(result.data(), kCount, size));
  CHECK_EQUAL(memory[1], static_cast<float>(rank + 1));
}

}  // namespace

TEST(the_launch_with_the_earlier_time_goes_first_also_when_the_later_one_is_agreed_first) {
  LaunchOrder order;
  LaunchOrder::Turn first(order, 7);
  LaunchOrder::Turn second(order, 3);
  CHECK(first.proposed() < second.proposed());
  second.agree(second.proposed());
  CHECK(!second.first() && !first.first());  // the first one could still get an earlier time
  first.agree(second.proposed() + 5);
  CHECK(second.first() && !first.first());
  {
    const LaunchOrder::Turn third(order, 1);
    CHECK(third.proposed() > second.proposed() + 5 && second.first());
  }
  LaunchOrder::Turn same(order, 2);
  same.agree(second.proposed() + 6);
  CHECK(second.first() && !same.first());
}

TEST(reductions_go_through_nccl_between_hosts) {
  threads({0, 1, 2}, [](int rank, farandole_engine* engine) {
    check_sums(engine, rank, 3);
    CHECK_EQUAL(by_nccl(engine), kBytes);
    const auto mine = static_cast<float>(rank + 1);  // 1, 2, 3
    CHECK_EQUAL(reduced(engine, kFloat32, kSum, mine, 2.0, 0.5), 6.0f);
    CHECK_EQUAL(reduced(engine, kFloat32, kAverage, mine), 2.0f);
    CHECK_EQUAL(reduced(engine, kFloat32, kAverage, mine, 1.0, 4.0), 8.0f);
    CHECK_EQUAL(reduced(engine, kFloat64, kProduct, static_cast<double>(mine)), 6.0);
    CHECK_EQUAL(reduced(engine, kFloat64, kMin, static_cast<double>(mine)), 1.0);
    CHECK_EQUAL(reduced(engine, kInt32, kMax, rank), 2);
    CHECK_EQUAL(reduced(engine, kInt32, kAverage, rank + 2), 3);
    CHECK_EQUAL(reduced<unsigned char>(engine, kBool, kSum, rank == 1), 1);
    CHECK_EQUAL(reduced<unsigned char>(engine, kBool, kProduct, rank == 1), 0);
    const int64_t before = by_nccl(engine);
    CHECK_EQUAL(before, static_cast<int64_t>((4 * sizeof(float) + 2 * sizeof(double) + 2 * sizeof(int) + 2) * kCount));
    CHECK_EQUAL(reduced<std::int16_t>(engine, kInt16, kSum, static_cast<std::int16_t>(rank)), 3);  // NCCL lacks it
    CHECK_EQUAL(by_nccl(engine), before);
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), 0);
  });
}

TEST(the_other_collectives_go_through_nccl_with_parts_of_any_size) {
  threads({0, 1, 2}, [](int rank, farandole_engine* engine) {
    const auto mine = static_cast<float>(100 * rank);
    const standin::Memory memory(libraries().driver, 16), result(libraries().driver, 32);
    fill(memory.data(), 16, mine);
    Request spread(kBroadcast, memory.data(), result.data(), {8});
    spread.request.peer = 2;
    spread.succeed(engine);
    CHECK_EQUAL(result[7], 207.0f);
    for (const bool even : {true, false}) {
      const int64_t rows = even ? 2 : rank;  // 0, 1 and 2
      Request gather(kAllgather, memory.data(), result.data(), {rows, 2});
      gather.request.output_bytes = (even ? 12 : 6) * static_cast<int64_t>(sizeof(float));
      gather.succeed(engine);
      if (even) CHECK(result[3] == 3 && result[4] == 100 && result[11] == 203);
      if (!even) CHECK(result[0] == 100 && result[1] == 101 && result[2] == 200 && result[5] == 203);
      const int64_t length = even ? 9 : 7;  // shares of 3, 3, 3 or 3, 2, 2
      Request(kReducescatter, memory.data(), result.data(), {length}).succeed(engine);
      const int start = even ? 3 * rank : rank == 0 ? 0 : 2 * rank + 1;
      CHECK_EQUAL(result[1], 300.0f + 3 * static_cast<float>(start + 1));
    }
    Request scaled(kReducescatter, memory.data(), result.data(), {9});
    scaled.request.prescale = 2.0;
    scaled.succeed(engine);
    CHECK_EQUAL(result[0], 600.0f + 18 * static_cast<float>(rank));
    CHECK_EQUAL(memory[1], mine + 1);
    const std::vector<int64_t> splits[] = {{1, 2, 3}, {0, 4, 2}, {5, 0, 1}};
    Request exchange(kAlltoall, memory.data(), result.data(), {6});
    exchange.request.splits = splits[rank].data();
    exchange.request.splits_count = 3;
    exchange.request.output_bytes = 6 * static_cast<int64_t>(sizeof(float));
    exchange.succeed(engine);
    if (rank == 0) CHECK(result[0] == 0 && result[1] == 200 && result[5] == 204);
    if (rank == 1) CHECK(result[0] == 1 && result[1] == 2 && result[2] == 100 && result[5] == 103);
    if (rank == 2) CHECK(result[0] == 3 && result[2] == 5 && result[3] == 104 && result[5] == 205);
    CHECK_EQUAL(farandole_counter(engine, 0) > 0, true);
    CHECK(by_nccl(engine) > 0 && farandole_counter(engine, kOnDeviceBytes) == 0);
  });
}

TEST(tensors_of_a_group_are_packed_and_reduced_by_one_call) {
  for (const double prescale : {1.0, 0.5})
    threads({0, 1},
            [=](int rank, farandole_engine* engine) {
              constexpr std::size_t kTensors = 200;
              const standin::Memory memory(libraries().driver, kTensors * 24),
                  result(libraries().driver, kTensors * 24);
              std::vector<std::string> names;
              std::vector<farandole_request> requests;
              for (std::size_t i = 0; i < kTensors; ++i) names.push_back("tensor" + std::to_string(i));
              const std::vector<int64_t> shape{21};  // not a multiple of the arena's alignment
              for (std::size_t i = 0; i < kTensors; ++i) {
                fill(memory.data() + 24 * i, 21, static_cast<float>(rank));
                requests.push_back(Request(kAllreduce, memory.data() + 24 * i, result.data() + 24 * i, {21}).request);
                requests.back().name = names[i].c_str();
                requests.back().shape = shape.data();
                requests.back().prescale = prescale;
                requests.back().postscale = 1 / prescale;
              }
              std::vector<int64_t> handles(kTensors);
              char error[512];
              CHECK_EQUAL(
                  farandole_submit(engine, requests.data(), kTensors, 1, 0, handles.data(), error, sizeof error), 0);
              for (std::size_t i = 0; i < kTensors; ++i) {
                CHECK_EQUAL(job::finish(engine, handles[i]), 0);
                CHECK(all_sums(result.data() + 24 * i, 21, 2));
                CHECK_EQUAL(memory[24 * i + 1], static_cast<float>(rank + 1));
              }
              CHECK_EQUAL(by_nccl(engine), static_cast<int64_t>(kTensors * 21 * sizeof(float)));
            },
            {.variables = {{"STANDIN_NCCL_FAULTS", "one_thread"}}});
}

TEST(on_one_host_a_setting_chooses_it_and_ranks_that_share_a_gpu_map_their_memory) {
  for (const int use : {0, 1})
    threads({0, 0},
            [=](int rank, farandole_engine* engine) {
              check_sums(engine, rank, 2, rank);
              CHECK_EQUAL(by_nccl(engine), use == 1 ? kBytes : 0);
              check_sums(engine, rank, 2, 0);  // both on the first GPU
              CHECK_EQUAL(by_nccl(engine), use == 1 ? kBytes : 0);
              CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), use == 1 ? kBytes : 2 * kBytes);
            },
            {.use_nccl = use, .variables = {{"STANDIN_CUDA_DEVICES", "2"}}});
}

TEST(on_one_host_it_takes_the_place_of_memory_that_others_cannot_open) {
  two_processes({0, 0},
                [](int rank, farandole_engine* engine) {
                  for (int i = 0; i < 3; ++i) check_sums(engine, rank, 2, rank);
                  CHECK_EQUAL(by_nccl(engine), 3 * kBytes);
                  check_sums(engine, rank, 2, 0);  // on one GPU NCCL cannot
                  CHECK_EQUAL(by_nccl(engine), 3 * kBytes);
                  CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), 0);
                },
                false, {.variables = {{"STANDIN_CUDA_DEVICES", "2"}, {"STANDIN_CUDA_IPC", "0"}}});
}

TEST(one_rank_without_it_leads_all_another_way) {
  processes::alone([] {
    libraries();
    const job::Job job({0, 1});
    job.run([&](int rank) {
      use_gpus(job.engine(rank), rank == 0 ? 1 : 2);
      for (int i = 0; i < 3; ++i) check_sums(job.engine(rank), rank, 2);
      CHECK_EQUAL(by_nccl(job.engine(rank)), 0);
    });
  });
  for (const char* version : {"21706", "22501"})  // too old; its aborts hang
    threads({0, 1},
            [](int rank, farandole_engine* engine) {
              check_sums(engine, rank, 2);
              CHECK_EQUAL(by_nccl(engine), 0);
            },
            {.variables = {{"STANDIN_NCCL_VERSION", version}}});
}

TEST(an_initialisation_that_never_ends_leads_all_through_host_memory_in_time) {
  const auto began = steady_clock::now();
  threads({0, 1},
          [](int rank, farandole_engine* engine) {
            for (int i = 0; i < 3; ++i) check_sums(engine, rank, 2);
            CHECK_EQUAL(by_nccl(engine), 0);
            CHECK_EQUAL(communicators(), 0);
          },
          {.start_ms = 300, .variables = {{"STANDIN_NCCL_FAULTS", "init_never_ends"}}});
  CHECK(steady_clock::now() - began < std::chrono::seconds(10));
}

TEST(groups_that_overlap_and_are_asked_in_a_cycle_are_launched_in_one_order) {
  const char* rounds = std::getenv("FARANDOLE_TEST_ROUNDS");
  const int count = rounds == nullptr ? 200 : std::atoi(rounds);
  threads({0, 1, 2},
          [count](int rank, farandole_engine* engine) {
            const int64_t sets[] = {2, 0, 1, 2, 1, 2, 2, 2, 0};
            job::Tensor none(0);
            farandole_request add = job::request(kAddGroup, "sets", none);
            add.splits = sets;
            add.splits_count = 9;
            int64_t first = 0;
            CHECK_EQUAL(job::finish(engine, job::submit(engine, add), nullptr, &first), 0);
            const int mine[3][2] = {{0, 2}, {1, 0}, {2, 1}};  // each rank begins with another one
            const standin::Memory memory(libraries().driver, 3 * 64);
            for (int round = 0; round < count; ++round) {
              std::vector<int64_t> handles;
              for (int i = 0; i < 3; ++i) {
                float* place = memory.data() + 64 * i;
                std::fill_n(place, 64, 1.0f);
                Request request(kAllreduce, place, place, {64});
                request.request.name = nullptr;
                request.request.group = i < 2 ? static_cast<int>(first) + mine[rank][i] : 0;
                handles.push_back(job::submit(engine, request.request));
              }
              for (int64_t handle : handles) CHECK_EQUAL(job::finish(engine, handle), 0);
              CHECK(memory[63] == 2 && memory[64 + 63] == 2 && memory[2 * 64] == 3);
            }
            CHECK_EQUAL(by_nccl(engine), count * 3 * 64 * static_cast<int64_t>(sizeof(float)));
          },
          {.variables = {{"STANDIN_NCCL_FAULTS", "narrow,one_thread"}}});
}

TEST(a_process_set_that_is_removed_and_a_job_that_ends_leave_no_communicator) {
  processes::alone([] {
    libraries();
    {
      const job::Job job({0, 1, 2});
      job.run([&](int rank) {
        farandole_engine* engine = job.engine(rank);
        use_gpus(engine);
        check_sums(engine, rank, 3);
        const int64_t set[] = {2, 0, 1};
        job::Tensor none(0);
        farandole_request change = job::request(kAddGroup, "set", none);
        change.splits = set;
        change.splits_count = 3;
        int64_t id = 0;
        CHECK_EQUAL(job::finish(engine, job::submit(engine, change), nullptr, &id), 0);
        if (rank < 2) {
          const standin::Memory memory(libraries().driver, 16);
          fill(memory.data(), 16, static_cast<float>(rank));
          Request request(kAllreduce, memory.data(), memory.data(), {16});
          request.request.group = static_cast<int32_t>(id);
          request.succeed(engine);
          CHECK(all_sums(memory.data(), 16, 2));
          if (rank == 0) standin::until([] { return communicators() == 5; });  // three of all ranks, and two
        }
        change.kind = kRemoveGroup;
        change.splits = &id;
        change.splits_count = 1;
        CHECK_EQUAL(job::finish(engine, job::submit(engine, change)), 0);
        standin::until([] { return communicators() == 3; });
      });
    }
    CHECK_EQUAL(communicators(), 0);
  });
}

TEST(an_error_of_nccl_ends_the_generation_with_its_number) {
  threads({0, 1},
          [](int rank, farandole_engine* engine) {
            std::string text;
            int code = 0;
            for (int i = 0; i < 10 && code == 0; ++i) {
              const standin::Memory memory(libraries().driver, kCount);
              fill(memory.data(), kCount, static_cast<float>(rank));
              code = Request(kAllreduce, memory.data(), memory.data(), {kCount}).run(engine, &text);
            }
            CHECK_EQUAL(code, static_cast<int>(kInternal));
            CHECK(text.find("NCCL failed with result 6") != std::string::npos);
          },
          {.variables = {{"STANDIN_NCCL_ASYNC_ERROR_AFTER", "2"}}});
}

TEST(a_death_ends_what_nccl_runs_and_names_the_rank) {
  for (const char* version : {"22809", "22705"}) {  // with and without ncclCommRevoke
    two_processes(
        {0, 1},
        [](int rank, farandole_engine* engine) {
          check_sums(engine, rank, 2);
          CHECK_EQUAL(by_nccl(engine), kBytes);
          // Rank 1 dies between its part of the agreement and its launch: its stream would wait for ever.
          const standin::Memory memory(libraries().driver, std::size_t{1} << 22);
          Request request(kAllreduce, memory.data(), memory.data(), {1 << 22});
          const int64_t handle = job::submit(engine, request.request);
          if (rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));  // sleep: into the middle of the transfer
            ::kill(::getpid(), SIGKILL);
          }
          std::string text;
          CHECK_EQUAL(job::finish(engine, handle, &text), static_cast<int>(kPeerLost));
          CHECK(text.find("rank 1") != std::string::npos);
          CHECK_EQUAL(communicators(), 0);
          memory[0] = 5;                                               // nothing writes there any more
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // sleep: what still ran would write
          CHECK_EQUAL(memory[0], 5.0f);
        },
        true, {.variables = {{"STANDIN_NCCL_VERSION", version}}});
  }
}

TEST(an_abort_that_hangs_delays_the_error_but_not_for_ever) {
  const auto began = steady_clock::now();
  two_processes({0, 1},
                [](int rank, farandole_engine* engine) {
                  check_sums(engine, rank, 2);
                  static const standin::Memory memory(libraries().driver,
                                                      std::size_t{1} << 22);  // as long as the process
                  Request request(kAllreduce, memory.data(), memory.data(), {1 << 22});
                  const int64_t handle = job::submit(engine, request.request);
                  if (rank == 1) ::kill(::getpid(), SIGKILL);
                  CHECK_EQUAL(job::finish(engine, handle), static_cast<int>(kPeerLost));
                  ::_exit(0);  // the thread that was given up is still there
                },
                true, {.variables = {{"STANDIN_NCCL_FAULTS", "abort_hangs"}}});
  CHECK(steady_clock::now() - began < std::chrono::seconds(20));
}
