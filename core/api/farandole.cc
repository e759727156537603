// The C interface over the engine: checks arguments, turns exceptions into codes.
// Touches engine/ and kernel/.
#include "api/farandole.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <string>

#include "api/engine.h"
#include "group/heartbeat.h"
#include "kernel/kernel.h"
#include "os/clock.h"
#include "os/memory.h"
#include "trace/recorder.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using farandole::Code;
using farandole::Error;

struct farandole_heartbeat {
  farandole_heartbeat(int32_t mine, int32_t theirs, int64_t beat_ms)
      : heartbeat(farandole::os::Descriptor(mine), farandole::os::Descriptor(theirs), beat_ms) {}
  farandole::Heartbeat heartbeat;
};

namespace {

constexpr const char* kNoLease =
    "this host's agent has had no message from the launcher for too long; the other ranks may continue without this "
    "rank";
using farandole::negotiate::kMaxName;

int code_of(const Error& error) { return static_cast<int>(error.code); }

int report(const Error& error, char* text, size_t capacity) {
  if (text != nullptr && capacity > 0) std::snprintf(text, capacity, "%s", error.message.c_str());
  return code_of(error);
}

// Runs `body`, which returns an Error; exceptions become errors.
template <class Body>
Error guarded(Body body) {
  try {
    return body();
  } catch (const farandole::Failure& failure) {
    return failure.error();
  } catch (const std::bad_alloc&) {
    return {Code::no_memory, "out of memory", -1};
  } catch (const std::exception& exception) {
    return {Code::internal, exception.what(), -1};
  }
}

Error forked_error() {
  return {Code::internal, "this process was forked from a rank; only the rank itself can call its engine", -1};
}

Error other_build(uint64_t theirs) {
  char words[192];
  std::snprintf(
      words, sizeof words,
      "the library has interface %016llx, but its caller was compiled for %016llx: they are different builds. "
      "Install farandole again.",
      static_cast<unsigned long long>(FARANDOLE_INTERFACE), static_cast<unsigned long long>(theirs));
  return {Code::invalid_argument, words};
}

Error read_options(const farandole_options* given, farandole::Options& options) {
  if (given == nullptr || given->interface != FARANDOLE_INTERFACE)
    return other_build(given == nullptr ? 0 : given->interface);
  if (given->size < 1 || given->rank < 0 || given->rank >= given->size || given->hosts == nullptr)
    return {Code::invalid_argument, "rank " + std::to_string(given->rank) + " of size " + std::to_string(given->size) +
                                        " is not possible: ranks are from 0 to size - 1"};
  if (given->slot_bytes < 64 || given->slot_bytes % 64 != 0 || given->slot_bytes > (64 << 20) || given->slots < 2 ||
      given->slots > 4096)
    return {Code::invalid_argument, "slot_bytes is " + std::to_string(given->slot_bytes) + " and slots is " +
                                        std::to_string(given->slots) +
                                        "; slot_bytes must be a multiple of 64 up to 64 MiB, slots from 2 to 4096"};
  if (given->chunk_bytes < 64 || given->chunk_bytes > (1 << 30) || given->chunk_bytes % 64 != 0)
    return {Code::invalid_argument,
            "chunk_bytes is " + std::to_string(given->chunk_bytes) + "; it must be a multiple of 64 up to 1 GiB"};
  if (given->tcp_streams < 1 || given->tcp_streams > 64)
    return {Code::invalid_argument,
            "tcp_streams is " + std::to_string(given->tcp_streams) + "; it must be from 1 to 64"};
  if (given->allreduce_algorithm < 0 || given->allreduce_algorithm > FARANDOLE_ALGORITHM_TREE)
    return {Code::invalid_argument,
            "allreduce algorithm " + std::to_string(given->allreduce_algorithm) + " does not exist"};
  options.rank = given->rank;
  options.size = given->size;
  options.hosts.assign(given->hosts, given->hosts + given->size);
  options.generation = given->generation;
  options.algorithm = static_cast<farandole::collective::Algorithm>(given->allreduce_algorithm);
  options.tuning.fusion_threshold = static_cast<std::size_t>(std::max<int64_t>(0, given->fusion_threshold));
  options.plan_capacity = static_cast<std::size_t>(std::max<int64_t>(0, given->plan_capacity));
  options.tuning.flush_ns = given->flush_us * 1000;
  options.tuning.spin_ns = given->spin_us * 1000;
  options.stall_note_ns = given->stall_note_ms * 1'000'000;
  options.stall_warning_ns = given->stall_warning_ms * 1'000'000;
  options.stall_shutdown_ns = given->stall_shutdown_ms * 1'000'000;
  options.slot_bytes = static_cast<std::size_t>(given->slot_bytes);
  options.slots = given->slots;
  options.fuse_bundles = given->fuse_bundles != 0;
  options.tuning.chunk_bytes = static_cast<std::size_t>(given->chunk_bytes);
  options.tcp_streams = options.tuning.streams = given->tcp_streams;
  return {};
}

Error read_pieces(const farandole_request& given, farandole::Operation& operation) {
  if (operation.request.kind != farandole::Kind::allreduce)
    return {Code::invalid_argument, "only an allreduce can use memory in several places (pieces)"};
  for (int64_t i = 0; i < given.pieces_count; ++i) {
    int64_t address = given.pieces[2 * i], bytes = given.pieces[2 * i + 1];
    if (address == 0 || bytes <= 0) return {Code::invalid_argument, "a piece of memory needs an address and bytes"};
    operation.pieces.add(reinterpret_cast<const void*>(address), static_cast<std::size_t>(bytes));
  }
  if (operation.pieces.bytes() != operation.request.bytes())
    return {Code::invalid_argument, "the pieces have " + std::to_string(operation.pieces.bytes()) +
                                        " bytes, the tensor " + std::to_string(operation.request.bytes())};
  operation.group = given.group;
  return {};
}

Error read_request(const farandole_request& given, farandole::Operation& operation) {
  if (given.kind < 0 || given.kind >= farandole::kKinds)
    return {Code::invalid_argument, "operation kind " + std::to_string(given.kind) + " does not exist"};
  if (given.dtype < 0 || given.dtype >= farandole::kDTypes)
    return {Code::invalid_argument, "data type " + std::to_string(given.dtype) + " does not exist"};
  if (given.op < 0 || given.op >= farandole::kReduceOps)
    return {Code::invalid_argument, "reduction " + std::to_string(given.op) + " does not exist"};
  if (given.dimensions < 0 || given.dimensions > 64 || given.splits_count < 0)
    return {Code::invalid_argument,
            "a tensor must have 0 to 64 dimensions; this one has " + std::to_string(given.dimensions)};
  if (given.output_bytes < 0) return {Code::invalid_argument, "output_bytes must not be negative"};
  if (given.device < -1) return {Code::invalid_argument, "device " + std::to_string(given.device) + " does not exist"};
  farandole::negotiate::Request& request = operation.request;
  request.kind = static_cast<farandole::Kind>(given.kind);
  request.dtype = static_cast<farandole::DType>(given.dtype);
  request.op = static_cast<farandole::ReduceOp>(given.op);
  request.root = request.kind == farandole::Kind::broadcast ? given.peer : -1;
  request.device = given.device;
  request.prescale = given.prescale;
  request.postscale = given.postscale;
  request.unnamed = given.name == nullptr;
  if (given.name != nullptr) request.name = given.name;
  if (request.name.size() > kMaxName)
    return {Code::invalid_argument, "a name can have " + std::to_string(kMaxName) + " bytes, but this one has " +
                                        std::to_string(request.name.size()) + ": " + request.name.substr(0, 64) +
                                        "..."};
  request.shape.assign(given.shape, given.shape + given.dimensions);
  if (given.splits != nullptr) request.splits.assign(given.splits, given.splits + given.splits_count);
  for (int64_t dimension : request.shape)
    if (dimension < 0)
      return {Code::invalid_argument, "a dimension is " + std::to_string(dimension) + ", which is negative"};
  if (given.pieces_count > 0) return read_pieces(given, operation);
  bool reads = request.kind <= farandole::Kind::reducescatter || request.kind == farandole::Kind::send;
  if ((reads && given.input == nullptr) || (request.kind == farandole::Kind::receive && given.output == nullptr)) {
    if (request.bytes() > 0)
      return {Code::invalid_argument, "a tensor with elements needs memory: its address is null"};
  }
  operation.group = given.group;
  operation.peer = given.peer;
  operation.tag = given.tag;
  operation.input = given.input;
  operation.output = given.output;
  if (rows_vary(request.kind)) operation.output_bytes = static_cast<std::size_t>(given.output_bytes);
  return {};
}

// Requests that are submitted together and use one stream share its moment.
struct Placed {
  int32_t on_device = 0;
  void* stream = nullptr;
  farandole::cuda::MomentPtr ready;
};

Error read_place(farandole::Engine& engine, const farandole_request& given, farandole::Operation& operation,
                 Placed& last) {
  if (given.on_device == 0) return {};
  if (given.on_device < 0 || given.pieces_count > 0 || operation.request.kind > farandole::Kind::reducescatter)
    return {Code::invalid_argument, "only a collective on a whole tensor can use memory of a device"};
  if (last.on_device != given.on_device || last.stream != given.stream)
    last = {given.on_device, given.stream,
            engine.mark(given.on_device - 1, static_cast<farandole::cuda::Stream>(given.stream))};
  operation.ready = last.ready;
  return {};
}

// The results of other kinds are only in the outcome.
bool fills_memory_of_the_caller(const farandole::Operation& operation) {
  using farandole::Kind;
  const Kind kind = operation.request.kind;
  // On the CPU, callers that give memory for an alltoall know the splits.
  if (kind == Kind::alltoall && operation.ready != nullptr) return false;
  if (rows_vary(kind)) return operation.owned == nullptr;
  return kind == Kind::allreduce || kind == Kind::broadcast || kind == Kind::reducescatter || kind == Kind::barrier ||
         kind == Kind::send || kind == Kind::receive;
}

void fill_outcome(const farandole::Operation& operation, farandole_outcome& outcome) {
  outcome.code = static_cast<int32_t>(operation.error.code);
  outcome.rank = operation.error.rank;
  outcome.value = operation.value;
  outcome.message = operation.error.message.c_str();
  outcome.phase = operation.phase;
  outcome.output = operation.output;
  outcome.output_bytes = static_cast<int64_t>(operation.output_bytes);
  outcome.dimensions = static_cast<int32_t>(operation.shape.size());
  outcome.shape = operation.shape.data();
  outcome.splits_count = static_cast<int32_t>(operation.splits.size());
  outcome.splits = operation.splits.data();
}

}  // namespace

static_assert(farandole::Recorder::kBytes == FARANDOLE_RECORD_BYTES);

EXPORT const char* farandole_version(void) { return FARANDOLE_VERSION; }
EXPORT uint64_t farandole_interface(void) { return FARANDOLE_INTERFACE; }
EXPORT uint64_t farandole_wire(void) { return FARANDOLE_WIRE; }
EXPORT const char* farandole_kernels(void) { return farandole::kernel::name(); }

EXPORT int farandole_add(int32_t dtype, const void* left, const void* right, void* out, int64_t elements) {
  return code_of(guarded([&]() -> Error {
    if (dtype < 0 || dtype >= farandole::kDTypes || elements < 0) return {Code::invalid_argument, ""};
    const void* sources[] = {left, right};
    farandole::kernel::Reduce work;
    work.dtype = static_cast<farandole::DType>(dtype);
    work.sources = sources;
    work.count = 2;
    work.out = out;
    work.elements = static_cast<std::size_t>(elements);
    farandole::kernel::reduce(work);
    return {};
  }));
}

EXPORT int farandole_create(const farandole_options* options, farandole_engine** engine, char* error, size_t capacity) {
  *engine = nullptr;
  return report(guarded([&]() -> Error {
                  farandole::Options read;
                  Error bad = read_options(options, read);
                  if (options == nullptr || options->interface != FARANDOLE_INTERFACE) return bad;
                  farandole::os::Descriptor record(options->record);
                  if (!bad.failed()) *engine = new farandole_engine(std::move(read), std::move(record));
                  return bad;
                }),
                error, capacity);
}

EXPORT int farandole_add_link(farandole_engine* engine, int32_t peer, int32_t descriptor, int32_t kind) {
  return code_of(guarded([&]() -> Error {
    farandole::os::Descriptor stream(descriptor);
    if (engine->engine.forked()) return forked_error();
    if (kind != 0 && kind != 1) return {Code::invalid_argument, "a link's kind must be 0 (unix) or 1 (TCP)", -1};
    return engine->engine.add_link(peer, std::move(stream), static_cast<farandole::link::StreamKind>(kind));
  }));
}

EXPORT int farandole_start(farandole_engine* engine, int64_t timeout_ms, char* error, size_t capacity) {
  return report(guarded([&] { return engine->engine.forked() ? forked_error() : engine->engine.start(timeout_ms); }),
                error, capacity);
}

EXPORT int farandole_leave(farandole_engine* engine, int64_t linger_ms) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    return {engine->engine.leave(linger_ms) ? Code::ok : Code::in_progress, "", -1};
  }));
}

EXPORT int farandole_revoke(farandole_engine* engine, int32_t code, int32_t rank, const char* message) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    if (!farandole::names_failure(code))
      return {Code::invalid_argument, "revoke needs the code of a failure, not " + std::to_string(code)};
    if (message == nullptr || rank < -1) return {Code::invalid_argument, "revoke needs a message, and a rank or -1"};
    engine->engine.revoke_from_outside({static_cast<Code>(code), message, rank});
    return {};
  }));
}

EXPORT int farandole_heartbeat_start(int32_t mine, int32_t theirs, int64_t beat_ms, farandole_heartbeat** heartbeat,
                                     char* error, size_t capacity) {
  return report(guarded([&]() -> Error {
                  *heartbeat = new farandole_heartbeat(mine, theirs, beat_ms);
                  return {};
                }),
                error, capacity);
}

EXPORT void farandole_heartbeat_guard(farandole_heartbeat* heartbeat, farandole_engine* engine, int64_t lease_ms) {
  std::function<void()> act;
  if (engine != nullptr) {
    act = [engine] { farandole_revoke(engine, static_cast<int>(Code::revoked), -1, kNoLease); };
  }
  heartbeat->heartbeat.guard(lease_ms, std::move(act));
}

EXPORT int64_t farandole_heartbeat_silence(farandole_heartbeat* heartbeat) { return heartbeat->heartbeat.silence_ms(); }

EXPORT void farandole_heartbeat_stop(farandole_heartbeat* heartbeat) { delete heartbeat; }

EXPORT void farandole_destroy(farandole_engine* engine) {
  // A forked child does not have the engine's thread and descriptors: there is nothing to join or close.
  if (engine != nullptr && !engine->engine.forked()) delete engine;
}

EXPORT int farandole_submit(farandole_engine* engine, const farandole_request* requests, int32_t count, int32_t flags,
                            int64_t queue, int64_t* handles, char* error, size_t capacity) {
  return report(guarded([&]() -> Error {
                  if (engine->engine.forked()) return forked_error();
                  farandole::Completions* completions = engine->engine.handles().queue(queue);
                  if (queue != 0 && completions == nullptr)
                    return {Code::invalid_argument, "completion queue " + std::to_string(queue) + " does not exist"};
                  std::vector<farandole::OperationPtr> operations;
                  operations.reserve(static_cast<std::size_t>(count));
                  Placed placed;
                  for (int32_t i = 0; i < count; ++i) {
                    operations.push_back(std::make_shared<farandole::Operation>());
                    operations.back()->completions = completions;
                    Error bad = read_request(requests[i], *operations.back());
                    if (!bad.failed()) bad = read_place(engine->engine, requests[i], *operations.back(), placed);
                    if (bad.failed()) return bad;
                  }
                  std::vector<farandole::OperationPtr> kept = operations;
                  Error bad = engine->engine.submit(std::move(operations), (flags & 1) != 0, (flags & 2) != 0);
                  if (!bad.failed())
                    for (int32_t i = 0; i < count; ++i) handles[i] = kept[static_cast<std::size_t>(i)]->handle;
                  return bad;
                }),
                error, capacity);
}

EXPORT int farandole_run(farandole_call* call) {
  farandole::Engine& engine = call->engine->engine;
  bool reported = false;
  int code = report(guarded([&]() -> Error {
                      if (engine.forked()) return forked_error();
                      auto operation = std::make_shared<farandole::Operation>();
                      Error bad = read_request(*call->request, *operation);
                      Placed placed;
                      if (!bad.failed()) bad = read_place(engine, *call->request, *operation, placed);
                      if (!bad.failed()) bad = engine.submit({operation}, false, true);
                      if (bad.failed()) return bad;
                      call->handle = operation->handle;
                      if (!engine.wait(operation, call->timeout_ms)) return {Code::in_progress, "", -1};
                      if (operation->error.failed() || !fills_memory_of_the_caller(*operation)) {
                        fill_outcome(*operation, *call->outcome);
                        reported = true;
                      } else {
                        engine.handles().release(call->handle);
                      }
                      return {};
                    }),
                    call->error, call->capacity);
  return reported ? -1 : code;
}

EXPORT int farandole_poll(farandole_engine* engine, int64_t handle) {
  int result = -1;
  Error error = guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    farandole::OperationPtr operation = engine->engine.find(handle);
    if (operation != nullptr) result = engine->engine.poll(operation) ? 1 : 0;
    return {};
  });
  return error.failed() ? -1 : result;
}

static int wait_for(farandole_engine* engine, int64_t handle, int64_t timeout_ms, bool passive) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    farandole::OperationPtr operation = engine->engine.find(handle);
    if (operation == nullptr) return {Code::invalid_argument, "no such handle", -1};
    return {engine->engine.wait(operation, timeout_ms, passive) ? Code::ok : Code::in_progress, "", -1};
  }));
}

EXPORT int farandole_wait(farandole_engine* engine, int64_t handle, int64_t timeout_ms) {
  return wait_for(engine, handle, timeout_ms, false);
}

EXPORT int farandole_wait_passive(farandole_engine* engine, int64_t handle, int64_t timeout_ms) {
  return wait_for(engine, handle, timeout_ms, true);
}

EXPORT void farandole_use_huge_pages(void* memory, size_t bytes) {
  farandole::os::collapse_into_huge_pages(memory, bytes);
}

EXPORT uint64_t farandole_share(farandole_engine* engine, int32_t file, void* memory, size_t bytes) {
  uint64_t region = 0;
  guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    region = engine->engine.share(farandole::os::Descriptor(file), static_cast<std::byte*>(memory), bytes);
    return {};
  });
  return region;
}

EXPORT void farandole_unshare(farandole_engine* engine, uint64_t region) {
  guarded([&]() -> Error {
    if (!engine->engine.forked()) engine->engine.unshare(region);
    return {};
  });
}

EXPORT int64_t farandole_open_queue(farandole_engine* engine) {
  int64_t queue = 0;
  guarded([&]() -> Error {
    if (!engine->engine.forked()) queue = engine->engine.handles().open_queue();
    return {};
  });
  return queue;
}

EXPORT int64_t farandole_next_completion(farandole_engine* engine, int64_t queue, int64_t timeout_ms) {
  int64_t handle = -1;
  guarded([&]() -> Error {
    if (engine->engine.forked()) return {};
    farandole::Completions* completions = engine->engine.handles().queue(queue);
    if (completions != nullptr) handle = completions->next(timeout_ms);
    return {};
  });
  return handle;
}

EXPORT int farandole_outcome_of(farandole_engine* engine, int64_t handle, farandole_outcome* outcome) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    farandole::OperationPtr operation = engine->engine.find(handle);
    if (operation == nullptr) return {Code::invalid_argument, "no such handle", -1};
    if (operation->done.load(std::memory_order_acquire) == 0) return {Code::in_progress, "", -1};
    fill_outcome(*operation, *outcome);
    return {};
  }));
}

EXPORT void farandole_release(farandole_engine* engine, int64_t handle) {
  guarded([&]() -> Error {
    if (!engine->engine.forked()) engine->engine.handles().release(handle);
    return {};
  });
}

EXPORT int farandole_next_event(farandole_engine* engine, farandole_event* event, int64_t timeout_ms) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    farandole::BindingEvent next;
    switch (engine->engine.events().next(next, timeout_ms)) {
      case farandole::Events::Next::timeout:
        return {Code::in_progress, "", -1};
      case farandole::Events::Next::closed:
        return {Code::shut_down, "", -1};
      case farandole::Events::Next::event:
        break;
    }
    event->kind = static_cast<int32_t>(next.kind);
    event->peer = next.peer;
    event->level = static_cast<int32_t>(next.level);
    event->reserved = 0;
    std::snprintf(event->text, sizeof event->text, "%s", next.text.c_str());
    return {};
  }));
}

EXPORT int64_t farandole_counter(farandole_engine* engine, int32_t which) {
  return engine->engine.forked() ? -1 : engine->engine.counter(which);
}

EXPORT int farandole_tuning(farandole_engine* engine, int64_t values[5]) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    farandole::Tuning now = engine->engine.tuned();
    values[0] = static_cast<int64_t>(now.fusion_threshold);
    values[1] = now.flush_ns / 1000;
    values[2] = now.spin_ns / 1000;
    values[3] = static_cast<int64_t>(now.chunk_bytes);
    values[4] = now.streams;
    return {};
  }));
}

EXPORT int farandole_trace(farandole_engine* engine, int32_t on, int32_t mark_plans) {
  return code_of(guarded([&]() -> Error {
    if (engine->engine.forked()) return forked_error();
    engine->engine.set_trace(on != 0, mark_plans != 0);
    return {};
  }));
}

EXPORT int64_t farandole_trace_drain(farandole_engine* engine, char* buffer, int64_t capacity) {
  int64_t bytes = 0;
  guarded([&]() -> Error {
    if (!engine->engine.forked())
      bytes = static_cast<int64_t>(engine->engine.trace().drain(buffer, static_cast<std::size_t>(capacity)));
    return {};
  });
  return bytes;
}

EXPORT const farandole_functions* farandole_table(uint64_t interface) {
#define FUNCTION(name) &farandole_##name,
  static const farandole_functions table = {FARANDOLE_FUNCTIONS(FUNCTION)
#ifdef FARANDOLE_CHAOS
                                                FUNCTION(chaos_set) FUNCTION(chaos_fired)
#else
      nullptr, nullptr,
#endif
  };
#undef FUNCTION
  return interface == FARANDOLE_INTERFACE ? &table : nullptr;
}
