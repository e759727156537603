// Tensors in the memory of stand-in GPUs through the C interface: requests, kernels, and what the results must be.
// Touches api/ through job.h, and the stand-ins.
#pragma once

#include <array>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "job.h"
#include "processes.h"
#include "standin_process.h"

namespace gpu_job {

enum {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kAlltoall = 3,
  kReducescatter = 4,
  kAddGroup = 7,
  kRemoveGroup = 8
};
enum { kOnDeviceBytes = 13, kNcclBytes = 14 };
enum { kPeerLost = 6, kInternal = 10 };
enum { kAverage = 0, kSum = 1, kMin = 3, kMax = 4, kProduct = 5 };

// The kernel as a function of the host; it takes what reduce_source.h takes.
template <class T>
void reduce_sum(unsigned, unsigned, void** given) {
  const auto word = [given](int i) { return *static_cast<std::uint64_t*>(given[i]); };
  const auto* row = reinterpret_cast<const std::uint64_t*>(word(0));
  const std::uint64_t ins = word(3), outs = word(4);
  const double prescale = *static_cast<double*>(given[5]), postscale = *static_cast<double*>(given[6]);
  const auto divisor = static_cast<double>(word(7));
  for (std::uint64_t r = 0; r < word(1); ++r, row += 2 + ins + outs)
    for (std::uint64_t e = 0; e < row[1]; ++e) {
      T sum{};
      for (std::uint64_t i = 0; i < ins; ++i)
        sum = static_cast<T>(sum +
                             static_cast<T>(static_cast<double>(reinterpret_cast<const T*>(row[2 + i])[e]) * prescale));
      if (postscale != 1 || divisor != 1) sum = static_cast<T>(static_cast<double>(sum) * postscale / divisor);
      for (std::uint64_t o = 0; o < outs; ++o) reinterpret_cast<T*>(row[2 + ins + o])[e] = sum;
    }
}

inline standin::Libraries& libraries() {
  static auto* all = [] {
    auto* made = new standin::Libraries;  // as long as the process
    made->kernel("farandole_sum_float32", reduce_sum<float>);
    made->kernel("farandole_sum_float64", reduce_sum<double>);
    made->kernel("farandole_sum_int32", reduce_sum<std::int32_t>);
    made->kernel("farandole_sum_uint8", reduce_sum<unsigned char>);
    return made;
  }();
  return *all;
}

// `use_nccl`: 0 automatic, 1 on, 2 off.
inline void use_gpus(farandole_engine* engine, int use_nccl = 0, int start_ms = 20000) {
  const std::string folder = FARANDOLE_STANDINS, driver = folder + "/libcuda.so.1", nvrtc = folder + "/libnvrtc.so.13",
                    nccl = folder + "/libnccl.so.2";
  const farandole_place first{2, 0, driver.c_str()}, second{2, 0, nvrtc.c_str()}, third{2, 0, nccl.c_str()};
  farandole_gpu_options options{};
  options.driver = &first;
  options.nvrtc = &second;
  options.nccl = &third;
  options.drivers = options.nvrtcs = options.nccls = 1;
  options.use_nccl = use_nccl;
  options.start_ms = start_ms;
  options.cache = "";
  char error[512] = "";
  CHECK_EQUAL(farandole_use_gpus(engine, &options, error, sizeof error), 0);
}

struct Request {
  farandole_request request{};
  std::vector<int64_t> shape;

  Request(int kind, void* in, void* out, std::vector<int64_t> of) : shape(std::move(of)) {
    request.kind = kind;
    request.dtype = 8;
    request.op = kSum;
    request.peer = 0;
    request.device = 0;
    request.on_device = 1;
    request.name = "tensor";
    request.input = in;
    request.output = out;
    request.shape = shape.data();
    request.dimensions = static_cast<int32_t>(shape.size());
    request.prescale = request.postscale = 1.0;
  }
  int run(farandole_engine* engine, std::string* text = nullptr) const {
    return job::finish(engine, job::submit(engine, request), text);
  }
  void succeed(farandole_engine* engine) const {
    std::string text;
    const int code = run(engine, &text);
    CHECK_EQUAL(code == 0 ? "" : text, "");
  }
};

inline void fill(float* values, std::size_t count, float first) { std::iota(values, values + count, first); }

inline bool all_sums(const float* values, std::size_t count, int size) {
  for (std::size_t i = 0; i < count; ++i) {
    const float wanted = static_cast<float>(size) * static_cast<float>(i) + static_cast<float>(size * (size - 1) / 2);
    if (values[i] != wanted) return false;
  }
  return true;
}

using Body = std::function<void(int rank, farandole_engine* engine)>;

struct Setup {
  int use_nccl = 0;
  int start_ms = 20000;
  std::vector<std::pair<const char*, const char*>> variables = {};  // set when the libraries are open

  void set() const {
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  }
};

// The ranks as threads of a process of their own: the test's process must not have the driver's threads when it forks.
inline void threads(const std::vector<int>& hosts, const Body& body, const Setup& setup = {}) {
  processes::alone([&] {
    libraries();
    setup.set();
    const job::Job job(hosts);
    job.run([&](int rank) {
      use_gpus(job.engine(rank), setup.use_nccl, setup.start_ms);
      body(rank, job.engine(rank));
    });
  });
}

// Two ranks as processes.
inline void two_processes(const std::array<int32_t, 2>& hosts, const Body& body, bool second_dies = false,
                          const Setup& setup = {}) {
  const bool local = hosts[0] == hosts[1];
  int sockets[2];
  if (local)
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  else
    job::tcp_pair(sockets);
  const auto rank_of = [&](int rank) {
    ::close(sockets[1 - rank]);
    farandole_options options = job::default_options();
    options.tcp_streams = 1;
    options.rank = rank;
    options.size = 2;
    options.hosts = hosts.data();
    farandole_engine* engine = nullptr;
    char error[512] = "";
    CHECK_EQUAL(farandole_create(&options, &engine, error, sizeof error), 0);
    farandole_add_link(engine, 1 - rank, sockets[rank], local ? 0 : 1);
    while (farandole_start(engine, 20000, error, sizeof error) == 1) {
    }
    libraries();
    setup.set();
    use_gpus(engine, setup.use_nccl, setup.start_ms);
    body(rank, engine);
    while (farandole_leave(engine, 2000) == 1) {
    }
    farandole_destroy(engine);
  };
  const processes::Child first = processes::start([&] { rank_of(0); }), second = processes::start([&] { rank_of(1); });
  ::close(sockets[0]);
  ::close(sockets[1]);
  CHECK_EQUAL(processes::result_of(first), "");
  CHECK_EQUAL(processes::result_of(second), second_dies ? "killed" : "");
}

}  // namespace gpu_job
