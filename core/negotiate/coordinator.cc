// Counts the members' requests, and makes buckets of those that all members have submitted.
// Pure. Touches base/.
#include "negotiate/coordinator.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace farandole::negotiate {
namespace {

constexpr std::size_t kNamed = 8;  // tensors that a message lists before it gives only the number of the others

std::string title(Kind kind) {
  switch (kind) {
    case Kind::allgather:
      return "Allgather";
    case Kind::broadcast:
      return "Broadcast";
    case Kind::alltoall:
      return "Alltoall";
    case Kind::reducescatter:
      return "Reducescatter";
    default:
      return "Changing process sets";
  }
}

Error joined_error(const Request& request, int absent) {
  if (absent == 0 || request.kind == Kind::allreduce || request.kind == Kind::barrier) return {};
  return {Code::precondition, title(request.kind) + " is not supported with Join at this time. Tensor '" +
                                  request.name + "': " + std::to_string(absent) + " ranks have joined."};
}

// Hash of all splits of an alltoall, in their order.
std::uint64_t digest_of(const std::vector<std::int64_t>& splits) {
  std::uint64_t digest = splits.size();
  for (std::int64_t rows : splits) {
    digest = (digest ^ static_cast<std::uint64_t>(rows)) * 0x9e3779b97f4a7c15ull;
    digest ^= digest >> 29;
  }
  return digest;
}

void fill_rows(Item& item, const Submitted& requests, Kind kind) {
  std::vector<std::int64_t> rows = requests.rows();
  const std::size_t members = rows.size();
  item.shape.front() = rows[requests.first()];
  if (kind != Kind::alltoall) {
    item.first_dims = std::move(rows);
    return;
  }
  item.splits.reserve(members * members);
  for (std::size_t member = 0; member < members; ++member) {
    const std::vector<std::int64_t>& splits = requests.request_of(member).splits;
    if (splits.empty())
      item.splits.insert(item.splits.end(), members, rows[member] / static_cast<std::int64_t>(members));
    else
      item.splits.insert(item.splits.end(), splits.begin(), splits.end());
  }
  item.digest = digest_of(item.splits);
}

// Compares all members' requests, and validates each.
Error check(const Submitted& requests, const std::vector<int>& ranks) {
  Error error;
  const auto validate_each = [&](const Request& request) {
    if (!error.failed()) error = validate_one(request, ranks);
  };
  if (requests.whole().empty()) {  // then nothing can differ
    error = validate({&requests.common()}, ranks);
    requests.for_each_number_of_rows(validate_each);
    return error;
  }
  std::deque<Request> rebuilt;
  const std::vector<const Request*> by_member = requests.by_member(rebuilt);
  error = validate(by_member, ranks);
  for (const Request* request : by_member) {
    if (request != nullptr) validate_each(*request);
  }
  return error;
}

// No member could count the bytes of all contributions.
Error check_rows(Item& item, Kind kind) {
  std::int64_t bytes = 0;
  if (sum_of(kind == Kind::alltoall ? item.splits : item.first_dims, item.rows) &&
      volume(item.shape, static_cast<std::int64_t>(size_of(item.dtype)), item.rows, bytes))
    return {};
  return {Code::precondition, title(kind) + " of tensor '" + item.name +
                                  "': the contributions of all ranks have more than 2^63 - 1 bytes together."};
}

}  // namespace

Coordinator::Coordinator(std::vector<int> ranks, CoordinatorOptions options)
    : ranks_(std::move(ranks)), options_(options), loads_(ranks_.size()), has_joined_(ranks_.size(), false) {}

void Coordinator::submit(int member, Request request, std::int64_t now_ns) {
  if (member < 0 || static_cast<std::size_t>(member) >= ranks_.size()) {
    throw Failure(Code::internal, "request of member " + std::to_string(member) + " of a group of " +
                                      std::to_string(ranks_.size()) + " members");
  }
  const auto index = static_cast<std::size_t>(member);
  if (request.kind == Kind::join) {
    if (has_joined_[index]) return;
    has_joined_[index] = true;
    ++joined_;
    last_joined_ = ranks_[index];
    check_all();
    return;
  }
  if (request.kind == Kind::tune) {
    if (member != 0)
      throw Failure(Code::internal, "rank " + std::to_string(ranks_[index]) + " submitted a tune, but only rank 0 may");
    Bucket bucket;
    bucket.kind = Kind::tune;
    bucket.items.push_back({request.name, request.unnamed, request.dtype, {}, {}, std::move(request.splits)});
    ready_.push_back({std::move(bucket), 0});
    return;
  }
  const std::string name = request.name;
  const auto [entry, added] = pending_.try_emplace(name, ranks_.size());
  Pending& pending = entry->second;
  if (added) {
    pending.order = ++arrivals_;
    pending.since_ns = now_ns;
  }
  // A member may submit a name again that failed with its bundle while the first request was under way.
  if (pending.complete) leave_bundle(name, pending);
  add_load(pending, index, -1);
  pending.requests.put(index, std::move(request));
  add_load(pending, index, 1);
  check_ready(name);
}

// Adds the member's request to the member's load (sign 1), or removes it (sign -1).
void Coordinator::add_load(const Pending& pending, std::size_t member, int sign) {
  const Submitted& requests = pending.requests;
  PendingLoad& load = loads_[member];
  if (requests.count() > 0 && requests.common_member() == member) load.add(requests.common(), sign);
  if (const auto own = requests.whole().find(member); own != requests.whole().end()) load.add(own->second, sign);
}

bool Coordinator::asks_too_much(int member) const { return loads_[static_cast<std::size_t>(member)].over_limit(); }

bool Coordinator::covered(const Pending& pending) const {
  const int members = static_cast<int>(ranks_.size());
  const int count = pending.requests.count();
  if (count == members) return true;
  if (count == 0 || count + joined_ < members) return false;
  for (std::size_t m = 0; m < ranks_.size(); ++m) {
    if (!pending.requests.has(m) && !has_joined_[m]) return false;
  }
  return true;
}

void Coordinator::check_ready(const std::string& name) {
  Pending& pending = pending_.at(name);
  if (pending.complete || !covered(pending)) return;
  const Request& first = pending.requests.request_of(pending.requests.first());
  if (!pending.requests.one_bundle_size()) {
    // Ranks without the bundle may never submit its other tensors, so no rank waits for them.
    Bucket failed = single(pending);
    fail_bundle(bundled_with(name), failed.error);
  } else if (first.bundle_size > 0) {
    pending.complete = true;
    pending.bundle = first.bundle;
    bundles_[first.bundle].push_back(name);
    check_bundle(first.bundle);
  } else {
    ready_.push_back({single(pending), 0});
    erase(name);
  }
}

void Coordinator::check_bundle(const std::string& name) {
  const auto entry = bundles_.find(name);
  const Submitted& leader = pending_.at(entry->second.front()).requests;
  if (entry->second.size() < leader.request_of(leader.first()).bundle_size) return;
  const std::vector<std::string> names = std::move(entry->second);
  bundles_.erase(entry);

  std::vector<Bucket> singles;
  Error error;
  for (const std::string& tensor : names) {
    const Pending& pending = pending_.at(tensor);
    const Submitted& requests = pending.requests;
    singles.push_back(single(pending));
    if (!error.failed()) error = singles.back().error;
    if (leader.all_in(leader.common().bundle) && requests.all_in(leader.common().bundle)) continue;
    for (std::size_t m = 0; m < ranks_.size() && !error.failed(); ++m) {
      if (!requests.has(m) || !leader.has(m) || requests.request_of(m).bundle == leader.request_of(m).bundle) continue;
      error = {Code::precondition, "Mismatched groups: Tensors '" + names.front() + "' and '" + tensor +
                                       "' are in one group on rank " + std::to_string(ranks_[leader.first()]) +
                                       ", but in two on rank " + std::to_string(ranks_[m]) + "."};
    }
  }
  if (error.failed()) return fail_bundle(names, std::move(error));
  ++bundle_numbers_;
  for (Bucket& bucket : singles) ready_.push_back({std::move(bucket), bundle_numbers_});
  for (const std::string& tensor : names) erase(tensor);
}

// A joining member completes everything that waited for it alone, in order of arrival.
void Coordinator::check_all() {
  std::vector<std::pair<std::uint64_t, std::string>> names;
  for (const auto& [name, pending] : pending_) names.emplace_back(pending.order, name);
  std::sort(names.begin(), names.end());
  for (const auto& [order, name] : names) {
    if (pending_.contains(name)) check_ready(name);
  }
}

// The tensor and all others that some member has put into a bundle with it, in order of arrival.
std::vector<std::string> Coordinator::bundled_with(const std::string& name) const {
  const Submitted& own = pending_.at(name).requests;
  std::vector<std::pair<std::uint64_t, std::string>> found;
  for (const auto& [other, pending] : pending_) {
    const Submitted& requests = pending.requests;
    bool together = other == name;
    const bool unbundled = requests.all_in("");
    for (std::size_t m = 0; m < ranks_.size() && !together && !unbundled; ++m) {
      together = own.has(m) && requests.has(m) && !own.request_of(m).bundle.empty() &&
                 own.request_of(m).bundle == requests.request_of(m).bundle;
    }
    if (together) found.emplace_back(pending.order, other);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> names;
  for (auto& [order, other] : found) names.push_back(std::move(other));
  return names;
}

void Coordinator::fail_bundle(const std::vector<std::string>& names, Error error) {
  Bucket failed;
  for (const std::string& name : names) {
    const Submitted& requests = pending_.at(name).requests;
    const Request& first = requests.request_of(requests.first());
    failed.kind = first.kind;
    Item item;
    item.name = name;
    item.unnamed = first.unnamed;
    item.dtype = first.dtype;
    item.shape = first.shape;
    failed.items.push_back(std::move(item));
    forget(name);
  }
  failed.error = std::move(error);
  if (names.size() > 1) {
    failed.error.message += " The group fails as a whole:";
    for (std::size_t i = 0; i < names.size() && i < kNamed; ++i) failed.error.message += " '" + names[i] + "'";
    failed.error.message += names.size() > kNamed ? " and " + std::to_string(names.size() - kNamed) + " more." : ".";
  }
  ready_.push_back({std::move(failed), 0});
}

void Coordinator::leave_bundle(const std::string& name, Pending& pending) {
  pending.complete = false;
  const auto bundle = bundles_.find(pending.bundle);
  if (bundle == bundles_.end()) return;
  std::erase(bundle->second, name);
  if (bundle->second.empty()) bundles_.erase(bundle);
}

void Coordinator::forget(const std::string& name) {
  Pending& pending = pending_.at(name);
  if (pending.complete) leave_bundle(name, pending);
  erase(name);
}

void Coordinator::erase(const std::string& name) {
  const auto found = pending_.find(name);
  const Submitted& requests = found->second.requests;
  add_load(found->second, requests.common_member(), -1);
  for (const auto& [member, request] : requests.whole()) {
    if (member != requests.common_member()) add_load(found->second, member, -1);
  }
  pending_.erase(found);
}

Bucket Coordinator::single(const Pending& pending) const {
  const Submitted& requests = pending.requests;
  const Request& first = requests.request_of(requests.first());
  const int absent = static_cast<int>(ranks_.size()) - requests.count();
  Bucket bucket;
  bucket.kind = first.kind;
  bucket.op = first.op;
  bucket.root = first.root;
  bucket.device = requests.device(requests.first());
  bucket.prescale = first.prescale;
  bucket.postscale = first.postscale;
  bucket.joined = absent;
  bucket.error = check(requests, ranks_);
  if (!bucket.error.failed()) bucket.error = joined_error(first, absent);

  Item item;
  item.name = first.name;
  item.unnamed = requests.unnamed();
  item.dtype = first.dtype;
  item.shape = first.shape;
  if (first.kind == Kind::add_group || first.kind == Kind::remove_group) item.splits = first.splits;
  if (rows_vary(first.kind) && !bucket.error.failed()) {
    fill_rows(item, requests, first.kind);
    bucket.error = check_rows(item, first.kind);
  }
  bucket.items.push_back(std::move(item));
  return bucket;
}

std::vector<Bucket> Coordinator::take_ready() {
  std::vector<Bucket> buckets;
  for (std::size_t begin = 0; begin < ready_.size();) {
    std::size_t end = begin;
    std::vector<Bucket> singles;
    const std::uint64_t bundle = ready_[begin].bundle;
    while (end < ready_.size() && (options_.fuse_bundles || ready_[end].bundle == bundle)) {
      singles.push_back(std::move(ready_[end++].bucket));
    }
    std::vector<Bucket> fused = fuse(std::move(singles), options_);
    std::move(fused.begin(), fused.end(), std::back_inserter(buckets));
    begin = end;
  }
  ready_.clear();
  // What was pending is ready now that all have joined, and runs before the join ends.
  if (joined_ > 0 && joined_ == static_cast<int>(ranks_.size())) {
    Bucket join;
    join.kind = Kind::join;
    join.last_joined = last_joined_;
    buckets.push_back(std::move(join));
    has_joined_.assign(ranks_.size(), false);
    joined_ = 0;
    last_joined_ = -1;
  }
  return buckets;
}

void Coordinator::forget_pending() {
  pending_.clear();
  bundles_.clear();
  loads_.assign(ranks_.size(), {});
  // Joins are sent again too, after the requests that came before them.
  has_joined_.assign(ranks_.size(), false);
  joined_ = 0;
  last_joined_ = -1;
}

std::vector<Stall> Coordinator::stalls(std::int64_t now_ns, std::int64_t older_than_ns) const {
  std::vector<std::pair<std::uint64_t, Stall>> found;
  for (const auto& [name, pending] : pending_) {
    if (pending.complete || now_ns - pending.since_ns < older_than_ns) continue;
    Stall stall{name, pending.since_ns, {}, {}};
    for (std::size_t m = 0; m < ranks_.size(); ++m) {
      if (pending.requests.has(m)) {
        stall.present.push_back(ranks_[m]);
      } else if (!has_joined_[m]) {
        stall.missing.push_back(ranks_[m]);
      }
    }
    found.emplace_back(pending.order, std::move(stall));
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Stall> stalls;
  for (auto& [order, stall] : found) stalls.push_back(std::move(stall));
  return stalls;
}

bool Coordinator::anything_pending() const { return !pending_.empty() || !ready_.empty(); }

int Coordinator::joined() const { return joined_; }

}  // namespace farandole::negotiate
