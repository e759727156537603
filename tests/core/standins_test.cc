// The stand-ins for CUDA's libraries behave as the real ones: order on streams, memory of other processes, collectives
// between real processes, and the faults that they are told to have. Touches cuda/, the stand-ins and processes.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/nccl.h"
#include "cuda/nvrtc.h"
#include "processes.h"
#include "standin_process.h"

namespace {

using namespace farandole::cuda;
using processes::alone;
using standin::Libraries;
using standin::Memory;
using standin::OnDevice;
using standin::Shared;

void set(const char* variable, const char* value) { ::setenv(variable, value, 1); }

// A communicator of `size` ranks whose id rank 0 has put into shared memory.
Comm join(const Libraries& all, Shared& shared, int rank, int size, bool blocking = true) {
  if (rank == 0) {
    CHECK(all.nccl.get_unique_id(&shared.memory().id) == NcclResult::success);
    shared.memory().ready = 1;
  }
  standin::until([&] { return shared.memory().ready == 1; });
  CommConfig config;
  config.blocking = blocking ? 1 : 0;
  Comm comm = nullptr;
  const NcclResult result = all.nccl.comm_init(&comm, size, shared.memory().id, rank, &config);
  CHECK(result == (blocking ? NcclResult::success : NcclResult::in_progress));
  return comm;
}

NcclResult settled(const Libraries& all, Comm comm) {
  NcclResult error = NcclResult::in_progress;
  standin::until([&] {
    CHECK(all.nccl.comm_async_error(comm, &error) == NcclResult::success);
    return error != NcclResult::in_progress;
  });
  return error;
}

// An allreduce that cannot end, because rank 1 of the communicator never comes to it.
void start_alone(const Libraries& all, Comm comm, Stream stream, const Memory& memory) {
  CHECK(all.nccl.all_reduce(memory.data(), memory.data(), 16, NcclType::float32, NcclOp::sum, comm, stream) ==
        NcclResult::success);
}

}  // namespace

TEST(a_stream_runs_in_order_and_others_wait_for_its_events) {
  alone([] {
    Libraries all;
    Stream first = all.stream(), second = all.stream();
    OnDevice device(all.driver, 64);
    std::uint64_t gate = 0, seen = 0;
    const std::uint64_t value = 7;
    Event event = nullptr;
    CHECK(all.driver.event_create(&event, kEventDisableTiming) == kSuccess);
    Address at = 0;
    CHECK(all.driver.host_address(&at, &gate, 0) == kSuccess);
    CHECK(all.driver.stream_wait_value64(first, at, 5, kWaitAtLeast) == kSuccess);
    CHECK(all.driver.copy_to_device(device.address, &value, sizeof value, first) == kSuccess);
    CHECK(all.driver.event_record(event, first) == kSuccess);
    CHECK(all.driver.stream_wait_event(second, event, 0) == kSuccess);
    CHECK(all.driver.copy_to_host(&seen, device.address, sizeof seen, second) == kSuccess);
    CHECK(all.driver.stream_query(second) == kNotReady && all.driver.event_query(event) == kNotReady);
    std::atomic_ref(gate).store(4);
    CHECK(all.driver.stream_query(second) == kNotReady);
    std::atomic_ref(gate).store(6);  // at least 5
    CHECK(all.driver.stream_synchronize(second) == kSuccess);
    CHECK_EQUAL(seen, value);
    CHECK(all.driver.event_query(event) == kSuccess);
    CHECK(all.driver.event_destroy(event) == kSuccess);
    CHECK(all.driver.stream_destroy(first) == kSuccess && all.driver.stream_destroy(second) == kSuccess);
  });
}

TEST(memory_is_shared_with_another_process_by_descriptor_and_outlives_its_maker) {
  alone([] {
    int sides[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, sides) == 0);
    const processes::Child maker = processes::start([&] {
      Libraries all;
      standin::Mapped mine(all.driver, standin::allocate(all.driver));
      *mine.words() = 41;
      int file = -1;
      CHECK(all.driver.mem_export(&file, mine.allocation, kPosixDescriptor, 0) == kSuccess);
      standin::send_descriptor(sides[0], farandole::os::Descriptor(file));
    });
    const farandole::os::Descriptor file = standin::receive_descriptor(sides[1]);
    CHECK_EQUAL(processes::result_of(maker), "");
    Libraries all;
    Allocation theirs = 0;
    void* const name = reinterpret_cast<void*>(static_cast<std::intptr_t>(file.get()));
    CHECK(all.driver.mem_import(&theirs, name, kPosixDescriptor) == kSuccess);
    standin::Mapped mapped(all.driver, theirs);
    CHECK_EQUAL(*mapped.words(), 41u);
  });
}

TEST(memory_is_shared_with_another_process_by_ipc_handle_and_flags_order_streams_of_both) {
  struct Content {
    IpcMemory handle;
    std::atomic<int> ready;
  };
  standin::SharedPage<Content> page;
  processes::ranks(2, [&](int rank) {
    Libraries all;
    Stream stream = all.stream();
    std::uint64_t word = 0;
    if (rank == 0) {
      OnDevice device(all.driver, 128);
      CHECK(all.driver.ipc_get(&page->handle, device.address) == kSuccess);
      Address again = 0;
      CHECK(all.driver.ipc_open(&again, page->handle, 1) != kSuccess);  // a process's own memory
      page->ready = 1;
      CHECK(all.driver.stream_wait_value64(stream, device.address, 1, kWaitAtLeast) == kSuccess);
      CHECK(all.driver.copy_to_host(&word, device.address + 8, sizeof word, stream) == kSuccess);
      CHECK(all.driver.stream_synchronize(stream) == kSuccess);
      CHECK_EQUAL(word, 99u);
      return;
    }
    standin::until([&] { return page->ready == 1; });
    Address theirs = 0;
    CHECK(all.driver.ipc_open(&theirs, page->handle, 1) == kSuccess);
    word = 99;
    CHECK(all.driver.copy_to_device(theirs + 8, &word, sizeof word, stream) == kSuccess);
    CHECK(all.driver.stream_write_value64(stream, theirs, 1, 0) == kSuccess);
    CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    CHECK(all.driver.ipc_close(theirs) == kSuccess);
  });
}

TEST(a_kernel_is_compiled_loaded_and_launched_in_order) {
  alone([] {
    Libraries all;
    Nvrtc nvrtc = all.nvrtc();
    Program program = nullptr;
    const char* source = "extern \"C\" __global__ void fill(long* to, long value, long count) {}";
    CHECK_EQUAL(nvrtc.create(&program, source, "fill.cu", 0, nullptr, nullptr), 0);
    CHECK_EQUAL(nvrtc.compile(program, 0, nullptr), 0);
    std::size_t bytes = 0;
    CHECK_EQUAL(nvrtc.cubin_size(program, &bytes), 0);
    std::string cubin(bytes, 0);
    CHECK_EQUAL(nvrtc.cubin(program, cubin.data()), 0);
    CHECK_EQUAL(nvrtc.destroy(&program), 0);
    all.kernel("fill", [](unsigned, unsigned, void** given) {
      const auto words = static_cast<std::uint64_t**>(static_cast<void*>(given));
      for (std::uint64_t i = 0; i < *words[2]; ++i) reinterpret_cast<std::uint64_t*>(*words[0])[i] = *words[1];
    });
    Module module = nullptr;
    Function fill = nullptr, none = nullptr;
    CHECK(all.driver.module_load(&module, cubin.data()) == kSuccess);
    CHECK(all.driver.module_function(&fill, module, "fill") == kSuccess);
    CHECK(all.driver.module_function(&none, module, "other") != kSuccess);
    OnDevice device(all.driver, 64);
    std::uint64_t value = 3, count = 8;
    void* given[] = {&device.address, &value, &count, nullptr};
    CHECK(all.driver.launch(fill, 1, 1, 1, 32, 1, 1, 0, nullptr, given, nullptr) == kSuccess);
    value = 4;  // the launch has its own copy
    CHECK(all.driver.stream_synchronize(nullptr) == kSuccess);
    CHECK_EQUAL(device.words()[7], 3u);
    CHECK_EQUAL(nvrtc.create(&program, "#error no", "no.cu", 0, nullptr, nullptr), 0);
    CHECK(nvrtc.compile(program, 0, nullptr) != 0);
  });
}

TEST(collectives_move_data_between_processes) {
  constexpr int kRanks = 4;
  constexpr std::size_t kCount = 50000;  // more than a slot of the stand-in
  Shared shared;
  processes::ranks(kRanks, [&](int rank) {
    Libraries all;
    Stream stream = all.stream();
    Comm comm = join(all, shared, rank, kRanks);
    Memory mine(all.driver, kCount), sum(all.driver, kCount), every(all.driver, kCount * kRanks);
    for (std::size_t i = 0; i < kCount; ++i) mine[i] = static_cast<float>(rank * 1000 + static_cast<int>(i % 100));
    const auto ok = NcclResult::success;
    const auto f32 = NcclType::float32;
    CHECK(all.nccl.all_reduce(mine.data(), sum.data(), kCount, f32, NcclOp::sum, comm, stream) == ok);
    CHECK(all.nccl.all_gather(mine.data(), every.data(), kCount, f32, comm, stream) == ok);
    CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    for (std::size_t i = 0; i < kCount; i += 999) {
      const float one = static_cast<float>(i % 100);
      CHECK_EQUAL(sum[i], 6000 + 4 * one);
      for (int r = 0; r < kRanks; ++r)
        CHECK_EQUAL(every[static_cast<std::size_t>(r) * kCount + i], 1000 * static_cast<float>(r) + one);
    }
    const auto at = static_cast<std::size_t>(rank);
    CHECK(all.nccl.reduce_scatter(every.data(), mine.data(), kCount, f32, NcclOp::average, comm, stream) == ok);
    CHECK(all.nccl.broadcast(every.data(), sum.data(), kCount, f32, 2, comm, stream) == ok);
    CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    CHECK_EQUAL(mine[kCount - 1], every[at * kCount + kCount - 1]);  // the same on all ranks, so its average
    CHECK_EQUAL(sum[5], 5.0f);
    CHECK(all.nccl.comm_finalize(comm) == ok && all.nccl.comm_destroy(comm) == ok);
  });
}

TEST(a_group_of_sends_and_receives_crosses) {
  constexpr std::size_t kCount = 70000;
  Shared shared;
  processes::ranks(3, [&](int rank) {
    Libraries all;
    Stream stream = all.stream();
    Comm comm = join(all, shared, rank, 3);
    Memory out(all.driver, kCount), in(all.driver, kCount * 3);
    for (std::size_t i = 0; i < kCount; ++i) out[i] = static_cast<float>(rank) + static_cast<float>(i % 7) / 8;
    CHECK(all.nccl.group_start() == NcclResult::success);
    for (int peer = 0; peer < 3; ++peer) {
      float* place = in.data() + static_cast<std::size_t>(peer) * kCount;
      CHECK(all.nccl.send(out.data(), kCount, NcclType::float32, peer, comm, stream) == NcclResult::success);
      CHECK(all.nccl.receive(place, kCount, NcclType::float32, peer, comm, stream) == NcclResult::success);
    }
    CHECK(all.nccl.group_end() == NcclResult::success);
    CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    for (int peer = 0; peer < 3; ++peer)
      CHECK_EQUAL(in[static_cast<std::size_t>(peer) * kCount + kCount - 1],
                  static_cast<float>(peer) + static_cast<float>((kCount - 1) % 7) / 8);
  });
}

TEST(without_blocking_a_communicator_passes_through_its_states) {
  Shared shared;
  processes::ranks(2, [&](int rank) {
    Libraries all;
    Stream stream = all.stream();
    Comm comm = join(all, shared, rank, 2, false);
    Memory memory(all.driver, 16);
    memory[0] = 1;
    CHECK(settled(all, comm) == NcclResult::success);
    const auto reduce = [&] {
      return all.nccl.all_reduce(memory.data(), memory.data(), 16, NcclType::float32, NcclOp::sum, comm, stream);
    };
    CHECK(reduce() == NcclResult::in_progress);
    CHECK(reduce() == NcclResult::invalid_usage);  // before it is settled
    CHECK(settled(all, comm) == NcclResult::success);
    CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    CHECK_EQUAL(memory[0], 2.0f);
    CHECK(all.nccl.comm_destroy(comm) == NcclResult::success);
  });
}

TEST(an_initialisation_that_never_ends_and_a_collective_without_its_peer_end_by_abort_or_revoke) {
  alone([] {
    set("STANDIN_NCCL_FAULTS", "init_never_ends");
    Libraries all;
    Shared shared;
    Comm comm = join(all, shared, 0, 1, false);
    NcclResult error = NcclResult::success;
    for (int i = 0; i < 100; ++i) {
      CHECK(all.nccl.comm_async_error(comm, &error) == NcclResult::success);
      CHECK(error == NcclResult::in_progress);
    }
    CHECK(all.nccl.comm_destroy(comm) == NcclResult::invalid_usage);
    CHECK(all.nccl.comm_abort(comm) == NcclResult::success);
  });
  for (const bool revokes : {false, true}) {
    Shared shared;
    processes::ranks(2, [&](int rank) {
      Libraries all;
      Stream stream = all.stream();
      Comm comm = join(all, shared, rank, 2);
      if (rank == 1) return;  // its process ends
      Memory memory(all.driver, 16);
      start_alone(all, comm, stream, memory);
      CHECK(all.driver.stream_query(stream) == kNotReady);
      if (revokes) CHECK(all.nccl.comm_revoke(comm, 0) == NcclResult::success);
      if (!revokes) CHECK(all.nccl.comm_abort(comm) == NcclResult::success);
      CHECK(all.driver.stream_synchronize(stream) == kSuccess);
      if (!revokes) return;
      CHECK(all.nccl.all_reduce(memory.data(), memory.data(), 16, NcclType::float32, NcclOp::sum, comm, stream) ==
            NcclResult::invalid_usage);
      CHECK(all.nccl.comm_abort(comm) == NcclResult::success);
    });
  }
}

TEST(the_stand_in_fails_after_the_requested_number_of_collectives) {
  alone([] {
    set("STANDIN_NCCL_ASYNC_ERROR_AFTER", "2");
    Libraries all;
    Shared shared;
    Stream stream = all.stream();
    Comm comm = join(all, shared, 0, 1);
    Memory memory(all.driver, 16);
    for (int done = 1; done <= 2; ++done) {
      CHECK(settled(all, comm) == NcclResult::success);
      start_alone(all, comm, stream, memory);
      CHECK(all.driver.stream_synchronize(stream) == kSuccess);
    }
    CHECK(settled(all, comm) == NcclResult::remote_error);
  });
}

TEST(an_abort_that_hangs_does_not_return) {
  std::atomic<int>* word = nullptr;
  standin::SharedPage<std::atomic<int>> state;
  word = &*state;
  const processes::Child child = processes::start([&] {
    set("STANDIN_NCCL_FAULTS", "abort_hangs");
    Libraries all;
    Shared shared;
    Comm comm = join(all, shared, 0, 1);
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));  // sleep: the time in which an abort returns
      *word = *word == 1 ? 2 : 3;
      ::_exit(0);
    });
    *word = 1;
    all.nccl.comm_abort(comm);
    *word = 4;
    late.join();
  });
  CHECK_EQUAL(processes::result_of(child), "");
  CHECK_EQUAL(word->load(), 2);
}

TEST(the_stand_in_can_refuse_calls_of_other_threads) {
  alone([] {
    set("STANDIN_NCCL_FAULTS", "one_thread");
    Libraries all;
    Shared shared;
    Comm comm = join(all, shared, 0, 1);
    NcclResult result = NcclResult::success, error{};
    std::thread([&] { result = all.nccl.comm_async_error(comm, &error); }).join();
    CHECK(result == NcclResult::invalid_usage);
    CHECK(all.nccl.comm_async_error(comm, &error) == NcclResult::success);
    CHECK(all.nccl.comm_destroy(comm) == NcclResult::success);
  });
}
