// CPU quotas of control groups, version 1 and 2: of this process's group and of those above it.
// Only reads files.
#include "os/quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace farandole::os {
namespace {

// The first two fields of a file as numbers; "max", which is not a number, leaves them 0.
double ratio(std::istream& fields) {
  double share = 0, period = 0;
  fields >> share >> period;
  return share > 0 && period > 0 ? share / period : 0;
}

double quota_of(const std::string& folder, bool second) {
  std::stringstream fields;
  if (second) {
    fields << std::ifstream(folder + "/cpu.max").rdbuf();
  } else {
    fields << std::ifstream(folder + "/cpu.cfs_quota_us").rdbuf() << ' ';
    fields.clear();  // an empty file is no error
    fields << std::ifstream(folder + "/cpu.cfs_period_us").rdbuf();
  }
  fields.clear();
  return ratio(fields);
}

bool names_cpu(const std::string& controllers) {
  std::stringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');)
    if (name == "cpu") return true;
  return false;
}

}  // namespace

int quota_cores(const std::string& proc, const std::string& groups) {
  double smallest = 0;
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
      if (found > 0 && (smallest == 0 || found < smallest)) smallest = found;
      if (place.find('/') == std::string::npos) break;
    }
  }
  return smallest == 0 ? 0 : std::max(1, static_cast<int>(smallest));
}

}  // namespace farandole::os
