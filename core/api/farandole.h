/* The C interface of the core, for all bindings. Plain data, no globals, no exceptions.
 * Only these symbols are exported. Calls are safe from any thread unless they say otherwise. */
#ifndef FARANDOLE_H
#define FARANDOLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* FARANDOLE_INTERFACE is a hash of this file. Callers define it when they compile against the file (CMakeLists.txt, and
 * compiled/__init__.py for the operations of frameworks). A library refuses a caller with another hash. */
uint64_t farandole_interface(void); /* the library's */
/* A hash of what all ranks of a job must have in common: messages, shared memory, the choice of algorithms. */
uint64_t farandole_wire(void);

/* The numbers of the interface: X(the core's name, NAME, number), and for a data type also the bytes of an element.
 * api/numbers.cc checks the core's enums against them, native.py those of Python. */
/* clang-format off */
#define FARANDOLE_CODES(X)                                                                                          \
  X(ok, OK, 0) X(in_progress, IN_PROGRESS, 1) X(invalid_argument, INVALID_ARGUMENT, 2)                              \
  X(precondition, PRECONDITION, 3) X(aborted, ABORTED, 4) X(shut_down, SHUT_DOWN, 5) X(peer_lost, PEER_LOST, 6)     \
  X(revoked, REVOKED, 7) X(timed_out, TIMED_OUT, 8) X(no_memory, NO_MEMORY, 9) X(internal, INTERNAL, 10)
#define FARANDOLE_KINDS(X)                                                                                          \
  X(allreduce, ALLREDUCE, 0) X(allgather, ALLGATHER, 1) X(broadcast, BROADCAST, 2) X(alltoall, ALLTOALL, 3)         \
  X(reducescatter, REDUCESCATTER, 4) X(barrier, BARRIER, 5) X(join, JOIN, 6) X(add_group, ADD_GROUP, 7)             \
  X(remove_group, REMOVE_GROUP, 8) X(send, SEND, 9) X(receive, RECEIVE, 10) X(tune, TUNE, 11)
#define FARANDOLE_DTYPES(X)                                                                                         \
  X(boolean, BOOL, 0, 1) X(uint8, UINT8, 1, 1) X(int8, INT8, 2, 1) X(uint16, UINT16, 3, 2) X(int16, INT16, 4, 2)    \
  X(int32, INT32, 5, 4) X(int64, INT64, 6, 8) X(float16, FLOAT16, 7, 2) X(float32, FLOAT32, 8, 4)                   \
  X(float64, FLOAT64, 9, 8) X(bfloat16, BFLOAT16, 10, 2)
#define FARANDOLE_OPS(X) /* Horovod's */                                                                            \
  X(average, AVERAGE, 0) X(sum, SUM, 1) X(adasum, ADASUM, 2) X(min, MIN, 3) X(max, MAX, 4) X(product, PRODUCT, 5)
#define FARANDOLE_ALGORITHMS(X)                                                                                     \
  X(automatic, AUTO, 0) X(ring, RING, 1) X(direct, DIRECT, 2) X(doubling, DOUBLING, 3) X(tree, TREE, 4)
/* clang-format on */
#define FARANDOLE_CODE(name, NAME, number) FARANDOLE_CODE_##NAME = number,
#define FARANDOLE_KIND(name, NAME, number) FARANDOLE_KIND_##NAME = number,
#define FARANDOLE_DTYPE(name, NAME, number, bytes) FARANDOLE_DTYPE_##NAME = number,
#define FARANDOLE_OP(name, NAME, number) FARANDOLE_OP_##NAME = number,
#define FARANDOLE_ALGORITHM(name, NAME, number) FARANDOLE_ALGORITHM_##NAME = number,
enum farandole_code { FARANDOLE_CODES(FARANDOLE_CODE) };
enum farandole_kind { FARANDOLE_KINDS(FARANDOLE_KIND) };
enum farandole_dtype { FARANDOLE_DTYPES(FARANDOLE_DTYPE) };
enum farandole_op { FARANDOLE_OPS(FARANDOLE_OP) };
enum farandole_algorithm { FARANDOLE_ALGORITHMS(FARANDOLE_ALGORITHM) };
#undef FARANDOLE_CODE
#undef FARANDOLE_KIND
#undef FARANDOLE_DTYPE
#undef FARANDOLE_OP
#undef FARANDOLE_ALGORITHM

/* Functions that return int return a code unless they say otherwise. */

typedef struct farandole_engine farandole_engine;

#define FARANDOLE_RECORD_BYTES 266240 /* core/trace/recorder.h has the layout */

typedef struct farandole_options {
  uint64_t interface; /* FARANDOLE_INTERFACE */
  int32_t rank;
  int32_t size;
  const int32_t* hosts; /* `size` host numbers: ranks with one number share memory */
  uint32_t generation;
  int32_t allreduce_algorithm; /* farandole_algorithm */
  int64_t fusion_threshold;    /* bytes */
  int64_t plan_capacity;       /* tensors of a step that is planned; 0 switches plans off */
  int64_t flush_us;            /* the longest time that a request waits in an incomplete planned bucket */
  int64_t spin_us;             /* how long a waiting thread spins before it sleeps */
  int64_t stall_note_ms;       /* first line about a stalled tensor; 0 never */
  int64_t stall_warning_ms;    /* the full report, and again after each such time; 0 never */
  int64_t stall_shutdown_ms;   /* end the job; 0 never */
  int64_t slot_bytes;          /* size of a slot of a ring in shared memory */
  int32_t slots;
  int32_t fuse_bundles; /* 0: a group of tensors shares its bucket with no others */
  int64_t chunk_bytes;  /* of a message between hosts */
  int32_t tcp_streams;  /* connections between two ranks on different hosts */
  int32_t record; /* a memory file of FARANDOLE_RECORD_BYTES for the last operations, or -1. The core owns it, also
                     when it returns an error */
} farandole_options;

const char* farandole_version(void);
const char* farandole_kernels(void); /* "neon", "avx2", ... */
/* The arithmetic alone, for measurements: out = left + right; a dtype as in a request. */
int farandole_add(int32_t dtype, const void* left, const void* right, void* out, int64_t elements);

/* An error text is written to `error` (always terminated). */
int farandole_create(const farandole_options* options, farandole_engine** engine, char* error, size_t capacity);
/* Takes over a connected, authenticated stream to `peer`. kind: 0 unix socket on one host, 1 TCP (`tcp_streams` times,
 * in the same order on both sides). May be called at any time after create. The core owns the descriptor, also when it
 * returns an error. */
int farandole_add_link(farandole_engine* engine, int32_t peer, int32_t descriptor, int32_t kind);
/* Exchanges memory files with the ranks of this host and starts the engine's thread. Returns 1 at least every 100 ms:
 * call it again, and with 0 when your time limit is over, which gives an error that names the missing ranks. */
int farandole_start(farandole_engine* engine, int64_t timeout_ms, char* error, size_t capacity);
/* Shuts down normally: pending operations end with `shut down`, peers are told, bytes under way get `linger_ms`.
 * Returns 1 at least every 100 ms: call it again with the rest of that time. At 0, threads, descriptors and shared
 * memory are released; outcomes can still be read. */
int farandole_leave(farandole_engine* engine, int64_t linger_ms);
/* Ends every operation, now and later, with `code`, which must be a failure; `rank` caused it (or -1). Tells the peers.
 */
int farandole_revoke(farandole_engine* engine, int32_t code, int32_t rank, const char* message);
/* Calls leave if needed. No other call may be running. In a forked child it does nothing. */
void farandole_destroy(farandole_engine* engine);

/* The heartbeat of this process in an elastic job: a thread that every `beat_ms` adds one to the first word of the
 * memory file `mine` (4096 bytes), and reads from `theirs` (-1: none) when the agent last heard from the launcher, in
 * milliseconds of the monotonic clock. Takes over both descriptors. */
typedef struct farandole_heartbeat farandole_heartbeat;
int farandole_heartbeat_start(int32_t mine, int32_t theirs, int64_t beat_ms, farandole_heartbeat** heartbeat,
                              char* error, size_t capacity);
/* Revokes everything in `engine` when that was `lease_ms` ago. Null: guards no engine any more; call it before the
 * engine is destroyed. */
void farandole_heartbeat_guard(farandole_heartbeat* heartbeat, farandole_engine* engine, int64_t lease_ms);
int64_t farandole_heartbeat_silence(farandole_heartbeat* heartbeat); /* milliseconds since then */
void farandole_heartbeat_stop(farandole_heartbeat* heartbeat);       /* not in a forked child */

typedef struct farandole_request {
  int32_t kind;      /* farandole_kind */
  int32_t dtype;     /* farandole_dtype */
  int32_t op;        /* farandole_op */
  int32_t group;     /* 0: everyone */
  int32_t peer;      /* broadcast: root; send, receive: the other side. A rank in the job; receive: -1, whoever sends */
  int32_t device;    /* where the user's tensor lies, -1: CPU; all ranks must agree whether that is a GPU */
  int32_t on_device; /* 0: `input` and `output` are CPU memory, whatever `device` is. Else 1 + the number of the CUDA
                        device on which they lie, ready when `stream` has done what it has now; use_gpus comes first */
  const char* name;  /* UTF-8, or null: paired by order of calls per (group, kind). Copied. */
  const void* input;
  void* output; /* may equal input; not of allgather and alltoall, whose result goes there if it has exactly
                   `output_bytes`, and else (or for null) into memory of the core: see outcome */
  const int64_t* shape;
  int32_t dimensions;
  int32_t splits_count;
  const int64_t* splits; /* alltoall: rows for each member. add_group: count, ranks..., again. remove_group: id.
                            tune, on rank 0 alone, for all: fusion_threshold, flush_us, spin_us, chunk_bytes, streams
                            in use between hosts, 1 to count steps or 0 */
  double prescale;
  double postscale;
  int64_t tag;  /* send, receive: both sides agree on it. add_group: 0, or a number from 1 << 20 that the members have
                   agreed on: then they alone ask for the group, and nobody waits for anybody. remove_group: 0; of such a
                   group: 1, this rank alone leaves it, or 2, it ends on all its members, with an error */
  void* stream; /* with on_device */
  /* allreduce in place on memory in several places, which counts as one tensor: pairs of an address and its bytes.
   * `input` and `output` are not looked at. */
  const int64_t* pieces;
  int64_t pieces_count;
  int64_t output_bytes; /* allgather, alltoall */
} farandole_request;

/* All or nothing. Handles count up from 1. Memory must stay valid until done.
 * flags: 1, the requests become ready together; 2, the caller waits for them at once, so the engine's thread need not
 * be woken: the caller starts them. queue: the completion queue; 0: none. */
int farandole_submit(farandole_engine* engine, const farandole_request* requests, int32_t count, int32_t flags,
                     int64_t queue, int64_t* handles, char* error, size_t capacity);

typedef struct farandole_outcome {
  int32_t code;
  int32_t rank;  /* whom the error blames, or -1 */
  int64_t value; /* join: the last rank; receive from whoever sends: who it was; add_group: the first new group's id
                    (the rest follow) */
  const char* message; /* "" when ok */
  const char* phase;   /* where it failed: "negotiate", "pack", ... */
  void* output;        /* the result's memory: yours, or the core's until release */
  int64_t output_bytes;
  int32_t dimensions;
  int32_t splits_count;
  const int64_t* shape;  /* of the result */
  const int64_t* splits; /* alltoall: rows received from each member */
} farandole_outcome;

typedef struct farandole_call {
  farandole_engine* engine;
  const farandole_request* request;
  char* error;
  size_t capacity;
  int64_t timeout_ms;
  farandole_outcome* outcome;
  int64_t handle; /* written by the call, as is the outcome */
} farandole_call;

/* Submits one request and waits for it, up to `timeout_ms`, a signal, or 100 ms. 0: it has succeeded, the result is in
 * the caller's memory, and there is no handle. -1: it is done; `outcome` has the details, and `handle` must be
 * released. 1: wait on `handle`. Any other code: the request was not accepted. One argument, because bindings pay for
 * each. */
int farandole_run(farandole_call* call);
/* 1 done (also failed), 0 not yet, -1 no such handle. */
int farandole_poll(farandole_engine* engine, int64_t handle);
/* 0 when done (read the outcome); 1 after `timeout_ms`, at a signal, and at least every 100 ms: call it again.
 * 2: no such handle. */
int farandole_wait(farandole_engine* engine, int64_t handle, int64_t timeout_ms);
/* The same for a thread that waits while others compute: it leaves all work to the engine's own thread. */
int farandole_wait_passive(farandole_engine* engine, int64_t handle, int64_t timeout_ms);
/* Moves the whole pages of memory that will be used repeatedly into huge pages, where the system can. */
void farandole_use_huge_pages(void* memory, size_t bytes);
/* Memory that ranks of this host may read and write in place: `memory` is a mapping of all `bytes` of `file`, which the
 * engine takes over. An in-place allreduce on such memory of all members of a group needs one pass over it. Returns the
 * region's number; call unshare with it before the memory is freed. 0: it cannot be shared. */
uint64_t farandole_share(farandole_engine* engine, int32_t file, void* memory, size_t bytes);
void farandole_unshare(farandole_engine* engine, uint64_t region);
/* A completion queue, for one consumer; it lives as long as the engine. Its number, or 0 when memory is short. */
int64_t farandole_open_queue(farandole_engine* engine);
/* Blocks until an operation that was submitted with this queue is done. Returns its handle, 0 after timeout_ms, -1 when
 * the engine has ended or there is no such queue. Each handle comes once. */
int64_t farandole_next_completion(farandole_engine* engine, int64_t queue, int64_t timeout_ms);

int farandole_outcome_of(farandole_engine* engine, int64_t handle, farandole_outcome* outcome);
/* Frees the handle and what the core allocated for it; for a pending one, when it is done. */
void farandole_release(farandole_engine* engine, int64_t handle);

typedef struct farandole_event {
  int32_t kind; /* 1: the core needs a link to `peer`. 2: a log line at `level` (10 debug .. 40 error) */
  int32_t peer;
  int32_t level;
  int32_t reserved;
  char text[4096];
} farandole_event;

/* Blocks (for one thread of the binding): 0 an event, 1 after timeout_ms (-1: no limit), 5 when the engine has ended.
 */
int farandole_next_event(farandole_engine* engine, farandole_event* event, int64_t timeout_ms);

/* Counters: 0 bytes sent over streams, 1 received, 2 frames, 3 negotiated buckets, 4 planned buckets, 5 diverts, 6
 * bytes reduced in place in shared memory (farandole_share), and of results that local peers wrote in place, 7
 * collectives done, 8 wake-ups of the engine's thread. On rank 0, since the last tune that asked for it: 9 steps, and
 * for the last step 10 its end (ns, monotonic) and 11 the bytes reduced. 12: nanoseconds that threads have waited for
 * operations. 13: bytes of device tensors that did not leave the device. 14: bytes of device tensors that NCCL moved.
 */
int64_t farandole_counter(farandole_engine* engine, int32_t which);
/* The current tuning of this rank: the first five values of a tune. */
int farandole_tuning(farandole_engine* engine, int64_t values[5]);

/* Tracing: events of this rank as lines of JSON (Chrome trace), which the binding drains. */
int farandole_trace(farandole_engine* engine, int32_t on, int32_t mark_plans);
/* Copies whole lines; returns the number of bytes, 0 when there are none. */
int64_t farandole_trace_drain(farandole_engine* engine, char* buffer, int64_t capacity);

/* The libraries of CUDA. The core loads them here and nowhere else. `which`: 0 the driver (libcuda), 1 NVRTC, 2 NCCL or
 * RCCL. The copy that this process has loaded comes first, then `places` in their order, then what the loader finds. */
typedef struct farandole_place {
  int32_t source; /* as below: 2 or 3 */
  int32_t reserved;
  const char* path;
} farandole_place;
typedef struct farandole_library {
  int32_t source;     /* 0 there is none, 1 the process had loaded it, 2 a setting, 3 a Python package, 4 the system */
  int32_t version;    /* as the library counts: 13000, 22809; 0: unknown */
  char path[1024];    /* of the file */
  char why[1024];     /* it cannot be used; "" when it can */
  char missing[2048]; /* functions that it does not have, with the reason */
} farandole_library;
/* OK: it can be used. PRECONDITION: it cannot; `found` says why. */
int farandole_cuda_library(int32_t which, const farandole_place* places, int32_t count, farandole_library* found);

typedef struct farandole_device {
  char name[256];
  char uuid[48];        /* "GPU-..." or "MIG-..." */
  int64_t bytes;        /* of its memory */
  int32_t major, minor; /* compute capability */
  int32_t multiprocessors;
  int32_t slice;             /* 1: a part of a GPU that MIG divides */
  int32_t mps;               /* 1: processes share it under MPS; -1: the driver does not tell */
  int32_t stream_operations; /* 1: its streams can wait for and write 64-bit words */
  int32_t exports_memory;    /* 1: its memory can be handed to other processes as descriptors */
  int32_t reserved;
} farandole_device;
/* The GPUs that the driver shows to this process, at most `capacity` of them; `found`: how many there are. `places` are
 * the driver's. Starts the driver (cuInit), creates no context. */
int farandole_cuda_devices(const farandole_place* places, int32_t count, farandole_device* devices, int32_t capacity,
                           int32_t* found, char* error, size_t error_capacity);

typedef struct farandole_gpu_options {
  const farandole_place *driver, *nvrtc, *nccl; /* where these libraries may be */
  int32_t drivers, nvrtcs, nccls;               /* how many places each has */
  int32_t use_nccl; /* 0: between hosts, and where ranks of one host cannot open each other's memory; 1: also where they
                       can; 2: never */
  int32_t start_ms; /* how long NCCL may take to connect the ranks of a group */
  int32_t reserved;
  const char* cache; /* a folder for compiled kernels, or "" */
} farandole_gpu_options;
/* Lets requests of this engine have memory of GPUs. Starts the driver. NCCL is opened when it is needed. */
int farandole_use_gpus(farandole_engine* engine, const farandole_gpu_options* options, char* error, size_t capacity);

/* Only in the test library (link/chaos.cc). "allreduce.pack" or "*.pack"; action: kill, stop, delay:<ms>, error,
 * no_memory, corrupt, truncate, short; fires once after `skip` passes. engine null: all engines. */
int farandole_chaos_set(farandole_engine* engine, const char* point, const char* action, int32_t skip);
int64_t farandole_chaos_fired(farandole_engine* engine, const char* point);

/* All functions in one table, so that a program that opens the library needs one symbol. */
/* clang-format off */
#define FARANDOLE_FUNCTIONS(X)                                                                                       \
  X(version) X(kernels) X(wire) X(add) X(create) X(add_link) X(start) X(leave) X(revoke) X(destroy)                  \
  X(heartbeat_start) X(heartbeat_guard) X(heartbeat_silence) X(heartbeat_stop) X(submit) X(run) X(poll) X(wait)      \
  X(wait_passive) X(use_huge_pages) X(share) X(unshare) X(open_queue) X(next_completion) X(outcome_of) X(release)    \
  X(next_event) X(counter) X(tuning) X(trace) X(trace_drain) X(cuda_library) X(cuda_devices) X(use_gpus)
/* clang-format on */
typedef struct farandole_functions {
#define FARANDOLE_MEMBER(name) __typeof__(&farandole_##name) name;
  FARANDOLE_FUNCTIONS(FARANDOLE_MEMBER)
  /* Null in a library without failpoints: */
  FARANDOLE_MEMBER(chaos_set)
  FARANDOLE_MEMBER(chaos_fired)
#undef FARANDOLE_MEMBER
} farandole_functions;
/* Null unless the caller was compiled against this header: pass FARANDOLE_INTERFACE. */
const farandole_functions* farandole_table(uint64_t interface);

#ifdef __cplusplus
}
#endif
#endif
