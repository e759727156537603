// The driver: which thread makes progress for the engine, how threads wait, and the engine's own thread.
// Touches base/, os/ and link/status_page.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "engine/operation.h"
#include "link/status_page.h"
#include "os/poller.h"

namespace farandole {

using LocalPeers = std::map<int, std::unique_ptr<link::LocalPeer>>;  // by rank, on this host

// What a driver drives. These are called with the driver lock held.
class Driven {
 public:
  virtual ~Driven() = default;
  virtual bool pass(std::int64_t now) = 0;         // one pass over everything; true when it made progress
  virtual bool busy() const = 0;                   // something is under way
  virtual bool waits_for_network() const = 0;      // what is under way needs other hosts
  virtual bool has_news() = 0;                     // something has arrived while no thread was driving
  virtual std::int64_t next_deadline() const = 0;  // when to make a pass even without events; kNever
  virtual void fail(Error error) = 0;              // a pass has thrown; throws nothing
};

// One thread at a time is the driver: it holds the driver lock and makes progress on everything, and never blocks
// meanwhile. Usually that is the engine's own thread, which sleeps in the poller when there is nothing to do. A user's
// thread that waits for an operation becomes the driver if no other thread is, so that short operations need no thread
// switch.
class Driver {
 public:
  enum class Thread { engine, user };  // which thread drives

  // All arguments must exist longer than the driver.
  Driver(Driven& driven, const os::Poller& poller, link::StatusPage& status_page, const LocalPeers& local_peers,
         std::atomic<std::int64_t>& wake_ups, bool oversubscribed, std::int64_t spin_ns);

  void start();  // starts the engine's own thread; again: does nothing
  void stop();   // ends it; no user's thread drives after this
  bool running() const { return running_.load(std::memory_order_acquire); }

  // Holds the driver lock. Before it is released, everything that has happened meanwhile is checked once more.
  class Lock {
   public:
    explicit Lock(Driver& driver);             // waits for the lock
    Lock(Driver& driver, std::try_to_lock_t);  // false when another thread drives, or the engine does not run
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    explicit operator bool() const { return lock_.owns_lock(); }
    // Call it before the release. True when there is more work, which the caller must then do.
    bool prepare_release();
    void release_now() { prepared_ = true; }

   private:
    void take();
    Driver& driver_;
    std::unique_lock<std::mutex> lock_;
    bool prepared_ = false;
  };
  std::mutex& mutex() { return mutex_; }  // for threads that only read or change the engine's state

  // With the lock held.
  bool drive();                              // one pass; throws nothing
  void pause(Thread thread);                 // between two passes that moved nothing
  std::int64_t now() const { return now_; }  // when the last pass began
  void drain() const { wakeup_.drain(); }
  void set_spin(std::int64_t spin_ns) { spin_ns_.store(spin_ns, std::memory_order_relaxed); }

  // Until the operation is done or `end`: drives, or sleeps while another thread drives. `passive`: only sleeps.
  // Returns the time.
  std::int64_t wait(Operation& operation, std::int64_t now, std::int64_t end, bool passive);
  void wake();                               // after new work: wakes the engine's thread only if no thread drives
  void notify() const { wakeup_.notify(); }  // wakes it in any case
  const os::Descriptor& descriptor() const { return wakeup_.descriptor(); }  // readable after notify()

 private:
  void thread_main();
  std::int64_t spin_time() const;
  void check_shared_cores(Thread thread);
  bool prepare_sleep();  // throws nothing
  bool check_before_sleep();
  template <class Body>
  bool guarded(Body body);  // what the body throws fails the engine; then returns true

  static constexpr std::int64_t kShortSpin = 30'000;  // when other ranks need the cores, or nothing will come soon

  Driven& driven_;
  const os::Poller& poller_;
  link::StatusPage& status_page_;
  const LocalPeers& local_peers_;
  std::atomic<std::int64_t>& wake_ups_;
  const bool oversubscribed_;  // more ranks than cores: a thread that polls yields the core
  std::mutex mutex_;           // held by the driver
  os::Wakeup wakeup_;
  std::thread thread_;
  std::atomic<std::int64_t> spin_ns_;
  std::atomic<bool> running_{false};  // from start() to stop(): threads of the user may drive
  std::atomic<int> waiters_{0};       // threads of the user that sleep until an operation is done
  std::atomic<bool> asleep_{true};    // no thread makes progress: a thread that adds work must wake the engine's thread
  std::atomic<std::int64_t> sleeping_until_{0};
  std::int64_t now_ = 0;
  std::int64_t checked_cores_at_ = 0;
  bool shares_core_ = false;  // this core with another rank, for now
};

}  // namespace farandole
