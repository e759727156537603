// The communicators of NCCL that a process has, and the one thread that touches them.
// Touches base/, os/ and cuda/.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "cuda/nccl.h"

namespace farandole::cuda {

struct CommKey {
  std::uint32_t generation = 0;
  int group = 0;
  int device = 0;
  auto operator<=>(const CommKey&) const = default;
};

struct CommOptions {
  Nccl nccl;
  int version = 0;
  std::function<void(int device)> enter;  // makes the device's context current on the owner thread
  std::chrono::milliseconds start_limit{60000};
  std::chrono::milliseconds end_limit{5000};
  // An error of a running operation is told after this time: when it comes from the death of a member, that is known by
  // then, and the generation ends with its name.
  std::chrono::milliseconds grace{1000};
};

// All calls return at once, but `ended`. Callbacks must not block. Each `done` is called exactly once: on the owner
// thread, or, when that is given up, in the call that finds it so. Launches begin in the order of the calls, whatever
// communicator they are for: NCCL needs one order on all ranks where groups overlap.
class Communicators {
 public:
  using Done = std::function<void(const Error&)>;
  // The unique id of a communicator: false, not here yet; it is asked again until start_limit.
  using GetId = std::function<bool(UniqueId&)>;

  explicit Communicators(CommOptions options);
  // Retires all communicators; those that are not gone after end_limit are aborted.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  // A new unique id, for one communicator.
  void make_id(std::function<void(const Error&, const UniqueId&)> done);
  // Makes a communicator without blocking. `done`: every member has come, or why not.
  void create(const CommKey& key, int rank, int size, GetId id, Done done);
  // `calls` runs as one group, as soon as the communicator has finished what it was told before. `finished` is asked
  // until it is true (an event behind the calls); then, or at an error of the communicator, `done` is called.
  void launch(const CommKey& key, std::function<NcclResult(const Nccl&, Comm)> calls, std::function<bool()> finished,
              Done done);
  // It is not needed any more: when what it runs is over, it is finalized and destroyed.
  void retire(const CommKey& key);
  // Revokes (where NCCL can) and aborts it; what runs on it ends with `error`. The streams leave it at once, but later
  // than this returns: call `ended`, and synchronize them, before the memory is used again.
  void drop(const CommKey& key, const Error& error);
  // The same for all communicators of this and of older generations, of which no new one can come.
  void end(std::uint32_t generation, const Error& error);
  // Waits until all that was dropped or ended is gone, at most for end_limit. False: an abort did not return. Then the
  // owner thread is given up with all that it has, and every call from now on fails.
  bool ended();
  // Whether that has happened in this process: NCCL may not work in it any more.
  static bool abort_hung();

 private:
  struct State;
  const unsigned fork_depth_;
  std::shared_ptr<State> state_;  // shared with the owner thread, which may outlive this object
};

}  // namespace farandole::cuda
