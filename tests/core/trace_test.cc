// The timeline: names and order of events; each begin has its end, also after a stop; bounded memory; complete lines.
// Touches only trace/.
#include "trace/trace.h"

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "check.h"
#include "os/clock.h"

namespace farandole {
namespace {

std::vector<std::string> lines_of(Trace& trace, std::size_t capacity = 4096) {
  std::string text;
  std::vector<char> buffer(capacity);
  while (std::size_t bytes = trace.drain(buffer.data(), capacity)) {
    CHECK_EQUAL(buffer[bytes - 1], '\n');
    text.append(buffer.data(), bytes);
  }
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string field(const std::string& line, const std::string& name) {
  const std::size_t at = line.find("\"" + name + "\":");
  if (at == std::string::npos) return "";
  const std::size_t begin = at + name.size() + 3;
  return line.substr(begin, line.find_first_of(",}", begin) - begin);
}

// For each process: the depth is never below zero, it is zero at the end, and times never decrease.
void check_balanced(const std::vector<std::string>& lines) {
  std::map<std::string, int> depth;
  std::map<std::string, double> time;
  for (const std::string& line : lines) {
    CHECK(line.front() == '{' && line.back() == '}');
    const std::string phase = field(line, "ph"), pid = field(line, "pid");
    if (phase == "\"B\"") ++depth[pid];
    if (phase == "\"E\"") CHECK(--depth[pid] >= 0);
    if (phase != "\"B\"" && phase != "\"E\"") continue;
    const double now = std::stod(field(line, "ts"));
    CHECK(now >= time[pid]);
    time[pid] = now;
  }
  for (const auto& [pid, open] : depth) CHECK_EQUAL(open, 0);
}

TEST(one_allreduce_has_the_events_of_horovods_timeline) {
  Trace trace;
  trace.negotiate_begin("t", Kind::allreduce);  // off: nothing
  trace.start(os::now_ns(), 1234567, true);
  CHECK(trace.on());
  trace.negotiate_tick("t", 1);  // faster than this rank
  trace.negotiate_begin("t", Kind::allreduce);
  trace.negotiate_tick("t", 0);
  trace.negotiate_end("t");
  trace.mark(os::now_ns());
  trace.begin("t", Kind::allreduce);
  trace.activity_begin("t", "QUEUE");
  trace.activity_end("t");
  trace.activity_begin("t", "SHM_ALLREDUCE");
  trace.activity_end("t");
  trace.end("t", DType::float32, {2, 3});
  trace.stop();
  const std::vector<std::string> lines = lines_of(trace);
  std::string order;
  for (const std::string& line : lines) order += field(line, "ph") + field(line, "name") + ' ';
  CHECK_EQUAL(order,
              "\"M\"\"process_name\" \"M\"\"process_name\" \"M\"\"process_sort_index\" \"B\"\"NEGOTIATE_ALLREDUCE\" "
              "\"X\"\"1\" \"X\"\"0\" \"E\" \"i\"\"CYCLE_START\" \"B\"\"ALLREDUCE\" \"B\"\"QUEUE\" \"E\" "
              "\"B\"\"SHM_ALLREDUCE\" \"E\" \"E\" ");
  CHECK(lines[0].find("\"start_time_since_epoch_in_micros\":1234567}") != std::string::npos);
  CHECK(lines.back().find("\"args\":{\"dtype\":\"float32\",\"shape\":\"[2, 3]\"}") != std::string::npos);
  check_balanced(lines);
}

TEST(names_are_escaped) {
  Trace trace;
  trace.start(0, 0, false);
  trace.begin("a\"b\\c\n", Kind::allgather);
  trace.mark(5);
  trace.stop();
  const std::vector<std::string> lines = lines_of(trace);
  CHECK(lines[1].find(R"("a\"b\\c\u000a")") != std::string::npos);
  check_balanced(lines);
}

TEST(any_order_of_calls_is_balanced) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Trace trace;
    std::vector<std::string> lines;
    for (int run = 0; run < 2; ++run) {
      trace.start(os::now_ns(), 0, true);
      for (int call = 0; call < 100; ++call) {
        const std::string name(1, static_cast<char>('a' + random() % 3));
        switch (random() % 7) {
          case 0:
            trace.negotiate_begin(name, Kind::alltoall);
            break;
          case 1:
            trace.negotiate_tick(name, 3);
            break;
          case 2:
            trace.negotiate_end(name);
            break;
          case 3:
            trace.begin(name, Kind::alltoall);
            break;
          case 4:
            trace.activity_begin(name, "QUEUE");
            break;
          case 5:
            trace.activity_end(name);
            break;
          default:
            trace.end(name, DType::int8, {});
            break;
        }
      }
      trace.stop();
      lines = lines_of(trace, 512);
      check_balanced(lines);
    }
  }
}

TEST(memory_is_limited_and_dropped_events_are_counted) {
  Trace trace;
  trace.start(os::now_ns(), 0, false);
  const std::string name(1 << 16, 'n');
  trace.begin("open", Kind::allreduce);
  for (int i = 0; i < 1100; ++i) {
    trace.begin(name + std::to_string(i), Kind::allreduce);
    trace.end(name + std::to_string(i), DType::int8, {});
  }
  trace.end("open", DType::int8, {});
  trace.begin("late", Kind::allreduce);
  trace.activity_begin("late", "QUEUE");
  std::vector<char> buffer(8 << 20);
  std::size_t total = 0;
  for (int i = 0; i < 4; ++i) total += trace.drain(buffer.data(), buffer.size());
  trace.mark(0);
  trace.begin("again", Kind::allreduce);
  trace.stop();
  std::vector<std::string> lines = lines_of(trace, 8 << 20);
  for (const std::string& line : lines) total += line.size() + 1;
  CHECK(total > Trace::kMaxBytes && total < Trace::kMaxBytes + (1 << 20));
  bool found = false;
  for (const std::string& line : lines) found = found || field(line, "name") == "\"DROPPED_EVENTS\"";
  CHECK(found);
  char small[4];
  CHECK_EQUAL(trace.drain(small, sizeof small), 0u);
}

TEST(draining_while_the_driver_runs) {
  Trace trace;
  trace.start(os::now_ns(), 0, false);
  std::atomic<bool> done{false};
  std::vector<std::string> lines;
  std::thread reader([&] {
    while (!done.load()) {
      for (std::string& line : lines_of(trace)) lines.push_back(std::move(line));
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 2000; ++i) {
    trace.begin("t", Kind::allreduce);
    trace.end("t", DType::int8, {1});
  }
  trace.stop();
  done.store(true);
  reader.join();
  for (std::string& line : lines_of(trace)) lines.push_back(std::move(line));
  CHECK_EQUAL(lines.size(), 4003u);
  check_balanced(lines);
}

}  // namespace
}  // namespace farandole
