// What the coordinator stores for pending requests: little for each member, and never without limit.
// Touches negotiate/.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "check.h"
#include "negotiate/coordinator.h"

namespace {

std::atomic<std::size_t> in_use{0};

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  in_use += malloc_usable_size(memory);
  return memory;
}
void operator delete(void* memory) noexcept {
  in_use -= memory == nullptr ? 0 : malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace farandole::negotiate {
namespace {

constexpr std::size_t kMembers = 1024;
constexpr std::size_t kNames = 100;

std::vector<int> ranks() {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < kMembers; ++rank) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

Request request(std::size_t number, Kind kind = Kind::allreduce) {
  Request made;
  made.kind = kind;
  made.name = "gradient.layer." + std::to_string(number);
  made.shape = {128, 16};
  return made;
}

// Bytes for each name when so many members have submitted it.
template <class Differ>
std::size_t bytes_of_a_name(Coordinator& coordinator, std::size_t members, Kind kind, Differ differ) {
  const std::size_t before = in_use;
  for (std::size_t member = 0; member < members; ++member) {
    for (std::size_t name = 0; name < kNames; ++name) {
      Request one = request(name, kind);
      differ(one, member);
      coordinator.submit(static_cast<int>(member), std::move(one), 0);
    }
  }
  return (in_use - before) / kNames;
}

TEST(a_pending_name_costs_one_request) {
  constexpr std::size_t kOneRequest = 1024, kDifferences = 2 * 16 * kMembers;
  const auto nothing = [](Request&, std::size_t) {};
  const auto rows = [](Request& r, std::size_t member) { r.shape[0] = static_cast<std::int64_t>(member); };
  const auto device = [](Request& r, std::size_t member) { r.device = static_cast<std::int32_t>(member % 8); };
  Coordinator first(ranks(), {}), second(ranks(), {}), third(ranks(), {}), fourth(ranks(), {});
  CHECK(bytes_of_a_name(first, 1, Kind::allreduce, nothing) < kOneRequest);
  CHECK(bytes_of_a_name(second, kMembers - 1, Kind::allreduce, nothing) < kOneRequest);
  CHECK(bytes_of_a_name(third, kMembers - 1, Kind::allgather, rows) < kOneRequest + kDifferences);
  CHECK(bytes_of_a_name(fourth, kMembers - 1, Kind::allreduce, device) < kOneRequest + kDifferences);
  for (std::size_t name = 0; name < kNames; ++name) {
    Request gathered = request(name, Kind::allgather);
    gathered.shape[0] = kMembers - 1;
    third.submit(kMembers - 1, std::move(gathered), 0);
  }
  const std::vector<Bucket> buckets = third.take_ready();
  for (const Bucket& bucket : buckets) {
    CHECK(!bucket.error.failed());
    for (const Item& item : bucket.items) {
      CHECK_EQUAL(item.shape[0], 0);
      for (std::size_t member = 0; member < kMembers; ++member)
        CHECK_EQUAL(item.first_dims[member], static_cast<std::int64_t>(member));
    }
  }
  CHECK(!third.anything_pending());
}

TEST(a_mismatch_names_the_member_that_differs) {
  Coordinator coordinator({10, 11, 12}, {});
  Request gathered = request(1, Kind::allgather), other = gathered, odd = gathered;
  other.shape[0] = 7;
  odd.shape = {5, 17};
  coordinator.submit(2, gathered, 0);
  coordinator.submit(0, other, 0);
  coordinator.submit(1, odd, 0);
  Bucket bucket = coordinator.take_ready().at(0);
  CHECK_EQUAL(
      bucket.error.message,
      "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 16, but another rank "
      "sent a tensor with dimension 1 equal to 17. Tensor 'gradient.layer.1': [7, 16] on rank 10; [5, 17] on "
      "rank 11; [128, 16] on rank 12.");
  // If a member repeats a request, the last one counts, also if this member was the first.
  coordinator.submit(2, gathered, 0);
  coordinator.submit(0, odd, 0);
  coordinator.submit(0, other, 0);
  coordinator.submit(2, other, 0);
  coordinator.submit(1, gathered, 0);
  bucket = coordinator.take_ready().at(0);
  CHECK(!bucket.error.failed());
  CHECK(bucket.items[0].first_dims == (std::vector<std::int64_t>{7, 128, 7}));
}

TEST(one_member_may_submit_much_but_not_without_limit) {
  constexpr std::size_t kMuch = 1 << 19, kWords = 1 << 17;
  Coordinator coordinator({10, 11, 12}, {});
  for (std::size_t i = 0; i < kMuch; ++i) coordinator.submit(1, request(i), 0);
  CHECK(!coordinator.asks_too_much(1));
  coordinator.submit(1, request(kMuch), 0);
  CHECK(coordinator.asks_too_much(1) && !coordinator.asks_too_much(2));
  for (int member : {0, 2}) coordinator.submit(member, request(0), 0);  // what all have asked for counts no more
  CHECK(!coordinator.asks_too_much(1));
  coordinator.forget_pending();
  Request large = request(0, Kind::alltoall);
  for (std::size_t i = 0; i < 256; ++i) {
    large.name = std::to_string(i);
    large.splits.assign(kWords, 0);
    coordinator.submit(1, request(i), 0);
    coordinator.submit(2, large, 0);
  }
  CHECK(coordinator.asks_too_much(2) && !coordinator.asks_too_much(1));
  coordinator.forget_pending();
  CHECK(!coordinator.asks_too_much(2));
}

}  // namespace
}  // namespace farandole::negotiate
