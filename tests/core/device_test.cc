// Tensors in the memory of GPUs through the C interface: which way they take, when they are ready, and what a death
// does. Touches api/ through job.h, cuda/ and the stand-ins.
#include <signal.h>

#include <cstdlib>

#include "gpu_job.h"
#include "processes.h"

namespace {

using namespace gpu_job;
using farandole::cuda::Address;

constexpr std::size_t kCount = 1000;

}  // namespace

TEST(an_allreduce_stays_on_the_device_in_place_and_out_of_place) {
  threads({0, 0, 0}, [](int rank, farandole_engine* engine) {
    const standin::Memory memory(libraries().driver, kCount), result(libraries().driver, kCount);
    fill(memory.data(), kCount, static_cast<float>(rank));
    Request(kAllreduce, memory.data(), result.data(), {kCount}).succeed(engine);
    CHECK(all_sums(result.data(), kCount, 3));
    CHECK_EQUAL(memory[1], static_cast<float>(rank + 1));
    Request in_place(kAllreduce, memory.data(), memory.data(), {kCount});
    in_place.request.op = kAverage;
    in_place.request.postscale = 3.0;
    in_place.succeed(engine);
    CHECK(all_sums(memory.data(), kCount, 3));
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), static_cast<int64_t>(2 * kCount * sizeof(float)));
  });
}

TEST(the_other_collectives_stay_on_the_device) {
  threads({0, 0}, [](int rank, farandole_engine* engine) {
    const auto mine = static_cast<float>(rank);
    const standin::Memory memory(libraries().driver, 8), result(libraries().driver, 16);
    fill(memory.data(), 8, 100 * mine);
    Request(kBroadcast, memory.data(), result.data(), {8}).succeed(engine);
    CHECK_EQUAL(result[7], 7.0f);
    Request gather(kAllgather, memory.data(), result.data(), {4, 2});
    gather.request.output_bytes = 16 * sizeof(float);
    gather.succeed(engine);
    CHECK(result[0] == 0 && result[7] == 7 && result[8] == 100 && result[15] == 107);
    const std::vector<int64_t> splits = rank == 0 ? std::vector<int64_t>{3, 5} : std::vector<int64_t>{5, 3};
    Request exchange(kAlltoall, memory.data(), result.data(), {8});
    exchange.request.output_bytes = 8 * sizeof(float);
    exchange.request.splits = splits.data();
    exchange.request.splits_count = 2;
    exchange.succeed(engine);
    if (rank == 0) CHECK(result[2] == 2 && result[3] == 100 && result[7] == 104);
    if (rank == 1) CHECK(result[0] == 3 && result[4] == 7 && result[5] == 105);
    Request(kReducescatter, memory.data(), result.data(), {8}).succeed(engine);
    CHECK_EQUAL(result[0], rank == 0 ? 100.0f : 108.0f);
    CHECK(farandole_counter(engine, kOnDeviceBytes) > 0);
  });
}

TEST(a_rank_with_host_memory_or_a_result_of_another_size_leads_all_through_host_memory) {
  threads({0, 0}, [](int rank, farandole_engine* engine) {
    const standin::Memory memory(libraries().driver, kCount);
    std::vector<float> host(kCount);
    float* place = rank == 0 ? memory.data() : host.data();
    fill(place, kCount, static_cast<float>(rank));
    Request request(kAllreduce, place, place, {kCount});
    if (rank == 1) request.request.on_device = 0;
    request.succeed(engine);
    CHECK(all_sums(place, kCount, 2));
    // Rank 1 sends more rows than rank 0 has expected.
    const int64_t rows = rank == 0 ? 2 : 3;
    const standin::Memory result(libraries().driver, 6);
    fill(memory.data(), 3, 10 * static_cast<float>(rank));
    Request gather(kAllgather, memory.data(), result.data(), {rows});
    gather.request.output_bytes = 2 * rows * static_cast<int64_t>(sizeof(float));
    const int64_t handle = job::submit(engine, gather.request);
    while (farandole_wait(engine, handle, 100) == 1) {
    }
    farandole_outcome outcome{};
    CHECK_EQUAL(farandole_outcome_of(engine, handle, &outcome), 0);
    CHECK_EQUAL(outcome.code, 0);
    CHECK_EQUAL(outcome.output_bytes, static_cast<int64_t>(5 * sizeof(float)));
    const auto* found = static_cast<const float*>(outcome.output);
    CHECK(found != result.data() && found[1] == 1 && found[2] == 10 && found[4] == 12);
    farandole_release(engine, handle);
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), 0);
  });
}

TEST(device_tensors_of_several_hosts_go_through_host_memory_where_ranks_share_a_gpu) {
  threads({0, 0, 1}, [](int rank, farandole_engine* engine) {
    const standin::Memory memory(libraries().driver, kCount);
    fill(memory.data(), kCount, static_cast<float>(rank));
    Request(kAllreduce, memory.data(), memory.data(), {kCount}).succeed(engine);
    CHECK(all_sums(memory.data(), kCount, 3));
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), 0);
  });
}

TEST(memory_without_a_handle_is_copied_on_the_device) {
  threads({0, 0}, [](int rank, farandole_engine* engine) {
    const standin::Mapped memory(libraries().driver, standin::allocate(libraries().driver));
    auto* values = reinterpret_cast<float*>(memory.address);
    fill(values, kCount, static_cast<float>(rank));
    Request(kAllreduce, values, values, {kCount}).succeed(engine);
    CHECK(all_sums(values, kCount, 2));
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), static_cast<int64_t>(kCount * sizeof(float)));
  });
}

TEST(each_gpu_does_its_part_when_the_ranks_have_several) {
  processes::alone([] {
    ::setenv("STANDIN_CUDA_DEVICES", "2", 1);
    libraries();
    const job::Job job({0, 0, 0});
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      use_gpus(engine);
      const standin::Memory memory(libraries().driver, kCount);
      fill(memory.data(), kCount, static_cast<float>(rank));
      Request request(kAllreduce, memory.data(), memory.data(), {kCount});
      request.request.on_device = rank == 1 ? 2 : 1;
      request.request.device = request.request.on_device - 1;
      request.succeed(engine);
      CHECK(all_sums(memory.data(), kCount, 3));
      CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), static_cast<int64_t>(kCount * sizeof(float)));
    });
  });
}

TEST(an_operation_waits_for_what_its_stream_has_to_do_first) {
  threads({0, 0}, [](int rank, farandole_engine* engine) {
    const farandole::cuda::Driver& driver = libraries().driver;
    static const standin::OnDevice flag(driver, sizeof(std::uint64_t));  // of both ranks
    farandole::cuda::Context context = nullptr;
    CHECK(driver.primary_retain(&context, 0) == 0 && driver.set_current(context) == 0);
    const standin::Memory memory(driver, kCount);
    std::vector<float> later(kCount);
    fill(later.data(), kCount, static_cast<float>(rank));
    farandole::cuda::Stream stream = libraries().stream();
    CHECK(driver.stream_wait_value64(stream, flag.address, 1, farandole::cuda::kWaitAtLeast) == 0);
    CHECK(driver.copy_to_device(reinterpret_cast<Address>(memory.data()), later.data(), kCount * sizeof(float),
                                stream) == 0);
    Request request(kAllreduce, memory.data(), memory.data(), {kCount});
    request.request.stream = stream;
    const int64_t handle = job::submit(engine, request.request);
    CHECK_EQUAL(farandole_poll(engine, handle), 0);
    if (rank == 0) CHECK(driver.stream_write_value64(nullptr, flag.address, 1, 0) == 0);
    CHECK_EQUAL(job::finish(engine, handle), 0);
    CHECK(all_sums(memory.data(), kCount, 2));
    driver.stream_destroy(stream);
  });
}

TEST(many_tensors_are_reduced_together) {
  threads({0, 0}, [](int rank, farandole_engine* engine) {
    constexpr std::size_t kTensors = 200;
    const standin::Memory memory(libraries().driver, kTensors * 16);
    std::vector<std::string> names;
    std::vector<farandole_request> requests;
    for (std::size_t i = 0; i < kTensors; ++i) names.push_back("tensor" + std::to_string(i));
    const std::vector<int64_t> shape{16};
    for (std::size_t i = 0; i < kTensors; ++i) {
      fill(memory.data() + 16 * i, 16, static_cast<float>(rank));
      requests.push_back(Request(kAllreduce, memory.data() + 16 * i, memory.data() + 16 * i, {16}).request);
      requests.back().name = names[i].c_str();
      requests.back().shape = shape.data();
    }
    std::vector<int64_t> handles(kTensors);
    char error[512];
    CHECK_EQUAL(farandole_submit(engine, requests.data(), kTensors, 1, 0, handles.data(), error, sizeof error), 0);
    for (std::size_t i = 0; i < kTensors; ++i) {
      CHECK_EQUAL(job::finish(engine, handles[i]), 0);
      CHECK(all_sums(memory.data() + 16 * i, 16, 2));
    }
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes), static_cast<int64_t>(kTensors * 16 * sizeof(float)));
  });
}

TEST(processes_open_each_others_memory_also_when_it_is_new) {
  two_processes({0, 0}, [](int rank, farandole_engine* engine) {
    for (std::size_t count : {kCount, 3 * kCount, std::size_t{1} << 20, kCount}) {
      const standin::Memory memory(libraries().driver, count), result(libraries().driver, count);
      fill(memory.data(), count, static_cast<float>(rank));
      const auto rows = static_cast<int64_t>(count);
      Request(kAllreduce, memory.data(), result.data(), {rows}).succeed(engine);
      CHECK(all_sums(result.data(), kCount, 2));
    }
    CHECK_EQUAL(farandole_counter(engine, kOnDeviceBytes),
                static_cast<int64_t>((5 * kCount + (std::size_t{1} << 20)) * sizeof(float)));
  });
}

TEST(a_death_ends_the_wait_for_a_stream_that_never_ends) {
  two_processes(
      {0, 0},
      [](int rank, farandole_engine* engine) {
        const farandole::cuda::Driver& driver = libraries().driver;
        static const standin::Memory memory(driver, kCount);  // the stream waits until the process ends
        static const standin::OnDevice never(driver, sizeof(std::uint64_t));
        farandole::cuda::Stream stream = libraries().stream();
        CHECK(driver.stream_wait_value64(stream, never.address, 1, farandole::cuda::kWaitAtLeast) == 0);
        Request request(kAllreduce, memory.data(), memory.data(), {kCount});
        request.request.stream = stream;
        const int64_t handle = job::submit(engine, request.request);
        if (rank == 1) ::kill(::getpid(), SIGKILL);
        std::string text;
        CHECK_EQUAL(job::finish(engine, handle, &text), static_cast<int>(kPeerLost));
        CHECK(text.find("rank 1") != std::string::npos);
      },
      true);
}
