// Members agree whether all can, and when it is their turn; they connect once; then each launches, and waits.
// Touches base/, cuda/, link/ and group/.
#include "collective/nccl.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "collective/blocks.h"
#include "collective/nccl_calls.h"
#include "collective/parts.h"

namespace farandole::collective {

namespace {

using cuda::UniqueId;

// Steps of the messages, beside those of the collective that may follow on host memory.
constexpr std::uint32_t kAgree = 0xffffff00, kMeet = 0xffffff01, kMet = 0xffffff02;
constexpr std::chrono::milliseconds kDrain(5000);  // for a stream whose communicator was aborted

// What a call on the owner thread has given; shared with it.
class Answer {
 public:
  explicit Answer(std::shared_ptr<cuda::Waker> waker) : waker_(std::move(waker)) {}

  void give(const Error& error) {
    {
      std::lock_guard lock(mutex_);
      error_ = error;
      here_ = true;
    }
    waker_->wake();
  }
  bool here() const {
    std::lock_guard lock(mutex_);
    return here_;
  }
  Error error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  const std::shared_ptr<cuda::Waker> waker_;
  mutable std::mutex mutex_;
  bool here_ = false;
  Error error_;
};

// One launch: on this side the coroutine, which may be destroyed at any time, on the other one the owner thread.
class Launch {
 public:
  Launch(cuda::Lane& lane, std::shared_ptr<cuda::Waker> waker, NcclPlan plan)
      : gpu_(lane.gpu().shared_from_this()), stream_(lane.stream()), waker_(std::move(waker)), plan_(std::move(plan)) {}

  cuda::NcclResult begin(const cuda::Nccl& nccl, cuda::Comm comm) {
    std::lock_guard lock(mutex_);
    begun_ = !cancelled_;
    cuda::NcclResult result = cancelled_ ? cuda::NcclResult::invalid_usage : cuda::NcclResult::success;
    for (const NcclCall& one : plan_.calls)
      if (result == cuda::NcclResult::success || result == cuda::NcclResult::in_progress)
        result = call(one, plan_, nccl, comm, stream_);
    return result;
  }
  bool finished() {
    std::lock_guard lock(mutex_);
    if (cancelled_) return true;
    if (moment_ != nullptr) return moment_->reached();
    moment_ = gpu_->mark(stream_);
    waker_->wake();
    return moment_->reached();
  }
  void end(const Error& error) {
    {
      std::lock_guard lock(mutex_);
      error_ = error;
    }
    waker_->wake();
  }

  // Null: it is not in the stream yet. Throws the error that it has ended with.
  cuda::MomentPtr moment() {
    std::lock_guard lock(mutex_);
    if (error_.failed()) throw Failure(error_);
    return moment_;
  }
  enum class Reached { nothing, nccl, stream };
  // From now on it does nothing. How far it has come: NCCL may put something into the stream even later.
  Reached cancel() {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    return !begun_ ? Reached::nothing : moment_ == nullptr ? Reached::nccl : Reached::stream;
  }

 private:
  const std::shared_ptr<cuda::Gpu> gpu_;
  const cuda::Stream stream_;
  const std::shared_ptr<cuda::Waker> waker_;
  const NcclPlan plan_;
  std::mutex mutex_;  // of all that follows
  bool begun_ = false, cancelled_ = false;
  cuda::MomentPtr moment_;
  Error error_;
};

// A launch that is cancelled ends before the tensors are the caller's again, unless an abort hangs.
class InFlight {
 public:
  InFlight(Nccl& shared, cuda::CommKey key, cuda::Lane& lane, std::shared_ptr<Launch> launch)
      : shared_(shared), key_(key), lane_(lane), launch_(std::move(launch)) {}
  ~InFlight() {
    if (over_) return;
    const Launch::Reached reached = launch_->cancel();
    shared_.communicators().drop(key_, {Code::revoked, "the operation was cancelled"});
    // An abort frees much behind the kernels' end, which need not be waited for.
    bool ended = reached != Launch::Reached::nccl || shared_.communicators().ended();
    const auto limit = std::chrono::steady_clock::now() + kDrain;
    while (ended && !lane_.idle()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      ended = std::chrono::steady_clock::now() < limit;
    }
    if (!ended) shared_.note_hang();
  }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
  void over() { over_ = true; }

 private:
  Nccl& shared_;
  const cuda::CommKey key_;
  cuda::Lane& lane_;
  const std::shared_ptr<Launch> launch_;
  bool over_ = false;
};

// A communicator that is being made; it goes when nobody waits for it any more.
class Connecting {
 public:
  Connecting(cuda::Communicators& communicators, cuda::CommKey key) : communicators_(communicators), key_(key) {}
  ~Connecting() {
    if (!works_) communicators_.drop(key_, {Code::revoked, "the connection was given up"});
  }
  Connecting(const Connecting&) = delete;
  Connecting& operator=(const Connecting&) = delete;
  void works() { works_ = true; }

 private:
  cuda::Communicators& communicators_;
  const cuda::CommKey key_;
  bool works_ = false;
};

// Every member's numbers, as many from each.
Task share_numbers(const Context& context, const Numbers& mine, std::vector<Numbers>& all, std::uint32_t step) {
  all.assign(index(context.topology->size()), mine);
  const std::size_t bytes = mine.size() * sizeof(std::uint64_t);
  std::vector<Pieces> out;
  for (Numbers& numbers : all) out.emplace_back(numbers.data(), bytes);
  const Pieces in(mine.data(), bytes);
  Task task = gather_blocks(context, in, out, step);
  co_await task;
}

// Whether the others need not be asked again.
bool for_good(Obstacle obstacle) {
  return obstacle == Obstacle::nccl_off || obstacle == Obstacle::nccl_versions || obstacle == Obstacle::nccl_failed;
}

}  // namespace

Nccl::Nccl(NcclOptions options, std::shared_ptr<cuda::Gpus> gpus, std::shared_ptr<cuda::Waker> waker)
    : options_(std::move(options)), gpus_(std::move(gpus)), waker_(std::move(waker)) {}

void Nccl::open() {
  if (options_.use == NcclUse::off) {
    refusal_ = "the setting nccl is off";
    return;
  }
  const cuda::Report report = cuda::open(cuda::nccl_library, options_.places, &functions_);
  version_ = report.version;
  if (!report.usable)
    refusal_ = report.why;
  else if (cuda::abort_may_hang(report.version))
    refusal_ = "NCCL " + cuda::nccl_library.text(report.version) + " may hang when a rank dies; use another version";
}

const std::string& Nccl::refusal() {
  if (!opened_) open();
  opened_ = true;
  if (refusal_.empty() && cuda::Communicators::abort_hung())
    refusal_ = "an abort of NCCL did not return in this process";
  return refusal_;
}

cuda::Communicators& Nccl::communicators() {
  if (communicators_ == nullptr) {
    cuda::CommOptions given;
    given.nccl = functions_;
    given.version = version_;
    given.enter = [gpus = gpus_](int device) { gpus->at(device)->enter(); };
    given.start_limit = options_.start_limit;
    communicators_ = std::make_unique<cuda::Communicators>(std::move(given));
  }
  return *communicators_;
}

void Nccl::end(const Error& error) {
  if (communicators_ != nullptr) communicators_->end(options_.generation, error);
}

NcclGroup::~NcclGroup() {
  if (!devices_.empty()) shared_->communicators().retire(key_);
}

bool NcclGroup::possible(const DeviceJob& job, const Topology& topology) const {
  return !refused_ && topology.size() > 1 && nccl_has(job);
}

// One collective of a group.
class NcclCollective {
 public:
  NcclCollective(const Context& context, const DeviceJob& job, NcclGroup& group)
      : context_(context), job_(job), group_(group), shared_(group.shared_.get()) {}

  Task run(Obstacle& met);

 private:
  int size() const { return context_.topology->size(); }
  int me() const { return context_.topology->me; }
  bool ready();
  void prepare();
  Obstacle judge(const std::vector<Numbers>& all) const;
  Task connect(Obstacle& met);
  Task make_id(UniqueId& id);
  Task launch();

  const Context& context_;
  const DeviceJob& job_;
  NcclGroup& group_;
  Nccl* const shared_;  // null on a rank that uses no GPUs
  NcclPlan plan_;
  Obstacle mine_ = Obstacle::none;
  std::size_t waited_ = 0;
};

// What keeps this member from it; else its plan.
void NcclCollective::prepare() {
  if (shared_ == nullptr || !shared_->refusal().empty()) {
    mine_ = Obstacle::nccl_off;
    if (job_.lane != nullptr && shared_ != nullptr) job_.lane->gpu().note_trouble(shared_->refusal());
  } else if (job_.lane == nullptr) {
    mine_ = Obstacle::host_memory;
  } else {
    mine_ = job_.obstacle == Obstacle::wants_nccl ? Obstacle::none : job_.obstacle;
    if (mine_ == Obstacle::none) mine_ = plan_of(job_, me(), size(), plan_);
  }
}

// Whether the tensors can be read: what their streams had to do first is done.
bool NcclCollective::ready() {
  while (mine_ == Obstacle::none && waited_ < job_.ready.size() && job_.lane->reached(*job_.ready[waited_])) ++waited_;
  return mine_ != Obstacle::none || waited_ == job_.ready.size();
}

// From what all members have said: time, obstacle, version, device (2). The same on all.
Obstacle NcclCollective::judge(const std::vector<Numbers>& all) const {
  Obstacle worst = Obstacle::none;
  for (const Numbers& numbers : all) worst = std::max(worst, static_cast<Obstacle>(numbers[1]));
  if (worst != Obstacle::none) return worst;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i][2] != all[0][2]) return Obstacle::nccl_versions;
    for (std::size_t j = 0; j < i; ++j)
      if (context_.topology->host_of[i] == context_.topology->host_of[j] && all[i][3] == all[j][3] &&
          all[i][4] == all[j][4])
        return Obstacle::shared_gpu;
    if (!group_.devices_.empty() && group_.devices_[i] != NcclGroup::Device{all[i][3], all[i][4]})
      return Obstacle::other_gpu;
  }
  return Obstacle::none;
}

Task NcclCollective::run(Obstacle& met) {
  enter(context_, "pack");
  prepare();
  auto readable = until([this] { return ready(); });
  co_await readable;
  std::optional<LaunchOrder::Turn> turn;
  Numbers mine{0, static_cast<std::uint64_t>(mine_), 0, 0, 0};
  if (mine_ == Obstacle::none) {
    turn.emplace(shared_->order(), context_.group);
    const auto& device = job_.lane->gpu().uuid();
    mine = {turn->proposed(), 0, static_cast<std::uint64_t>(shared_->version()), device[0], device[1]};
  }
  std::vector<Numbers> all;
  Task asked = share_numbers(context_, mine, all, kAgree);
  co_await asked;
  met = judge(all);
  group_.refused_ = for_good(met);
  if (met != Obstacle::none) co_return;
  LaunchOrder::Time latest = 0;
  for (const Numbers& numbers : all) latest = std::max(latest, numbers[0]);
  turn->agree(latest);
  auto first = until([&turn] { return turn->first(); });
  co_await first;
  if (group_.devices_.empty()) {
    Task connected = connect(met);
    co_await connected;
    if (met != Obstacle::none) co_return;
    for (const Numbers& numbers : all) group_.devices_.push_back({numbers[3], numbers[4]});
  }
  Task launched = launch();
  co_await launched;
}

Task NcclCollective::make_id(UniqueId& id) {
  struct Made {
    std::mutex mutex;
    UniqueId id{};
  };
  auto made = std::make_shared<Made>();
  auto answer = std::make_shared<Answer>(shared_->waker());
  shared_->communicators().make_id([made, answer](const Error& error, const UniqueId& given) {
    {
      std::lock_guard lock(made->mutex);
      made->id = given;
    }
    answer->give(error);
  });
  auto here = until([&answer] { return answer->here(); });
  co_await here;
  if (answer->error().failed())
    job_.lane->gpu().note_trouble(answer->error().message);  // without an id nobody can connect, and all will say so
  std::lock_guard lock(made->mutex);
  id = made->id;
}

// The first member's id goes to all over our own links; then all say whether their communicator works.
Task NcclCollective::connect(Obstacle& met) {
  enter(context_, "connect");
  UniqueId id{};
  Numbers words(sizeof id / sizeof(std::uint64_t), 0);
  if (me() == 0) {
    Task task = make_id(id);
    co_await task;
    std::memcpy(words.data(), &id, sizeof id);
  }
  std::vector<Numbers> all;
  Task told = share_numbers(context_, words, all, kMeet);
  co_await told;
  std::memcpy(&id, all[0].data(), sizeof id);
  group_.key_ = {shared_->generation(), static_cast<int>(context_.group), job_.lane->gpu().ordinal()};
  auto answer = std::make_shared<Answer>(shared_->waker());
  const auto given = [id](UniqueId& found) {
    found = id;
    return true;
  };
  Connecting connecting(shared_->communicators(), group_.key_);
  shared_->communicators().create(group_.key_, me(), size(), given, [answer](const Error& e) { answer->give(e); });
  auto here = until([&answer] { return answer->here(); });
  co_await here;
  const Error error = answer->error();
  if (error.failed()) job_.lane->gpu().note_trouble(error.message);
  const Numbers mine{static_cast<std::uint64_t>(error.failed() ? Obstacle::nccl_failed : Obstacle::none)};
  Task agreed = share_numbers(context_, mine, all, kMet);
  co_await agreed;
  for (const Numbers& numbers : all) met = std::max(met, static_cast<Obstacle>(numbers[0]));
  group_.refused_ = met != Obstacle::none;
  if (met == Obstacle::none) connecting.works();
}

Task NcclCollective::launch() {
  cuda::Lane& lane = *job_.lane;
  const std::optional<cuda::Work> after = plan_.after;
  auto launch = std::make_shared<Launch>(lane, shared_->waker(), plan_);
  InFlight in_flight(*shared_, group_.key_, lane, launch);
  if (plan_.before.has_value()) lane.run(*plan_.before);
  enter(context_, "reduce");
  shared_->communicators().launch(
      group_.key_, [launch](const cuda::Nccl& nccl, cuda::Comm comm) { return launch->begin(nccl, comm); },
      [launch] { return launch->finished(); }, [launch](const Error& error) { launch->end(error); });
  auto begun = until([&launch] { return launch->moment() != nullptr; });
  co_await begun;
  cuda::MomentPtr last = launch->moment();
  if (after.has_value()) {
    enter(context_, "unpack");
    lane.run(*after);
    last = lane.mark();
  }
  auto finished = until([&lane, &last, &launch] { return launch->moment() != nullptr && lane.reached(*last); });
  co_await finished;
  in_flight.over();
}

Task by_nccl(const Context& context, const DeviceJob& job, NcclGroup& group, Obstacle& met) {
  NcclCollective collective(context, job, group);
  Task task = collective.run(met);
  co_await task;
}

}  // namespace farandole::collective
