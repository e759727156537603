// Memory that the ranks of a host share, through the C interface: the bits are those of memory that nobody shares.
// Touches api/ through job.h.
#include <sys/mman.h>
#include <unistd.h>

#include <random>

#include "check.h"
#include "job.h"

using job::finish;
using job::Job;
using job::request;
using job::submit;
using job::Tensor;

namespace {

enum { kAllreduce = 0, kBarrier = 5 };
enum { kInPlaceBytes = 6 };
constexpr std::size_t kElements = (1 << 20) + 37;

// A tensor in a file of its own, which neighbours may have.
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

// What memory of its own gives.
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
    CHECK_EQUAL(farandole_submit(job.engine(rank), asked.data(), 2, 1, handles, error, sizeof error), 0);
    for (std::int64_t handle : handles) CHECK_EQUAL(finish(job.engine(rank), handle), 0);
    for (const Shared* memory : {&one, &two}) CHECK(std::equal(sum.begin(), sum.end(), memory->data()));
    CHECK_EQUAL(in_place(job, rank) - before, static_cast<std::int64_t>(2 * kElements * sizeof(float)));
  });
}

TEST(one_rank_without_it_makes_all_do_without) {
  Job job({0, 0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    if (rank == 1) {
      std::vector<float> own(kElements);
      for (int i = 0; i < 20; ++i) reduce(job, rank, own.data(), sum);
    } else {
      Shared memory(job.engine(rank), kElements);
      for (int i = 0; i < 20; ++i) reduce(job, rank, memory.data(), sum);
    }
    CHECK_EQUAL(in_place(job, rank), 0);
  });
}

TEST(a_file_of_another_size_is_not_used) {
  Job job({0, 0});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    Shared memory(job.engine(rank), kElements, rank == 0 ? kElements * sizeof(float) + 4096 : 0);
    for (int i = 0; i < 20; ++i) reduce(job, rank, memory.data(), sum);
    CHECK_EQUAL(in_place(job, rank), 0);
  });
}

TEST(memory_comes_and_goes) {
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

TEST(between_hosts_it_changes_nothing) {
  Job job({0, 0, 1, 1});
  job.run([&](int rank) {
    std::vector<float> sum = expected(job, rank, kElements);
    Shared memory(job.engine(rank), kElements);
    for (int i = 0; i < 10; ++i) reduce(job, rank, memory.data(), sum);
    CHECK_EQUAL(in_place(job, rank), 0);
  });
}
