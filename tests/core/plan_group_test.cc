// A simulated group: plans, negotiation and joins with every delay random; all members must run the same buckets and
// end. Touches only negotiate/.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "check.h"
#include "negotiate/coordinator.h"
#include "negotiate/plan.h"
#include "requests.h"

namespace farandole::negotiate {
namespace {

using Match = Follower::Match;

struct Op {
  Request request;
  bool wait_after = false;     // for everything this member has submitted
  bool with_previous = false;  // submitted in one call: a bundle
};
using Program = std::vector<Op>;

struct Published {
  std::uint32_t epoch = 0;
  bool diverted = false;
  std::uint64_t ready = 0;
};

struct Group;

struct Member {
  int me = 0;
  Group* group = nullptr;
  Program program;
  std::size_t next = 0;  // op of the program; also its ticket is next + 1
  std::set<std::int64_t> outstanding;
  std::map<std::string, std::int64_t> busy;  // names in use
  Recorder recorder{64};
  std::unique_ptr<Follower> follower;
  bool diverting = false, waiting = false, joined = false;
  std::uint32_t epoch = 0;
  std::uint64_t run = 0;
  std::map<std::string, std::int64_t> pending;  // name -> ticket, at the coordinator
  std::vector<std::int64_t> later;              // unplanned, until the plan is left
  std::deque<std::vector<Bucket>> answers;
  std::vector<Published> seen;
  std::vector<std::string> log;
  std::map<std::int64_t, int> done;

  const Request& request(std::int64_t ticket) const { return program[static_cast<std::size_t>(ticket - 1)].request; }
  void finish(std::int64_t ticket) {
    CHECK_EQUAL(++done[ticket], 1);
    CHECK_EQUAL(outstanding.erase(ticket), 1u);
    busy.erase(request(ticket).name);
  }
  void offer(std::int64_t ticket);
  void negotiate(std::int64_t ticket);
  void divert();
  void publish();
  bool submit();
  bool answer();
  bool follow(std::mt19937& random);
  void agree(const std::vector<Bucket>& buckets);
  void activate();
};

struct Letter {
  int member;
  std::uint32_t epoch;
  Request request;
};

struct Group {
  std::vector<Member> members;
  std::vector<Published> words;
  std::vector<std::deque<Letter>> letters;  // to the coordinator, in order per member
  std::vector<Letter> held;
  Coordinator coordinator;
  std::mt19937 random;
  std::uint64_t planned = 0, negotiated = 0, diverts = 0;

  Group(std::vector<Program> programs, CoordinatorOptions options, unsigned seed)
      : words(programs.size()), letters(programs.size()), coordinator(ranks(programs.size()), options), random(seed) {
    members.resize(programs.size());
    for (std::size_t m = 0; m < programs.size(); ++m) {
      members[m].me = static_cast<int>(m);
      members[m].group = this;
      members[m].program = std::move(programs[m]);
      members[m].seen.resize(words.size());
    }
  }
  static std::vector<int> ranks(std::size_t count) {
    std::vector<int> ranks(count);
    for (std::size_t m = 0; m < count; ++m) ranks[m] = static_cast<int>(m);
    return ranks;
  }
  bool deliver(std::size_t m);
  void receive(Letter letter);
  bool emit();
  bool finished() const {
    return std::all_of(members.begin(), members.end(),
                       [](const Member& m) { return m.next == m.program.size() && m.outstanding.empty(); });
  }
  void simulate();
};

void Member::negotiate(std::int64_t ticket) {
  const Request& mine = request(ticket);
  if (mine.kind == Kind::join) joined = true;
  pending[mine.name] = ticket;
  group->letters[static_cast<std::size_t>(me)].push_back({me, epoch, mine});
}

void Member::publish() { group->words[static_cast<std::size_t>(me)] = {epoch, diverting, follower->ready()}; }

void Member::divert() {
  if (diverting) return;
  diverting = true;
  ++group->diverts;
  publish();
}

void Member::offer(std::int64_t ticket) {
  if (diverting) return later.push_back(ticket);
  Match match = Match::unplanned;
  if (request(ticket).kind != Kind::join) match = follower->offer(request(ticket), ticket);
  if (match == Match::unplanned) {
    later.push_back(ticket);
    divert();
  } else if (match == Match::filled) {
    publish();
  }
}

bool Member::submit() {
  if (waiting && !outstanding.empty()) {
    for (std::int64_t ticket : outstanding) {
      if (follower && follower->incomplete(ticket)) divert();
    }
    return false;
  }
  waiting = false;
  if (next == program.size()) return false;
  std::size_t end = next + 1;
  while (end < program.size() && program[end].with_previous) ++end;
  for (std::size_t op = next; op < end; ++op) {
    const auto used = busy.find(program[op].request.name);
    if (used == busy.end()) continue;
    if (follower && follower->incomplete(used->second)) divert();  // the program waits for it
    return false;
  }
  while (next < end) {
    const Op& op = program[next++];
    const auto ticket = static_cast<std::int64_t>(next);
    outstanding.insert(ticket);
    busy[op.request.name] = ticket;
    waiting = op.wait_after;
    if (follower) {
      offer(ticket);
    } else {
      negotiate(ticket);
    }
  }
  return true;
}

bool Member::answer() {
  if (answers.empty()) return false;
  const std::vector<Bucket> buckets = std::move(answers.front());
  answers.pop_front();
  agree(buckets);
  return true;
}

void Member::agree(const std::vector<Bucket>& buckets) {
  bool complete = false;
  for (const Bucket& bucket : buckets) {
    if (bucket.error.failed()) check::fail(__FILE__, __LINE__, bucket.error.message);
    Planned mine{bucket, {}};
    std::string line = name_of(bucket.kind);
    if (bucket.kind == Kind::join) {
      CHECK(joined);
      joined = false;
      finish(pending.at("join"));
      pending.erase("join");
    }
    for (const Item& item : bucket.items) {
      line += " " + item.name;
      const auto found = pending.find(item.name);
      if (found == pending.end()) {
        CHECK(joined && bucket.joined > 0);
        continue;
      }
      mine.requests.push_back(request(found->second));
      finish(found->second);
      pending.erase(found);
    }
    log.push_back(line);
    ++group->negotiated;
    complete = recorder.record(std::move(mine));
  }
  if (complete) activate();
}

void Member::activate() {
  std::vector<std::int64_t> tickets;
  for (const auto& [name, ticket] : pending) tickets.push_back(ticket);
  std::sort(tickets.begin(), tickets.end());
  pending.clear();
  joined = false;
  if (me == 0) group->coordinator.forget_pending();
  ++epoch;
  run = 0;
  diverting = false;
  follower = std::make_unique<Follower>(recorder.plan());
  publish();
  for (std::int64_t ticket : tickets) offer(ticket);
}

bool Member::follow(std::mt19937& random_) {
  if (!follower) return false;
  for (std::size_t m = 0; m < seen.size(); ++m) {
    if (random_() % 2 == 0 || static_cast<int>(m) == me) seen[m] = group->words[m];
  }
  std::uint64_t go = ~0ull;
  bool any = false, all = true;
  for (const Published& word : seen) {
    const bool current = word.epoch == epoch;
    go = std::min(go, current ? word.ready : 0);
    any = any || (current && word.diverted);
    all = all && current && word.diverted;
  }
  if (any && !diverting) divert();
  bool moved = false;
  for (; run < go; ++run, moved = true) {
    CHECK(run < follower->ready());
    std::string line = name_of(follower->bucket(run).bucket->kind);
    const std::vector<std::int64_t> tickets = follower->take(run);
    for (std::int64_t ticket : tickets) {
      line += " " + request(ticket).name;
      finish(ticket);
    }
    log.push_back(line);
    ++group->planned;
  }
  if (!all) {
    if (!diverting && follower->anything_incomplete() && random_() % 64 == 0) divert();  // flush_us
    return moved;
  }
  std::vector<std::int64_t> left = follower->withdraw(go);
  left.insert(left.end(), later.begin(), later.end());
  later.clear();
  follower.reset();
  diverting = false;
  ++epoch;
  recorder.diverted(go % recorder.plan().size(), go / recorder.plan().size());
  for (std::int64_t ticket : left) negotiate(ticket);
  if (me == 0) {
    std::vector<Letter> early = std::move(group->held);
    group->held.clear();
    for (Letter& letter : early) group->receive(std::move(letter));
  }
  return true;
}

void Group::receive(Letter letter) {
  if (letter.epoch > members[0].epoch) {
    held.push_back(std::move(letter));
  } else if (letter.epoch == members[0].epoch) {
    coordinator.submit(letter.member, std::move(letter.request), 0);
  }
}

bool Group::deliver(std::size_t m) {
  if (letters[m].empty()) return false;
  Letter letter = std::move(letters[m].front());
  letters[m].pop_front();
  receive(std::move(letter));
  return true;
}

bool Group::emit() {
  if (members[0].follower) return false;
  std::vector<Bucket> buckets = coordinator.take_ready();
  if (buckets.empty()) return false;
  for (std::size_t m = 1; m < members.size(); ++m) members[m].answers.push_back(buckets);
  members[0].agree(buckets);
  return true;
}

void Group::simulate() {
  std::uint64_t quiet = 0;
  while (!finished()) {
    const std::size_t m = random() % members.size();
    bool moved = false;
    switch (random() % 5) {
      case 0:
      case 1:
        moved = members[m].submit();
        break;
      case 2:
        moved = members[m].answer();
        break;
      case 3:
        moved = members[m].follow(random);
        break;
      default:
        moved = random() % 2 == 0 ? emit() : deliver(m);
    }
    quiet = moved ? 0 : quiet + 1;
    if (quiet > 200000) check::fail(__FILE__, __LINE__, "the group stands still");
  }
  for (const Member& member : members) {
    CHECK(member.log == members[0].log);
    CHECK_EQUAL(member.done.size(), member.program.size());
  }
}

// Every member submits the same tensors in a step, each in its own order.
std::vector<Program> make_programs(std::mt19937& random, std::size_t members, bool with_unnamed) {
  std::vector<Program> programs(members);
  std::vector<int> numbers(members, 0);
  int fresh = 0, bundles = 0;
  const auto shuffled = [&](std::vector<std::vector<Request>> calls, std::size_t m, bool wait) {
    std::shuffle(calls.begin(), calls.end(), random);
    for (std::vector<Request>& call : calls) {
      for (std::size_t i = 0; i < call.size(); ++i) {
        Request request = call[i];
        if (request.kind == Kind::allgather) request.shape[0] += static_cast<std::int64_t>(m);
        programs[m].push_back({request, false, i > 0});
      }
    }
    if (!programs[m].empty() && wait) programs[m].back().wait_after = true;
  };
  const int phases = 1 + static_cast<int>(random() % 3);
  for (int phase = 0; phase < phases; ++phase) {
    const int names = with_unnamed && random() % 3 == 0 ? 0 : 1 + static_cast<int>(random() % 6);
    const int steps = 3 + static_cast<int>(random() % 12);
    const unsigned oddity = 2 + random() % 20;  // one step in so many differs
    const bool wait = random() % 2 == 0, bundled_pair = random() % 3 == 0;
    const int metrics = with_unnamed ? static_cast<int>(random() % 3) + (names == 0 ? 1 : 0) : 0;
    for (int step = 0; step < steps; ++step) {
      const bool odd = random() % oddity == 0;
      std::vector<std::vector<Request>> calls;
      for (int i = 0; i < names; ++i) {
        if (odd && random() % 2 == 0) continue;
        Request request = named("t" + std::to_string(i), odd && random() % 8 == 0 ? 7 : 4 + i);
        request.dtype = i % 3 == 2 ? DType::int32 : DType::float32;
        if (i == 3) request.kind = Kind::allgather;
        calls.push_back({request});
      }
      if (odd && random() % 3 == 0) calls.push_back({named("new" + std::to_string(fresh++))});
      if (bundled_pair) {
        const std::string bundle = "bundle" + std::to_string(bundles++);
        std::vector<Request> call = {bundled("x", bundle, 3), bundled("y", bundle, 3), bundled("z", bundle, 3)};
        call[1].dtype = DType::float64;
        call[2].shape = {1000};
        calls.push_back(call);
      }
      const bool wait_now = wait || random() % 4 == 0;
      for (std::size_t m = 0; m < members; ++m) {
        shuffled(calls, m, wait_now);
        for (int i = 0; i < metrics; ++i) {
          programs[m].push_back({unnamed(++numbers[m], odd && i == 0 ? 9 : 1), i + 1 == metrics && wait_now, false});
        }
      }
    }
    if (random() % 2 == 0) continue;
    // Some members run out of data before others, and join.
    for (std::size_t m = 0; m < members; ++m) {
      if (!programs[m].empty()) programs[m].back().wait_after = true;
      const int extra = static_cast<int>(random() % 4);
      for (int step = 0; step < extra; ++step) shuffled({{named("t0")}, {named("t1", 5)}}, m, random() % 2 == 0);
      Request join = named("join");
      join.kind = Kind::join;
      programs[m].push_back({join, true, false});
    }
    for (std::size_t m = 0; m < members; ++m) numbers[m] = *std::max_element(numbers.begin(), numbers.end());
  }
  return programs;
}

TEST(any_group_runs_the_same_buckets_and_ends) {
  std::uint64_t planned_buckets = 0, negotiated = 0, diverts = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(seed);
    const std::size_t members = 1 + random() % 5;
    CoordinatorOptions options;
    options.fusion_threshold = seed % 3 == 0 ? 64 : 1 << 20;
    options.fuse_bundles = seed % 5 != 0;
    Group group(make_programs(random, members, seed % 2 == 0), options, seed * 7 + 1);
    try {
      group.simulate();
    } catch (const std::exception& error) {
      throw std::runtime_error("seed " + std::to_string(seed) + ": " + error.what());
    }
    planned_buckets += group.planned;
    negotiated += group.negotiated;
    diverts += group.diverts;
  }
  std::printf("planned %llu, negotiated %llu, diverts %llu\n", static_cast<unsigned long long>(planned_buckets),
              static_cast<unsigned long long>(negotiated), static_cast<unsigned long long>(diverts));
  CHECK(planned_buckets > 1000);
  CHECK(negotiated > 1000);
  CHECK(diverts > 100);
}

TEST(a_repeating_program_runs_by_plan_only) {
  std::vector<Program> programs(3);
  for (Program& program : programs) {
    for (int step = 0; step < 100; ++step) {
      for (int i = 0; i < 5; ++i) program.push_back({named("t" + std::to_string(i)), i == 4, false});
      program.push_back({unnamed(2 * step), false, false});
      program.push_back({unnamed(2 * step + 1), true, false});
    }
  }
  Group group(programs, {}, 1);
  group.simulate();
  CHECK(group.planned > 10 * group.negotiated);
}

}  // namespace
}  // namespace farandole::negotiate
