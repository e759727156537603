// The kinds of operation that a rank can submit, and their names in traces and messages.
// Touches nothing.
#pragma once

#include <cstdint>

namespace farandole {

// The values are part of the C interface and of the wire.
enum class Kind : std::uint8_t {
  allreduce = 0,
  allgather = 1,
  broadcast = 2,
  alltoall = 3,
  reducescatter = 4,
  barrier = 5,
  join = 6,
  add_group = 7,  // one or more process sets; all ranks must agree
  remove_group = 8,
  send = 9,  // point to point: not negotiated
  receive = 10,
  tune = 11,  // submitted by rank 0 alone; the others receive it with the answer
};
inline constexpr int kKinds = 12;

// Whether members may have different numbers of rows. Then no member knows the size of its result in advance.
constexpr bool rows_vary(Kind kind) { return kind == Kind::allgather || kind == Kind::alltoall; }

constexpr const char* name_of(Kind kind) {
  constexpr const char* names[] = {"ALLREDUCE", "ALLGATHER", "BROADCAST",    "ALLTOALL", "REDUCESCATTER", "BARRIER",
                                   "JOIN",      "ADD_GROUP", "REMOVE_GROUP", "SEND",     "RECEIVE",       "TUNE"};
  return names[static_cast<int>(kind)];
}

}  // namespace farandole
