// Requests and buckets, and their encoding: what members send to the group's first member, and what it answers.
// Pure. Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/kind.h"
#include "wire/buffer.h"

namespace farandole::negotiate {

// One operation that a member submits.
struct Request {
  Kind kind = Kind::allreduce;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  std::int32_t root = -1;    // broadcast: the root's rank in the job
  std::int32_t device = -1;  // -1: CPU, else a GPU's number
  double prescale = 1.0;
  double postscale = 1.0;
  std::string name;  // unique among the member's pending requests; "<kind>.noname.<n>" when the user gave no name
  bool unnamed = false;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> splits;  // alltoall: rows for each member. add_group: sets as [count, ranks..., count,
                                     // ranks...]. remove_group: [id]. tune: its values
  std::string bundle;                // tensors with one bundle name become ready together; "" when alone
  std::uint32_t bundle_size = 0;

  std::int64_t elements() const;  // the largest int64 on overflow
  std::size_t bytes() const;
  // Includes the bundle's name, but not its size.
  bool same_but_name(const Request& other) const;
};

// The size of one member's requests that are kept until the other members have submitted the same.
struct PendingLoad {
  std::int64_t requests = 0;
  std::int64_t bytes = 0;  // of their names and lists

  void add(const Request& request, int sign = 1);
  bool over_limit() const;  // more than any program submits before it waits
};

// One tensor of a bucket, as all members have agreed on it.
struct Item {
  std::string name;
  bool unnamed = false;  // on all members
  DType dtype = DType::float32;
  std::vector<std::int64_t>
      shape;  // allreduce, broadcast, reducescatter: of all; allgather, alltoall: of the first member
  std::vector<std::int64_t> first_dims;  // allgather: by member
  // alltoall: with the coordinator members x members, row = sender; in an answer the rows that the reader sends to each
  // member, then those that it receives from each. add_group, remove_group, tune: as in the request.
  std::vector<std::int64_t> splits;
  std::int64_t rows = 0;  // alltoall: sent by all members together
  std::uint64_t digest =
      0;  // alltoall: of all splits, so that members who know different parts recognise the same step
};

// What all members run next: one fused collective, or an error for the named tensors. The order is that of the bytes.
struct Bucket {
  Kind kind = Kind::allreduce;
  ReduceOp op = ReduceOp::sum;
  std::int32_t root = -1;
  std::int32_t device = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<Item> items;
  Error error;                    // failed(): every member's request of these names ends with it
  std::int32_t joined = 0;        // number of joined members: they contribute zeros
  std::int32_t last_joined = -1;  // kind join: the rank that joined last

  std::size_t bytes() const;  // of the reduced or broadcast tensors; gathered bytes for allgather
};

// The largest size of a name in bytes.
inline constexpr std::size_t kMaxName = 4096;

// The number at the end of an unnamed request's name. Unnamed requests of one kind are paired by it.
std::uint64_t number_of(const std::string& name);

// The product of `shape` times `each`; false when a dimension is negative or on overflow of int64.
bool volume(const std::vector<std::int64_t>& shape, std::int64_t each, std::int64_t& result);
// The same with `rows` in place of the first dimension.
bool volume(const std::vector<std::int64_t>& shape, std::int64_t each, std::int64_t rows, std::int64_t& result);
// The sum of values; false when one is negative, or on overflow of int64.
bool sum_of(std::span<const std::int64_t> values, std::int64_t& sum);

void encode(wire::Writer& writer, const Request& request);
Request decode_request(wire::Reader& reader);  // check reader.ok() after it
void encode(wire::Writer& writer, const Bucket& bucket);
Bucket decode_bucket(wire::Reader& reader);

}  // namespace farandole::negotiate
