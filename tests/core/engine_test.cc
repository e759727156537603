// The engine through the C interface: ranks as threads, real sockets and shared memory between them.
// Touches api/ through job.h.
#include <sched.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <random>

#include "check.h"
#include "job.h"

using namespace job;

namespace {

thread_local int64_t moves = 0;  // how often the affinity of the thread was set

}  // namespace

// In the C library's place.
extern "C" int sched_setaffinity(pid_t thread, std::size_t bytes, const cpu_set_t* set) noexcept {
  ++moves;
  return static_cast<int>(syscall(SYS_sched_setaffinity, thread, bytes, set)) < 0 ? -1 : 0;
}

namespace {

enum {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 5,
  kJoin = 6,
  kAddGroup = 7,
  kSend = 9,
  kReceive = 10
};
enum { kNegotiated = 3, kPlanned = 4, kDiverts = 5 };

const std::vector<std::vector<int>> kShapes = {{0},       {0, 0},       {0, 1},       {0, 0, 0},
                                               {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 0, 2}};

void allreduce_once(const Job& job, int rank, const char* name, std::size_t elements) {
  Tensor tensor(elements, static_cast<float>(rank + 1));
  CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, name, tensor))), 0);
  float expected = static_cast<float>(job.size() * (job.size() + 1) / 2);
  for (float value : tensor.data) CHECK_EQUAL(value, expected);
}

double milliseconds(const std::function<void()>& body) {
  auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST(allreduce_on_every_shape) {
  for (const std::vector<int>& hosts : kShapes) {
    Job job(hosts);
    job.run([&](int rank) {
      for (std::size_t elements : {0, 1, 3, 1000, 70001, 600000}) allreduce_once(job, rank, "x", elements);
    });
  }
}

TEST(named_requests_in_any_order) {
  for (const std::vector<int>& hosts : kShapes) {
    Job job(hosts);
    job.run([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < 20; ++round) {
        std::vector<Tensor> tensors;
        std::vector<int> order;
        for (int i = 0; i < 12; ++i) {
          tensors.emplace_back(static_cast<std::size_t>(i * i * 7), static_cast<float>(rank + i));
          order.push_back(i);
        }
        std::shuffle(order.begin(), order.end(), random);
        std::vector<int64_t> handles(12);
        for (int i : order)
          handles[static_cast<std::size_t>(i)] =
              submit(job.engine(rank),
                     request(kAllreduce, ("t" + std::to_string(i)).c_str(), tensors[static_cast<std::size_t>(i)]));
        for (int i = 0; i < 12; ++i) {
          CHECK_EQUAL(finish(job.engine(rank), handles[static_cast<std::size_t>(i)]), 0);
          float expected = static_cast<float>(job.size() * (job.size() - 1) / 2 + i * job.size());
          for (float value : tensors[static_cast<std::size_t>(i)].data) CHECK_EQUAL(value, expected);
        }
      }
    });
  }
}

TEST(a_repeated_step_is_planned) {
  for (const std::vector<int>& hosts : kShapes) {
    Job job(hosts);
    job.run([&](int rank) {
      for (int step = 0; step < 30; ++step) allreduce_once(job, rank, step % 2 != 0 ? "b" : "a", 100);
      CHECK(farandole_counter(job.engine(rank), kPlanned) >= 20);
    });
  }
}

TEST(unnamed_loops_are_planned) {
  Job job({0, 0, 1});
  job.run([&](int rank) {
    for (int step = 0; step < 30; ++step) allreduce_once(job, rank, nullptr, 10);
    CHECK(farandole_counter(job.engine(rank), kPlanned) >= 20);
  });
}

TEST(a_step_with_a_part_of_the_plan_ends_soon) {
  for (const std::vector<int>& hosts : kShapes) {
    Job job(hosts);
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      Tensor a(10, 1), b(10, 1);
      for (int step = 0; step < 8; ++step) {
        int64_t first = submit(engine, request(kAllreduce, "a", a)),
                second = submit(engine, request(kAllreduce, "b", b));
        CHECK_EQUAL(finish(engine, first), 0);
        CHECK_EQUAL(finish(engine, second), 0);
      }
      for (int step = 0; step < 3; ++step) {
        double spent =
            milliseconds([&] { CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "a", a))), 0); });
        CHECK(spent < 1000);
      }
    });
  }
}

TEST(one_rank_submits_a_part_of_the_plan_and_no_rank_hangs) {
  Job job({0, 0});
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    Tensor a(10, 1), b(10, 1);
    int64_t first = 0, second = 0;
    for (int step = 0; step < 8; ++step) {
      first = submit(engine, request(kAllreduce, "a", a));
      second = submit(engine, request(kAllreduce, "b", b));
      CHECK_EQUAL(finish(engine, first), 0);
      CHECK_EQUAL(finish(engine, second), 0);
    }
    first = submit(engine, request(kAllreduce, "a", a));
    if (rank == 0) second = submit(engine, request(kAllreduce, "b", b));
    while (farandole_poll(engine, first) == 0) std::this_thread::yield();
    CHECK_EQUAL(finish(engine, first), 0);
    if (rank == 1) second = submit(engine, request(kAllreduce, "b", b));
    CHECK_EQUAL(finish(engine, second), 0);
  });
}

TEST(disagreement_is_an_error_everywhere_and_the_next_works) {
  for (const std::vector<int>& hosts : kShapes) {
    if (hosts.size() < 2) continue;
    Job job(hosts);
    job.run([&](int rank) {
      for (int round = 0; round < 5; ++round) {
        Tensor tensor(rank == 0 ? 10 : 11, 1);
        std::string text;
        CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "x", tensor)), &text), 3);
        CHECK_EQUAL(text.find("Mismatched ALLREDUCE tensor shapes"), std::size_t{0});
        allreduce_once(job, rank, "x", 10);
      }
    });
  }
}

TEST(a_name_is_pending_once) {
  Job job({0, 0});
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    Tensor a(10, 1), b(10, 1);
    if (rank == 0) {
      int64_t first = submit(engine, request(kAllreduce, "x", a));
      CHECK_THROWS(submit(engine, request(kAllreduce, "x", b)), std::runtime_error);
      allreduce_once(job, rank, "y", 1);
      CHECK_EQUAL(finish(engine, first), 0);
    } else {
      allreduce_once(job, rank, "y", 1);
      CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "x", a))), 0);
    }
  });
}

TEST(a_name_is_taken_until_its_completion_was_seen) {
  Job job({0, 0});
  std::atomic<int> ahead{0};
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    Tensor a(10, 1), b(10, 1), c(10, 1);
    for (int round = 0; round < 100; ++round) {
      // Rank 0 comes first, so that rank 1's operation may have ended when its submission returns.
      while (rank == 1 && ahead.load() <= round) std::this_thread::yield();
      int64_t first = submit(engine, request(kAllreduce, "x", a));
      if (rank == 0)
        ++ahead;
      else
        CHECK_THROWS(submit(engine, request(kAllreduce, "x", b)), std::runtime_error);
      CHECK_EQUAL(finish(engine, first), 0);
    }
    // A user that has seen this request end may use the name again, also one that has seen a later request end.
    int64_t polled = submit(engine, request(kAllreduce, "x", a));
    while (farandole_poll(engine, polled) == 0) std::this_thread::yield();
    int64_t forgotten = submit(engine, request(kAllreduce, "x", b));
    allreduce_once(job, rank, "y", 1);
    int64_t last = submit(engine, request(kAllreduce, "x", c));
    for (int64_t handle : {polled, forgotten, last}) CHECK_EQUAL(finish(engine, handle), 0);
  });
}

TEST(a_name_is_free_after_release_or_a_transfer_or_one_second) {
  enum class Rule { released, sent, received, a_second };
  for (Rule rule : {Rule::released, Rule::sent, Rule::received, Rule::a_second}) {
    Job job({0, 0});
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      Tensor a(10, 1), b(10, 1), data(10, 1);
      if (rank == 0) {
        CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "x", a))), 0);
        farandole_request other = request(rule == Rule::sent ? kReceive : kSend, nullptr, data);
        other.peer = 1;
        if (rule == Rule::sent || rule == Rule::received) CHECK_EQUAL(finish(engine, submit(engine, other)), 0);
        CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "x", b))), 0);
        return;
      }
      const auto began = std::chrono::steady_clock::now();
      const auto age = [&] { return std::chrono::steady_clock::now() - began; };
      const int64_t queue = farandole_open_queue(engine);
      const farandole_request x = request(kAllreduce, "x", a);
      char error[512];
      int64_t first = 0;
      CHECK_EQUAL(farandole_submit(engine, &x, 1, 0, queue, &first, error, sizeof error), 0);
      // Only the queue of events says here that it has ended; the user has not polled it.
      CHECK_EQUAL(farandole_next_completion(engine, queue, 20'000), first);
      if (rule == Rule::released) farandole_release(engine, first);
      if (rule == Rule::sent || rule == Rule::received) {
        farandole_request other = request(rule == Rule::sent ? kSend : kReceive, nullptr, data);
        other.peer = 0;
        CHECK_EQUAL(finish(engine, submit(engine, other)), 0);
      }
      const farandole_request again = request(kAllreduce, "x", b);
      int64_t second = 0;
      int code = farandole_submit(engine, &again, 1, 0, 0, &second, error, sizeof error);
      if (rule == Rule::a_second) {
        for (; code != 0 && age() < std::chrono::seconds(60); std::this_thread::yield())
          code = farandole_submit(engine, &again, 1, 0, 0, &second, error, sizeof error);
        CHECK(age() > std::chrono::seconds(1));
      }
      CHECK_EQUAL(code, 0);
      CHECK_EQUAL(finish(engine, second), 0);
    });
  }
}

// Both begin on one processor: there a driver of the user's sees who shares it, and yields instead of leaving.
TEST(waiting_keeps_the_affinity_of_the_users_thread) {
  farandole_options options = job::default_options();
  options.spin_us = 1'000'000;
  Job job({0, 0}, options);
  cpu_set_t all, one;
  CHECK_EQUAL(sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  std::atomic<pid_t> waiting[2] = {0, 0};
  Tensor tensors[4] = {Tensor(10, 1), Tensor(10, 1), Tensor(10, 1), Tensor(10, 1)};
  const auto stays = [&](pid_t thread) {
    cpu_set_t now;
    return sched_getaffinity(thread, sizeof now, &now) == 0 && CPU_EQUAL(&now, &all);
  };
  // Drives the engine while it waits for an operation that another thread completes.
  const auto user = [&](int rank) {
    CHECK_EQUAL(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQUAL(sched_setaffinity(0, sizeof all, &all), 0);
    const int64_t handle =
        submit(job.engine(rank), request(kAllreduce, rank == 0 ? "x" : "y", tensors[static_cast<std::size_t>(rank)]));
    const int64_t before = moves;
    waiting[rank] = gettid();
    CHECK_EQUAL(finish(job.engine(rank), handle), 0);
    CHECK_EQUAL(moves, before);
    CHECK(stays(0));
    waiting[rank] = 0;
  };
  bool stayed = true;
  std::thread other([&] {
    while (waiting[0].load() == 0 || waiting[1].load() == 0) std::this_thread::yield();
    const pid_t threads[] = {waiting[0], waiting[1]};
    const auto began = std::chrono::steady_clock::now();  // many looks at the cores, of which there is one in 100 us
    while (std::chrono::steady_clock::now() - began < std::chrono::milliseconds(200)) {
      stayed = stayed && stays(threads[0]) && stays(threads[1]);
      std::this_thread::yield();
    }
    const int64_t x = submit(job.engine(1), request(kAllreduce, "x", tensors[2]));
    const int64_t y = submit(job.engine(0), request(kAllreduce, "y", tensors[3]));
    finish(job.engine(1), x);
    finish(job.engine(0), y);
  });
  job.run(user);
  other.join();
  CHECK(stayed);
}

TEST(join_contributes_zeros) {
  for (const std::vector<int>& hosts : kShapes) {
    Job job(hosts);
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      for (int round = 0; round < 4; ++round) {
        // Rank r has 5 + r batches.
        for (int step = 0; step < 5 + rank; ++step) {
          Tensor tensor(100, 1);
          CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "grad", tensor))), 0);
          int there = job.size() - std::max(0, step - 4);
          CHECK_EQUAL(tensor.data[0], static_cast<float>(there));
        }
        Tensor none(0);
        int64_t last = -1;
        CHECK_EQUAL(finish(engine, submit(engine, request(kJoin, "join", none)), nullptr, &last), 0);
        CHECK_EQUAL(last, job.size() - 1);
      }
    });
  }
}

TEST(overlapping_pairs_submitted_in_a_cycle) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 2}, {0, 0, 1}}) {
    Job job(hosts);
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      const int64_t sets[] = {2, 0, 1, 2, 1, 2, 2, 2, 0};
      Tensor none(0);
      farandole_request add = request(kAddGroup, "sets", none);
      add.splits = sets;
      add.splits_count = 9;
      int64_t first = 0;
      CHECK_EQUAL(finish(engine, submit(engine, add), nullptr, &first), 0);
      const int mine[3][2] = {{0, 2}, {1, 0}, {2, 1}};  // each rank begins with another one
      for (int round = 0; round < 100; ++round) {
        Tensor a(1000, 1), b(1000, 1);
        int64_t x = submit(engine, request(kAllreduce, nullptr, a, static_cast<int>(first) + mine[rank][0]));
        int64_t y = submit(engine, request(kAllreduce, nullptr, b, static_cast<int>(first) + mine[rank][1]));
        CHECK_EQUAL(finish(engine, x), 0);
        CHECK_EQUAL(finish(engine, y), 0);
        CHECK_EQUAL(a.data[999], 2.0f);
        CHECK_EQUAL(b.data[999], 2.0f);
      }
    });
  }
}

TEST(send_and_receive_during_an_allreduce) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    Job job(hosts);
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      for (int round = 0; round < 50; ++round) {
        std::size_t elements = round % 2 != 0 ? 100000 : 10;
        Tensor out(elements, static_cast<float>(rank)), in(elements, -1), sum(elements, 1);
        farandole_request send = request(kSend, nullptr, out), receive = request(kReceive, nullptr, in);
        send.peer = receive.peer = 1 - rank;
        int64_t a = submit(engine, send), b = submit(engine, request(kAllreduce, "sum", sum)),
                c = submit(engine, receive);
        CHECK_EQUAL(finish(engine, c), 0);
        CHECK_EQUAL(finish(engine, b), 0);
        CHECK_EQUAL(finish(engine, a), 0);
        CHECK_EQUAL(in.data[elements - 1], static_cast<float>(1 - rank));
        CHECK_EQUAL(sum.data[0], 2.0f);
      }
    });
  }
}

TEST(a_rank_that_leaves_ends_what_needs_it) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 2}, {0, 0, 1}}) {
    Job job(hosts);
    job.run([&](int rank) {
      farandole_engine* engine = job.engine(rank);
      allreduce_once(job, rank, "x", 1000);
      if (rank == 1) {
        while (farandole_leave(engine, 1000) == 1) {
        }
        return;
      }
      Tensor tensor(10, 1);
      int64_t handle = 0;
      char error[512];
      farandole_request one = request(kAllreduce, "y", tensor);
      if (farandole_submit(engine, &one, 1, 0, 0, &handle, error, sizeof error) == 0) {
        std::string text;
        CHECK_EQUAL(finish(engine, handle, &text), 5);
        CHECK(text.find("rank 1") != std::string::npos);
      }
    });
  }
}

TEST(completions_go_to_their_own_queue) {
  Job job({0, 0});
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    constexpr int kQueues = 3, kEach = 100;
    std::vector<Tensor> tensors(kQueues * kEach, Tensor(4, 1));
    std::vector<int64_t> queues, asked[kQueues];
    for (int queue = 0; queue < kQueues; ++queue) queues.push_back(farandole_open_queue(engine));
    char error[512];
    int64_t handle = 0;
    for (int i = 0; i < kQueues * kEach; ++i) {
      const std::string name = "x" + std::to_string(i);
      farandole_request one = request(kAllreduce, name.c_str(), tensors[static_cast<std::size_t>(i)]);
      const auto queue = static_cast<std::size_t>(i % kQueues);
      CHECK_EQUAL(farandole_submit(engine, &one, 1, 0, queues[queue], &handle, error, sizeof error), 0);
      asked[queue].push_back(handle);
    }
    for (std::size_t queue = 0; queue < kQueues; ++queue) {
      std::vector<int64_t> completed;
      while (completed.size() < asked[queue].size()) {
        handle = farandole_next_completion(engine, queues[queue], 1000);
        if (handle == 0) continue;
        CHECK(handle > 0);
        completed.push_back(handle);
        farandole_release(engine, handle);
      }
      std::sort(completed.begin(), completed.end());
      CHECK(completed == asked[queue]);  // each once, and none of another queue
    }
    CHECK_EQUAL(farandole_next_completion(engine, queues[0], 0), 0);
    CHECK_EQUAL(farandole_next_completion(engine, 99, 0), -1);
    farandole_request one = request(kAllreduce, "nowhere", tensors[0]);
    CHECK_EQUAL(farandole_submit(engine, &one, 1, 0, 99, &handle, error, sizeof error), 2);
  });
}

TEST(revoking_ends_all_operations_on_all_ranks) {
  Job job({0, 0, 1});
  std::latch all_have_x(3);
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    allreduce_once(job, rank, "x", 1000);
    all_have_x.arrive_and_wait();
    Tensor tensor(10, 1);
    if (rank == 2) {
      farandole_revoke(engine, 7, -1, "enough");
    } else {
      std::string text;
      CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "y", tensor)), &text), 7);
      CHECK_EQUAL(text, std::string("enough"));
    }
  });
}

TEST(a_revocation_without_a_failure_code_is_refused) {
  Job job({0, 0});
  for (const int code : {-1, 0, 1, 11, 1 << 20}) CHECK_EQUAL(farandole_revoke(job.engine(0), code, -1, "enough"), 2);
  CHECK_EQUAL(farandole_revoke(job.engine(0), 7, -1, nullptr), 2);
  CHECK_EQUAL(farandole_revoke(job.engine(0), 7, -2, "enough"), 2);
  job.run([&](int rank) { allreduce_once(job, rank, "x", 1000); });
}

TEST(stalls_are_reported_by_name_and_rank) {
  farandole_options options = job::default_options();
  options.stall_note_ms = 50;
  options.stall_warning_ms = 100;
  options.stall_shutdown_ms = 300;
  Job job({0, 0, 0}, options);
  job.run([&](int rank) {
    farandole_engine* engine = job.engine(rank);
    if (rank == 1) return;
    Tensor tensor(10, 1);
    std::string text;
    CHECK_EQUAL(finish(engine, submit(engine, request(kAllreduce, "grad", tensor)), &text), 5);
    CHECK(text.find("grad") != std::string::npos);
    CHECK(text.find("waiting for rank 1") != std::string::npos);
    if (rank != 0) return;
    farandole_event event{};
    CHECK_EQUAL(farandole_next_event(engine, &event, 1000), 0);
    CHECK(std::string(event.text).find("grad: waiting for rank 1") != std::string::npos);
  });
}
