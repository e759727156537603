// Stalls: the report, and its levels.
// Touches negotiate/ and engine/services.h.
#include "engine/stalls.h"

#include <algorithm>

namespace farandole {
namespace {

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < 16; ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > 16) text += " and " + std::to_string(ranks.size() - 16) + " more";
  return text;
}

}  // namespace

void Stalls::check(const negotiate::Coordinator& coordinator, std::int64_t now) {
  if (now < next_check_) return;
  const Options& options = services_.options();
  std::int64_t first = std::min({options.stall_note_ns > 0 ? options.stall_note_ns : kNever,
                                 options.stall_warning_ns > 0 ? options.stall_warning_ns : kNever,
                                 options.stall_shutdown_ns > 0 ? options.stall_shutdown_ns : kNever});
  if (!coordinator.anything_pending() || first == kNever) {
    next_check_ = kNever;
    return;
  }
  next_check_ = now + std::min<std::int64_t>(first, 1'000'000'000);
  std::string report;
  for (const negotiate::Stall& stall : coordinator.stalls(now, first)) {
    std::int64_t age = now - stall.since_ns;
    std::string line = stall.name + ": waiting for rank " + ranks_text(stall.missing) + " (submitted by rank " +
                       ranks_text(stall.present) + " " + std::to_string(age / 1'000'000'000) + " s ago)";
    if (options.stall_shutdown_ns > 0 && age >= options.stall_shutdown_ns)
      return services_.revoke(
          {Code::shut_down, "stalled for longer than the stall shutdown time: " + line, stall.missing.front()});
    int& level = reported_[stall.name];
    if (options.stall_warning_ns > 0 && age >= options.stall_warning_ns * (level < 2 ? 1 : level)) {
      level = level < 2 ? 2 : level + 1;
      report += "\n  " + line;
    } else if (options.stall_note_ns > 0 && age >= options.stall_note_ns && level == 0) {
      level = 1;
      services_.log(Level::warning, line);
    }
  }
  if (!report.empty())
    services_.log(
        Level::warning,
        "Stalled: some ranks have submitted tensors that others have not. A rank may have left its loop early, "
        "wait for something else, or run another sequence of operations:" +
            report);
}

}  // namespace farandole
