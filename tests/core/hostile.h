// A job of two engines and a hostile rank that has proven the secret like any other. What it does is chosen byte by
// byte, by a fuzzer or by a test that draws the bytes. Touches api/ and what fake_peer.h touches.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>

#include "background.h"
#include "engine/plan_state.h"
#include "fake_peer.h"
#include "job.h"
#include "negotiate/coordinator.h"
#include "negotiate/plan.h"
#include "os/memory.h"

namespace hostile {

using namespace farandole;
using fake_peer::Bytes;

// Decisions, one or more bytes each; zeros when none are left.
class Choices {
 public:
  explicit Choices(std::span<const std::byte> bytes) : left_(bytes) {}
  unsigned below(unsigned count) { return byte() % count; }
  bool over() const { return left_.empty(); }
  // Mostly numbers at which something changes.
  std::uint64_t number() {
    constexpr std::uint64_t kOften[] = {0,          1,          2,          3,          4,
                                        7,          12,         255,        4096,       1u << 20,
                                        1u << 30,   0x7fffffff, 0xffffffff, 1ull << 42, (1ull << 62) + 1,
                                        ~0ull >> 1, ~0ull};
    const unsigned which = below(std::size(kOften) + 2);
    if (which < std::size(kOften)) return kOften[which];
    std::uint64_t value = 0;
    for (int i = 0; i < (which % 2 == 0 ? 1 : 8); ++i) value = value << 8 | byte();
    return value;
  }
  std::int64_t signed_number() { return static_cast<std::int64_t>(number()); }
  std::int32_t small_number() { return static_cast<std::int32_t>(number()); }

 private:
  unsigned byte() {
    if (left_.empty()) return 0;
    const auto value = std::to_integer<unsigned>(left_.front());
    left_ = left_.subspan(1);
    return value;
  }
  std::span<const std::byte> left_;
};

// Kinds of what the hostile rank does: the control frames by their numbers, and these.
enum Act { kUnknownControl = 0, kData = kControls + 1, kGrant, kLeave, kMemory, kActs };

struct Report {
  std::array<int, kActs> done{};  // mutated frames and changes of memory, by kind
  int ended_well = 0;             // operations
  int named_hostile = 0;          // operations that failed with the hostile rank's number
  double slowest_ms = 0;          // from the last thing the hostile rank did to the end of the last operation
};

inline void never(bool wrong, const std::string& what) {
  if (wrong) throw std::runtime_error(what);
}

class Game {
 public:
  static constexpr std::size_t kElements = 12;
  static constexpr int kPatienceMs = 200;  // an engine that has revoked the generation asks for nothing any more

  Game(std::span<const std::byte> bytes, Report& report) : choices_(bytes), report_(report) {
    const unsigned drawn = choices_.below(4 * (Background::kWhats + 3)), shape = drawn % 4;
    what_ = drawn / 4 < Background::kWhats ? drawn / 4 : unsigned{Background::kNothing};
    me_ = shape % 2 == 0 ? 0 : 2;  // the coordinator, or one who asks it
    const int mine = shape < 2 ? 0 : 1;
    hosts_ = me_ == 0 ? std::vector<int32_t>{mine, 0, 0} : std::vector<int32_t>{0, 0, mine};
    honest_ = me_ == 0 ? std::array<int, 2>{1, 2} : std::array<int, 2>{0, 1};
    farandole_options options = job::default_options();
    options.slot_bytes = 4096;
    options.slots = 2;
    options.tcp_streams = 1;
    options.hosts = hosts_.data();
    options.size = 3;
    char text[512];
    for (std::size_t i = 0; i < 2; ++i) {
      options.rank = honest_[i];
      never(farandole_create(&options, &engines_[i], text, sizeof text) != 0, text);
    }
    int ends[2];
    never(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0, "no socket pair");
    farandole_add_link(engines_[0], honest_[1], ends[0], 0);
    farandole_add_link(engines_[1], honest_[0], ends[1], 0);
    peer_.emplace(me_, std::vector<int>(hosts_.begin(), hosts_.end()), options);
    for (std::size_t i = 0; i < 2; ++i) peer_->connect(honest_[i], engines_[i]);
    background_.emplace(engines_, honest_, me_);
  }
  Game(const Game&) = delete;
  Game& operator=(const Game&) = delete;
  ~Game() {
    peer_->close_links();
    for (farandole_engine* engine : engines_) farandole_leave(engine, 100);
    for (farandole_engine* engine : engines_) farandole_destroy(engine);
  }

  void play() {
    const bool early = choices_.below(16) == 15;
    if (early) act();  // before its greeting
    for (int other : honest_) peer_->send_hello(other);
    if (!start(early)) return;
    const bool one_host = hosts_[static_cast<std::size_t>(me_)] == 0;
    for (unsigned left = choices_.below(5); left > 0 && one_host && !early; --left) honest_round();
    submit(choices_.below(4) == 0 ? Kind::allreduce : static_cast<Kind>(choices_.below(6)));
    background_->begin(what_);
    const bool first = choices_.below(2) == 0;
    if (first) take_part(true);
    do act();
    while (!choices_.over());
    if (!first) take_part(true);
    finish();
  }

 private:
  struct Tensors {
    std::array<std::vector<float>, 2> in, out;
    std::array<std::int64_t, 2> handles{};
  };

  // Who leaves before its greeting is waited for until the caller's time is up: so not that long.
  bool start(bool early) {
    char text[512];
    std::array<int, 2> codes{1, 1};
    for (int turn = 0; turn < (early ? 3 : 100) && (codes[0] == 1 || codes[1] == 1); ++turn)
      for (std::size_t i = 0; i < 2; ++i)
        if (codes[i] == 1) codes[i] = farandole_start(engines_[i], turn == 0 ? 1 : 100, text, sizeof text);
    never(!early && (codes[0] == 1 || codes[1] == 1), "an engine neither starts nor fails");
    if (codes[0] != 0 || codes[1] != 0) return false;
    return peer_->wait_for_rings(honest_[0]) && peer_->wait_for_rings(honest_[1]);
  }

  static float value(std::size_t i, std::size_t element) {
    return static_cast<float>(100 * (i + 1)) + static_cast<float>(element);
  }

  void submit(Kind kind) {
    request_ = negotiate::Request();
    request_.kind = kind;
    request_.name = "x";
    request_.shape = {kElements};
    request_.root = kind == Kind::broadcast ? honest_[0] : -1;
    const std::int64_t rows = kElements;
    for (std::size_t i = 0; i < 2; ++i) {
      tensors_.in[i].resize(kElements);
      for (std::size_t e = 0; e < kElements; ++e) tensors_.in[i][e] = value(i, e);
      tensors_.out[i].assign(kElements, 0);
      farandole_request made{};
      made.kind = static_cast<int32_t>(kind);
      made.dtype = static_cast<int32_t>(DType::float32);
      made.op = static_cast<int32_t>(ReduceOp::sum);
      made.peer = request_.root;
      made.device = -1;
      made.name = "x";
      made.input = tensors_.in[i].data();
      made.output = rows_vary(kind) ? nullptr : tensors_.out[i].data();
      made.shape = &rows;
      made.dimensions = 1;
      made.prescale = made.postscale = 1.0;
      tensors_.handles[i] = job::submit(engines_[i], made);
    }
  }

  // As an engine would, or nearly: asks or answers, and adds ones to what is reduced in one hop.
  void take_part(bool mutated) {
    if (planned_) {
      if (mutated) return;
      rings().own_plan_states().own.store(PlanState{1, false, false, ++followed_}.pack(), std::memory_order_release);
      rings().notify_all();
    } else if (me_ != 0) {
      ask(mutated);
    } else {
      answer(mutated);
    }
    contribute();
  }

  void ask(bool mutated) {
    negotiate::Request request = request_;
    if (mutated && choices_.below(2) == 0) change(request);
    for (const Bytes& message : negotiate::encode_requests(0, 0, std::span(&request, 1)))
      peer_->send_control(0, Control::requests, message);
    if (mutated) {
      std::vector<negotiate::Request> more = background_->same(what_);
      if (!more.empty() && choices_.below(2) == 0) change(more.back());
      for (const Bytes& message : negotiate::encode_requests(Background::group_of(what_), 0, more))
        peer_->send_control(0, Control::requests, message);
      return;
    }
    Bytes payload;
    negotiate::Answer answer;
    never(!peer_->wait_for(0, Control::buckets, payload) || !decode(payload, answer), "no answer to an honest request");
    remember(answer.buckets);
  }

  void answer(bool mutated) {
    negotiate::Coordinator coordinator({0, 1, 2}, {});
    coordinator.submit(0, request_, 0);
    for (int other : honest_) {
      Bytes payload;
      negotiate::Requests received;
      if (!peer_->wait_for(other, Control::requests, payload, mutated ? kPatienceMs : fake_peer::FakePeer::kTimeoutMs))
        return;
      never(!decode(payload, received), "an engine's requests cannot be read");
      for (negotiate::Request& one : received.requests) {
        if (one.name != request_.name && other == honest_[0]) coordinator.submit(0, one, 0);
        coordinator.submit(other, std::move(one), 0);
      }
    }
    std::vector<negotiate::Bucket> buckets = coordinator.take_ready();
    remember(buckets);
    for (int other : honest_) {
      std::vector<negotiate::Bucket> answers;
      for (const negotiate::Bucket& bucket : buckets) answers.push_back(negotiate::answer_for(bucket, other, 3));
      if (mutated && choices_.below(2) == 0) change(answers[choices_.below(static_cast<unsigned>(answers.size()))]);
      wire::Writer writer;
      writer.u32(0);
      writer.u32(1);
      writer.u32(static_cast<std::uint32_t>(answers.size()));
      for (const negotiate::Bucket& bucket : answers) negotiate::encode(writer, bucket);
      peer_->send_control(other, Control::buckets, writer.take());
    }
  }

  void remember(const std::vector<negotiate::Bucket>& buckets) {
    for (const negotiate::Bucket& bucket : buckets)
      if (!bucket.error.failed()) planned_ = recorder_.record({bucket, {request_}}) || planned_;
  }

  void contribute() {
    ++sequence_;
    if (peer_->rings() == nullptr || request_.kind != Kind::allreduce) return;
    std::byte* slot = rings().claim(link::Rings::everyone);
    if (slot == nullptr) return;
    const std::vector<float> ones(kElements, 1);
    std::memcpy(slot, ones.data(), kElements * sizeof(float));
    rings().publish(link::Rings::everyone, sequence_ << 32 | kElements * sizeof(float));
  }

  // An allreduce with all three.
  void honest_round() {
    submit(Kind::allreduce);
    take_part(false);
    for (std::size_t i = 0; i < 2; ++i) {
      std::string text;
      never(job::finish(engines_[i], tensors_.handles[i], &text) != 0, "an honest allreduce failed: " + text);
      for (std::size_t e = 0; e < kElements; ++e)
        never(tensors_.out[i][e] != value(0, e) + value(1, e) + 1, "an honest allreduce has a wrong result");
      const std::uint64_t stamp = sequence_ << 32 | kElements * sizeof(float);
      never(rings().peek(honest_[i], true, stamp) == nullptr, "a finished allreduce has left no contribution");
      rings().consume(honest_[i], true);
    }
  }

  link::Rings& rings() { return *peer_->rings(); }

  void change(negotiate::Request& request);
  void change(negotiate::Bucket& bucket);
  void act();
  Bytes payload_of(Control type);
  Bytes mutated(Bytes bytes);
  std::vector<os::Descriptor> files_for(Control type);
  void scribble();
  void finish();
  void check_outcome(std::size_t i, const farandole_outcome& outcome);
  void look_at(const farandole_outcome& outcome);

  Choices choices_;
  Report& report_;
  int me_ = 0;
  std::vector<int32_t> hosts_;
  std::array<int, 2> honest_{};
  std::array<farandole_engine*, 2> engines_{};
  std::optional<fake_peer::FakePeer> peer_;
  unsigned what_ = Background::kNothing;
  std::optional<Background> background_;
  negotiate::Recorder recorder_{1024};
  negotiate::Request request_;
  Tensors tensors_;
  std::uint64_t sequence_ = 0;
  std::uint64_t followed_ = 0;
  bool planned_ = false;
};

inline void Game::change(negotiate::Request& request) {
  switch (choices_.below(8)) {
    case 0:
      request.kind = static_cast<Kind>(choices_.below(kKinds));
      break;
    case 1:
      request.dtype = static_cast<DType>(choices_.below(kDTypes));
      break;
    case 2:
      request.shape.assign(choices_.below(4), choices_.signed_number());
      break;
    case 3:
      request.splits.assign(choices_.below(5), choices_.signed_number());
      break;
    case 4:
      request.bundle = choices_.below(2) == 0 ? "x" : "b";
      request.bundle_size = static_cast<std::uint32_t>(choices_.number());
      break;
    case 5:
      request.root = choices_.small_number();
      break;
    case 6:
      request.name.assign(choices_.below(3) * 3000, 'n');
      break;
    default:
      request.unnamed = true;
      request.name = "allreduce.noname.1";
  }
}

inline void Game::change(negotiate::Bucket& bucket) {
  if (bucket.items.empty()) return;
  negotiate::Item& item = bucket.items.front();
  const auto one_of = [&](std::vector<std::int64_t>& values) {
    if (values.empty() || choices_.below(4) == 0)
      values.assign(choices_.below(9), choices_.signed_number());
    else
      values[choices_.below(static_cast<unsigned>(values.size()))] = choices_.signed_number();
  };
  switch (choices_.below(12)) {
    case 0:
      bucket.kind = static_cast<Kind>(choices_.below(kKinds));
      break;
    case 1:
      item.dtype = static_cast<DType>(choices_.below(kDTypes));
      break;
    case 2:
      one_of(item.shape);
      break;
    case 3:
      one_of(item.first_dims);
      break;
    case 4:
      one_of(item.splits);
      break;
    case 5:
      item.rows = choices_.signed_number();
      break;
    case 6:
      bucket.joined = choices_.small_number();
      break;
    case 7:
      bucket.error = {static_cast<Code>(choices_.below(11)), "why", choices_.small_number()};
      break;
    case 8:
      bucket.root = choices_.small_number();
      break;
    case 9:
      bucket.items.push_back(bucket.items.front());
      break;
    case 10:
      item.name = choices_.below(2) == 0 ? "" : "y";
      break;
    default:
      bucket.op = static_cast<ReduceOp>(choices_.below(kReduceOps));
      bucket.prescale = static_cast<double>(choices_.signed_number());
  }
}

inline Bytes Game::payload_of(Control type) {
  const unsigned whose = choices_.below(4);
  const auto group = whose == 0   ? static_cast<std::uint32_t>(choices_.number())
                     : whose == 1 ? (what_ == Background::kNegotiated ? 1 : Background::group_of(what_))
                                  : 0;
  switch (type) {
    case Control::hello:
      return control::encode(control::Hello{peer_->generation(), me_, fake_peer::FakePeer::kNonce});
    case Control::segment:
      return control::encode(control::Segment{group});
    case Control::requests: {
      negotiate::Request request = request_;
      change(request);
      const auto epoch = choices_.below(2) == 0 ? 0 : static_cast<std::uint32_t>(choices_.number());
      return negotiate::encode_requests(group, epoch, std::span(&request, 1)).front();
    }
    case Control::buckets: {
      negotiate::Bucket bucket;
      bucket.kind = request_.kind;
      bucket.items.push_back({request_.name, false, request_.dtype, request_.shape, {}, {}});
      change(bucket);
      wire::Writer writer;
      writer.u32(group);
      writer.u32(choices_.below(3));
      writer.u32(1);
      negotiate::encode(writer, bucket);
      return writer.take();
    }
    case Control::plan_state:
      return control::encode(control::PlanState{group, choices_.number()});
    case Control::leaving:
      return control::encode(control::Leaving{{{group, {choices_.number(), choices_.number()}}}});
    case Control::revoke:
      return control::encode(
          control::Revocation{{static_cast<Code>(choices_.small_number()), "why", choices_.small_number()}});
    case Control::abandon:
      return control::encode(control::Abandon{static_cast<std::uint32_t>(choices_.number()), "why"});
    case Control::share:
      return control::encode(
          control::Share{choices_.number(), choices_.below(2) == 0 ? 4096 : choices_.number(), choices_.below(2) == 0});
    case Control::unshare:
      return control::encode(control::Unshare{choices_.number()});
  }
  return Bytes(choices_.below(64));
}

inline Bytes Game::mutated(Bytes bytes) {
  for (unsigned left = choices_.below(3); left > 0; --left) {
    const unsigned where = bytes.empty() ? 0 : choices_.below(256) % static_cast<unsigned>(bytes.size());
    switch (choices_.below(4)) {
      case 0:
        bytes.resize(where);
        break;
      case 1:
        bytes.push_back(static_cast<std::byte>(choices_.below(256)));
        break;
      default:
        if (!bytes.empty()) bytes[where] = static_cast<std::byte>(choices_.below(256));
    }
  }
  return bytes;
}

inline std::vector<os::Descriptor> Game::files_for(Control type) {
  const bool right = choices_.below(2) == 0;
  std::size_t count = right ? control::descriptors_with(type) : choices_.below(4);
  std::vector<os::Descriptor> files;
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned which = right && type != Control::share ? static_cast<unsigned>(i) : choices_.below(5);
    int ends[2] = {-1, -1};
    if (type == Control::segment && right && peer_->rings() != nullptr) {
      files.push_back(peer_->rings()->memory().file().duplicate());
    } else if (which == 0) {
      files.push_back(peer_->status_page().memory().file().duplicate());
    } else if (which == 1) {
      files.push_back(peer_->wakeup_sender());
    } else if (which == 2) {
      never(pipe(ends) != 0, "no pipe");
      files.emplace_back(ends[1]);
      close(ends[0]);
    } else {
      files.emplace_back(memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      never(ftruncate(files.back().get(), which == 3 ? 4096 : 100) != 0, "no memory file");
      if (choices_.below(2) == 0) fcntl(files.back().get(), F_ADD_SEALS, F_SEAL_SHRINK);  // else it could shrink
    }
  }
  return files;
}

// In the memory that local peers read: the status page, the plan states, the counters, the stamps. That is
// a race on purpose, so not where races are looked for.
inline void Game::scribble() {
#ifndef __SANITIZE_THREAD__
  constexpr unsigned kSleeping = 8;
  const bool board = peer_->rings() == nullptr || choices_.below(8) == 0;
  const os::SharedMemory& memory = board ? peer_->status_page().memory() : peer_->rings()->memory();
  auto* words = reinterpret_cast<std::uint64_t*>(memory.data());
  std::uint64_t& word = words[board ? kSleeping : choices_.below(128)];
  std::atomic_ref<std::uint64_t>(word).store(choices_.number(), std::memory_order_release);
  if (peer_->rings() != nullptr) peer_->rings()->notify_all(true);
#endif
}

inline void Game::act() {
  const int other = honest_[choices_.below(2)];
  const unsigned kind = choices_.below(kActs);
  ++report_.done[kind];
  if (kind == kMemory) return scribble();
  wire::Frame frame;
  frame.tag = {choices_.below(3), choices_.below(8), choices_.below(4)};
  if (kind == kData || kind == kGrant) {
    using enum wire::FrameType;
    constexpr std::array kWithoutBytes{grant, answer, cancel_grant};
    frame.type = kind == kData ? data : kWithoutBytes[choices_.below(kWithoutBytes.size())];
    frame.total = choices_.number();
    Bytes payload(kind == kData ? choices_.below(200) : 0);
    if (frame.total < payload.size()) payload.resize(frame.total);
    peer_->send(other, frame, payload);
  } else if (kind == kLeave) {
    frame.type = wire::FrameType::leave;
    peer_->send(other, frame, {});
  } else {
    const auto type = kind == kUnknownControl ? static_cast<Control>(choices_.number()) : static_cast<Control>(kind);
    const Bytes payload = mutated(payload_of(type));
    std::vector<os::Descriptor> files = files_for(type);
    if (!peer_->is_local(other)) files.clear();
    peer_->send_control(other, type, payload, std::move(files));
  }
}

// It hangs up, and whatever still waits for it ends.
inline void Game::finish() {
  const auto began = std::chrono::steady_clock::now();
  peer_->close_links();
  for (std::size_t i = 0; i < 2; ++i) {
    int code = 1;
    for (int slices = 0; code == 1 && slices < 200; ++slices)
      code = farandole_wait(engines_[i], tensors_.handles[i], 100);
    never(code == 1, "an operation does not end after the hostile rank has gone");
    farandole_outcome outcome{};
    never(farandole_outcome_of(engines_[i], tensors_.handles[i], &outcome) != 0, "an operation has no outcome");
    check_outcome(i, outcome);
  }
  background_->finish([&](const farandole_outcome& outcome) { look_at(outcome); });
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - began;
  report_.slowest_ms = std::max(report_.slowest_ms, spent.count());
}

inline void Game::look_at(const farandole_outcome& outcome) {
  const std::string text = outcome.message;
  never(outcome.code == 1 || outcome.code < 0 || outcome.code > 10, "an outcome of no known code");
  never(text.find("breaks the protocol") != std::string::npos && outcome.rank != me_,
        "the wrong rank is named_hostile: " + text);
  report_.named_hostile += outcome.code != 0 && outcome.rank == me_ ? 1 : 0;
}

// Between the two engines nothing but the truth may pass; what the hostile rank brings is its own affair.
inline void Game::check_outcome(std::size_t i, const farandole_outcome& outcome) {
  look_at(outcome);
  if (outcome.code != 0) return;
  ++report_.ended_well;
  const auto* result = static_cast<const float*>(outcome.output);
  const std::int64_t rows = outcome.dimensions > 0 ? outcome.shape[0] : 0;
  if (request_.kind == Kind::allgather) {
    never(rows < 24, "a block is missing");
    const std::int64_t before = me_ == 0 ? rows - 24 : 0;
    for (std::size_t e = 0; e < 2 * kElements; ++e)
      never(result[before + static_cast<std::int64_t>(e)] != value(e / kElements, e % kElements),
            "a block of an honest rank is wrong");
  } else if (request_.kind == Kind::alltoall) {
    never(outcome.splits_count != 3, "splits are missing");
    std::int64_t at = me_ == 0 ? outcome.splits[0] : 0;
    for (std::size_t from = 0; from < 2; ++from) {
      never(outcome.splits[honest_[from]] != 4, "a split between honest ranks is wrong");
      for (std::size_t e = 0; e < 4; ++e, ++at)
        never(result[at] != value(from, 4 * static_cast<std::size_t>(honest_[i]) + e),
              "a block between honest ranks is wrong");
    }
  } else if (request_.kind == Kind::broadcast) {
    for (std::size_t e = 0; e < kElements; ++e)
      never(result[e] != value(0, e), "a broadcast of an honest rank is wrong");
  }
}

inline void play(std::span<const std::byte> bytes, Report& report) {
  // A rank may truly bring a tensor of many GiB, and one that has joined fills as much with zeros.
  os::max_allocation = std::size_t{64} << 20;
  Game game(bytes, report);
  game.play();
}

}  // namespace hostile
