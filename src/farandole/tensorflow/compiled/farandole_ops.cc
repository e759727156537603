// The operations of TensorFlow's graphs over the core's C interface; compiled against the TensorFlow that is installed.
// Touches TensorFlow's headers and the core's functions, which Python hands over.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "farandole.h"
#include "farandole_words.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

using farandole::kAllgather;
using farandole::kAllreduce;
using farandole::kAlltoall;
using farandole::kBroadcast;
using farandole::kReducescatter;

// One node that is under way: as many requests as it has tensors.
struct Step {
  OpKernelContext* context = nullptr;
  AsyncOpKernel::DoneCallback done;
  int kind = 0;
  size_t left = 0;
  std::vector<Tensor> inputs;  // keeps the memory
  absl::Status status;
};

struct World {
  std::mutex mutex;
  farandole_engine* engine = nullptr;
  int rank = 0, size = 0;
  const farandole_functions* core = nullptr;
  std::int64_t queue = 0;  // of completions, of this engine, for these nodes alone
  std::map<std::int64_t, std::pair<std::shared_ptr<Step>, size_t>> pending;  // by handle; the index of the tensor
};

World& world() {
  static World* one = new World;  // nodes may outlive static objects
  return *one;
}

int dtype_of(DataType type) {
  namespace tf = tensorflow;
  static constexpr std::pair<DataType, int> types[] = {
      {tf::DT_BOOL, FARANDOLE_DTYPE_BOOL},         {tf::DT_UINT8, FARANDOLE_DTYPE_UINT8},
      {tf::DT_INT8, FARANDOLE_DTYPE_INT8},         {tf::DT_UINT16, FARANDOLE_DTYPE_UINT16},
      {tf::DT_INT16, FARANDOLE_DTYPE_INT16},       {tf::DT_INT32, FARANDOLE_DTYPE_INT32},
      {tf::DT_INT64, FARANDOLE_DTYPE_INT64},       {tf::DT_HALF, FARANDOLE_DTYPE_FLOAT16},
      {tf::DT_FLOAT, FARANDOLE_DTYPE_FLOAT32},     {tf::DT_DOUBLE, FARANDOLE_DTYPE_FLOAT64},
      {tf::DT_BFLOAT16, FARANDOLE_DTYPE_BFLOAT16},
  };
  for (const auto& [theirs, ours] : types) {
    if (theirs == type) return ours;
  }
  return -1;
}

absl::Status failure(int code, const std::string& message) {
  const std::string words = farandole::words_of(code, message);
  if (code == FARANDOLE_CODE_INVALID_ARGUMENT) return absl::InvalidArgumentError(words);
  if (code == FARANDOLE_CODE_PRECONDITION) return absl::FailedPreconditionError(words);
  return absl::UnknownError(words);
}

absl::Status take_received(Step& step, size_t index, const farandole_outcome& outcome) {
  TensorShape shape;
  for (int i = 0; i < outcome.dimensions; ++i) shape.AddDim(outcome.shape[i]);
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(step.context->allocate_output(static_cast<int>(index), shape, &output));
  if (outcome.output_bytes > 0) std::memcpy(output->data(), outcome.output, outcome.output_bytes);
  if (step.kind != kAlltoall) return absl::OkStatus();
  Tensor* splits = nullptr;
  TF_RETURN_IF_ERROR(step.context->allocate_output(1, TensorShape({outcome.splits_count}), &splits));
  for (int i = 0; i < outcome.splits_count; ++i)
    splits->flat<std::int32_t>()(i) = static_cast<std::int32_t>(outcome.splits[i]);
  return absl::OkStatus();
}

void finish(const std::shared_ptr<Step>& step) {
  if (!step->status.ok()) step->context->SetStatus(step->status);
  // What comes after the node runs in TensorFlow's own threads: this one only passes results on.
  auto done = std::move(step->done);
  step->inputs.clear();
  (*step->context->runner())([done]() { done(); });
}

void complete(std::int64_t handle, farandole_engine* engine, const farandole_functions& core) {
  std::shared_ptr<Step> step;
  size_t index = 0;
  {
    std::lock_guard lock(world().mutex);
    auto found = world().pending.find(handle);
    if (found == world().pending.end()) return;  // of an engine that has ended
    step = found->second.first;
    index = found->second.second;
    world().pending.erase(found);
  }
  farandole_outcome outcome{};
  absl::Status status;
  if (core.outcome_of(engine, handle, &outcome) != 0)
    status = failure(10, "the outcome is gone");
  else if (outcome.code != 0)
    status = failure(outcome.code, outcome.message);
  else if (step->kind == kAllgather || step->kind == kAlltoall)
    status = take_received(*step, index, outcome);
  core.release(engine, handle);
  if (!status.ok() && step->status.ok()) step->status = status;
  if (--step->left == 0) finish(step);  // one thread completes, so that nobody else counts
}

class Collective : public AsyncOpKernel {
 public:
  explicit Collective(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("kind", &kind_));
    OP_REQUIRES_OK(context, context->GetAttr("tensor_names", &names_));
    OP_REQUIRES_OK(context, context->GetAttr("bundle", &bundle_));
    OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &op_));
    OP_REQUIRES_OK(context, context->GetAttr("root_rank", &root_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set_id", &group_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    std::string scales;
    OP_REQUIRES_OK(context, context->GetAttr("scales", &scales));
    char* rest = nullptr;
    prescale_ = std::strtod(scales.c_str(), &rest);
    postscale_ = std::strtod(rest, nullptr);
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto step = std::make_shared<Step>();
    step->context = context;
    step->done = std::move(done);
    step->kind = kind_;
    step->left = names_.size();
    absl::Status status;
    {
      // One lock for all: a completion must find what it belongs to.
      std::lock_guard lock(world().mutex);
      status = submit(*context, step);
    }
    // `done` runs what comes after the node, which may be another collective that wants the lock.
    if (status.ok()) return;
    context->SetStatus(status);
    step->done();
  }

 private:
  absl::Status without_rows() const {  // no_rows() of base/errors.py
    const std::string name = kind_ == kAllgather ? "allgather" : kind_ == kAlltoall ? "alltoall" : "reducescatter";
    return absl::FailedPreconditionError("NoRows: Process-set rank zero tried to " + name + " a rank-zero tensor. " +
                                         name + " needs at least one dimension; reshape the scalar to (1,)");
  }

  absl::Status submit(OpKernelContext& context, const std::shared_ptr<Step>& step) {
    World& now = world();
    if (now.engine == nullptr) return absl::FailedPreconditionError(farandole::kNotInitialized);
    const size_t count = names_.size();
    std::vector<farandole_request> requests(count);
    std::vector<std::vector<std::int64_t>> shapes(count);
    std::vector<std::int64_t> splits;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& input = context.input(static_cast<int>(i) + 1);
      for (int d = 0; d < input.dims(); ++d) shapes[i].push_back(input.dim_size(d));
      if (kind_ != kAllreduce && kind_ != kBroadcast && input.dims() == 0) return without_rows();
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(allocate(context, static_cast<int>(i), input, &output));
      if (kind_ == kAlltoall) TF_RETURN_IF_ERROR(read_splits(context, input, splits, shapes[i]));
      farandole_request& request = requests[i];
      request = farandole_request{};
      request.kind = kind_;
      request.dtype = dtype_of(input.dtype());
      request.op = op_;
      request.group = group_;
      request.peer = root_;
      request.device = -1;
      request.name = names_[i].c_str();
      request.input = input.data();
      request.output = output == nullptr ? nullptr : output->data();
      request.shape = shapes[i].data();
      request.dimensions = static_cast<std::int32_t>(shapes[i].size());
      request.splits = splits.empty() ? nullptr : splits.data();
      request.splits_count = static_cast<std::int32_t>(splits.size());
      request.prescale = prescale_;
      request.postscale = postscale_;
      step->inputs.push_back(input);
    }
    std::vector<std::int64_t> handles(count);
    char error[1024] = "";
    int code = now.core->submit(now.engine, requests.data(), static_cast<std::int32_t>(count), bundle_ ? 1 : 0,
                                now.queue, handles.data(), error, sizeof error);
    if (code != 0) return failure(code, error);
    for (size_t i = 0; i < count; ++i) now.pending.emplace(handles[i], std::make_pair(step, i));
    return absl::OkStatus();
  }

  absl::Status allocate(OpKernelContext& context, int index, const Tensor& input, Tensor** output) const {
    if (kind_ == kAllgather || kind_ == kAlltoall) return absl::OkStatus();  // the core allocates
    TensorShape shape = input.shape();
    // A gradient that nobody else will read becomes its own result.
    if (kind_ != kReducescatter) return context.forward_input_or_allocate_output({index + 1}, index, shape, output);
    const std::int64_t rows = shape.dim_size(0), members = size(), own = member_index();
    shape.set_dim(0, rows / members + (own < rows % members ? 1 : 0));
    return context.allocate_output(index, shape, output);
  }

  // Rows for each member; rows beyond their sum go nowhere.
  absl::Status read_splits(OpKernelContext& context, const Tensor& input, std::vector<std::int64_t>& splits,
                           std::vector<std::int64_t>& shape) const {
    const std::int64_t rows = input.dim_size(0), members = size();
    const Tensor& splits_input = context.input(2);
    if (splits_input.NumElements() == 1 && splits_input.dims() == 0) {  // none were given
      if (rows % members != 0)
        return failure(2, "alltoall without splits: " + std::to_string(rows) + " rows cannot be divided evenly among " +
                              std::to_string(members) + " ranks");
      splits.assign(members, rows / members);
      return absl::OkStatus();
    }
    if (splits_input.dims() != 1 || splits_input.NumElements() != members)
      return failure(2, "splits has " + std::to_string(splits_input.NumElements()) +
                            " entries, but the process set has " + std::to_string(members) + " ranks");
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < members; ++i) {
      splits.push_back(splits_input.flat<std::int64_t>()(i));
      if (splits.back() < 0) return failure(2, "splits: a number of rows cannot be negative");
      sum += splits.back();
    }
    if (sum > rows)
      return failure(2, "splits ask for " + std::to_string(sum) + " rows, but the tensor has " + std::to_string(rows));
    shape[0] = sum;
    return absl::OkStatus();
  }

  std::int64_t size() const { return ranks_.empty() ? world().size : static_cast<std::int64_t>(ranks_.size()); }
  std::int64_t member_index() const {
    if (ranks_.empty()) return world().rank;
    for (size_t i = 0; i < ranks_.size(); ++i)
      if (ranks_[i] == world().rank) return static_cast<std::int64_t>(i);
    return 0;
  }

  int kind_ = 0, op_ = 1, root_ = -1, group_ = 0;
  bool bundle_ = false;
  double prescale_ = 1, postscale_ = 1;
  std::vector<std::string> names_;
  std::vector<int> ranks_;
};

// A number that TensorFlow must ask for each time: whatever depends on it is not computed once and kept.
class Anchor : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<std::int32_t>()() = 0;
  }
};

using tensorflow::shape_inference::InferenceContext;

absl::Status shapes_of(InferenceContext* context) {
  int kind = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("kind", &kind));
  for (int i = 0; i < context->num_outputs(); ++i) {
    if (kind == kAllreduce || kind == kBroadcast) {
      context->set_output(i, context->input(i + 1));
    } else if (kind == kAlltoall && i == 1) {
      context->set_output(i, context->UnknownShapeOfRank(1));
    } else if (!context->RankKnown(context->input(i + 1)) || context->Rank(context->input(i + 1)) == 0) {
      context->set_output(i, context->UnknownShape());
    } else {
      auto shape = context->input(i + 1);
      TF_RETURN_IF_ERROR(context->ReplaceDim(shape, 0, context->UnknownDim(), &shape));
      context->set_output(i, shape);
    }
  }
  return absl::OkStatus();
}

#define COLLECTIVE_ATTRIBUTES             \
  Attr("kind: int")                       \
      .Attr("tensor_names: list(string)") \
      .Attr("bundle: bool = false")       \
      .Attr("reduce_op: int = 1")         \
      .Attr("root_rank: int = -1")        \
      .Attr("process_set_id: int = 0")    \
      .Attr("ranks: list(int) = []")      \
      .Attr("scales: string = '1 1'")

REGISTER_OP("FarandoleAnchor")
    .Output("anchor: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);
REGISTER_OP("FarandoleCollective")
    .Input("anchor: int32")
    .Input("tensors: T")
    .Output("outputs: T")
    .Attr("T: list({bool, uint8, int8, uint16, int16, int32, int64, half, float, double, bfloat16})")
    .COLLECTIVE_ATTRIBUTES.SetShapeFn(shapes_of);
REGISTER_OP("FarandoleAlltoall")
    .Input("anchor: int32")
    .Input("tensor: T")
    .Input("splits: int64")
    .Output("output: T")
    .Output("received_splits: int32")
    .Attr("T: {bool, uint8, int8, uint16, int16, int32, int64, half, float, double, bfloat16}")
    .COLLECTIVE_ATTRIBUTES.SetShapeFn(shapes_of);

REGISTER_KERNEL_BUILDER(Name("FarandoleAnchor").Device(tensorflow::DEVICE_CPU), Anchor);
REGISTER_KERNEL_BUILDER(Name("FarandoleCollective").Device(tensorflow::DEVICE_CPU), Collective);
REGISTER_KERNEL_BUILDER(Name("FarandoleAlltoall").Device(tensorflow::DEVICE_CPU), Collective);

}  // namespace

// The interface of the core that this was compiled against.
extern "C" __attribute__((visibility("default"))) std::uint64_t farandole_compiled_for() { return FARANDOLE_INTERFACE; }

// From now on nodes use this engine, and wait for it to be served. 0, or 1 when they were compiled against another
// interface of the core, or memory is short.
extern "C" __attribute__((visibility("default"))) int farandole_attach(std::uint64_t interface,
                                                                       const farandole_functions* core,
                                                                       farandole_engine* engine, std::int32_t rank,
                                                                       std::int32_t size) {
  if (interface != FARANDOLE_INTERFACE) return 1;
  const std::int64_t queue = core->open_queue(engine);
  if (queue == 0) return 1;
  std::lock_guard lock(world().mutex);
  world().engine = engine;
  world().rank = rank;
  world().size = size;
  world().core = core;
  world().queue = queue;
  return 0;
}

// Serves the nodes that use this engine until it has ended; blocks, for one thread of Python.
extern "C" __attribute__((visibility("default"))) void farandole_serve(farandole_engine* engine) {
  const farandole_functions* core = nullptr;
  std::int64_t queue = 0;
  {
    std::lock_guard lock(world().mutex);
    core = world().core;
    queue = world().queue;
  }
  std::int64_t handle = 0;
  while ((handle = core->next_completion(engine, queue, 1000)) >= 0)
    if (handle > 0) complete(handle, engine, *core);
  std::map<std::int64_t, std::pair<std::shared_ptr<Step>, size_t>> rest;
  {
    std::lock_guard lock(world().mutex);
    if (world().engine != engine) return;
    world().engine = nullptr;
    rest.swap(world().pending);
  }
  for (auto& [_, entry] : rest) {
    auto& step = entry.first;
    if (step->status.ok()) step->status = failure(FARANDOLE_CODE_SHUT_DOWN, "This rank has left the job");
    if (--step->left == 0) finish(step);
  }
}
