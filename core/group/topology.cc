// Building a group's topology from ranks and hosts.
// Touches only base/.
#include "group/topology.h"

#include <algorithm>
#include <map>

namespace farandole {

int Topology::member_of(int rank) const {
  auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return found != ranks.end() && *found == rank ? static_cast<int>(found - ranks.begin()) : -1;
}

Topology Topology::make(std::vector<int> ranks, const std::vector<int>& host_of_rank, int my_rank) {
  Topology topology;
  std::sort(ranks.begin(), ranks.end());
  topology.ranks = std::move(ranks);
  std::map<int, std::vector<int>> by_host;
  for (int member = 0; member < topology.size(); ++member)
    by_host[host_of_rank[static_cast<std::size_t>(topology.ranks[static_cast<std::size_t>(member)])]].push_back(member);
  topology.host_of.resize(topology.ranks.size());
  topology.local_of.resize(topology.ranks.size());
  for (auto& [host, members] : by_host) {
    for (std::size_t local = 0; local < members.size(); ++local) {
      topology.host_of[static_cast<std::size_t>(members[local])] = topology.host_count();
      topology.local_of[static_cast<std::size_t>(members[local])] = static_cast<int>(local);
    }
    topology.hosts.push_back(members);
  }
  topology.me = topology.member_of(my_rank);
  return topology;
}

}  // namespace farandole
