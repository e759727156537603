// The rules for a bucket. The contents of a plan were checked when they were agreed on.
// Pure. Touches base/.
#include "negotiate/verify.h"

#include <algorithm>
#include <span>

#include "negotiate/coordinator.h"

namespace farandole::negotiate {
namespace {

bool fuses(Kind kind) { return kind == Kind::allreduce || kind == Kind::allgather || kind == Kind::reducescatter; }
bool reduces(Kind kind) { return kind == Kind::allreduce || kind == Kind::reducescatter; }
bool takes_joined(Kind kind) { return kind == Kind::allreduce || kind == Kind::barrier; }

const char* fault_in_join(const Bucket& bucket, const Requester& requester) {
  if (!bucket.items.empty()) return "ends a join and names tensors";
  if (!requester.joined) return "ends a join, but this rank has not joined";
  const bool member =
      std::find(requester.ranks.begin(), requester.ranks.end(), bucket.last_joined) != requester.ranks.end();
  return member ? nullptr : "names a last rank to join that is not in the process set";
}

// The tensor's rows by member, and the bytes of all of them together.
const char* fault_in_gathered(const Item& item, const Request& own, const Requester& requester) {
  std::int64_t rows = 0, bytes = 0;
  if (item.first_dims.size() != requester.ranks.size()) return "does not have a number of rows for each member";
  if (item.first_dims[static_cast<std::size_t>(requester.me)] != own.shape.front())
    return "has another number of rows for this rank than it requested";
  if (item.first_dims.front() != item.shape.front()) return "has two numbers of rows for the first member";
  if (!sum_of(item.first_dims, rows) ||
      !volume(item.shape, static_cast<std::int64_t>(size_of(item.dtype)), rows, bytes))
    return "has more rows than can be counted";
  return nullptr;
}

const char* fault_in_exchanged(const Item& item, const Request& own, const Requester& requester) {
  const std::size_t members = requester.ranks.size();
  if (item.splits.size() != 2 * members) return "does not have a split to and from each member";
  const std::span<const std::int64_t> splits(item.splits);
  const std::int64_t each = own.shape.front() / static_cast<std::int64_t>(members);
  for (std::size_t member = 0; member < members; ++member)
    if (splits[member] != (own.splits.empty() ? each : own.splits[member]))
      return "has other splits for this rank than it requested";
  const auto me = static_cast<std::size_t>(requester.me);
  if (splits[me] != splits[members + me]) return "has two splits from this rank to itself";
  std::int64_t sent = 0, received = 0, bytes = 0;
  if (!sum_of(splits.first(members), sent) || !sum_of(splits.last(members), received) || item.rows < sent ||
      item.rows < received || !volume(item.shape, static_cast<std::int64_t>(size_of(item.dtype)), item.rows, bytes))
    return "has splits that cannot be added up";
  return nullptr;
}

bool same_except_rows(const Item& item, const Request& own) {
  return item.shape.size() == own.shape.size() && !own.shape.empty() && item.shape.front() >= 0 &&
         std::equal(own.shape.begin() + 1, own.shape.end(), item.shape.begin() + 1);
}

// A tensor for a member that has joined: no request limits its size, only the machine's memory does.
const char* fault_in_zeros(const Bucket& bucket, const Item& item, const Requester& requester) {
  if (!requester.joined || bucket.joined == 0) return "holds a tensor that this rank has not submitted";
  std::int64_t bytes = 0;
  const bool counted = volume(item.shape, static_cast<std::int64_t>(size_of(item.dtype)), bytes);
  return counted ? nullptr : "has a shape that cannot exist";
}

}  // namespace

const char* fault_in(const Bucket& bucket, const Requester& requester) {
  const auto members = static_cast<std::int32_t>(requester.ranks.size());
  if (bucket.kind == Kind::send || bucket.kind == Kind::receive) return "is of a kind that is never negotiated";
  if (bucket.error.failed()) {
    const Code code = bucket.error.code;
    if (code == Code::invalid_argument || code == Code::precondition || code == Code::aborted) return nullptr;
    return "has an error that negotiation does not know";
  }
  if (bucket.joined < 0 || bucket.joined >= members) return "counts more joined members than there can be";
  if (bucket.joined > 0 && !takes_joined(bucket.kind)) return "is of a kind that needs members which have joined";
  if (bucket.kind == Kind::join) return fault_in_join(bucket, requester);
  if (bucket.items.empty()) return "names no tensor";
  if (bucket.items.size() > 1 && !fuses(bucket.kind)) return "fuses tensors of a kind that cannot be fused";
  const DType dtype = bucket.items.front().dtype;
  const bool one_dtype =
      std::all_of(bucket.items.begin(), bucket.items.end(), [&](const Item& item) { return item.dtype == dtype; });
  return one_dtype ? nullptr : "fuses tensors of different data types";
}

const char* fault_in(const Bucket& bucket, const Item& item, const Request* own, const Requester& requester) {
  // An error may name tensors that only other members have submitted; only rank 0 submits tuning.
  if (bucket.error.failed()) return own != nullptr && own->kind == Kind::join ? "fails a join" : nullptr;
  if (own == nullptr && bucket.kind == Kind::tune) return nullptr;
  if (own == nullptr) return fault_in_zeros(bucket, item, requester);
  if (own->kind != bucket.kind) return "is of another kind than this rank requested";
  if (bucket.kind > Kind::reducescatter)
    return item.splits == own->splits ? nullptr : "has other values than this rank requested";
  if (own->dtype != item.dtype) return "has another data type than this rank requested";
  if (item.unnamed && !own->unnamed) return "takes a tensor for unnamed that this rank has named";
  if ((own->device < 0) != (bucket.device < 0)) return "is for another kind of device than this rank requested";
  if (validate_one(*own, requester.ranks).failed()) return "agrees to a request that cannot be carried out";
  if (reduces(bucket.kind) &&
      (own->op != bucket.op || own->prescale != bucket.prescale || own->postscale != bucket.postscale))
    return "has another reduction than this rank requested";
  if (bucket.kind == Kind::broadcast && own->root != bucket.root) return "has another root than this rank requested";
  if (!rows_vary(bucket.kind)) return own->shape == item.shape ? nullptr : "has another shape than this rank requested";
  if (!same_except_rows(item, *own)) return "has another shape than this rank requested";
  return bucket.kind == Kind::allgather ? fault_in_gathered(item, *own, requester)
                                        : fault_in_exchanged(item, *own, requester);
}

}  // namespace farandole::negotiate
