// Failpoints: a test sets rules, and every failpoint looks for a rule that fires there. Only in the library for tests.
// Touches api/ and base/. The rules are global, because a rule may be for all engines of the process.
#include "link/chaos.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "api/farandole.h"
#include "base/error.h"
#include "base/failpoint.h"

namespace farandole {

namespace {

// truncate: the stream ends as if the peer had closed it. shorten: a read or write moves only one byte.
enum class Action { kill, stop, delay, error, no_memory, corrupt, truncate, shorten };

struct Rule {
  const void* engine;  // null: all engines
  std::string point;
  Action action;
  std::int64_t delay_ms;
  std::int64_t skip;
  std::int64_t fired = 0;

  bool matches(const void* who, const std::string& where) const {
    if (engine != nullptr && engine != who) return false;
    if (point == where) return true;
    return point.starts_with("*.") && where.ends_with(point.substr(1));
  }
};

std::mutex mutex;
std::vector<Rule>& rules() {
  // Never destroyed: if a test does not destroy its engine, that engine's threads may still run after main returns.
  static auto* all = new std::vector<Rule>;
  return *all;
}
std::atomic<int> rule_count{0};  // without rules a failpoint costs one load

bool parse(const std::string& text, Action& action, std::int64_t& delay_ms) {
  delay_ms = 0;
  static const std::map<std::string, Action> named = {
      {"kill", Action::kill},           {"stop", Action::stop},       {"error", Action::error},
      {"no_memory", Action::no_memory}, {"corrupt", Action::corrupt}, {"truncate", Action::truncate},
      {"short", Action::shorten},
  };
  if (const auto found = named.find(text); found != named.end()) {
    action = found->second;
    return true;
  }
  if (!text.starts_with("delay:")) return false;
  char* end = nullptr;
  delay_ms = std::strtoll(text.c_str() + 6, &end, 10);
  action = Action::delay;
  return end != text.c_str() + 6 && *end == '\0' && delay_ms >= 0;
}

// These change the bytes of a stream: the code at the failpoint does it, and `act` does nothing.
bool acts_on_stream(Action action) {
  return action == Action::corrupt || action == Action::truncate || action == Action::shorten;
}

// Counts that the failpoint was reached; true if the rule fires now. "short" fires every time, the others once.
bool count_and_decide(Rule& rule) {
  if (rule.skip-- > 0) return false;
  if (rule.action != Action::shorten && rule.fired > 0) return false;
  ++rule.fired;
  return true;
}

void act(const Rule& rule) {
  switch (rule.action) {
    case Action::kill:
      ::kill(getpid(), SIGKILL);
      break;
    case Action::stop:
      ::kill(getpid(), SIGSTOP);
      break;
    case Action::delay:
      std::this_thread::sleep_for(std::chrono::milliseconds(rule.delay_ms));
      break;
    case Action::error:
      throw Failure(Code::internal, "failpoint " + rule.point);
    case Action::no_memory:
      throw std::bad_alloc();
    default:
      break;
  }
}

}  // namespace

void failpoint(const void* engine, Kind kind, const char* phase) {
  if (rule_count.load(std::memory_order_relaxed) == 0) return;
  std::string where = name_of(kind);
  for (char& letter : where) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  where += std::string(".") + phase;
  std::vector<Rule> firing;
  {
    const std::lock_guard lock(mutex);
    for (Rule& rule : rules()) {
      if (!acts_on_stream(rule.action) && rule.matches(engine, where) && count_and_decide(rule)) firing.push_back(rule);
    }
  }
  for (const Rule& rule : firing) act(rule);
}

namespace link {

// Whether a rule fires at this point of a stream. The point's name says what the caller then does.
bool chaos_fires(const void* engine, const char* point) {
  if (rule_count.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(mutex);
  bool fires = false;
  for (Rule& rule : rules()) {
    if (acts_on_stream(rule.action) && rule.matches(engine, point) && count_and_decide(rule)) fires = true;
  }
  return fires;
}

}  // namespace link
}  // namespace farandole

extern "C" {

__attribute__((visibility("default"))) int farandole_chaos_set(farandole_engine* engine, const char* point,
                                                               const char* action, int32_t skip) {
  using namespace farandole;
  if (point == nullptr || action == nullptr) return static_cast<int>(Code::invalid_argument);
  const std::lock_guard lock(mutex);
  if (std::strcmp(action, "off") == 0) {
    std::erase_if(rules(), [&](const Rule& rule) { return rule.engine == engine && rule.point == point; });
    rule_count = static_cast<int>(rules().size());
    return 0;
  }
  Rule rule{engine, point, Action::kill, 0, skip};
  if (!parse(action, rule.action, rule.delay_ms)) return static_cast<int>(Code::invalid_argument);
  if (acts_on_stream(rule.action) != rule.point.starts_with("stream.")) return static_cast<int>(Code::invalid_argument);
  rules().push_back(rule);
  rule_count = static_cast<int>(rules().size());
  return 0;
}

__attribute__((visibility("default"))) int64_t farandole_chaos_fired(farandole_engine* engine, const char* point) {
  using namespace farandole;
  if (point == nullptr) return 0;
  const std::lock_guard lock(mutex);
  int64_t fired = 0;
  for (const Rule& rule : rules()) {
    if (rule.engine == engine && rule.point == point) fired += rule.fired;
  }
  return fired;
}
}
