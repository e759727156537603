// The collectives of XLA's programs over the core's C interface; compiled against the jaxlib that is installed.
// Touches XLA's foreign function interface and the core's functions, which Python hands over.
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "farandole.h"
#include "farandole_words.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

struct World {
  std::mutex mutex;
  std::condition_variable left;
  farandole_engine* engine = nullptr;
  const farandole_functions* core = nullptr;
  int inside = 0;  // calls that use the engine now
};

World& world() {
  static World* one = new World;  // calls may outlive static objects
  return *one;
}

// The engine while a call uses it; detaching waits for the last of them.
class Visit {
 public:
  Visit() {
    std::lock_guard lock(world().mutex);
    engine = world().engine;
    core = world().core;
    if (engine != nullptr) ++world().inside;
  }
  ~Visit() {
    if (engine == nullptr) return;
    std::lock_guard lock(world().mutex);
    if (--world().inside == 0) world().left.notify_all();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  farandole_engine* engine = nullptr;
  const farandole_functions* core = nullptr;
};

ffi::Error failure(int code, const std::string& message) {
  const std::string words = farandole::words_of(code, message);
  return code == FARANDOLE_CODE_INVALID_ARGUMENT ? ffi::Error::InvalidArgument(words) : ffi::Error::Internal(words);
}

int dtype_of(ffi::DataType type) {
  using T = ffi::DataType;
  static constexpr std::pair<T, int> types[] = {
      {T::PRED, FARANDOLE_DTYPE_BOOL},   {T::U8, FARANDOLE_DTYPE_UINT8},      {T::S8, FARANDOLE_DTYPE_INT8},
      {T::U16, FARANDOLE_DTYPE_UINT16},  {T::S16, FARANDOLE_DTYPE_INT16},     {T::S32, FARANDOLE_DTYPE_INT32},
      {T::S64, FARANDOLE_DTYPE_INT64},   {T::F16, FARANDOLE_DTYPE_FLOAT16},   {T::F32, FARANDOLE_DTYPE_FLOAT32},
      {T::F64, FARANDOLE_DTYPE_FLOAT64}, {T::BF16, FARANDOLE_DTYPE_BFLOAT16},
  };
  for (const auto& [theirs, ours] : types) {
    if (theirs == type) return ours;
  }
  return -1;
}

// What the core has received, into XLA's memory, whose shape was fixed when the function was compiled.
ffi::Error take_received(const farandole_outcome& outcome, ffi::AnyBuffer& output) {
  const auto wanted = output.dimensions();
  bool same = static_cast<size_t>(outcome.dimensions) == wanted.size();
  for (int i = 0; same && i < outcome.dimensions; ++i) same = outcome.shape[i] == wanted[i];
  if (!same)
    return failure(2, std::to_string(outcome.dimensions > 0 ? outcome.shape[0] : 0) + " rows were received, but " +
                          std::to_string(wanted.size() > 0 ? wanted[0] : 0) +
                          " fit: in a compiled function all ranks' arrays have the same number of rows");
  if (outcome.output_bytes > 0) std::memcpy(output.untyped_data(), outcome.output, outcome.output_bytes);
  return ffi::Error::Success();
}

ffi::Error wait_for(const Visit& visit, std::int64_t handle, ffi::AnyBuffer& output, bool receives) {
  while (visit.core->wait(visit.engine, handle, 1000) == 1) {
  }
  farandole_outcome outcome{};
  ffi::Error error = ffi::Error::Success();
  if (visit.core->outcome_of(visit.engine, handle, &outcome) != 0)
    error = failure(10, "the outcome is gone");
  else if (outcome.code != 0)
    error = failure(outcome.code, outcome.message);
  else if (receives)
    error = take_received(outcome, output);
  visit.core->release(visit.engine, handle);
  return error;
}

// `bundle`: 0 a single array, 1 arrays that become ready together, 2 arrays that only travel in one call.
// Blocks until the collective is done. JAX runs these calls one after the other, in the order of the program, so that
// no more than one thread of XLA ever waits here for a program.
ffi::Error collective(ffi::RemainingArgs inputs, ffi::RemainingRets outputs, std::int32_t kind, std::int32_t op,
                      std::int32_t group, std::int32_t root, std::int32_t members, std::int32_t bundle, double prescale,
                      double postscale, std::string_view name) {
  Visit visit;
  if (visit.engine == nullptr) return ffi::Error::Internal(farandole::kNotInitialized);
  const size_t count = inputs.size() - 1;  // the first is the token of JAX, which keeps the order
  std::vector<farandole_request> requests(count);
  std::vector<std::string> names(count, std::string(name));
  std::vector<std::int64_t> splits;
  std::vector<ffi::AnyBuffer> results;
  const bool receives = kind == farandole::kAllgather || kind == farandole::kAlltoall;
  for (size_t i = 0; i < count; ++i) {
    auto input = inputs.get<ffi::AnyBuffer>(i + 1);
    auto output = outputs.get<ffi::AnyBuffer>(i + 1);
    if (!input.has_value()) return input.error();
    if (!output.has_value()) return output.error();
    results.push_back(**output);
    if (bundle) names[i] += "_" + std::to_string(i + 1) + "of" + std::to_string(count);
    if (kind == farandole::kAlltoall) splits.assign(members, input->dimensions()[0] / members);
    farandole_request& request = requests[i];
    request = farandole_request{};
    request.kind = kind;
    request.dtype = dtype_of(input->element_type());
    request.op = op;
    request.group = group;
    request.peer = root;
    request.device = -1;
    request.name = names[i].c_str();
    request.input = input->untyped_data();
    request.output = receives ? nullptr : results[i].untyped_data();
    request.shape = input->dimensions().begin();
    request.dimensions = static_cast<std::int32_t>(input->dimensions().size());
    request.splits = splits.empty() ? nullptr : splits.data();
    request.splits_count = static_cast<std::int32_t>(splits.size());
    request.prescale = prescale;
    request.postscale = postscale;
  }
  std::vector<std::int64_t> handles(count);
  char error[1024] = "";
  const int code = visit.core->submit(visit.engine, requests.data(), static_cast<std::int32_t>(count),
                                      (bundle == 1 ? 1 : 0) + 2, 0, handles.data(), error, sizeof error);
  if (code != 0) return failure(code, error);
  ffi::Error first = ffi::Error::Success();
  for (size_t i = 0; i < count; ++i) {
    ffi::Error found = wait_for(visit, handles[i], results[i], receives);
    if (first.success() && found.failure()) first = std::move(found);
  }
  return first;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* farandole_collective(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(farandole_collective, collective,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::int32_t>("kind")
                                  .Attr<std::int32_t>("op")
                                  .Attr<std::int32_t>("group")
                                  .Attr<std::int32_t>("root")
                                  .Attr<std::int32_t>("members")
                                  .Attr<std::int32_t>("bundle")
                                  .Attr<double>("prescale")
                                  .Attr<double>("postscale")
                                  .Attr<std::string_view>("name"));

// The interface of the core that this was compiled against.
extern "C" __attribute__((visibility("default"))) std::uint64_t farandole_compiled_for() { return FARANDOLE_INTERFACE; }

// From now on calls use this engine. 0, or 1 when they were compiled against another interface of the core.
extern "C" __attribute__((visibility("default"))) int farandole_attach(std::uint64_t interface,
                                                                       const farandole_functions* core,
                                                                       farandole_engine* engine, std::int32_t /*rank*/,
                                                                       std::int32_t /*size*/) {
  if (interface != FARANDOLE_INTERFACE) return 1;
  std::lock_guard lock(world().mutex);
  world().engine = engine;
  world().core = core;
  return 0;
}

// The engine is about to go; returns when no call uses it. Its operations have ended, so that nobody waits long.
extern "C" __attribute__((visibility("default"))) void farandole_detach(farandole_engine* engine) {
  std::unique_lock lock(world().mutex);
  if (world().engine == engine) world().engine = nullptr;
  world().left.wait(lock, [] { return world().inside == 0; });
}
