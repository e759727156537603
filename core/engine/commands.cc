// Submission: the checks, names and handles of operations; and what else is handed to the driver.
// Touches base/, os/, link/ and negotiate/.
#include "engine/commands.h"

#include <algorithm>
#include <string_view>

#include "base/failpoint.h"
#include "negotiate/coordinator.h"
#include "os/clock.h"

namespace farandole {
namespace {

constexpr std::int64_t kNameTakenFor = 1'000'000'000;  // nanoseconds for which the last operation's name stays taken

std::string unnamed_prefix(Kind kind) {
  constexpr const char* names[] = {"allreduce", "allgather", "broadcast",    "alltoall", "reducescatter", "barrier",
                                   "join",      "add_group", "remove_group", "send",     "receive",       "tune"};
  return std::string(names[static_cast<int>(kind)]) + ".noname.";
}

}  // namespace

Commands::Submitted Commands::submit(const std::vector<OperationPtr>& operations, bool bundle) {
  std::lock_guard lock(mutex_);
  if (ended_.failed()) {
    // The outcomes say what happened and which rank caused it.
    std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
    for (const OperationPtr& operation : operations) {
      operation->handle = handle++;
      operation->error = ended_;
      handles_.insert(operation);
      handles_.finish(*operation);
    }
    return {};
  }
  std::unordered_set<std::string_view> together;
  for (const OperationPtr& operation : operations) {
    Error error = check(*operation);
    bool again =
        operations.size() > 1 && !operation->request.unnamed && !together.insert(operation->request.name).second;
    if (again && !error.failed() && !bypasses_negotiation(*operation))
      error = {Code::invalid_argument, "two tensors of one group have the same name " + operation->request.name};
    if (error.failed()) return {error};
  }
  Submitted submitted{{}, true};
  const std::size_t before = submitted_.size();
  try {
    submitted.bytes = enter(operations, bundle);
  } catch (...) {  // out of memory: undo everything
    submitted_.resize(before);
    for (const OperationPtr& operation : operations) withdraw(*operation);
    throw;
  }
  look_again();
  return submitted;
}

Error Commands::check(const Operation& operation) const {
  auto members = members_.find(operation.group);
  if (members == members_.end())
    return {Code::invalid_argument, "process set " + std::to_string(operation.group) + " does not exist"};
  const std::vector<int>& ranks = members->second;
  if (!std::binary_search(ranks.begin(), ranks.end(), options_.rank))
    return {Code::invalid_argument,
            "rank " + std::to_string(options_.rank) + " is not in process set " + std::to_string(operation.group)};
  if (point_to_point(operation.request.kind)) {
    bool any_source = operation.request.kind == Kind::receive && operation.peer == kAnySource;
    if (!any_source && !std::binary_search(ranks.begin(), ranks.end(), operation.peer))
      return {Code::invalid_argument,
              "rank " + std::to_string(operation.peer) + " is not in process set " + std::to_string(operation.group)};
    return {};
  }
  if (bypasses_negotiation(operation)) {
    if (operation.request.kind == Kind::remove_group) {
      if (operation.request.splits.size() == 1 && operation.request.splits[0] >= kFirstMemberGroup) return {};
      return {Code::invalid_argument,
              "only a process set that its members have created can be left or aborted by one member"};
    }
    if (operation.tag >= kFirstMemberGroup && operation.tag < kLastMemberGroup) return {};
    return {Code::invalid_argument, "a process set that its members create needs an ID from " +
                                        std::to_string(kFirstMemberGroup) + " to " +
                                        std::to_string(kLastMemberGroup - 1)};
  }
  if (operation.request.kind == Kind::tune) {
    Tuning tuning;
    bool measuring = false;
    if (operation.group != 0 || options_.rank != 0)
      return {Code::invalid_argument, "only rank 0 can change the tuning; it applies to all ranks"};
    return Tuning::read(operation.request.splits, tuning, measuring);
  }
  // Other errors must be equal on all ranks (docs: Horovod's contract). The coordinator finds them again and sends them
  // to all.
  Error error = negotiate::validate_one(operation.request, ranks);
  if (error.code == Code::invalid_argument) return error;
  if (!operation.request.unnamed && name_taken(operation))
    return {Code::invalid_argument,
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
            "currently being processed: " +
                operation.request.name + ". Wait for the first one, or give this one another name."};
  return {};
}

// Whether the name belongs to a pending operation, or to the last one that ended and whose end the user has not seen:
// whether two operations of one name collide must not depend on how fast the first one was.
bool Commands::name_taken(const Operation& operation) const {
  const std::string& name = operation.request.name;
  auto names = names_.find(operation.group);
  if (names != names_.end() && names->second.count(name) != 0) return true;
  const auto& last = last_;
  const std::int64_t handle = last.handle.load(std::memory_order_relaxed);
  if (handle == 0 || last.group != operation.group || last.name.empty() || last.name.value() != name) return false;
  OperationPtr first = handles_.find(handle);  // null: it was released
  return first != nullptr && !first->seen.load(std::memory_order_relaxed) && os::now_ns() - last.at <= kNameTakenFor;
}

// Registers the operations, with the commands' mutex held. Returns their size in bytes.
std::size_t Commands::enter(const std::vector<OperationPtr>& operations, bool bundle) {
  std::size_t bytes = 0;
  std::int64_t now = os::now_ns();
  std::int64_t handle = handles_.reserve(static_cast<int>(operations.size()));
  for (const OperationPtr& operation : operations) {
    negotiate::Request& request = operation->request;
    operation->submitted_ns = now;
    const std::size_t size = request.bytes();
    bytes += size;
    if (!bypasses_negotiation(*operation)) {
      if (request.unnamed) {
        std::uint64_t& count = unnamed_[{operation->group, request.kind}];
        request.name = unnamed_prefix(request.kind) + std::to_string(count + 1);
        ++count;
      }
      operation->handle = handle;  // from here on withdraw() can undo it
      names_[operation->group].insert(request.name);
      if (bundle) {
        request.bundle = operations.front()->request.name;
        request.bundle_size = static_cast<std::uint32_t>(operations.size());
      }
    }
    operation->handle = handle++;
    handles_.insert(operation);
    FARANDOLE_FAILPOINT(services_, request.kind, "submit");
    submitted_.push_back(operation);
    const int peer = point_to_point(request.kind) ? operation->peer : request.root;
    operation->record = recorder_.submitted({request.name, &request.shape, static_cast<std::int64_t>(size),
                                             operation->group, peer, request.kind, request.dtype, request.op},
                                            now);
  }
  return bytes;
}

void Commands::withdraw(const Operation& operation) {
  if (operation.handle == 0) return;  // it was not registered yet
  recorder_.done(operation.record, Code::no_memory, 0, operation.submitted_ns);
  handles_.release(operation.handle);
  if (bypasses_negotiation(operation)) return;
  auto names = names_.find(operation.group);
  if (names != names_.end()) names->second.erase(operation.request.name);
  if (operation.request.unnamed) --unnamed_.at({operation.group, operation.request.kind});
}

void Commands::await(const Operation& operation) {
  std::lock_guard lock(mutex_);
  taken_.awaited.emplace_back(operation.group, operation.handle);
  look_again();
}

void Commands::add_link(NewLink link) {
  std::lock_guard lock(mutex_);
  taken_.links.push_back(std::move(link));
  look_again();
}

std::uint64_t Commands::share(os::Descriptor file, std::byte* data, std::size_t bytes, link::RegionUse use) {
  std::lock_guard lock(mutex_);
  taken_.sharings.push_back({++regions_, std::move(file), data, bytes, use});
  look_again();
  return regions_;
}

void Commands::unshare(std::uint64_t region) {
  std::lock_guard lock(mutex_);
  taken_.sharings.push_back({region, os::Descriptor(), nullptr, 0});
  look_again();
}

void Commands::revoke(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!taken_.revoke.failed()) taken_.revoke = error;
  look_again();
}

void Commands::leave() {
  std::lock_guard lock(mutex_);
  taken_.leave = true;
  look_again();
}

Commands::Taken Commands::take(std::vector<OperationPtr>& operations) {
  Taken taken;
  std::lock_guard lock(mutex_);
  pending_.store(false, std::memory_order_relaxed);
  operations.swap(submitted_);
  taken.awaited.swap(taken_.awaited);
  taken.links.swap(taken_.links);
  taken.sharings.swap(taken_.sharings);
  taken.revoke = taken_.revoke;
  taken.leave = taken_.leave;
  return taken;
}

void Commands::finished(const Operation& operation, std::int64_t now) {
  if (bypasses_negotiation(operation)) {
    last_.handle.store(0, std::memory_order_relaxed);
    return;
  }
  std::lock_guard lock(mutex_);
  auto names = names_.find(operation.group);  // none: the group was removed
  last_.name = names == names_.end() ? Names::node_type() : names->second.extract(operation.request.name);
  last_.group = operation.group;
  last_.at = now;
  last_.handle.store(operation.handle, std::memory_order_relaxed);
}

void Commands::end(const Error& error) {
  std::lock_guard lock(mutex_);
  ended_ = error;
}

// `waiting`: those whose handles were released are in it alone.
void Commands::take_unfinished(std::vector<OperationPtr>& unfinished, std::vector<OperationPtr>& waiting) {
  std::lock_guard lock(mutex_);  // later submissions fail at once
  unfinished = handles_.unfinished();
  waiting.swap(submitted_);
}

void Commands::forget_sharings() {
  std::lock_guard lock(mutex_);
  taken_.sharings.clear();
}

void Commands::add_group(std::int32_t group, const std::vector<int>& ranks) {
  std::lock_guard lock(mutex_);
  members_[group] = ranks;
}

void Commands::remove_group(std::int32_t group) {
  std::lock_guard lock(mutex_);
  members_.erase(group);
}

void Commands::forget_names(std::int32_t group) {
  restart_unnamed_numbers(group);
  std::lock_guard lock(mutex_);
  names_.erase(group);
}

void Commands::restart_unnamed_numbers(std::int32_t group) {
  std::lock_guard lock(mutex_);
  std::erase_if(unnamed_, [&](const auto& entry) { return entry.first.first == group; });
}

}  // namespace farandole
