// A GPU as a rank uses it: streams, events, memory that other processes have mapped, kernels.
// Touches base/, os/ and cuda/.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/nvrtc.h"

namespace farandole::cuda {

class Gpu;

// The functions of the libraries that devices need.
struct Libraries {
  Driver driver;
  Nvrtc nvrtc;
  int nvrtc_version = 0;
};

// A point in a stream: everything that was put there before has been done when it is reached.
class Moment {
 public:
  Moment(std::shared_ptr<Gpu> gpu, Event event, std::uint64_t number)
      : gpu_(std::move(gpu)), event_(event), number_(number) {}
  ~Moment();
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  bool reached() const;  // throws Failure(internal) when the device has failed
  Event event() const { return event_; }
  std::uint64_t number() const { return number_; }  // from 1; no other moment of the device has it
  const std::shared_ptr<Gpu>& gpu() const { return gpu_; }

 private:
  const std::shared_ptr<Gpu> gpu_;
  const Event event_;
  const std::uint64_t number_;
};
using MomentPtr = std::shared_ptr<const Moment>;

// An allocation of a process, as others open it: eleven numbers.
struct Segment {
  std::uint64_t id = 0;  // unique in its process; 0: it cannot be opened
  Address base = 0;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, 8> handle{};
};
constexpr std::size_t kSegmentNumbers = 11;

// One device of this process. Safe from any thread, but for what lanes do.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // Throws Failure(precondition) when the device cannot be used.
  Gpu(std::shared_ptr<const Libraries> libraries, int ordinal, const std::string& folder);
  ~Gpu();

  // Makes the context current on this thread for a while, and keeps its calls out of graphs that others capture.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Driver& driver_;
    Context before_ = nullptr;
    int mode_ = kCaptureRelaxed;
  };

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  const std::array<std::uint64_t, 2>& uuid() const { return uuid_; }
  void enter() const;  // makes the context current on this thread for good
  MomentPtr mark(Stream stream);
  // These two with the context current. The allocation that has all of this memory:
  Segment segment_of(Address address, std::size_t bytes);
  // Where another process's allocation lies here; 0: it cannot be opened, and trouble() says why. `process` is its
  // process_nonce().
  Address open(std::uint64_t process, const Segment& segment);
  std::string trouble() const;  // why the last thing failed that this device could not do; "": nothing has
  void note_trouble(std::string words);
  Kernels& kernels() { return kernels_; }
  unsigned blocks() const { return blocks_; }  // that fill the device

  // Throws Failure(internal) that names the call.
  void check(Result result, const char* call) const;

 private:
  friend class Moment;
  Event take_event();

  struct Mapped {
    Segment segment;
    Address at = 0;
    std::uint64_t used = 0;
  };

  const std::shared_ptr<const Libraries> libraries_;
  const Driver& driver_;
  const int ordinal_;
  Context context_ = nullptr;
  std::array<std::uint64_t, 2> uuid_{};
  unsigned blocks_ = 1;
  Kernels kernels_;
  mutable std::mutex mutex_;  // of all that follows
  std::string trouble_;
  std::vector<Event> events_;
  std::map<Address, Segment> own_;                                    // by their ends
  std::map<std::pair<std::uint64_t, std::uint64_t>, Mapped> mapped_;  // by process and id
  std::uint64_t uses_ = 0;
  std::atomic<std::uint64_t> moments_{0};
};

// Told when something on a device has ended; never after close().
class Waker {
 public:
  explicit Waker(std::function<void()> wake) : wake_(std::move(wake)) {}
  void wake();
  void close();

 private:
  std::mutex mutex_;
  std::function<void()> wake_;
};

// What the kernel does with a table (reduce_source.h).
struct Work {
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  bool scaled = false;
  double prescale = 1.0, postscale = 1.0;
  std::int64_t divisor = 1;
  std::size_t ins = 1, outs = 1;
  std::vector<std::uint64_t> table;  // rows of first tile, elements, sources, results
  std::size_t rows = 0, tiles = 0;

  // `elements` of each source and result, whose addresses the caller appends to the table.
  void add_row(std::size_t elements);
};

// A stream of our own with its memory, for one collective at a time.
class Lane {
 public:
  Lane(std::shared_ptr<Gpu> gpu, std::shared_ptr<Waker> waker);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Gpu& gpu() const { return *gpu_; }
  Stream stream() const { return stream_; }
  bool idle() const;                 // everything in the stream is done, or has failed
  void after(const Moment& moment);  // what comes next waits for it
  // Looks whether it is reached; if not, the waker is told when it is.
  bool reached(const Moment& moment);
  void copy(Address to, Address from, std::size_t bytes);
  void to_host(void* to, Address from, std::size_t bytes);
  void to_device(Address to, const void* from, std::size_t bytes);
  bool loads(const Work& work);          // false: its kernel cannot be compiled or loaded
  void run(const Work& work);            // when the last but one is done
  MomentPtr mark();                      // reached when all of this is done
  void settle();                         // waits for it, which must not depend on what others do
  Address arena(std::size_t bytes);      // device memory that peers may map; valid until the next call
  std::byte* pinned(std::size_t bytes);  // host memory that the device copies from and to; likewise

 private:
  struct Pinned {
    std::unique_ptr<std::byte[]> memory;
    std::byte* at = nullptr;
    std::size_t bytes = 0;
  };
  void grow(Pinned& pinned, std::size_t bytes);
  void drop(Pinned& pinned);

  const std::shared_ptr<Gpu> gpu_;
  const std::shared_ptr<Waker> waker_;
  struct Table {
    Pinned rows;
    Address address = 0;
    std::size_t bytes = 0;
  };

  Stream stream_ = nullptr, bell_ = nullptr;  // the second only waits and wakes: what comes next need not wait for that
  std::uint64_t rung_for_ = 0;                // the last moment of which the waker will be told
  Address arena_ = 0;
  std::size_t arena_bytes_ = 0;
  Pinned pinned_;
  std::array<Table, 2> tables_;  // by turns
  std::size_t runs_ = 0;
};

// While work on the caller's tensors is under way on a lane: where it is cancelled, it ends before the tensors are the
// caller's again.
class Settled {
 public:
  explicit Settled(Lane& lane) : lane_(lane) {}
  ~Settled() { lane_.settle(); }
  Settled(const Settled&) = delete;
  Settled& operator=(const Settled&) = delete;

 private:
  Lane& lane_;
};

// The libraries, and the devices that were used. Safe from any thread.
class Gpus {
 public:
  // Throws Failure(precondition) when one of the libraries cannot be used.
  Gpus(std::span<const Place> driver, std::span<const Place> nvrtc, std::string folder);
  std::shared_ptr<Gpu> at(int ordinal);  // throws Failure(precondition)

 private:
  const std::shared_ptr<Libraries> libraries_;
  const std::string folder_;
  std::mutex mutex_;
  std::map<int, std::shared_ptr<Gpu>> made_;
};

// A number that no other process has: it tells whether memory is this process's own.
std::uint64_t process_nonce();

}  // namespace farandole::cuda
