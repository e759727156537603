// A stand-in for NCCL with its binary interface: real ranks, whose data goes through shared memory, on streams.
// Touches memory files, threads, the stand-in for CUDA's driver, the environment: STANDIN_NCCL_VERSION,
// STANDIN_NCCL_ASYNC_ERROR_AFTER (collectives), STANDIN_NCCL_FAULTS (init_never_ends, abort_hangs, one_thread, narrow:
// no two groups of calls of a rank run at once, as on a GPU without room).
#include "cuda/nccl.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl_reduce.h"
#include "nccl_room.h"
#include "standin.h"

using farandole::cuda::CommConfig;
using farandole::cuda::UniqueId;
using standin::Room;
using enum farandole::cuda::NcclResult;
using farandole::cuda::NcclOp;
using farandole::cuda::NcclResult;
using farandole::cuda::NcclType;

extern "C" int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data);

namespace {

constexpr int kBusyPolls = 2;  // looks at a communicator without blocking until what it was told is done

struct Comm {
  Room* room = nullptr;
  int rank = 0, size = 0;
  bool blocking = true;
  std::uint32_t round = 0;        // of barriers; only the stream's thread has it
  std::atomic<int> state{7};      // NcclResult: in progress until all have come
  std::atomic<bool> gone{false};  // aborted or revoked: what runs on a stream ends
  std::atomic<int> done{0};       // collectives
  int busy = 0;                   // polls that still say "in progress"
  std::thread init;
  const std::thread::id owner = std::this_thread::get_id();
  std::shared_ptr<std::mutex> device;  // held by what runs there, when it is narrow

  ~Comm() {
    if (init.joinable()) init.join();
    if (room != nullptr) ::munmap(room, sizeof(Room));
  }
  bool ended() const { return gone.load(); }
};
// What a stream runs keeps the communicator alive, as kernels under way do.
using Handle = std::shared_ptr<Comm>;

enum class What { all_reduce, all_gather, reduce, reduce_scatter, broadcast, send, receive };
struct Call {
  What what;
  const std::byte* from;
  std::byte* to;
  std::size_t count;
  NcclType type;
  NcclOp op;
  int root;  // or peer
  Handle comm;
  void* stream;
  std::size_t moved = 0;  // bytes of a send or receive
};

std::atomic<int> live{0}, aborted{0};
thread_local std::shared_ptr<std::mutex> device;  // of this rank: each has a thread that owns its communicators
thread_local int depth = 0;
thread_local std::vector<Call> queued;

bool fault(const char* name) { return standin::wants("STANDIN_NCCL_FAULTS", name); }
Handle& handle_of(void* comm) { return *static_cast<Handle*>(comm); }
bool wrong_thread(const Comm& comm) { return fault("one_thread") && comm.owner != std::this_thread::get_id(); }

// One pass of at most a slot of every rank: `give` fills this rank's slot, `take` reads those of all.
template <class Give, class Take>
bool pass(Comm& comm, Give give, Take take) {
  const auto ended = [&comm] { return comm.ended(); };
  give(comm.room->slots[comm.rank]);
  if (!standin::barrier(*comm.room, comm.round, comm.size, ended)) return false;
  take(comm.room->slots);
  return standin::barrier(*comm.room, comm.round, comm.size, ended);
}

void collective(Call& call) {
  Comm& comm = *call.comm;
  const std::size_t item = standin::bytes_of(call.type);
  const bool scatters = call.what == What::reduce_scatter;
  const std::size_t total = call.count * item * (scatters ? static_cast<std::size_t>(comm.size) : 1);
  const std::size_t mine = call.count * item * static_cast<std::size_t>(comm.rank);
  std::vector<std::byte> whole(scatters ? total : 0);  // NCCL needs no such copy
  std::byte* const out = scatters ? whole.data() : call.to;
  for (std::size_t at = 0; at < total; at += standin::kSlotBytes) {
    const std::size_t bytes = std::min(standin::kSlotBytes, total - at);
    const bool gives = call.what != What::broadcast || comm.rank == call.root;
    const bool on = pass(
        comm,
        [&](std::byte* slot) {
          if (gives) std::memcpy(slot, call.from + at, bytes);
        },
        [&](std::byte(*slots)[standin::kSlotBytes]) {
          if (call.what == What::broadcast) std::memcpy(out + at, slots[call.root], bytes);
          if (call.what == What::all_gather)
            for (int rank = 0; rank < comm.size; ++rank)
              std::memcpy(out + static_cast<std::size_t>(rank) * total + at, slots[rank], bytes);
          if (call.what == What::all_reduce || scatters || (call.what == What::reduce && comm.rank == call.root))
            standin::reduce(out + at, slots, comm.size, bytes / item, call.type, call.op);
        });
    if (!on) return;
  }
  if (scatters) std::memcpy(call.to, whole.data() + mine, call.count * item);
}

// Moves a part of a message, where the other side has room or data. True when all of it is moved.
bool message(Call& call) {
  Comm& comm = *call.comm;
  const std::size_t total = call.count * standin::bytes_of(call.type);
  if (call.moved == total) return true;
  const bool sends = call.what == What::send;
  standin::Mailbox& box = sends ? comm.room->boxes[comm.rank][call.root] : comm.room->boxes[call.root][comm.rank];
  if (box.full.load() != (sends ? 0u : 1u)) return false;
  const std::size_t bytes = sends ? std::min(standin::kSlotBytes, total - call.moved) : box.bytes.load();
  if (sends) {
    std::memcpy(box.data, call.from + call.moved, bytes);
    box.bytes.store(static_cast<std::uint32_t>(bytes));
  } else {
    std::memcpy(call.to + call.moved, box.data, std::min(bytes, total - call.moved));
  }
  box.full.store(sends ? 1 : 0);
  call.moved += bytes;
  return call.moved >= total;
}

// What a stream runs for one group of calls: collectives in their order, then all messages at once.
void run(void* data) {
  const std::unique_ptr<std::vector<Call>> calls(static_cast<std::vector<Call>*>(data));
  std::unique_lock<std::mutex> alone(*calls->front().comm->device, std::defer_lock);
  if (fault("narrow")) alone.lock();
  std::vector<Call*> messages;
  for (Call& call : *calls) {
    if (call.comm->ended()) continue;
    if (call.what == What::send || call.what == What::receive)
      messages.push_back(&call);
    else
      collective(call);
    ++call.comm->done;
  }
  const auto moved = [&] {
    bool all = true;
    for (Call* call : messages) all = message(*call) && all;
    return all;
  };
  standin::wait_until(moved,
                      [&] { return std::ranges::any_of(messages, [](Call* one) { return one->comm->ended(); }); });
}

NcclResult launch() {
  bool waits = false;
  while (!queued.empty()) {
    auto calls = std::make_unique<std::vector<Call>>();
    void* const stream = queued.front().stream;
    const auto same =
        std::stable_partition(queued.begin(), queued.end(), [=](Call& one) { return one.stream == stream; });
    calls->assign(queued.begin(), same);
    queued.erase(queued.begin(), same);
    for (Call& call : *calls) {
      if (call.comm->blocking) continue;
      call.comm->busy = kBusyPolls;
      waits = true;
    }
    if (cuLaunchHostFunc(stream, run, calls.get()) != 0) return unhandled_cuda_error;
    (void)calls.release();  // `run` has it
  }
  return waits ? in_progress : success;
}

NcclResult put(void* comm, Call call) {
  call.comm = handle_of(comm);
  const Comm& known = *call.comm;
  if (wrong_thread(known) || known.busy > 0 || known.ended()) return invalid_usage;
  if (known.state.load() != 0) return static_cast<NcclResult>(known.state.load() == 7 ? 5 : known.state.load());
  if (call.root < 0 || call.root >= known.size) return invalid_argument;
  queued.push_back(std::move(call));
  return depth > 0 ? success : launch();
}

Call call_of(What what, const void* from, void* to, std::size_t count, NcclType type, int root, void* stream,
             NcclOp op = NcclOp::sum) {
  return {what,  static_cast<const std::byte*>(from), static_cast<std::byte*>(to), count, type, op, root, nullptr,
          stream};
}

void meet(Comm& comm) {
  comm.room->size.store(comm.size);
  comm.room->arrived.fetch_add(1);
  const bool never = fault("init_never_ends");
  const bool met = standin::wait_until([&] { return !never && comm.room->arrived.load() >= comm.size; },
                                       [&comm] { return comm.ended(); });
  comm.state = met ? 0 : 3;
}

NcclResult finish(void* comm) {
  Handle* const handle = static_cast<Handle*>(comm);
  if (wrong_thread(**handle)) return invalid_usage;
  delete handle;
  --live;
  return success;
}

}  // namespace

// Communicators that were made and neither destroyed nor aborted, and those that were aborted.
STANDIN void standin_nccl_counts(int* now, int* ended) {
  *now = live;
  *ended = aborted;
}

STANDIN NcclResult ncclGetVersion(int* version) {
  *version = standin::number("STANDIN_NCCL_VERSION", 22809);
  return success;
}
STANDIN NcclResult ncclGetUniqueId(UniqueId* id) {
  const standin::Key key = standin::make_key();
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &key, sizeof key);
  return key.file < 0 ? system_error : success;
}
STANDIN NcclResult ncclCommInitRankConfig(void** made, int size, UniqueId id, int rank, CommConfig* config) {
  standin::Key key{};
  std::memcpy(&key, &id, sizeof key);
  if (config->magic != 0xcafebeef || size < 1 || size > standin::kMaxRanks || rank < 0 || rank >= size)
    return invalid_argument;
  auto comm = std::make_shared<Comm>();
  comm->room = standin::open_room(key);
  if (comm->room == nullptr) return remote_error;
  comm->rank = rank;
  comm->size = size;
  comm->blocking = config->blocking != 0;
  if (device == nullptr) device = std::make_shared<std::mutex>();
  comm->device = device;
  comm->init = std::thread([raw = comm.get()] { meet(*raw); });
  if (comm->blocking) comm->init.join();
  *made = new Handle(comm);
  ++live;
  return comm->blocking ? static_cast<NcclResult>(comm->state.load()) : in_progress;
}
STANDIN NcclResult ncclCommGetAsyncError(void* comm, NcclResult* error) {
  Comm& known = *handle_of(comm);
  if (wrong_thread(known)) return invalid_usage;
  const int after = standin::number("STANDIN_NCCL_ASYNC_ERROR_AFTER", -1);
  *error = static_cast<NcclResult>(known.state.load());
  if (*error == success && after >= 0 && known.done >= after) *error = remote_error;
  if (*error == success && known.busy > 0) {
    --known.busy;
    *error = in_progress;
  }
  return success;
}
STANDIN NcclResult ncclCommFinalize(void* comm) {
  Comm& known = *handle_of(comm);
  if (wrong_thread(known) || known.busy > 0) return invalid_usage;
  if (known.blocking) return success;
  known.busy = kBusyPolls;
  return in_progress;
}
STANDIN NcclResult ncclCommDestroy(void* comm) {
  const Comm& known = *handle_of(comm);
  return known.state.load() == 7 || known.busy > 0 ? invalid_usage : finish(comm);
}
STANDIN NcclResult ncclCommAbort(void* comm) {
  if (fault("abort_hangs"))
    while (true) ::usleep(1000);  // sleep: it hangs on purpose
  handle_of(comm)->gone = true;
  ++aborted;
  return finish(comm);
}
#ifndef STANDIN_LACKING
STANDIN NcclResult ncclCommRevoke(void* comm, int flags) {
  if (flags != 0 || wrong_thread(*handle_of(comm))) return invalid_argument;
  handle_of(comm)->gone = true;
  return success;
}
#endif
STANDIN NcclResult ncclCommRegister(void*, void* memory, std::size_t, void** handle) {
  *handle = memory;
  return success;
}
STANDIN NcclResult ncclCommDeregister(void*, void*) { return success; }

STANDIN NcclResult ncclGroupStart() {
  ++depth;
  return success;
}
STANDIN NcclResult ncclGroupEnd() {
  if (depth == 0) return invalid_usage;
  return --depth == 0 ? launch() : success;
}
STANDIN NcclResult ncclAllReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, void* comm,
                                 void* stream) {
  return put(comm, call_of(What::all_reduce, from, to, count, type, 0, stream, op));
}
STANDIN NcclResult ncclReduceScatter(const void* from, void* to, std::size_t count, NcclType type, NcclOp op,
                                     void* comm, void* stream) {
  return put(comm, call_of(What::reduce_scatter, from, to, count, type, 0, stream, op));
}
STANDIN NcclResult ncclReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOp op, int root,
                              void* comm, void* stream) {
  return put(comm, call_of(What::reduce, from, to, count, type, root, stream, op));
}
STANDIN NcclResult ncclAllGather(const void* from, void* to, std::size_t count, NcclType type, void* comm,
                                 void* stream) {
  return put(comm, call_of(What::all_gather, from, to, count, type, 0, stream));
}
STANDIN NcclResult ncclBroadcast(const void* from, void* to, std::size_t count, NcclType type, int root, void* comm,
                                 void* stream) {
  return put(comm, call_of(What::broadcast, from, to, count, type, root, stream));
}
STANDIN NcclResult ncclSend(const void* from, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
  return put(comm, call_of(What::send, from, nullptr, count, type, peer, stream));
}
STANDIN NcclResult ncclRecv(void* to, std::size_t count, NcclType type, int peer, void* comm, void* stream) {
  return put(comm, call_of(What::receive, nullptr, to, count, type, peer, stream));
}
