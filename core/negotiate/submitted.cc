// The members' requests of one name: what is stored of each, and how a whole request is rebuilt.
// Pure. Touches base/ and wire/.
#include "negotiate/submitted.h"

#include <algorithm>
#include <utility>

namespace farandole::negotiate {

namespace {

std::int64_t rows_of(const Request& request) { return request.shape.empty() ? 0 : request.shape.front(); }

}  // namespace

// Whether the request equals the common one, or differs from it only in rows and device.
bool Submitted::fits_common(const Request& request) const {
  const Request& a = common_;
  const Request& b = request;
  const std::ptrdiff_t first_compared = rows_vary(a.kind) && !a.shape.empty() ? 1 : 0;  // rows may differ
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
         (a.device < 0) == (b.device < 0) && a.prescale == b.prescale && a.postscale == b.postscale &&
         a.unnamed == b.unnamed && a.bundle_size == b.bundle_size && a.shape.size() == b.shape.size() &&
         std::equal(a.shape.begin() + first_compared, a.shape.end(), b.shape.begin() + first_compared) &&
         a.splits == b.splits && a.bundle == b.bundle;
}

void Submitted::put(std::size_t member, Request request) {
  if (present_[member]) {
    std::erase_if(differences_, [&](const Difference& difference) { return difference.member == member; });
    whole_.erase(member);
  } else {
    present_[member] = true;
    ++count_;
  }
  if (count_ == 1) {
    common_member_ = member;
    common_ = std::move(request);
  } else if (!fits_common(request)) {
    whole_.emplace(member, std::move(request));
  } else if (request.device != common_.device || rows_of(request) != rows_of(common_)) {
    differences_.push_back({static_cast<std::uint32_t>(member), request.device, rows_of(request)});
  }
}

std::size_t Submitted::first() const {
  return static_cast<std::size_t>(std::find(present_.begin(), present_.end(), true) - present_.begin());
}

const Request& Submitted::request_of(std::size_t member) const {
  const auto own = whole_.find(member);
  return own == whole_.end() ? common_ : own->second;
}

std::vector<std::int64_t> Submitted::rows() const {
  std::vector<std::int64_t> rows(present_.size(), rows_of(common_));
  for (const Difference& difference : differences_) rows[difference.member] = difference.rows;
  for (const auto& [member, request] : whole_) rows[member] = rows_of(request);
  return rows;
}

std::int32_t Submitted::device(std::size_t member) const {
  for (const Difference& difference : differences_) {
    if (difference.member == member) return difference.device;
  }
  return request_of(member).device;
}

bool Submitted::unnamed() const {
  const bool common_is_unused = static_cast<std::size_t>(count_) == whole_.size();
  return (common_is_unused || common_.unnamed) &&
         std::all_of(whole_.begin(), whole_.end(), [](const auto& entry) { return entry.second.unnamed; });
}

bool Submitted::one_bundle_size() const {
  const bool common_is_unused = static_cast<std::size_t>(count_) == whole_.size();
  const std::uint32_t size = request_of(first()).bundle_size;
  return (common_is_unused || common_.bundle_size == size) &&
         std::all_of(whole_.begin(), whole_.end(), [&](const auto& entry) { return entry.second.bundle_size == size; });
}

std::vector<const Request*> Submitted::by_member(std::deque<Request>& storage) const {
  std::vector<const Request*> requests(present_.size(), nullptr);
  for (std::size_t member = 0; member < present_.size(); ++member) {
    if (present_[member]) requests[member] = &request_of(member);
  }
  for (const Difference& difference : differences_) {
    Request& request = storage.emplace_back(common_);
    request.device = difference.device;
    if (rows_vary(request.kind) && !request.shape.empty()) request.shape.front() = difference.rows;
    requests[difference.member] = &request;
  }
  return requests;
}

}  // namespace farandole::negotiate
