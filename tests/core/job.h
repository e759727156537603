// A job of ranks as threads of one process: engines joined by real sockets, driven through the C interface.
// Touches api/ and, to make the sockets that the core never opens, the operating system.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "api/farandole.h"

namespace job {

inline void tcp_pair(int sockets[2]) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("no TCP on loopback");
  sockets[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(sockets[0], reinterpret_cast<sockaddr*>(&address), length) != 0) throw std::runtime_error("connect");
  sockets[1] = accept(listener, nullptr, nullptr);
  close(listener);
}

inline farandole_options default_options() {
  farandole_options options{};
  options.interface = farandole_interface();
  options.generation = 1;
  options.fusion_threshold = 128 << 20;
  options.plan_capacity = 1024;
  options.flush_us = 20000;
  options.spin_us = 100;
  options.slot_bytes = 64 << 10;
  options.slots = 4;
  options.fuse_bundles = 1;
  options.chunk_bytes = 256 << 10;
  options.tcp_streams = 2;
  options.record = -1;
  return options;
}

class Job {
 public:
  explicit Job(std::vector<int> hosts, farandole_options options = default_options())
      : hosts_(hosts.begin(), hosts.end()), engines_(hosts.size()) {
    int size = static_cast<int>(hosts.size());
    char error[512];
    for (int rank = 0; rank < size; ++rank) {
      options.rank = rank;
      options.size = size;
      options.hosts = hosts_.data();
      if (farandole_create(&options, &engines_[static_cast<std::size_t>(rank)], error, sizeof error) != 0)
        throw std::runtime_error(error);
    }
    for (int a = 0; a < size; ++a)
      for (int b = a + 1; b < size; ++b) {
        bool local = hosts[static_cast<std::size_t>(a)] == hosts[static_cast<std::size_t>(b)];
        for (int stream = 0; stream < (local ? 1 : options.tcp_streams); ++stream) {
          int pair[2];
          if (!local)
            tcp_pair(pair);
          else if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
            throw std::runtime_error("socketpair");
          farandole_add_link(engine(a), b, pair[0], local ? 0 : 1);
          farandole_add_link(engine(b), a, pair[1], local ? 0 : 1);
        }
      }
    run([&](int rank) {
      char text[512];
      int code = 1;
      for (int slices = 0; code == 1 && slices < 100; ++slices)
        code = farandole_start(engine(rank), 100, text, sizeof text);
      if (code != 0) throw std::runtime_error(text);
    });
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    run([&](int rank) {
      while (farandole_leave(engine(rank), 2000) == 1) {
      }
    });
    for (farandole_engine* engine : engines_) farandole_destroy(engine);
  }

  int size() const { return static_cast<int>(engines_.size()); }
  farandole_engine* engine(int rank) const { return engines_[static_cast<std::size_t>(rank)]; }

  // Runs `body` for every rank at once, each in its own thread, and passes on the first failure.
  void run(const std::function<void(int rank)>& body) const {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::string failure;
    for (int rank = 0; rank < size(); ++rank)
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (const std::exception& error) {
          std::lock_guard lock(mutex);
          if (failure.empty()) failure = "rank " + std::to_string(rank) + ": " + error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    if (!failure.empty()) throw std::runtime_error(failure);
  }

 private:
  std::vector<int32_t> hosts_;
  std::vector<farandole_engine*> engines_;
};

struct Tensor {
  std::vector<float> data;
  std::vector<int64_t> shape;
  explicit Tensor(std::size_t elements, float value = 0)
      : data(elements, value), shape{static_cast<int64_t>(elements)} {}
};

inline farandole_request request(int kind, const char* name, Tensor& tensor, int group = 0) {
  farandole_request made{};
  made.kind = kind;
  made.dtype = 8;
  made.op = 1;
  made.group = group;
  made.peer = -1;
  made.device = -1;
  made.name = name;
  made.input = tensor.data.data();
  made.output = tensor.data.data();
  made.shape = tensor.shape.data();
  made.dimensions = static_cast<int32_t>(tensor.shape.size());
  made.prescale = made.postscale = 1.0;
  return made;
}

inline int64_t submit(farandole_engine* engine, const farandole_request& one) {
  int64_t handle = 0;
  char error[512];
  if (farandole_submit(engine, &one, 1, 0, 0, &handle, error, sizeof error) != 0) throw std::runtime_error(error);
  return handle;
}

// The outcome's code; the message in `text` when asked for. Fails after `seconds`.
inline int finish(farandole_engine* engine, int64_t handle, std::string* text = nullptr, int64_t* value = nullptr,
                  int64_t seconds = 120) {
  for (int i = 0; i < seconds * 10; ++i) {
    int code = farandole_wait(engine, handle, 100);
    if (code == 1) continue;
    farandole_outcome outcome{};
    if (code != 0 || farandole_outcome_of(engine, handle, &outcome) != 0) throw std::runtime_error("no such handle");
    int result = outcome.code;
    if (text != nullptr) *text = outcome.message;
    if (value != nullptr) *value = outcome.value;
    farandole_release(engine, handle);
    return result;
  }
  throw std::runtime_error("an operation does not end");
}

}  // namespace job
