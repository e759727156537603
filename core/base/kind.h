// The kinds of operation a rank can ask for, and their names in traces and messages.
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
  add_group = 7,  // one or more process sets, agreed on by all ranks
  remove_group = 8,
  send = 9,  // point to point: never negotiated
  receive = 10,
  tune = 11,  // rank 0's alone: everybody else learns of it with the answer
};
inline constexpr int kKinds = 12;

// Whether members may bring different numbers of rows, so that none knows beforehand how large its result will be.
constexpr bool rows_vary(Kind kind) { return kind == Kind::allgather || kind == Kind::alltoall; }

constexpr const char* name_of(Kind kind) {
  constexpr const char* names[] = {"ALLREDUCE", "ALLGATHER", "BROADCAST",    "ALLTOALL", "REDUCESCATTER", "BARRIER",
                                   "JOIN",      "ADD_GROUP", "REMOVE_GROUP", "SEND",     "RECEIVE",       "TUNE"};
  return names[static_cast<int>(kind)];
}

}  // namespace farandole
