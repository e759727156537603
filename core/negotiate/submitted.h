// The members' requests of one name: one is stored as a whole, and of the others only what differs from it.
// Pure. Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "negotiate/request.h"

namespace farandole::negotiate {

// A whole request of each of 1,024 members would take 170 KB per pending name. Nearly always they are equal, or differ
// only in their rows (allgather) and device numbers.
class Submitted {
 public:
  explicit Submitted(std::size_t members) : present_(members, false) {}

  // Replaces the member's former request.
  void put(std::size_t member, Request request);

  std::size_t members() const { return present_.size(); }
  int count() const { return count_; }  // number of members that have submitted it
  bool has(std::size_t member) const { return present_[member]; }
  std::size_t first() const;  // the first member that has submitted it
  // A member's request, but the rows and the device number may be another member's.
  const Request& request_of(std::size_t member) const;
  std::vector<std::int64_t> rows() const;  // by member
  std::int32_t device(std::size_t member) const;
  bool unnamed() const;  // on all of them
  bool one_bundle_size() const;
  // Whether all have put it into a bundle of this name, or into none when the name is empty. False when that is not
  // known without a full comparison.
  bool all_in(const std::string& bundle) const { return whole_.empty() && common_.bundle == bundle; }

  // The requests that are stored as a whole: one, `common`, and those that differ from it in more than rows and device.
  std::size_t common_member() const { return common_member_; }  // whose request `common` is
  const Request& common() const { return common_; }
  const std::map<std::size_t, Request>& whole() const { return whole_; }
  // One request for each number of rows that members have.
  template <class Body>
  void for_each_number_of_rows(Body body) const {
    body(common_);
    if (differences_.empty()) return;
    Request other = common_;
    for (const Difference& difference : differences_) {
      if (!rows_vary(other.kind) || difference.rows == other.shape.front()) continue;
      other.shape.front() = difference.rows;
      body(other);
    }
  }
  // By member, null for those that have not submitted it. Requests that must be rebuilt are put into `storage`.
  std::vector<const Request*> by_member(std::deque<Request>& storage) const;

 private:
  struct Difference {
    std::uint32_t member;
    std::int32_t device;
    std::int64_t rows;
  };
  bool fits_common(const Request& request) const;

  int count_ = 0;
  std::vector<bool> present_;
  std::size_t common_member_ = 0;
  Request common_;
  std::vector<Difference> differences_;   // members whose requests differ from `common_` in rows or device
  std::map<std::size_t, Request> whole_;  // members whose requests also differ in something else
};

}  // namespace farandole::negotiate
