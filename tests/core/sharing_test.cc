// Memory that the ranks of a host share, through the C interface: results have the same bits as with private memory.
// Touches api/ through job.h, and the engine's memory for results.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <deque>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "check.h"
#include "engine/results.h"
#include "job.h"

using namespace job;

namespace {

enum { kAllreduce = 0, kAlltoall = 3, kBarrier = 5 };
enum { kInPlaceBytes = 6 };
constexpr std::size_t kElements = (1 << 20) + 37;

// A tensor in its own file, which local peers may map.
class Shared {
 public:
  Shared(farandole_engine* engine, std::size_t elements, std::size_t announced = 0)
      : engine_(engine), bytes_(elements * sizeof(float)) {
    file_ = memfd_create("tensor", 0);
    if (file_ < 0 || ftruncate(file_, static_cast<off_t>(bytes_)) != 0) throw std::runtime_error("memfd");
    data_ = static_cast<float*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
    region_ = farandole_share(engine, dup(file_), data_, announced > 0 ? announced : bytes_);
    CHECK(region_ > 0);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() {
    farandole_unshare(engine_, region_);
    munmap(data_, bytes_);
    close(file_);
  }
  float* data() const { return data_; }

 private:
  farandole_engine* engine_;
  std::size_t bytes_;
  int file_;
  float* data_;
  std::uint64_t region_;
};

std::vector<float> contribution(int rank, std::size_t elements) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> spread(-1000, 1000);
  std::vector<float> values(elements);
  for (float& value : values) value = spread(random);
  return values;
}

// The result with private memory.
std::vector<float> expected(const Job& job, int rank, std::size_t elements) {
  Tensor tensor(elements, 0);
  tensor.data = contribution(rank, elements);
  CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), request(kAllreduce, "plain", tensor))), 0);
  return tensor.data;
}

void reduce(const Job& job, int rank, float* data, const std::vector<float>& sum) {
  std::vector<float> mine = contribution(rank, sum.size());
  std::copy(mine.begin(), mine.end(), data);
  Tensor shape(sum.size(), 0);
  farandole_request asked = request(kAllreduce, "shared", shape);
  asked.input = asked.output = data;
  CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), asked)), 0);
  CHECK(std::equal(sum.begin(), sum.end(), data));
}

std::int64_t in_place(const Job& job, int rank) { return farandole_counter(job.engine(rank), kInPlaceBytes); }

// A file takes a while to arrive; until then sums go another way. All ranks see the same.
void reduce_until_in_place(const Job& job, int rank, float* data, const std::vector<float>& sum) {
  const std::int64_t before = in_place(job, rank);
  for (int tries = 0; in_place(job, rank) == before; ++tries) {
    CHECK(tries < 10000);
    reduce(job, rank, data, sum);
  }
  CHECK_EQUAL(in_place(job, rank) - before, static_cast<std::int64_t>(sum.size() * sizeof(float)));
}

// For memory that must not be used in place.
void reduce_by_copying(const Job& job, int rank, float* data, const std::vector<float>& sum) {
  for (int i = 0; i < 20; ++i) reduce(job, rank, data, sum);
  CHECK_EQUAL(in_place(job, rank), 0);
}

}  // namespace

TEST(shared_memory_gives_the_same_bits) {
  for (int size : {2, 3, 5}) {
    Job job(std::vector<int>(static_cast<std::size_t>(size), 0));
    job.run([&](int rank) {
      std::vector<float> sum = expected(job, rank, kElements);
      CHECK_EQUAL(in_place(job, rank), 0);
      Shared memory(job.engine(rank), kElements + 100);
      reduce_until_in_place(job, rank, memory.data() + 100, sum);
      reduce_until_in_place(job, rank, memory.data(), sum);
    });
  }
}

TEST(two_tensors_of_one_bucket) {
  Job job({0, 0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    Shared one(job.engine(rank), kElements), two(job.engine(rank), kElements);
    reduce_until_in_place(job, rank, one.data(), sum);
    reduce_until_in_place(job, rank, two.data(), sum);
    const std::int64_t before = in_place(job, rank);
    std::vector<float> mine = contribution(rank, kElements);
    Tensor shape(kElements, 0);
    std::vector<farandole_request> asked;
    for (const Shared* memory : {&one, &two}) {
      std::copy(mine.begin(), mine.end(), memory->data());
      asked.push_back(request(kAllreduce, memory == &one ? "one" : "two", shape));
      asked.back().input = asked.back().output = memory->data();
    }
    std::int64_t handles[2];
    char error[512];
    CHECK_EQUAL(farandole_submit(job.engine(rank), asked.data(), 2, 1, 0, handles, error, sizeof error), 0);
    for (std::int64_t handle : handles) CHECK_EQUAL(finish(job.engine(rank), handle), 0);
    for (const Shared* memory : {&one, &two}) CHECK(std::equal(sum.begin(), sum.end(), memory->data()));
    CHECK_EQUAL(in_place(job, rank) - before, static_cast<std::int64_t>(2 * kElements * sizeof(float)));
  });
}

TEST(one_rank_without_shared_memory_makes_all_copy) {
  Job job({0, 0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    if (rank == 1) {
      std::vector<float> own(kElements);
      reduce_by_copying(job, rank, own.data(), sum);
    } else {
      Shared memory(job.engine(rank), kElements);
      reduce_by_copying(job, rank, memory.data(), sum);
    }
  });
}

TEST(a_file_of_another_size_is_not_used) {
  Job job({0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    Shared memory(job.engine(rank), kElements, rank == 0 ? kElements * sizeof(float) + 4096 : 0);
    reduce_by_copying(job, rank, memory.data(), sum);
  });
}

TEST(shared_memory_is_added_and_removed) {
  Job job({0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    for (int round = 0; round < 20; ++round) {
      Shared memory(job.engine(rank), kElements);
      reduce_until_in_place(job, rank, memory.data(), sum);
    }
    std::vector<float> own(kElements);
    const std::int64_t before = in_place(job, rank);
    reduce(job, rank, own.data(), sum);
    CHECK_EQUAL(in_place(job, rank), before);
  });
}

TEST(shared_memory_changes_nothing_between_hosts) {
  Job job({0, 0, 1, 1});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    Shared memory(job.engine(rank), kElements);
    for (int i = 0; i < 10; ++i) reduce(job, rank, memory.data(), sum);
    CHECK_EQUAL(in_place(job, rank), 0);
  });
}

namespace {

// An alltoall of rows of 1024 numbers; rows[i][j] go from rank i to rank j.
using Rows = std::vector<std::vector<std::int64_t>>;
constexpr std::size_t kRow = 1024;

float number(int from, int to, std::size_t at) {
  return static_cast<float>(from * 1000 + to * 100) + static_cast<float>(at % 97);
}

// A result in the core's memory, until it goes.
class Received {
 public:
  Received(const Job& job, int rank, const Rows& rows) : job_(&job), rank_(rank), rows_(&rows) {
    const std::vector<std::int64_t>& mine = rows[static_cast<std::size_t>(rank)];
    const auto all = static_cast<std::size_t>(std::accumulate(mine.begin(), mine.end(), std::int64_t{0}));
    Tensor sent(all * kRow);
    float* next = sent.data.data();
    for (int to = 0; to < job.size(); ++to)
      for (std::size_t i = 0; i < static_cast<std::size_t>(mine[static_cast<std::size_t>(to)]) * kRow; ++i)
        *next++ = number(rank, to, i);
    sent.shape = {static_cast<std::int64_t>(all), static_cast<std::int64_t>(kRow)};
    farandole_request asked = request(kAlltoall, "blocks", sent);
    asked.output = nullptr;
    asked.splits = mine.data();
    asked.splits_count = job.size();
    handle_ = submit(job.engine(rank), asked);
    while (farandole_wait(job.engine(rank), handle_, 100) == 1) {
    }
    CHECK_EQUAL(farandole_outcome_of(job.engine(rank), handle_, &outcome_), 0);
    CHECK_EQUAL(outcome_.code, 0);
  }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;
  ~Received() { farandole_release(job_->engine(rank_), handle_); }

  const float* data() const { return static_cast<const float*>(outcome_.output); }
  std::int64_t bytes() const { return outcome_.output_bytes; }
  void check() const {
    const float* next = data();
    for (int from = 0; from < job_->size(); ++from) {
      const auto rows =
          static_cast<std::size_t>((*rows_)[static_cast<std::size_t>(from)][static_cast<std::size_t>(rank_)]);
      for (std::size_t i = 0; i < rows * kRow; ++i) CHECK(*next++ == number(from, rank_, i));
    }
    CHECK_EQUAL(static_cast<std::int64_t>((next - data()) * sizeof(float)), bytes());
  }

 private:
  const Job* job_;
  int rank_;
  const Rows* rows_;
  std::int64_t handle_ = 0;
  farandole_outcome outcome_{};
};

// Until one goes the short way; all ranks see the same.
void exchange_until_in_place(const Job& job, int rank, const Rows& rows) {
  const std::int64_t before = in_place(job, rank);
  std::int64_t bytes = 0;
  for (int tries = 0; in_place(job, rank) == before; ++tries) {
    CHECK(tries < 10000);
    Received received(job, rank, rows);
    received.check();
    bytes = received.bytes();
  }
  if (job.size() == 2) CHECK_EQUAL(in_place(job, rank) - before, bytes);
}

Rows even(std::size_t size, std::int64_t rows) { return Rows(size, std::vector<std::int64_t>(size, rows)); }

}  // namespace

TEST(blocks_go_directly_into_the_results_of_local_peers) {
  for (std::size_t size : {2u, 3u, 5u}) {
    Job job(std::vector<int>(size, 0));
    const Rows rows = even(size, 600);
    job.run([&](int rank) { exchange_until_in_place(job, rank, rows); });
  }
}

TEST(results_stay_unchanged_during_later_operations) {
  Job job({0, 0});
  const Rows rows = even(2, 520), more = even(2, 900);
  job.run([&](int rank) {
    exchange_until_in_place(job, rank, rows);
    std::deque<Received> held;
    for (int round = 0; round < 70; ++round) {  // more than the memory that is shared can hold
      const Rows& these = round % 2 == 0 ? rows : more;
      held.emplace_back(job, rank, these);
      held.back().check();
    }
    for (const Received& received : held) received.check();
    while (held.size() > 3) held.pop_front();
    const std::int64_t before = in_place(job, rank);
    for (int round = 0; round < 5; ++round) Received(job, rank, more).check();
    CHECK(in_place(job, rank) > before);
    for (const Received& received : held) received.check();
  });
}

TEST(blocks_of_any_size_and_none) {
  Job job({0, 0, 0});
  const Rows uneven = {{0, 3000, 1}, {0, 0, 0}, {2000, 999, 500}};
  job.run([&](int rank) {
    exchange_until_in_place(job, rank, uneven);
    const std::int64_t before = in_place(job, rank);
    const Rows small = even(3, 2);
    for (int round = 0; round < 5; ++round) Received(job, rank, small).check();
    CHECK_EQUAL(in_place(job, rank), before);
  });
}

TEST(blocks_from_other_hosts_go_into_the_same_results) {
  Job job({0, 0, 1, 1});
  const Rows rows = even(4, 400);
  job.run([&](int rank) { exchange_until_in_place(job, rank, rows); });
}

TEST(results_are_reduced_like_private_memory) {
  Job job({0, 0});
  const Rows rows = even(2, 520);
  job.run([&](int rank) {
    exchange_until_in_place(job, rank, rows);
    // A sum that fails would let local peers write into memory that a later result gets.
    Received received(job, rank, rows);
    const std::int64_t before = in_place(job, rank);
    auto* data = const_cast<float*>(received.data());
    const auto elements = static_cast<std::size_t>(received.bytes()) / sizeof(float);
    const float first = data[0];
    Tensor shape(elements, 0);
    farandole_request asked = request(kAllreduce, "sum", shape);
    asked.input = asked.output = data;
    for (int i = 0; i < 5; ++i) CHECK_EQUAL(finish(job.engine(rank), submit(job.engine(rank), asked)), 0);
    CHECK(data[0] == 16 * (2 * first + (rank == 0 ? 100.f : -100.f)));
    CHECK_EQUAL(in_place(job, rank), before);
  });
}

namespace {

// Files of so many bytes that this process has mapped.
int mappings(std::size_t bytes) {
  std::ifstream maps("/proc/self/maps");
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    // Memory without a file, such as a sanitizer's own, has the inode 0.
    std::size_t begin = 0, end = 0, inode = 0;
    const int read = std::sscanf(line.c_str(), "%zx-%zx %*s %*s %*s %zu", &begin, &end, &inode);
    if (read == 3 && inode != 0 && end - begin == bytes) ++found;
  }
  return found;
}

}  // namespace

TEST(after_shutdown_only_results_in_use_remain) {
  constexpr std::size_t kArena = 256 << 20;
  const Rows rows = even(3, 400);
  {
    Job job({0, 0, 0});
    job.run([&](int rank) { exchange_until_in_place(job, rank, rows); });
    CHECK_EQUAL(mappings(kArena), 9);  // each has all three
    std::unique_ptr<Received> held;
    job.run([&](int rank) {
      auto received = std::make_unique<Received>(job, rank, rows);
      if (rank == 1) held = std::move(received);
    });
    job.run([&](int rank) {
      while (farandole_leave(job.engine(rank), 2000) == 1) {
      }
    });
    CHECK_EQUAL(mappings(kArena), 1);
    held->check();
  }
  CHECK_EQUAL(mappings(kArena), 0);
}

TEST(memory_of_a_failed_operation_is_not_reused) {
  int shared = 0;
  auto results = std::make_shared<farandole::Results>([&](const farandole::os::SharedMemory&) { ++shared; });
  constexpr std::size_t kBytes = 4 << 20;
  for (int i = 0; i < 2; ++i) results->allocate_shared(kBytes);
  CHECK_EQUAL(shared, 0);
  const std::byte* first = results->allocate_shared(kBytes).get();
  CHECK_EQUAL(shared, 1);
  farandole::Memory failed = results->allocate_shared(kBytes);
  CHECK(failed.get() == first);
  failed.get_deleter().retire();
  failed.reset();
  farandole::Memory next = results->allocate_shared(kBytes);
  CHECK(next.get() > first);
  results->close();  // with one in use, and one that nobody will give back
  *next = std::byte{1};
  next.reset();
  CHECK_EQUAL(shared, 1);
}
