// Parts of tensors become calls; tensors that are reduced together become one.
// Touches base/ and cuda/.
#include "collective/nccl_calls.h"

#include <algorithm>

#include "collective/parts.h"

namespace farandole::collective {

namespace {

using cuda::Address;
using cuda::NcclOp;
using cuda::NcclType;
using What = NcclCall::What;

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::optional<NcclType> type_of(DType dtype) {
  switch (dtype) {
    case DType::boolean:  // 0 and 1: the sum is the larger one, the product the smaller one
    case DType::uint8:
      return NcclType::uint8;
    case DType::int8:
      return NcclType::int8;
    case DType::int32:
      return NcclType::int32;
    case DType::int64:
      return NcclType::int64;
    case DType::float16:
      return NcclType::float16;
    case DType::bfloat16:
      return NcclType::bfloat16;
    case DType::float32:
      return NcclType::float32;
    case DType::float64:
      return NcclType::float64;
    default:
      return std::nullopt;
  }
}

// An average of floating-point numbers is NCCL's own: their sum may be larger than the type can be.
bool averages(const Reduction& reduction) { return reduction.divisor > 1 && is_floating(reduction.dtype); }

NcclOp op_of(const Reduction& reduction) {
  const bool boolean = reduction.dtype == DType::boolean;
  switch (reduction.op) {
    case ReduceOp::min:
      return NcclOp::min;
    case ReduceOp::max:
      return NcclOp::max;
    case ReduceOp::product:
      return boolean ? NcclOp::min : NcclOp::product;
    default:
      return boolean ? NcclOp::max : averages(reduction) ? NcclOp::average : NcclOp::sum;
  }
}

// A kernel of one source and one result: copies, or scales.
cuda::Work work_for(DType dtype, double prescale, double postscale, std::int64_t divisor) {
  cuda::Work work;
  work.prescale = prescale;
  work.postscale = postscale;
  work.divisor = divisor;
  work.scaled = prescale != 1 || postscale != 1 || divisor != 1;
  if (work.scaled) work.dtype = dtype;
  return work;
}

void add_row(cuda::Work& work, Address from, Address to, std::size_t bytes) {
  if (bytes == 0) return;
  work.add_row(bytes / size_of(work.dtype));
  work.table.insert(work.table.end(), {from, to});
}

class Planner {
 public:
  Planner(const DeviceJob& job, int me, int members, NcclPlan& plan)
      : job_(job), me_(me), members_(members), plan_(plan), parts_(job.parts(sends())) {
    element_ = job.reduces ? size_of(job.reduction.dtype) : 1;
    for (const DeviceTensor& tensor : job.tensors) sources_.push_back(tensor.in), results_.push_back(tensor.out);
    if (!job.reduces) return;
    plan.type = type_of(job.reduction.dtype).value_or(NcclType::uint8);
    plan.op = op_of(job.reduction);
    scaled_ = job.reduction.dtype != DType::boolean;
    everywhere_ = !parts_.empty() && parts_[0].to.size() > 1;
  }

  Obstacle make() {
    if (!pack()) return Obstacle::device_memory;
    for (std::size_t at = 0; at < parts_.size(); at += add(at)) continue;
    unpack();
    return Obstacle::none;
  }

 private:
  // What this member sends and receives; what others send each other it need not know.
  std::vector<Numbers> sends() const {
    std::vector<Numbers> all(index(members_), Numbers(index(members_), 0));
    if (job_.sends.empty()) return all;
    all[index(me_)] = job_.sends;
    for (int from = 0; from < members_; ++from) all[index(from)][index(me_)] = job_.receives[index(from)];
    return all;
  }

  // All tensors of an allreduce become one; and what is prescaled must not change the user's input.
  bool pack() {
    const double prescale = scaled_ ? job_.reduction.prescale : 1.0;
    const bool joins = everywhere_ && job_.reduces && job_.tensors.size() > 1;
    if (!job_.reduces || (prescale == 1 && !joins)) return true;
    const bool in_arena = joins || !everywhere_;
    for (const DeviceTensor& tensor : job_.tensors) packed_ += aligned(tensor.in_bytes);
    Address at = in_arena ? job_.lane->arena(packed_) : 0;
    if (in_arena && at == 0) return false;
    if (joins) arena_ = at;
    plan_.before = work_for(job_.reduction.dtype, prescale, 1.0, 1);
    for (std::size_t i = 0; i < job_.tensors.size(); ++i) {
      const DeviceTensor& tensor = job_.tensors[i];
      sources_[i] = in_arena ? at : tensor.out;
      add_row(*plan_.before, tensor.in, sources_[i], tensor.in_bytes);
      at += aligned(tensor.in_bytes);
      if (joins) results_[i] = sources_[i];
    }
    return true;
  }

  void unpack() {
    const Reduction& reduction = job_.reduction;
    const double postscale = scaled_ ? reduction.postscale : 1.0;
    const std::int64_t divisor = scaled_ && !averages(reduction) ? reduction.divisor : 1;
    if (!job_.reduces || (postscale == 1 && divisor == 1 && arena_ == 0)) return;
    plan_.after = work_for(reduction.dtype, 1.0, postscale, divisor);
    for (std::size_t i = 0; i < job_.tensors.size(); ++i)
      add_row(*plan_.after, results_[i], job_.tensors[i].out, job_.tensors[i].out_bytes);
  }

  // Whether the parts from here on are one for each member, in their order and of one size, so that one call has all.
  bool even(std::size_t at, std::vector<DevicePart::Place> DevicePart::* one,
            std::vector<DevicePart::Place> DevicePart::* all) const {
    if (at + index(members_) > parts_.size()) return false;
    for (int member = 0; member < members_; ++member) {
      const DevicePart& part = parts_[at + index(member)];
      if ((part.*one).size() != 1 || (part.*all).size() != index(members_) || (part.*one)[0].member != member ||
          part.tensor != parts_[at].tensor || part.bytes != parts_[at].bytes ||
          (part.*all)[0].offset != index(member) * part.bytes)
        return false;
    }
    return true;
  }

  // The call for the part at this place, and how many parts it has done.
  std::size_t add(std::size_t at) {
    const DevicePart& part = parts_[at];
    const std::size_t count = part.bytes / element_;
    const Address from = sources_[part.tensor], to = results_[part.tensor];
    const bool from_all = part.from.size() > 1, to_all = part.to.size() > 1;
    if (arena_ != 0) {  // all of them
      plan_.calls.push_back({What::all_reduce, arena_, arena_, packed_ / element_, 0});
      return parts_.size();
    }
    if (to_all && !from_all && even(at, &DevicePart::from, &DevicePart::to)) {
      plan_.calls.push_back({What::all_gather, from, to, count, 0});
      return index(members_);
    }
    if (from_all && !to_all && even(at, &DevicePart::to, &DevicePart::from)) {
      plan_.calls.push_back({What::reduce_scatter, from, to, count, 0});
      return index(members_);
    }
    if (part.bytes == 0) return 1;
    const int source = part.from[0].member, target = part.to[0].member;
    if (from_all && to_all)
      plan_.calls.push_back({What::all_reduce, from, to, count, 0});
    else if (to_all)
      plan_.calls.push_back(
          {What::broadcast, from + part.from[0].offset, to + part.to[index(me_)].offset, count, source});
    else if (from_all)
      plan_.calls.push_back({What::reduce, from + part.from[index(me_)].offset, to + part.to[0].offset, count, target});
    else
      add_message(part, from, to, count);
    return 1;
  }

  void add_message(const DevicePart& part, Address from, Address to, std::size_t count) {
    const int source = part.from[0].member, target = part.to[0].member;
    if (source == me_) plan_.calls.push_back({What::send, from + part.from[0].offset, 0, count, target});
    if (target == me_) plan_.calls.push_back({What::receive, 0, to + part.to[0].offset, count, source});
  }

  const DeviceJob& job_;
  const int me_, members_;
  NcclPlan& plan_;
  const std::vector<DevicePart> parts_;
  std::vector<Address> sources_, results_;
  std::size_t element_ = 1, packed_ = 0;
  bool scaled_ = false, everywhere_ = false;
  Address arena_ = 0;  // of an allreduce of several tensors
};

}  // namespace

bool nccl_has(const DeviceJob& job) { return !job.reduces || type_of(job.reduction.dtype).has_value(); }

Obstacle plan_of(const DeviceJob& job, int me, int members, NcclPlan& plan) {
  const Obstacle met = Planner(job, me, members, plan).make();
  if (met != Obstacle::none) return met;
  for (const std::optional<cuda::Work>& work : {plan.before, plan.after})
    if (work.has_value() && work->tiles > 0 && !job.lane->loads(*work)) return Obstacle::kernel;
  return Obstacle::none;
}

cuda::NcclResult call(const NcclCall& call, const NcclPlan& plan, const cuda::Nccl& nccl, cuda::Comm comm,
                      cuda::Stream stream) {
  const auto* from = reinterpret_cast<const void*>(call.from);
  auto* to = reinterpret_cast<void*>(call.to);
  switch (call.what) {
    case What::all_reduce:
      return nccl.all_reduce(from, to, call.count, plan.type, plan.op, comm, stream);
    case What::reduce:
      return nccl.reduce(from, to, call.count, plan.type, plan.op, call.peer, comm, stream);
    case What::reduce_scatter:
      return nccl.reduce_scatter(from, to, call.count, plan.type, plan.op, comm, stream);
    case What::broadcast:
      return nccl.broadcast(from, to, call.count, plan.type, call.peer, comm, stream);
    case What::all_gather:
      return nccl.all_gather(from, to, call.count, plan.type, comm, stream);
    case What::send:
      return nccl.send(from, call.count, plan.type, call.peer, comm, stream);
    default:
      return nccl.receive(to, call.count, plan.type, call.peer, comm, stream);
  }
}

}  // namespace farandole::collective
