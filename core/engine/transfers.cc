// Sends and receives: how they begin, find their source, and end.
// Touches base/, link/ and engine/services.h.
#include "engine/transfers.h"

#include <set>
#include <utility>

#include "base/failpoint.h"
#include "os/clock.h"

namespace farandole {
namespace {

// A transfer is two messages: the data type, and the data. Their tags differ from those of collectives.
constexpr std::uint32_t kPointToPoint = 0x80000000u;
constexpr std::uint32_t kPointToPointDtype = 0x40000000u;

}  // namespace

std::uint32_t Transfers::group_of(std::uint32_t tag_group) {
  const bool transfer = (tag_group & kPointToPoint) != 0;
  return transfer ? tag_group & ~(kPointToPoint | kPointToPointDtype) : tag_group;
}

void Transfers::begin(const OperationPtr& operation) {
  Kind kind = operation->request.kind;
  if (operation->peer == kAnySource) {
    operation->phase = "recv";
    any_source_.push_back(operation);
    return;
  }
  FARANDOLE_FAILPOINT(&services_, kind, "enqueue");
  link::Messenger& messenger = services_.messenger();
  const link::Tag tag{kPointToPoint | static_cast<std::uint32_t>(operation->group),
                      static_cast<std::uint64_t>(operation->tag), 0};
  link::Tag dtype_tag = tag;
  dtype_tag.group |= kPointToPointDtype;
  std::size_t bytes = operation->request.bytes();
  operation->phase = kind == Kind::send ? "send" : "recv";
  services_.recorder().begun(operation->record, os::now_ns());
  operation->shape = operation->request.shape;
  operation->output_bytes = kind == Kind::receive ? bytes : 0;
  Transfer transfer;
  transfer.operation = operation;
  transfer.dtype = std::make_unique<std::uint32_t>(static_cast<std::uint32_t>(operation->request.dtype));
  Pieces dtype(transfer.dtype.get(), sizeof(std::uint32_t));
  if (kind == Kind::send) {
    transfer.dtype_transfer = messenger.send(operation->peer, dtype_tag, dtype);
    transfer.data = messenger.send(operation->peer, tag, Pieces(operation->input, bytes));
  } else {
    transfer.dtype_transfer = messenger.receive(operation->peer, dtype_tag, dtype);
    transfer.data = messenger.receive(operation->peer, tag, Pieces(operation->output, bytes));
  }
  FARANDOLE_FAILPOINT(&services_, kind, kind == Kind::send ? "send" : "recv");
  running_.push_back(std::move(transfer));
}

bool Transfers::advance() {
  const bool matched = !any_source_.empty() && match_any_source();
  return (!running_.empty() && finish_done()) || matched;
}

// For the receives from any source, oldest first: the first member that has sent something becomes the source.
bool Transfers::match_any_source() {
  const std::size_t before = any_source_.size();
  for (std::size_t i = 0; i < any_source_.size();) {
    OperationPtr operation = any_source_[i];
    auto id = static_cast<std::uint32_t>(operation->group);
    const Topology* group = services_.topology(id);
    if (group == nullptr) {
      any_source_.erase(any_source_.begin() + static_cast<std::ptrdiff_t>(i));
      services_.finish(*operation, {Code::invalid_argument, "process set " + std::to_string(id) + " was removed"});
      continue;
    }
    for (int rank : group->ranks) {
      const link::Tag dtype_tag{kPointToPoint | kPointToPointDtype | id, static_cast<std::uint64_t>(operation->tag), 0};
      if (!services_.messenger().has_unexpected(rank, dtype_tag)) continue;
      operation->peer = rank;
      operation->value = rank;  // the result that the user gets: the source
      break;
    }
    if (operation->peer == kAnySource) {
      ++i;
      continue;
    }
    begin(operation);  // if this throws, the operation is still in the list, and fails together with all others
    any_source_.erase(any_source_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return any_source_.size() != before;
}

Error Transfers::Transfer::mismatch() const {
  auto expected = static_cast<std::uint32_t>(operation->request.dtype);
  if (*dtype == expected) return {};
  std::string sent_dtype = *dtype < kDTypes ? name_of(static_cast<DType>(*dtype)) : "an unknown type";
  return {Code::precondition,
          "Mismatched data types: rank " + std::to_string(operation->peer) + " sends " + sent_dtype +
              ", but this rank receives " + name_of(operation->request.dtype),
          operation->peer};
}

bool Transfers::finish_done() {
  std::size_t before = running_.size();
  for (std::size_t i = 0; i < running_.size();) {
    Error error;
    bool done = true;
    try {
      done = running_[i].done();
      if (done) error = running_[i].mismatch();
    } catch (const Failure& failure) {
      error = failure.error();
    }
    if (!done) {
      ++i;
      continue;
    }
    OperationPtr operation = running_[i].operation;
    running_[i].cancel();
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    FARANDOLE_FAILPOINT(&services_, operation->request.kind, "complete");
    services_.finish(*operation, error);
  }
  return running_.size() != before;
}

void Transfers::end(const Error& error) {
  std::set<std::int32_t> groups;
  for (const OperationPtr& operation : any_source_) groups.insert(operation->group);
  for (const Transfer& transfer : running_) groups.insert(transfer.operation->group);
  for (std::int32_t group : groups) end(group, error);
}

void Transfers::end(std::int32_t group, const Error& error) {
  std::vector<OperationPtr> ended;
  std::erase_if(any_source_, [&](const OperationPtr& operation) {
    if (operation->group != group) return false;
    ended.push_back(operation);
    return true;
  });
  std::erase_if(running_, [&](Transfer& transfer) {
    if (transfer.operation->group != group) return false;
    transfer.cancel();  // before the operation's memory is released
    ended.push_back(transfer.operation);
    return true;
  });
  for (const OperationPtr& operation : ended) services_.finish(*operation, error);
}

}  // namespace farandole
