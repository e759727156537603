// The owner thread: makes communicators, launches groups on them, watches for errors, aborts.
// Touches base/, os/ and cuda/.
#include "cuda/communicators.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "os/clock.h"

namespace farandole::cuda {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLook = std::chrono::microseconds(100);  // between two looks at what is under way

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
  bool settled = false;
  Error failed;
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
  void advance(const CommKey& key, Entry& entry);
  void start(const CommKey& key, Entry& entry);
  void launch(Launch launch, Entry& entry);
  void fail(const CommKey& key, Entry& entry, const Error& error);
  void end(std::uint32_t generation, const Error& error);
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
    commands.push_back([ticket, command = std::move(command)](State& state) { command(state, ticket); });
    changed.notify_all();
    return true;
  }
  lock.unlock();
  done(lost_error());
  return false;
}

void Communicators::State::give_up() {
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
    return !entry.failed.failed() && (entry.created != 0 || !entry.settled || !entry.running.empty());
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
  options.enter(key.device);
  CommConfig config;
  config.blocking = 0;
  const NcclResult result = options.nccl.comm_init(&entry.comm, entry.size, id, entry.rank, &config);
  if (!fine(result)) fail(key, entry, error_of("ncclCommInitRankConfig", result));
}

void Communicators::State::advance(const CommKey& key, Entry& entry) {
  if (entry.comm == nullptr) start(key, entry);
  if (entry.comm != nullptr && !entry.failed.failed()) {
    NcclResult now = NcclResult::in_progress;
    const NcclResult asked = options.nccl.comm_async_error(entry.comm, &now);
    entry.settled = now == NcclResult::success;
    if (!fine(asked) || !fine(now)) fail(key, entry, error_of("a communicator", fine(asked) ? now : asked));
  }
  if (entry.failed.failed()) return;
  if (entry.settled && entry.created != 0) tell(std::exchange(entry.created, 0), {});
  if (entry.created != 0 && Clock::now() > entry.deadline)
    fail(key, entry, {Code::timed_out, "a communicator of NCCL was not ready in time: a member has not come to it"});
  while (entry.settled && !entry.running.empty() && entry.running.front().finished()) {
    const Ticket done = entry.running.front().done;
    entry.running.pop_front();
    tell(done, {});
  }
}

void Communicators::State::launch(Launch launch, Entry& entry) {
  options.enter(launch.key.device);
  NcclResult result = options.nccl.group_start();
  if (fine(result)) {
    result = launch.calls(options.nccl, entry.comm);
    const NcclResult closed = options.nccl.group_end();  // also after a failed call: a group must not stay open
    if (fine(result)) result = closed;
  }
  const CommKey key = launch.key;
  entry.settled = false;  // also after success: an error may show only when it is asked for
  entry.running.push_back(std::move(launch));
  if (!fine(result)) fail(key, entry, error_of("a group of calls", result));
}

void Communicators::State::work() {
  for (auto& [key, entry] : entries)
    if (!entry.failed.failed()) advance(key, entry);
  while (!waiting.empty()) {
    Entry& entry = entries.at(waiting.front().key);  // `fail` removes the launches of what has failed
    if (!entry.settled) return;
    Launch next = std::move(waiting.front());
    waiting.pop_front();
    launch(std::move(next), entry);
  }
}

void Communicators::State::end(std::uint32_t generation, const Error& error) {
  if (generation >= ended) {
    ended = generation + 1;
    end_error = error;
  }
  std::vector<Comm> over;
  for (auto at = entries.begin(); at != entries.end();) {
    if (at->first.generation > generation) {
      ++at;
      continue;
    }
    fail(at->first, at->second, error);
    if (at->second.comm != nullptr) over.push_back(at->second.comm);
    at = entries.erase(at);
  }
  if (over.empty()) return;
  if (options.nccl.comm_revoke != nullptr)
    for (Comm comm : over) options.nccl.comm_revoke(comm, 0);
  // All in one group: communicators that share ranks wait for each other otherwise.
  options.nccl.group_start();
  for (Comm comm : over) options.nccl.comm_abort(comm);
  options.nccl.group_end();
}

void Communicators::State::run() {
  std::unique_lock lock(mutex);
  const auto wanted = [this] { return !commands.empty() || leaving || lost; };
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
    const bool more = busy();
    lock.lock();
    if (more)
      changed.wait_for(lock, kLook, wanted);
    else
      changed.wait(lock, wanted);
  }
}

Communicators::Communicators(CommOptions options) : state_(std::make_shared<State>(std::move(options))) {
  state_->owner = os::start_thread("farandole-nccl", [state = state_] { state->run(); });
}

Communicators::~Communicators() {
  end(~std::uint32_t{0} - 1, {Code::shut_down, "the communicators are closed"});
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

bool Communicators::end(std::uint32_t generation, const Error& error) {
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
  const bool taken = state_->put(done, [=](State& state, Ticket ticket) {
    state.end(generation, error);
    state.tell(ticket, {});
  });
  if (!taken) return false;
  std::unique_lock lock(wait->mutex);
  if (wait->changed.wait_for(lock, state_->options.end_limit, [&] { return wait->over; })) return true;
  lock.unlock();
  state_->give_up();
  return false;
}

}  // namespace farandole::cuda
