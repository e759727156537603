// Send and receive: point to point, concurrent with collectives, not negotiated.
// Touches every room below it.
#include <utility>

#include "base/failpoint.h"
#include "engine/engine.h"

namespace farandole {
namespace {

// Tags of send and receive, separate from those of collectives.
constexpr std::uint32_t kPointToPoint = 0x80000000u;
constexpr std::uint32_t kDtypeOfPointToPoint = 0x40000000u;

}  // namespace

// As for control frames: an unknown process set was removed here meanwhile, or will be created.
bool Engine::may_send(int peer, std::uint32_t group) {
  const bool transfer = (group & kPointToPoint) != 0;
  const std::uint32_t id = transfer ? group & ~(kPointToPoint | kDtypeOfPointToPoint) : group;
  const auto known = all_groups_.find(id);
  if (known == all_groups_.end()) return id < kLastMemberGroup;
  return known->second.me >= 0 && known->second.member_of(peer) >= 0;
}

void Engine::begin_transfer(const OperationPtr& operation) {
  Kind kind = operation->request.kind;
  if (operation->peer == kAnySource) {
    operation->phase = "recv";
    any_source_.push_back(operation);
    return;
  }
  FARANDOLE_FAILPOINT(static_cast<Services*>(this), kind, "enqueue");
  const link::Tag tag{kPointToPoint | static_cast<std::uint32_t>(operation->group),
                      static_cast<std::uint64_t>(operation->tag), 0};
  link::Tag dtype_tag = tag;
  dtype_tag.group |= kDtypeOfPointToPoint;
  std::size_t bytes = operation->request.bytes();
  operation->phase = kind == Kind::send ? "send" : "recv";
  operation->shape = operation->request.shape;
  operation->output_bytes = kind == Kind::receive ? bytes : 0;
  PointToPoint transfer;
  transfer.operation = operation;
  transfer.dtype = std::make_unique<std::uint32_t>(static_cast<std::uint32_t>(operation->request.dtype));
  Pieces dtype(transfer.dtype.get(), sizeof(std::uint32_t));
  if (kind == Kind::send) {
    transfer.dtype_transfer = messenger_->send(operation->peer, dtype_tag, dtype);
    transfer.data = messenger_->send(operation->peer, tag, Pieces(operation->input, bytes));
  } else {
    transfer.dtype_transfer = messenger_->receive(operation->peer, dtype_tag, dtype);
    transfer.data = messenger_->receive(operation->peer, tag, Pieces(operation->output, bytes));
  }
  FARANDOLE_FAILPOINT(static_cast<Services*>(this), kind, kind == Kind::send ? "send" : "recv");
  transfers_.push_back(std::move(transfer));
}

// Receives from any source, in their order: the first member that has sent something becomes the source.
bool Engine::match_any_source() {
  const std::size_t before = any_source_.size();
  for (std::size_t i = 0; i < any_source_.size();) {
    OperationPtr operation = any_source_[i];
    auto id = static_cast<std::uint32_t>(operation->group);
    auto group = all_groups_.find(id);
    if (group == all_groups_.end()) {
      any_source_.erase(any_source_.begin() + static_cast<std::ptrdiff_t>(i));
      finish(*operation, {Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
      continue;
    }
    for (int rank : group->second.ranks) {
      const link::Tag dtype_tag{kPointToPoint | kDtypeOfPointToPoint | id, static_cast<std::uint64_t>(operation->tag),
                                0};
      if (!messenger_->has_unexpected(rank, dtype_tag)) continue;
      operation->peer = rank;
      operation->value = rank;
      break;
    }
    if (operation->peer == kAnySource) {
      ++i;
      continue;
    }
    begin_transfer(operation);  // an operation that fails here is still in the list, and ends with all others
    any_source_.erase(any_source_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return any_source_.size() != before;
}

Error Engine::PointToPoint::mismatch() const {
  auto mine = static_cast<std::uint32_t>(operation->request.dtype);
  if (*dtype == mine) return {};
  std::string theirs = *dtype < kDTypes ? name_of(static_cast<DType>(*dtype)) : "an unknown type";
  return {Code::precondition,
          "Mismatched data types: rank " + std::to_string(operation->peer) + " sends " + theirs +
              ", but this rank receives " + name_of(operation->request.dtype),
          operation->peer};
}

bool Engine::check_transfers() {
  std::size_t before = transfers_.size();
  for (std::size_t i = 0; i < transfers_.size();) {
    Error error;
    bool done = true;
    try {
      done = transfers_[i].done();
      if (done) error = transfers_[i].mismatch();
    } catch (const Failure& failure) {
      error = failure.error();
    }
    if (!done) {
      ++i;
      continue;
    }
    OperationPtr operation = transfers_[i].operation;
    transfers_[i].cancel();
    transfers_.erase(transfers_.begin() + static_cast<std::ptrdiff_t>(i));
    FARANDOLE_FAILPOINT(static_cast<Services*>(this), operation->request.kind, "complete");
    finish(*operation, error);
  }
  return transfers_.size() != before;
}

void Engine::end_transfers(const Error& error) {
  std::set<std::int32_t> groups;
  for (const OperationPtr& operation : any_source_) groups.insert(operation->group);
  for (const PointToPoint& transfer : transfers_) groups.insert(transfer.operation->group);
  for (std::int32_t group : groups) end_transfers(group, error);
}

void Engine::end_transfers(std::int32_t group, const Error& error) {
  std::vector<OperationPtr> ended;
  std::erase_if(any_source_, [&](const OperationPtr& operation) {
    if (operation->group != group) return false;
    ended.push_back(operation);
    return true;
  });
  std::erase_if(transfers_, [&](PointToPoint& transfer) {
    if (transfer.operation->group != group) return false;
    transfer.cancel();  // before the operation's memory is released
    ended.push_back(transfer.operation);
    return true;
  });
  for (const OperationPtr& operation : ended) finish(*operation, error);
}

}  // namespace farandole
