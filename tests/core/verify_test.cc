// Compares buckets with their requests: every field that a coordinator could get wrong, and the sizes of answers.
// Touches negotiate/.
#include "negotiate/verify.h"

#include <functional>
#include <limits>

#include "check.h"
#include "negotiate/coordinator.h"
#include "negotiate/messages.h"

namespace farandole::negotiate {
namespace {

const std::vector<int> kRanks = {3, 5, 8};
constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

Request request(const std::string& name, std::vector<std::int64_t> shape, Kind kind) {
  Request made;
  made.kind = kind;
  made.name = name;
  made.shape = std::move(shape);
  if (kind == Kind::broadcast) made.root = 5;
  if (kind == Kind::add_group) made.splits = {2, 3, 5};
  if (kind == Kind::remove_group) made.splits = {1};
  return made;
}

// What member 1 gets for requests that all members submit, and its own request.
struct Case {
  Request own;
  Bucket bucket;
};

Case agreed(Request own, const std::function<void(Request&, int member)>& differ = {}) {
  Coordinator coordinator(kRanks, {});
  for (int member = 0; member < 3; ++member) {
    Request theirs = own;
    if (differ) differ(theirs, member);
    if (member == 1) own = theirs;
    coordinator.submit(member, theirs, 0);
  }
  const std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK(!buckets[0].error.failed());
  return {own, answer_for(buckets[0], 1, 3)};
}

Case allreduced() { return agreed(request("t", {4, 2}, Kind::allreduce)); }
Case gathered() {
  return agreed(request("t", {4, 2}, Kind::allgather), [](Request& r, int member) { r.shape[0] = 2 + member; });
}
Case exchanged() {
  return agreed(request("t", {6, 2}, Kind::alltoall), [](Request& r, int member) {
    if (member != 2) r.splits = {member, 1, 2};
  });
}

std::string fault(const Case& given, bool joined = false, bool asked = true) {
  const Requester requester{kRanks, 1, joined};
  const char* found = fault_in(given.bucket, requester);
  for (const Item& item : given.bucket.items)
    if (found == nullptr) found = fault_in(given.bucket, item, asked ? &given.own : nullptr, requester);
  return found == nullptr ? "" : found;
}

void refused(Case given, const std::function<void(Bucket&)>& change, const std::string& part) {
  CHECK_EQUAL(fault(given), "");
  change(given.bucket);
  const std::string found = fault(given);
  if (found.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "'" + found + "' without '" + part + "'");
}

TEST(a_correct_answer_passes) {
  for (Kind kind : {Kind::allreduce, Kind::allgather, Kind::broadcast, Kind::alltoall, Kind::reducescatter,
                    Kind::barrier, Kind::add_group, Kind::remove_group})
    CHECK_EQUAL(fault(agreed(request("t", {6, 2}, kind))), "");
  CHECK_EQUAL(fault(gathered()), "");
  CHECK_EQUAL(fault(exchanged()), "");
}

TEST(another_operation_is_refused) {
  refused(allreduced(), [](Bucket& b) { b.kind = Kind::reducescatter; }, "another kind");
  refused(allreduced(), [](Bucket& b) { b.kind = Kind::send; }, "never negotiated");
  refused(allreduced(), [](Bucket& b) { b.op = ReduceOp::max; }, "another reduction");
  refused(allreduced(), [](Bucket& b) { b.prescale = 2; }, "another reduction");
  refused(allreduced(), [](Bucket& b) { b.postscale = std::numeric_limits<double>::quiet_NaN(); }, "another reduction");
  refused(allreduced(), [](Bucket& b) { b.device = 0; }, "device");
  refused(allreduced(), [](Bucket& b) { b.items[0].dtype = DType::float64; }, "data type");
  refused(allreduced(), [](Bucket& b) { b.items[0].shape = {4, 3}; }, "another shape");
  refused(allreduced(), [](Bucket& b) { b.items[0].shape = {8}; }, "another shape");
  refused(allreduced(), [](Bucket& b) { b.items[0].unnamed = true; }, "unnamed");
  refused(allreduced(), [](Bucket& b) { b.items.clear(); }, "no tensor");
  refused(allreduced(), [](Bucket& b) { b.items.push_back(b.items[0]), b.items[1].dtype = DType::int8; }, "different");
  refused(agreed(request("t", {4}, Kind::broadcast)), [](Bucket& b) { b.root = 8; }, "another root");
  refused(agreed(request("t", {4}, Kind::broadcast)), [](Bucket& b) { b.items.push_back(b.items[0]); }, "be fused");
  refused(agreed(request("g", {}, Kind::add_group)), [](Bucket& b) { b.items[0].splits = {1, 3}; }, "other values");
}

TEST(rows_of_other_members_must_add_up) {
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims.pop_back(); }, "for each member");
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims.push_back(1); }, "for each member");
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims[1] = 9; }, "for this rank");
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims[2] = -1; }, "can be counted");
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims[2] = kLargest; }, "can be counted");
  refused(gathered(), [](Bucket& b) { b.items[0].first_dims[2] = kLargest / 8; }, "can be counted");
  refused(gathered(), [](Bucket& b) { b.items[0].shape = {2, 3}; }, "another shape");
  refused(gathered(), [](Bucket& b) { b.items[0].shape = {}; }, "another shape");
  refused(gathered(), [](Bucket& b) { b.items[0].shape[0] = 7; }, "first member");
}

TEST(splits_of_other_members_must_add_up) {
  refused(exchanged(), [](Bucket& b) { b.items[0].splits.resize(5); }, "each member");
  refused(exchanged(), [](Bucket& b) { b.items[0].splits.resize(9); }, "each member");
  refused(exchanged(), [](Bucket& b) { b.items[0].splits[0] = 3; }, "other splits");
  refused(exchanged(), [](Bucket& b) { b.items[0].splits[4] = 3; }, "to itself");
  refused(exchanged(), [](Bucket& b) { b.items[0].splits[3] = -1; }, "added up");
  refused(exchanged(), [](Bucket& b) { b.items[0].splits[5] = kLargest; }, "added up");
  refused(exchanged(), [](Bucket& b) { b.items[0].rows = 3; }, "added up");
  refused(exchanged(), [](Bucket& b) { b.items[0].rows = kLargest; }, "added up");
}

TEST(an_impossible_request_is_not_accepted) {
  Case scalar = gathered();
  scalar.own.shape = scalar.bucket.items[0].shape = {};
  CHECK(!fault(scalar).empty());
  Case scattered = agreed(request("t", {4}, Kind::reducescatter));
  scattered.own.op = scattered.bucket.op = ReduceOp::max;
  CHECK(!fault(scattered).empty());
}

TEST(joined_members_take_part_in_what_allows_it) {
  Case given = allreduced();
  CHECK(!fault(given, true, false).empty());  // nobody has joined, says the bucket
  given.bucket.joined = 1;
  CHECK_EQUAL(fault(given, true, false), "");
  CHECK(!fault(given, false, false).empty());  // but this member has not
  given.bucket.items[0].shape = {kLargest, 8};
  CHECK(!fault(given, true, false).empty());
  for (std::int32_t joined : {-1, 3, 100}) refused(allreduced(), [&](Bucket& b) { b.joined = joined; }, "joined");
  refused(gathered(), [](Bucket& b) { b.joined = 1; }, "joined");

  Case join;
  join.bucket.kind = Kind::join;
  join.bucket.last_joined = 8;
  CHECK_EQUAL(fault(join, true), "");
  CHECK(!fault(join, false).empty());
  join.bucket.last_joined = 4;
  CHECK(!fault(join, true).empty());
}

TEST(errors_are_those_of_negotiation) {
  Case given = allreduced();
  for (Code code : {Code::invalid_argument, Code::precondition, Code::aborted}) {
    given.bucket.error = {code, "why", -1};
    CHECK_EQUAL(fault(given), "");
    CHECK_EQUAL(fault(given, false, false), "");
  }
  for (Code code : {Code::in_progress, Code::shut_down, Code::peer_lost, Code::internal}) {
    given.bucket.error = {code, "why", -1};
    CHECK(!fault(given).empty());
  }
  given.bucket.error = {Code::precondition, "why", -1};
  given.own.kind = Kind::join;
  CHECK(!fault(given).empty());
}

TEST(a_size_that_overflows_is_an_error_on_all) {
  Coordinator coordinator(kRanks, {});
  for (int member = 0; member < 3; ++member)
    coordinator.submit(member, request("t", {kLargest / 2, 0}, Kind::allgather), 0);
  const std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK(buckets.at(0).error.code == Code::precondition);
}

// One alltoall of `members`: bytes that the coordinator sends, all answers decoded and verified by their readers.
std::size_t sent_for_one_alltoall(int members) {
  std::vector<int> ranks;
  for (int rank = 0; rank < members; ++rank) ranks.push_back(rank);
  Coordinator coordinator(ranks, {});
  const auto split = [](int from, int to) { return static_cast<std::int64_t>((from * 7 + to * 3) % 5); };
  std::vector<Request> requests;
  for (int member = 0; member < members; ++member) {
    Request& made = requests.emplace_back(request("tokens", {5 * members, 2}, Kind::alltoall));
    for (int to = 0; to < members; ++to) made.splits.push_back(split(member, to));
    for (const Bytes& message : encode_requests(0, 0, std::span(&made, 1))) {
      Requests received;
      CHECK(decode(message, received));
      for (Request& one : received.requests) coordinator.submit(member, std::move(one), 0);
    }
  }
  const std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  std::size_t sent = 0;
  for (int member = 1; member < members; ++member) {
    const std::vector<Bytes> messages = encode_answer(0, buckets, member, members);
    CHECK_EQUAL(messages.size(), 1u);
    sent += messages[0].size();
    Answer answer;
    CHECK(decode(messages[0], answer));
    const Item& item = answer.buckets.at(0).items.at(0);
    const Requester requester{ranks, member, false};
    const auto own = static_cast<std::size_t>(member);
    CHECK(fault_in(answer.buckets[0], requester) == nullptr);
    CHECK(fault_in(answer.buckets[0], item, &requests[own], requester) == nullptr);
    for (int other = 0; other < members; ++other) {
      CHECK_EQUAL(item.splits[static_cast<std::size_t>(other)], split(member, other));
      CHECK_EQUAL(item.splits[static_cast<std::size_t>(members + other)], split(other, member));
    }
    CHECK_EQUAL(item.digest, buckets[0].items[0].digest);
  }
  return sent;
}

TEST(an_alltoall_of_1024_members_sends_each_its_row_and_column) {
  for (std::size_t members : {128u, 256u, 512u, 1024u}) {
    const std::size_t words = 2 * members * members * sizeof(std::int64_t);
    const std::size_t sent = sent_for_one_alltoall(static_cast<int>(members));
    CHECK(sent > words / 2);
    CHECK(sent <= words + 256 * members);
  }
}

TEST(large_messages_are_cut) {
  std::vector<Request> requests(40, request("t", {1 << 20}, Kind::alltoall));
  for (Request& one : requests) one.splits.assign(1 << 14, 1);
  const std::vector<Bytes> messages = encode_requests(7, 2, requests);
  CHECK(messages.size() > 4);
  std::size_t received = 0;
  for (const Bytes& message : messages) {
    CHECK(message.size() < 2 * kMessageBytes);
    Requests part;
    CHECK(decode(message, part));
    CHECK_EQUAL(part.group, 7u);
    CHECK_EQUAL(part.epoch, 2u);
    received += part.requests.size();
  }
  CHECK_EQUAL(received, requests.size());

  std::vector<Bucket> buckets(40);
  for (Bucket& bucket : buckets) {
    bucket.kind = Kind::allgather;
    bucket.items.emplace_back().first_dims.assign(1 << 14, 1);
  }
  const std::vector<Bytes> answers = encode_answer(7, buckets, 1, 1 << 14);
  CHECK(answers.size() > 4);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    Answer part;
    CHECK(decode(answers[i], part));
    CHECK_EQUAL(part.last, i + 1 == answers.size());
  }
}

TEST(fused_buckets_fit_a_message) {
  std::vector<Bucket> singles(2000);
  for (Bucket& single : singles) {
    single.kind = Kind::allgather;
    Item& item = single.items.emplace_back();
    item.shape = {1};
    item.first_dims.assign(1024, 1);
  }
  const std::vector<Bucket> buckets = fuse(singles, {});
  CHECK(buckets.size() > 1);
  std::size_t items = 0;
  for (const Bucket& bucket : buckets) {
    wire::Writer writer;
    encode(writer, bucket);
    CHECK(writer.size() < (16 << 20));
    items += bucket.items.size();
  }
  CHECK_EQUAL(items, singles.size());
}

}  // namespace
}  // namespace farandole::negotiate
