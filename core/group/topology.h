// The members of a group and their hosts. Members are numbered 0..size-1 in the order of their ranks.
// Touches only base/.
#pragma once

#include <vector>

namespace farandole {

struct Topology {
  std::vector<int> ranks;               // member -> rank in the job, ascending
  std::vector<int> host_of;             // member -> position in `hosts`
  std::vector<std::vector<int>> hosts;  // hosts by host index -> members on it, ascending
  std::vector<int> local_of;            // member -> position among the members of its host
  int me = -1;                          // this process's member number; -1 when it is not in the group

  int size() const { return static_cast<int>(ranks.size()); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  const std::vector<int>& my_host() const {
    return hosts[static_cast<std::size_t>(host_of[static_cast<std::size_t>(me)])];
  }
  int my_local() const { return local_of[static_cast<std::size_t>(me)]; }
  int member_of(int rank) const;  // -1 when the rank is not in the group

  // `ranks` need not be sorted; `host_of_rank` is indexed by rank in the job.
  static Topology make(std::vector<int> ranks, const std::vector<int>& host_of_rank, int my_rank);
};

}  // namespace farandole
