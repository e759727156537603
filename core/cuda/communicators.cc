// The owner thread: makes communicators, launches groups on them, watches for errors, aborts.
// Touches base/, os/ and cuda/.
#include "cuda/communicators.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "os/clock.h"
#include "os/fork.h"

namespace farandole::cuda {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::microseconds(200);      // between two looks at what is under way
constexpr auto kPatience = std::chrono::microseconds(500);  // without a sleep, until a launch has begun
std::atomic<bool> hung{false};

Error error_of(const char* call, NcclResult result) {
  return {Code::internal,
          std::string(call) + " of NCCL failed with result " + std::to_string(static_cast<int>(result))};
}

bool fine(NcclResult result) { return result == NcclResult::success || result == NcclResult::in_progress; }

using Ticket = std::uint64_t;  // of a `done` that was not called yet; 0: none

struct Launch {
  CommKey key;
  std::function<NcclResult(const Nccl&, Comm)> calls;
  std::function<bool()> finished;
  Ticket done;
};

struct Entry {
  int rank = 0, size = 0;
  Communicators::GetId id;
  Ticket created = 0;
  Clock::time_point deadline;
  Comm comm = nullptr;
  bool settled = false, retiring = false, finalized = false;
  Clock::time_point launched;
  Error failed, trouble;  // trouble: an error that is not told yet, since `noticed`
  Clock::time_point noticed;
  std::deque<Launch> running;
};

const Error& lost_error() {
  static const Error error{Code::internal,
                           "an abort of NCCL did not return; the thread that owns its communicators has been given up"};
  return error;
}

}  // namespace

struct Communicators::State {
  CommOptions options;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void(State&)>> commands;
  std::map<Ticket, Done> pending;
  Ticket last = 0;
  bool leaving = false, lost = false;
  bool empty = false;  // there is no communicator that works, and nothing was asked for since that was seen
  std::thread owner;
  // The owner thread's alone:
  std::map<CommKey, Entry> entries;
  std::deque<Launch> waiting;
  std::uint32_t ended = 0;  // generations below it are over
  Error end_error;

  explicit State(CommOptions given) : options(std::move(given)) {}

  void run();
  void work();
  bool busy() const;
  bool hurries() const;
  void advance(const CommKey& key, Entry& entry);
  void start(const CommKey& key, Entry& entry);
  void launch(Launch launch, Entry& entry);
  void fail(const CommKey& key, Entry& entry, const Error& error);
  void look(const CommKey& key, Entry& entry);
  bool retired(const CommKey& key, Entry& entry);
  void end(std::uint32_t generation, const Error& error);
  // Aborts all that `over(key)` names.
  template <class Over>
  void drop(Over over, const Error& error);
  void tell(Ticket ticket, const Error& error);
  // Hands a command with its `done` to the owner thread; false: that has been given up, and `done` was called.
  bool put(Done done, std::function<void(State&, Ticket)> command);
  void give_up();
};

void Communicators::State::tell(Ticket ticket, const Error& error) {
  std::unique_lock lock(mutex);
  const auto at = pending.find(ticket);
  if (at == pending.end()) return;  // given up, and told then
  const Done done = std::move(at->second);
  pending.erase(at);
  lock.unlock();
  done(error);
}

bool Communicators::State::put(Done done, std::function<void(State&, Ticket)> command) {
  std::unique_lock lock(mutex);
  if (!lost && !leaving) {
    const Ticket ticket = ++last;
    pending[ticket] = std::move(done);
    empty = false;
    commands.push_back([ticket, command = std::move(command)](State& state) { command(state, ticket); });
    changed.notify_all();
    return true;
  }
  lock.unlock();
  done(lost_error());
  return false;
}

void Communicators::State::give_up() {
  hung = true;
  std::unique_lock lock(mutex);
  lost = true;
  std::map<Ticket, Done> told = std::move(pending);
  pending.clear();
  lock.unlock();
  for (const auto& [ticket, done] : told) done(lost_error());
}

bool Communicators::State::busy() const {
  return !waiting.empty() || std::ranges::any_of(entries, [](const auto& pair) {
    const Entry& entry = pair.second;
    return !entry.failed.failed() && (entry.created != 0 || !entry.settled || !entry.running.empty() || entry.retiring);
  });
}

// Whether a launch has just been made: it begins within microseconds, and a rank waits for it.
bool Communicators::State::hurries() const {
  const auto now = Clock::now();
  return std::ranges::any_of(entries, [now](const auto& pair) {
    const Entry& entry = pair.second;
    return !entry.settled && !entry.running.empty() && now - entry.launched < kPatience;
  });
}

// Everything that was asked of it ends with the error; the communicator stays until its generation ends.
void Communicators::State::fail(const CommKey& key, Entry& entry, const Error& error) {
  if (entry.failed.failed()) return;
  entry.failed = error;
  std::vector<Ticket> told{std::exchange(entry.created, 0)};
  for (const Launch& one : entry.running) told.push_back(one.done);
  for (const Launch& one : waiting)
    if (one.key == key) told.push_back(one.done);
  entry.running.clear();
  std::erase_if(waiting, [&](const Launch& one) { return one.key == key; });
  for (Ticket ticket : told) tell(ticket, error);
}

void Communicators::State::start(const CommKey& key, Entry& entry) {
  UniqueId id{};
  if (!entry.id(id)) return;
  try {
    options.enter(key.device);
  } catch (const Failure& failure) {
    return fail(key, entry, failure.error());
  }
  CommConfig config;
  config.blocking = 0;
  const NcclResult result = options.nccl.comm_init(&entry.comm, entry.size, id, entry.rank, &config);
  if (!fine(result)) fail(key, entry, error_of("ncclCommInitRankConfig", result));
}

// Asks NCCL how the communicator is.
void Communicators::State::look(const CommKey& key, Entry& entry) {
  NcclResult now = NcclResult::in_progress;
  const NcclResult asked = options.nccl.comm_async_error(entry.comm, &now);
  entry.settled = now == NcclResult::success;
  if (!entry.trouble.failed() && (!fine(asked) || !fine(now))) {
    entry.trouble = error_of("a communicator", fine(asked) ? now : asked);
    entry.noticed = Clock::now();
  }
  if (!entry.trouble.failed()) return;
  entry.settled = false;
  if (entry.created != 0 || Clock::now() - entry.noticed >= options.grace) fail(key, entry, entry.trouble);
}

void Communicators::State::advance(const CommKey& key, Entry& entry) {
  if (entry.comm == nullptr) start(key, entry);
  if (entry.comm != nullptr && !entry.failed.failed()) look(key, entry);
  if (entry.failed.failed()) return;
  if (entry.settled && entry.created != 0) tell(std::exchange(entry.created, 0), {});
  if (entry.created != 0 && Clock::now() > entry.deadline)
    fail(key, entry, {Code::timed_out, "a communicator of NCCL was not ready in time: a member has not come to it"});
  try {
    while (entry.settled && !entry.running.empty() && entry.running.front().finished()) {
      const Ticket done = entry.running.front().done;
      entry.running.pop_front();
      tell(done, {});
    }
  } catch (const Failure& failure) {  // of the device
    fail(key, entry, failure.error());
  }
}

// Goes on with the end of a communicator that nothing runs on. True when it is gone.
bool Communicators::State::retired(const CommKey& key, Entry& entry) {
  if (!entry.retiring || !entry.settled || !entry.running.empty()) return false;
  if (std::ranges::any_of(waiting, [&key](const Launch& one) { return one.key == key; })) return false;
  if (!std::exchange(entry.finalized, true)) {
    if (fine(options.nccl.comm_finalize(entry.comm))) entry.settled = false;
    return false;
  }
  options.nccl.comm_destroy(entry.comm);
  return true;
}

void Communicators::State::launch(Launch launch, Entry& entry) {
  NcclResult result = NcclResult::success;
  try {
    options.enter(launch.key.device);
    result = options.nccl.group_start();
  } catch (const Failure&) {
    result = NcclResult::unhandled_cuda_error;
  }
  if (fine(result)) {
    result = launch.calls(options.nccl, entry.comm);
    const NcclResult closed = options.nccl.group_end();  // also after a failed call: a group must not stay open
    if (fine(result)) result = closed;
  }
  entry.settled = false;  // also after success: an error may show only when it is asked for
  entry.launched = entry.noticed = Clock::now();
  entry.running.push_back(std::move(launch));
  if (!fine(result)) entry.trouble = error_of("a group of calls", result);
}

void Communicators::State::work() {
  for (auto& [key, entry] : entries)
    if (!entry.failed.failed()) advance(key, entry);
  for (auto at = entries.begin(); at != entries.end();)
    at = !at->second.failed.failed() && retired(at->first, at->second) ? entries.erase(at) : std::next(at);
  while (!waiting.empty()) {
    Entry& entry = entries.at(waiting.front().key);  // `fail` removes the launches of what has failed
    if (!entry.settled) return;
    Launch next = std::move(waiting.front());
    waiting.pop_front();
    launch(std::move(next), entry);
  }
}

template <class Over>
void Communicators::State::drop(Over over, const Error& error) {
  std::vector<Comm> gone;
  for (auto at = entries.begin(); at != entries.end();) {
    if (!over(at->first)) {
      ++at;
      continue;
    }
    fail(at->first, at->second, error);
    if (at->second.comm != nullptr) gone.push_back(at->second.comm);
    at = entries.erase(at);
  }
  if (gone.empty()) return;
  if (options.nccl.comm_revoke != nullptr)
    for (Comm comm : gone) options.nccl.comm_revoke(comm, 0);
  // All in one group: communicators that share ranks wait for each other otherwise.
  options.nccl.group_start();
  for (Comm comm : gone) options.nccl.comm_abort(comm);
  options.nccl.group_end();
}

void Communicators::State::end(std::uint32_t generation, const Error& error) {
  if (generation >= ended) {
    ended = generation + 1;
    end_error = error;
  }
  drop([generation](const CommKey& key) { return key.generation <= generation; }, error);
}

void Communicators::State::run() {
  std::unique_lock lock(mutex);
  const auto wanted = [this] { return !commands.empty() || leaving || lost; };  // also notified: others look at `empty`
  while (!lost && (!leaving || !commands.empty())) {
    if (!commands.empty()) {
      const std::function<void(State&)> command = std::move(commands.front());
      commands.pop_front();
      lock.unlock();
      command(*this);
      lock.lock();
      continue;
    }
    lock.unlock();
    work();
    const bool more = busy(), now = hurries();
    const bool none = std::ranges::all_of(entries, [](const auto& pair) { return pair.second.failed.failed(); });
    if (now) std::this_thread::yield();
    lock.lock();
    if (now) continue;
    if (commands.empty() && none && !empty) {
      empty = true;
      changed.notify_all();
    }
    if (more)
      changed.wait_for(lock, kLook, wanted);
    else
      changed.wait(lock, wanted);
  }
}

Communicators::Communicators(CommOptions options)
    : fork_depth_(os::fork_depth()), state_(std::make_shared<State>(std::move(options))) {
  state_->owner = os::start_thread("farandole-nccl", [state = state_] { state->run(); });
}

Communicators::~Communicators() {
  if (os::fork_depth() != fork_depth_) {  // a child has no such thread
    static_cast<void>(new std::shared_ptr<State>(state_));
    return;
  }
  state_->put([](const Error&) {},
              [](State& state, Ticket ticket) {
                for (auto& [key, entry] : state.entries) entry.retiring = true;
                state.tell(ticket, {});
              });
  {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, state_->options.end_limit, [this] { return state_->empty || state_->lost; });
    const bool stuck = !state_->commands.empty();
    lock.unlock();
    if (stuck) state_->give_up();
  }
  end(~std::uint32_t{0} - 1, {Code::shut_down, "the communicators are closed"});
  ended();
  std::unique_lock lock(state_->mutex);
  state_->leaving = true;
  state_->changed.notify_all();
  std::thread owner = std::move(state_->owner);
  const bool lost = state_->lost;
  lock.unlock();
  if (lost)
    owner.detach();
  else
    owner.join();
}

bool Communicators::abort_hung() { return hung; }

void Communicators::make_id(std::function<void(const Error&, const UniqueId&)> done) {
  auto id = std::make_shared<UniqueId>();
  state_->put([done = std::move(done), id](const Error& error) { done(error, *id); },
              [id](State& state, Ticket ticket) {
                const NcclResult result = state.options.nccl.get_unique_id(id.get());
                state.tell(ticket, fine(result) ? Error{} : error_of("ncclGetUniqueId", result));
              });
}

void Communicators::create(const CommKey& key, int rank, int size, GetId id, Done done) {
  const auto deadline = Clock::now() + state_->options.start_limit;
  state_->put(std::move(done), [=](State& state, Ticket ticket) {
    if (key.generation < state.ended) return state.tell(ticket, state.end_error);
    auto [at, fresh] = state.entries.try_emplace(key);
    if (!fresh) return state.tell(ticket, {Code::invalid_argument, "there is such a communicator already"});
    Entry& entry = at->second;
    entry.rank = rank;
    entry.size = size;
    entry.id = id;
    entry.created = ticket;
    entry.deadline = deadline;
  });
}

void Communicators::launch(const CommKey& key, std::function<NcclResult(const Nccl&, Comm)> calls,
                           std::function<bool()> finished, Done done) {
  state_->put(std::move(done), [=](State& state, Ticket ticket) {
    const auto at = state.entries.find(key);
    if (at != state.entries.end() && !at->second.failed.failed())
      return state.waiting.push_back({key, calls, finished, ticket});
    if (at != state.entries.end()) return state.tell(ticket, at->second.failed);
    state.tell(ticket, key.generation < state.ended ? state.end_error
                                                    : Error{Code::invalid_argument, "there is no such communicator"});
  });
}

void Communicators::retire(const CommKey& key) {
  state_->put([](const Error&) {},
              [key](State& state, Ticket ticket) {
                if (const auto at = state.entries.find(key); at != state.entries.end()) at->second.retiring = true;
                state.tell(ticket, {});
              });
}

void Communicators::drop(const CommKey& key, const Error& error) {
  state_->put([](const Error&) {},
              [key, error](State& state, Ticket ticket) {
                state.drop([&key](const CommKey& one) { return one == key; }, error);
                state.tell(ticket, {});
              });
}

void Communicators::end(std::uint32_t generation, const Error& error) {
  state_->put([](const Error&) {},
              [=](State& state, Ticket ticket) {
                state.end(generation, error);
                state.tell(ticket, {});
              });
}

bool Communicators::ended() {
  struct Wait {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  auto wait = std::make_shared<Wait>();
  const auto done = [wait](const Error&) {
    std::lock_guard lock(wait->mutex);
    wait->over = true;
    wait->changed.notify_all();
  };
  if (!state_->put(done, [](State& state, Ticket ticket) { state.tell(ticket, {}); })) return false;
  std::unique_lock lock(wait->mutex);
  if (wait->changed.wait_for(lock, state_->options.end_limit, [&] { return wait->over; })) return true;
  lock.unlock();
  state_->give_up();
  return false;
}

}  // namespace farandole::cuda
