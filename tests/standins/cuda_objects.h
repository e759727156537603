// The objects of the stand-in for CUDA's driver: streams that run what they get in order, events, shared memory.
// Touches threads and memory files.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace standin {

// A stream: its thread does one task after the other. A task that is not done yet returns false and runs again, as a
// wait on a device does; nothing behind it starts before. A stream that is destroyed gives up such a wait.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void put(std::function<bool()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<bool()> task = tasks_.front();  // it stays in the queue until it is done
      lock.unlock();
      const bool done = task();
      if (!done) ::usleep(20);  // sleep: a wait of a device looks again
      lock.lock();
      if (!done && !ending_) continue;
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<bool()>> tasks_;
  bool ending_ = false;
  std::thread thread_;
};

// The state of an event is shared with the streams that will reach it.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;

  void reach() {
    std::lock_guard lock(mutex);
    reached = true;
    changed.notify_all();
  }
  bool look() {
    std::lock_guard lock(mutex);
    return reached;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
};
struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // of the last record; null: never recorded, which counts as reached

  std::shared_ptr<Mark> last() {
    std::lock_guard lock(mutex);
    return mark;
  }
};

// Device memory: a memory file, mapped.
struct Block {
  int file = -1;
  std::size_t bytes = 0;
  std::uint64_t id = 0;  // no other block of this process has had it
};

inline int make_file(std::size_t bytes) {
  const int file = static_cast<int>(::syscall(SYS_memfd_create, "standin", 1u));
  if (file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    ::close(file);
    return -1;
  }
  return file;
}

inline void* map_file(int file, std::size_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return at == MAP_FAILED ? nullptr : at;
}

}  // namespace standin
