// Encoding, cutting and checked decoding of requests and answers.
// Pure. Touches base/ and wire/.
#include "negotiate/messages.h"

#include <algorithm>

namespace farandole::negotiate {
namespace {

constexpr std::size_t kSmallest = 16;  // the smallest size of a request or a bucket

// Calls encode(writer, i) for 0 .. count - 1 and starts a new message whenever one is large enough. Each starts with
// the group, `second(last)` and the number of entries that follow.
template <class Second, class Encode>
std::vector<Bytes> cut(std::uint32_t group, std::size_t count, Second second, Encode encode_one) {
  std::vector<Bytes> messages;
  for (std::size_t next = 0; next < count;) {
    wire::Writer things;
    const std::size_t first = next;
    while (next < count && things.size() < kMessageBytes) encode_one(things, next++);
    wire::Writer message;
    message.u32(group);
    message.u32(second(next == count));
    message.u32(static_cast<std::uint32_t>(next - first));
    message.append(things.take());
    messages.push_back(message.take());
  }
  return messages;
}

}  // namespace

std::vector<Bytes> encode_requests(std::uint32_t group, std::uint32_t epoch, std::span<const Request> requests) {
  return cut(
      group, requests.size(), [&](bool) { return epoch; },
      [&](wire::Writer& writer, std::size_t i) { encode(writer, requests[i]); });
}

bool decode(std::span<const std::byte> bytes, Requests& message) {
  wire::Reader reader(bytes);
  message.group = reader.u32();
  message.epoch = reader.u32();
  const std::uint32_t count = reader.count(kSmallest);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) message.requests.push_back(decode_request(reader));
  return reader.finished() && count > 0;
}

Bucket answer_for(const Bucket& bucket, int member, int members) {
  if (bucket.kind != Kind::alltoall || bucket.error.failed()) return bucket;
  Bucket answer;
  answer.kind = bucket.kind;
  answer.op = bucket.op;
  answer.root = bucket.root;
  answer.device = bucket.device;
  answer.prescale = bucket.prescale;
  answer.postscale = bucket.postscale;
  const auto me = static_cast<std::size_t>(member), all = static_cast<std::size_t>(members);
  for (const Item& item : bucket.items) {
    Item& mine = answer.items.emplace_back(
        Item{item.name, item.unnamed, item.dtype, item.shape, {}, {}, item.rows, item.digest});
    mine.splits.reserve(2 * all);
    for (std::size_t to = 0; to < all; ++to) mine.splits.push_back(item.splits[me * all + to]);
    for (std::size_t from = 0; from < all; ++from) mine.splits.push_back(item.splits[from * all + me]);
  }
  return answer;
}

bool same_for_all(std::span<const Bucket> buckets) {
  return std::none_of(buckets.begin(), buckets.end(),
                      [](const Bucket& bucket) { return bucket.kind == Kind::alltoall && !bucket.error.failed(); });
}

std::vector<Bytes> encode_answer(std::uint32_t group, std::span<const Bucket> buckets, int member, int members) {
  return cut(
      group, buckets.size(), [](bool last) { return last ? 1u : 0u; },
      [&](wire::Writer& writer, std::size_t i) {
        if (same_for_all(buckets.subspan(i, 1)))
          encode(writer, buckets[i]);
        else
          encode(writer, answer_for(buckets[i], member, members));
      });
}

bool decode(std::span<const std::byte> bytes, Answer& message) {
  wire::Reader reader(bytes);
  message.group = reader.u32();
  const std::uint32_t last = reader.u32();
  message.last = last == 1;
  const std::uint32_t count = reader.count(kSmallest);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) message.buckets.push_back(decode_bucket(reader));
  return reader.finished() && last <= 1 && count > 0;
}

}  // namespace farandole::negotiate
