// Runs the ranks of a test as real processes, forked from the test before it has threads.
// Touches processes and pipes.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "check.h"

namespace processes {

constexpr int kLimitMs = 60000;  // a test that takes longer hangs

struct Child {
  pid_t id = -1;
  int words = -1;  // what it reports; the end without words is success
};

inline Child start(const std::function<void()>& body) {
  int pipe[2];
  CHECK(::pipe(pipe) == 0);
  const pid_t id = ::fork();
  CHECK(id >= 0);
  if (id > 0) {
    ::close(pipe[1]);
    return {id, pipe[0]};
  }
  ::close(pipe[0]);
  std::string words;
  try {
    body();
  } catch (const std::exception& error) {
    words = error.what();
    if (words.empty()) words = "failed";
  }
  const bool written = ::write(pipe[1], words.data(), words.size()) == static_cast<ssize_t>(words.size());
  ::_exit(written && words.empty() ? 0 : 1);
}

// What it reported; "killed" when a signal ended it. It is killed itself when it does not end.
inline std::string result_of(const Child& child) {
  std::string words;
  pollfd ready{child.words, POLLIN, 0};
  char some[512];
  while (::poll(&ready, 1, kLimitMs) > 0) {
    const ssize_t bytes = ::read(child.words, some, sizeof some);
    if (bytes <= 0) break;
    words.append(some, static_cast<std::size_t>(bytes));
  }
  if (ready.revents == 0) {
    words = "it did not end";
    ::kill(child.id, SIGKILL);
  }
  ::close(child.words);
  int status = 0;
  ::waitpid(child.id, &status, 0);
  if (words.empty() && WIFSIGNALED(status)) return "killed";
  return words;
}

// Runs `body` in a process of its own, which has no library of an earlier test.
inline void alone(const std::function<void()>& body) {
  const std::string words = result_of(start(body));
  if (!words.empty()) throw std::runtime_error(words);
}

// Runs `body(rank)` in `size` processes; fails with the words of all that failed.
inline void ranks(int size, const std::function<void(int)>& body) {
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) children.push_back(start([&body, rank] { body(rank); }));
  std::string words;
  for (int rank = 0; rank < size; ++rank) {
    const std::string one = result_of(children[static_cast<std::size_t>(rank)]);
    if (!one.empty()) words += "rank " + std::to_string(rank) + ": " + one + "; ";
  }
  if (!words.empty()) throw std::runtime_error(words);
}

}  // namespace processes
