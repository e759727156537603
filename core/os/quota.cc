// The quotas of control groups, version 1 and 2, of this process's group and those above it.
// Reads files alone.
#include "os/quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace farandole::os {
namespace {

// A file's first two words as numbers; "max", which is no number, leaves them 0.
double ratio(std::istream& words) {
  double share = 0, period = 0;
  words >> share >> period;
  return share > 0 && period > 0 ? share / period : 0;
}

double quota_of(const std::string& folder, bool second) {
  std::stringstream words;
  if (second) {
    words << std::ifstream(folder + "/cpu.max").rdbuf();
  } else {
    words << std::ifstream(folder + "/cpu.cfs_quota_us").rdbuf() << ' ';
    words.clear();  // an empty file is no error
    words << std::ifstream(folder + "/cpu.cfs_period_us").rdbuf();
  }
  words.clear();
  return ratio(words);
}

bool names_cpu(const std::string& controllers) {
  std::stringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');)
    if (name == "cpu") return true;
  return false;
}

}  // namespace

int quota_cores(const std::string& proc, const std::string& groups) {
  double least = 0;
  std::ifstream table(proc);
  for (std::string line; std::getline(table, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !names_cpu(controllers)) continue;
    const std::string root = controllers.empty() ? groups : groups + "/cpu";
    for (std::string place = line.substr(second + 1);; place.resize(place.rfind('/'))) {
      if (place == "/") place.clear();
      const double found = quota_of(root + place, controllers.empty());
      if (found > 0 && (least == 0 || found < least)) least = found;
      if (place.find('/') == std::string::npos) break;
    }
  }
  return least == 0 ? 0 : std::max(1, static_cast<int>(least));
}

}  // namespace farandole::os
