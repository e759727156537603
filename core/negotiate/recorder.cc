// Recorder: recognises a repeating step, in the same way on every member.
// Pure. Touches base/.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "negotiate/plan.h"

namespace farandole::negotiate {
namespace {

constexpr unsigned kMaxBackoff = 6;
constexpr std::size_t kMaxRun = 256;  // at most this many buckets of unnamed tensors are searched for a repetition
constexpr std::size_t kMinRepeatedTensors =
    32;  // after named tensors, this many unnamed ones must repeat to count as a loop

template <class Value>
void append(std::string& text, Value value) {
  char bytes[sizeof(Value)];
  std::memcpy(bytes, &value, sizeof(Value));
  text.append(bytes, sizeof(Value));
}

void append(std::string& text, const std::vector<std::int64_t>& values) {
  append(text, static_cast<std::uint32_t>(values.size()));
  for (std::int64_t value : values) append(text, value);
}

// What all members know of a tensor: its name or, when unnamed, everything that was agreed on.
std::string key_of(const Bucket& bucket, const Item& item) {
  if (!item.unnamed) return item.name;
  std::string key(1, '\0');  // no name starts with it
  append(key, bucket.kind);
  append(key, bucket.op);
  append(key, bucket.root);
  append(key, bucket.device);
  append(key, bucket.prescale);
  append(key, bucket.postscale);
  append(key, item.dtype);
  append(key, item.shape);
  append(key, item.first_dims);
  append(key, item.digest);  // of an alltoall's splits, of which each member knows only a part
  return key;
}

// FNV-1a with a final mix, because the hashes are added.
std::uint64_t hash_of(const std::string& key) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (char letter : key) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ull;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
  return hash ^ (hash >> 31);
}

bool plannable(const Bucket& bucket) {
  return bucket.kind <= Kind::reducescatter && !bucket.error.failed() && bucket.joined == 0 && !bucket.items.empty();
}

// A plan with a part of a bundle would leave the rest of it waiting without end.
bool whole_bundles(const std::vector<Planned>& buckets, std::size_t begin) {
  std::map<std::string, std::uint32_t> missing;
  for (std::size_t b = begin; b < buckets.size(); ++b) {
    for (const Request& request : buckets[b].requests) {
      if (request.bundle.empty()) continue;
      const auto bundle = missing.try_emplace(request.bundle, request.bundle_size).first;
      if (--bundle->second == 0) missing.erase(bundle);
    }
  }
  return missing.empty();
}

// The keys of unnamed tensors in the program's order of submission.
std::vector<std::string> in_program_order(const std::vector<Planned>& buckets, std::size_t begin, std::size_t end) {
  std::vector<std::tuple<Kind, std::uint64_t, std::string>> found;
  for (std::size_t b = begin; b < end; ++b) {
    const Bucket& bucket = *buckets[b].bucket;
    for (const Item& item : bucket.items) found.emplace_back(bucket.kind, number_of(item.name), key_of(bucket, item));
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> keys;
  for (auto& [kind, number, key] : found) keys.push_back(std::move(key));
  return keys;
}

}  // namespace

Recorder::Recorder(std::size_t capacity) : capacity_(capacity) {}

void Recorder::reset() {
  plan_.clear();
  open_.clear();
  backoff_ = 0;
  end_recording();
}

void Recorder::end_recording() {
  cut();
  expected_.clear();
  expected_tensors_ = 0;
  confirmed_ = 0;
}

void Recorder::cut() {
  recorded_.clear();
  keys_.clear();
  counts_.assign(1, 0);
  sums_.assign(1, 0);
  unnamed_since_ = 0;
}

void Recorder::append(Planned planned) {
  std::uint64_t sum = sums_.back();
  bool any_named = false;
  for (std::size_t i = 0; i < planned.bucket->items.size(); ++i) {
    std::string key = key_of(*planned.bucket, planned.bucket->items[i]);
    sum += hash_of(key);
    ++keys_[std::move(key)];
    any_named = any_named || !planned.bucket->items[i].unnamed;
  }
  counts_.push_back(counts_.back() + planned.bucket->items.size());
  sums_.push_back(sum);
  recorded_.push_back(std::move(planned));
  if (any_named) unnamed_since_ = recorded_.size();
}

bool Recorder::record(Planned planned) {
  if (capacity_ == 0) return false;
  if (!plannable(*planned.bucket)) {
    end_recording();
    return false;
  }
  if (planned.requests.size() != planned.bucket->items.size()) {
    throw Failure(Code::internal, "a bucket was recorded without this member's requests");
  }
  for (const Request& request : planned.requests) {
    if (request.bundle.empty()) continue;
    const auto bundle = open_.try_emplace(request.bundle, request.bundle_size).first;
    if (--bundle->second == 0) open_.erase(bundle);
  }
  const bool again = std::any_of(planned.bucket->items.begin(), planned.bucket->items.end(),
                                 [this](const Item& item) { return !item.unnamed && keys_.contains(item.name); });
  if (again || counts_.back() > 4 * capacity_ + kMaxRun) {
    const bool too_long = counts_.back() > capacity_;
    expected_ = too_long ? Keys{} : std::move(keys_);
    expected_tensors_ = too_long ? 0 : counts_.back();
    confirmed_ = 0;
    cut();
  }
  append(std::move(planned));
  if (counts_.back() == expected_tensors_ && keys_ == expected_ && open_.empty() && whole_bundles(recorded_, 0)) {
    if (++confirmed_ >= (1u << backoff_)) return adopt(0);
    cut();
    return false;
  }
  std::size_t begin = 0;
  return repeats_itself(begin) && open_.empty() && whole_bundles(recorded_, begin) && adopt(begin);
}

// Searches for the shortest run of buckets at the end that has the same tensors as the run before it.
bool Recorder::repeats_itself(std::size_t& begin) const {
  const std::size_t end = recorded_.size();
  const std::size_t oldest = std::max(unnamed_since_, end > kMaxRun ? end - kMaxRun : 0);
  std::size_t least = std::size_t{2} << backoff_;
  if (unnamed_since_ > 0) least = std::max(least, kMinRepeatedTensors);
  std::size_t before = end;
  for (begin = end; begin-- > oldest;) {
    const std::size_t tensors = counts_[end] - counts_[begin];
    if (tensors > counts_[begin] - counts_[oldest] || tensors > capacity_) return false;
    before = std::min(before, begin);
    while (counts_[before] > counts_[begin] - tensors) --before;
    if (counts_[begin] - counts_[before] != tensors || 2 * tensors < least) continue;
    if (sums_[end] - sums_[begin] != sums_[begin] - sums_[before]) continue;
    if (in_program_order(recorded_, before, begin) == in_program_order(recorded_, begin, end)) return true;
  }
  return false;
}

bool Recorder::adopt(std::size_t begin) {
  plan_.assign(std::make_move_iterator(recorded_.begin() + static_cast<std::ptrdiff_t>(begin)),
               std::make_move_iterator(recorded_.end()));
  cut();
  for (const Planned& planned : plan_) append(planned);
  expected_ = std::move(keys_);
  expected_tensors_ = counts_.back();
  cut();
  return true;
}

void Recorder::diverted(std::size_t done, std::uint64_t passes) {
  backoff_ = passes == 0 ? std::min(backoff_ + 1, kMaxBackoff) : 0;
  confirmed_ = 0;
  cut();
  for (std::size_t b = 0; b < done && b < plan_.size(); ++b) append(plan_[b]);
}

}  // namespace farandole::negotiate
