// Requests and buckets: their sizes and their encoding.
// Pure. Touches base/ and wire/.
#include "negotiate/request.h"

#include <limits>

namespace farandole::negotiate {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

// Fails the reader for a number outside the enumeration, so that the other code never sees one.
template <class Enumeration>
Enumeration one_of(wire::Reader& reader, int count) {
  const std::uint8_t value = reader.u8();
  if (value >= count) {
    reader.fail();
    return Enumeration{};
  }
  return static_cast<Enumeration>(value);
}

bool flag(wire::Reader& reader) {
  const std::uint8_t value = reader.u8();
  if (value > 1) reader.fail();
  return value == 1;
}

// The tensor's bytes as Bucket::bytes counts them; false on overflow.
bool item_bytes(Kind kind, const Item& item, std::int64_t& bytes) {
  const auto each = static_cast<std::int64_t>(size_of(item.dtype));
  std::int64_t rows = item.rows;
  if (kind == Kind::allgather && !sum_of(item.first_dims, rows)) return false;
  return rows_vary(kind) ? volume(item.shape, each, rows, bytes) : volume(item.shape, each, bytes);
}

std::string name(wire::Reader& reader) {
  std::string text = reader.text();
  if (text.size() > kMaxName) reader.fail();
  return text;
}

}  // namespace

std::uint64_t number_of(const std::string& name) {
  const std::size_t last = name.find_last_not_of("0123456789");
  std::uint64_t number = 0;
  for (std::size_t i = last == std::string::npos ? 0 : last + 1; i < name.size(); ++i) {
    number = number * 10 + static_cast<std::uint64_t>(name[i] - '0');
  }
  return number;
}

bool volume(const std::vector<std::int64_t>& shape, std::int64_t each, std::int64_t& result) {
  return volume(shape, each, shape.empty() ? 0 : shape.front(), result);
}

bool volume(const std::vector<std::int64_t>& shape, std::int64_t each, std::int64_t rows, std::int64_t& result) {
  result = each;
  bool empty = false, fits = true;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t dimension = d == 0 ? rows : shape[d];
    if (dimension < 0) return false;
    if (dimension == 0) {
      empty = true;
    } else if (result > kMost / dimension) {
      fits = false;
    } else {
      result *= dimension;
    }
  }
  if (empty) result = 0;
  return empty || fits;
}

bool sum_of(std::span<const std::int64_t> values, std::int64_t& sum) {
  sum = 0;
  for (std::int64_t value : values) {
    if (value < 0 || value > kMost - sum) return false;
    sum += value;
  }
  return true;
}

std::int64_t Request::elements() const {
  std::int64_t result = 0;
  return volume(shape, 1, result) ? result : kMost;
}

std::size_t Request::bytes() const {
  std::int64_t result = 0;
  return static_cast<std::size_t>(volume(shape, static_cast<std::int64_t>(size_of(dtype)), result) ? result : kMost);
}

bool Request::same_but_name(const Request& other) const {
  return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && device == other.device &&
         prescale == other.prescale && postscale == other.postscale && unnamed == other.unnamed &&
         bundle_size == other.bundle_size && bundle.empty() == other.bundle.empty() && shape == other.shape &&
         splits == other.splits;
}

void PendingLoad::add(const Request& request, int sign) {
  const std::size_t words = request.shape.size() + request.splits.size();
  requests += sign;
  bytes += sign * static_cast<std::int64_t>(request.name.size() + request.bundle.size() + sizeof(std::int64_t) * words);
}

// The largest programs have about 100,000 tensors.
bool PendingLoad::over_limit() const {
  constexpr std::int64_t kMaxRequests = 1 << 19;
  constexpr std::int64_t kMostBytes = 256 << 20;
  return requests > kMaxRequests || bytes > kMostBytes;
}

std::size_t Bucket::bytes() const {
  std::int64_t sum = 0;
  for (const Item& item : items) {
    std::int64_t bytes = 0;
    if (!item_bytes(kind, item, bytes) || bytes > kMost - sum) return static_cast<std::size_t>(kMost);
    sum += bytes;
  }
  return static_cast<std::size_t>(sum);
}

void encode(wire::Writer& writer, const Request& request) {
  writer.u8(static_cast<std::uint8_t>(request.kind));
  writer.u8(static_cast<std::uint8_t>(request.dtype));
  writer.u8(static_cast<std::uint8_t>(request.op));
  writer.u8(request.unnamed ? 1 : 0);
  writer.i32(request.root);
  writer.i32(request.device);
  writer.f64(request.prescale);
  writer.f64(request.postscale);
  writer.u32(request.bundle_size);
  writer.text(request.name);
  writer.text(request.bundle);
  writer.list(request.shape);
  writer.list(request.splits);
}

Request decode_request(wire::Reader& reader) {
  Request request;
  request.kind = one_of<Kind>(reader, kKinds);
  request.dtype = one_of<DType>(reader, kDTypes);
  request.op = one_of<ReduceOp>(reader, kReduceOps);
  request.unnamed = flag(reader);
  request.root = reader.i32();
  request.device = reader.i32();
  request.prescale = reader.f64();
  request.postscale = reader.f64();
  request.bundle_size = reader.u32();
  request.name = name(reader);
  request.bundle = name(reader);
  request.shape = reader.list();
  request.splits = reader.list();
  std::int64_t bytes = 0, rows = 0;
  if (request.kind > Kind::remove_group) reader.fail();  // transfers and tuning are never sent as requests
  if (!volume(request.shape, static_cast<std::int64_t>(size_of(request.dtype)), bytes)) reader.fail();
  if (request.kind == Kind::alltoall && !sum_of(request.splits, rows)) reader.fail();
  if (request.bundle.empty() != (request.bundle_size == 0)) reader.fail();
  return request;
}

void encode(wire::Writer& writer, const Bucket& bucket) {
  writer.u8(static_cast<std::uint8_t>(bucket.kind));
  writer.u8(static_cast<std::uint8_t>(bucket.op));
  writer.u8(static_cast<std::uint8_t>(bucket.error.code));
  writer.i32(bucket.root);
  writer.i32(bucket.device);
  writer.f64(bucket.prescale);
  writer.f64(bucket.postscale);
  writer.i32(bucket.joined);
  writer.i32(bucket.last_joined);
  writer.text(bucket.error.message);
  writer.i32(bucket.error.rank);
  writer.u32(static_cast<std::uint32_t>(bucket.items.size()));
  for (const Item& item : bucket.items) {
    writer.u8(static_cast<std::uint8_t>(item.dtype));
    writer.u8(item.unnamed ? 1 : 0);
    writer.text(item.name);
    writer.list(item.shape);
    writer.list(item.first_dims);
    writer.list(item.splits);
    if (bucket.kind != Kind::alltoall) continue;
    writer.i64(item.rows);
    writer.u64(item.digest);
  }
}

Bucket decode_bucket(wire::Reader& reader) {
  constexpr int kCodes = static_cast<int>(Code::internal) + 1;
  constexpr std::size_t kSmallestItem = 2 + 4 * 4;  // two bytes and four counts
  Bucket bucket;
  bucket.kind = one_of<Kind>(reader, kKinds);
  bucket.op = one_of<ReduceOp>(reader, kReduceOps);
  bucket.error.code = one_of<Code>(reader, kCodes);
  bucket.root = reader.i32();
  bucket.device = reader.i32();
  bucket.prescale = reader.f64();
  bucket.postscale = reader.f64();
  bucket.joined = reader.i32();
  bucket.last_joined = reader.i32();
  bucket.error.message = reader.text();
  bucket.error.rank = reader.i32();
  const std::uint32_t count = reader.count(kSmallestItem);
  bucket.items.reserve(count);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    Item item;
    item.dtype = one_of<DType>(reader, kDTypes);
    item.unnamed = flag(reader);
    item.name = name(reader);
    item.shape = reader.list();
    item.first_dims = reader.list();
    item.splits = reader.list();
    if (bucket.kind == Kind::alltoall) {
      item.rows = reader.i64();
      item.digest = reader.u64();
    }
    bucket.items.push_back(std::move(item));
  }
  if (!reader.ok()) return Bucket{};
  return bucket;
}

}  // namespace farandole::negotiate
