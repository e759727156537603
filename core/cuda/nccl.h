// The functions of NCCL (libnccl.so.2) that the core may call, with the first version that has each; RCCL has the same
// functions. Touches base/, os/ and cuda/driver.h; written from the documented binary interface, without NCCL's header.
#pragma once

#include <climits>
#include <cstddef>

#include "cuda/driver.h"

namespace farandole::cuda {

using Comm = struct CommObject*;
enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};
struct UniqueId {
  char bytes[128];
};
// The configuration of NCCL 2.18. Newer versions use defaults for the fields that were added later, because `size` and
// `version` say which version of the configuration this is.
struct CommConfig {
  std::size_t size = sizeof(CommConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;  // INT_MIN and null: NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};
static_assert(sizeof(CommConfig) == 48);
enum class NcclType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};
enum class NcclOp : int { sum = 0, product = 1, max = 2, min = 3, average = 4 };

// clang-format off
// X(member, symbol, the version that brought it, needed, parameters)
#define FARANDOLE_NCCL_FUNCTIONS(X)                                                                                 \
  X(get_unique_id, ncclGetUniqueId, 21800, true, (UniqueId* id))                                                    \
  X(comm_init, ncclCommInitRankConfig, 21800, true,                                                                 \
    (Comm* comm, int size, UniqueId id, int rank, CommConfig* config))                                              \
  X(comm_finalize, ncclCommFinalize, 21800, true, (Comm comm))                                                      \
  X(comm_destroy, ncclCommDestroy, 21800, true, (Comm comm))                                                        \
  X(comm_abort, ncclCommAbort, 21800, true, (Comm comm))                                                            \
  X(comm_async_error, ncclCommGetAsyncError, 21800, true, (Comm comm, NcclResult* error))                           \
  X(group_start, ncclGroupStart, 21800, true, ())                                                                   \
  X(group_end, ncclGroupEnd, 21800, true, ())                                                                       \
  X(all_reduce, ncclAllReduce, 21800, true,                                                                         \
    (const void* from, void* to, std::size_t count, NcclType type, NcclOp op, Comm comm, Stream stream))            \
  X(all_gather, ncclAllGather, 21800, true,                                                                         \
    (const void* from, void* to, std::size_t count, NcclType type, Comm comm, Stream stream))                       \
  X(broadcast, ncclBroadcast, 21800, true,                                                                          \
    (const void* from, void* to, std::size_t count, NcclType type, int root, Comm comm, Stream stream))             \
  X(reduce, ncclReduce, 21800, true,                                                                                \
    (const void* from, void* to, std::size_t count, NcclType type, NcclOp op, int root, Comm comm, Stream stream))  \
  X(reduce_scatter, ncclReduceScatter, 21800, true,                                                                 \
    (const void* from, void* to, std::size_t count, NcclType type, NcclOp op, Comm comm, Stream stream))            \
  X(send, ncclSend, 21800, true,                                                                                    \
    (const void* from, std::size_t count, NcclType type, int peer, Comm comm, Stream stream))                       \
  X(receive, ncclRecv, 21800, true,                                                                                 \
    (void* to, std::size_t count, NcclType type, int peer, Comm comm, Stream stream))                               \
  X(comm_register, ncclCommRegister, 21900, false, (Comm comm, void* memory, std::size_t bytes, void** handle))     \
  X(comm_deregister, ncclCommDeregister, 21900, false, (Comm comm, void* handle))                                   \
  X(all_to_all, ncclAlltoAll, 22803, false,                                                                         \
    (const void* from, void* to, std::size_t count, NcclType type, Comm comm, Stream stream))                       \
  X(comm_revoke, ncclCommRevoke, 22807, false, (Comm comm, int flags))
// clang-format on

struct Nccl {
#define FARANDOLE_MEMBER(member, symbol, since, needed, parameters) NcclResult(*member) parameters = nullptr;
  FARANDOLE_NCCL_FUNCTIONS(FARANDOLE_MEMBER)
#undef FARANDOLE_MEMBER
};

extern const LibraryDescription nccl_library;
// Whether ncclCommAbort of this version may hang.
constexpr bool abort_may_hang(int version) { return version >= 22501 && version < 22602; }

}  // namespace farandole::cuda
