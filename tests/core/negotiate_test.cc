// Negotiation: requests and buckets on the wire, agreement and error messages, bundles, join, fusion, stalls.
// Touches negotiate/ and wire/.
#include <limits>
#include <random>

#include "check.h"
#include "negotiate/coordinator.h"

namespace farandole::negotiate {
namespace {

Request request(const std::string& name, std::vector<std::int64_t> shape = {4}, Kind kind = Kind::allreduce) {
  Request request;
  request.kind = kind;
  request.name = name;
  request.shape = std::move(shape);
  if (kind == Kind::broadcast) request.root = 10;
  return request;
}

Request bundled(const std::string& name, const std::string& bundle, std::uint32_t size) {
  Request made = request(name);
  made.bundle = bundle;
  made.bundle_size = size;
  return made;
}

const std::vector<int> kRanks = {10, 11, 12};

bool starts(const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; }
bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<Bucket> agree(std::vector<Request> requests, CoordinatorOptions options = {}) {
  Coordinator coordinator(kRanks, options);
  for (std::size_t m = 0; m < requests.size(); ++m) {
    CHECK(coordinator.take_ready().empty());
    coordinator.submit(static_cast<int>(m), requests[m], 0);
  }
  return coordinator.take_ready();
}

// One member's request differs from the two others'.
template <class Change>
void expect_mismatch(Request base, Change change, const std::string& start) {
  for (std::size_t odd = 0; odd < 3; ++odd) {
    std::vector<Request> requests(3, base);
    change(requests[odd]);
    const std::vector<Bucket> buckets = agree(requests);
    CHECK_EQUAL(buckets.size(), 1u);
    CHECK(buckets[0].error.code == Code::precondition);
    if (!starts(buckets[0].error.message, start)) check::fail(__FILE__, __LINE__, buckets[0].error.message);
    CHECK(holds(buckets[0].error.message, "'t'"));
    CHECK(holds(buckets[0].error.message, "rank " + std::to_string(kRanks[odd])));
  }
}

TEST(requests_and_buckets_encode_and_decode) {
  Request original = bundled("näme", "pack", 3);
  original.kind = Kind::alltoall;
  original.dtype = DType::bfloat16;
  original.op = ReduceOp::max;
  original.root = 7;
  original.device = 2;
  original.prescale = 0.1;
  original.postscale = -3;
  original.unnamed = true;
  original.shape = {6, 0, 5};
  original.splits = {1, 5};
  wire::Writer writer;
  encode(writer, original);
  std::vector<std::byte> bytes = writer.take();
  wire::Reader reader(bytes);
  const Request copy = decode_request(reader);
  CHECK(reader.finished());
  CHECK(copy.same_but_name(original));
  CHECK_EQUAL(copy.name, original.name);
  CHECK_EQUAL(copy.bundle, original.bundle);

  Bucket bucket;
  bucket.kind = Kind::allgather;
  bucket.items = {{"a", true, DType::int8, {2, 3}, {2, 9}, {}}, {"b", false, DType::int8, {1}, {1, 0}, {}}};
  bucket.error = {Code::aborted, "why", 4};
  bucket.joined = 1;
  bucket.last_joined = 3;
  CHECK_EQUAL(bucket.bytes(), 34u);
  wire::Writer second;
  encode(second, bucket);
  bytes = second.take();
  wire::Reader again(bytes);
  const Bucket same = decode_bucket(again);
  CHECK(again.finished());
  CHECK_EQUAL(same.items.size(), 2u);
  CHECK(same.items[0].unnamed && same.items[0].first_dims == bucket.items[0].first_dims);
  CHECK_EQUAL(same.error.message, "why");
  CHECK_EQUAL(same.last_joined, 3);

  for (std::size_t cut = 0; cut < bytes.size(); ++cut) {
    wire::Reader part(std::span<const std::byte>(bytes).first(cut));
    (void)decode_bucket(part);
    CHECK(!part.finished());
  }
}

TEST(invalid_bytes_are_refused) {
  std::vector<Request> wrong(5, request("t"));
  wrong[0].shape = {-1};
  wrong[1].shape = {1ll << 32, 1ll << 31};
  wrong[2].kind = static_cast<Kind>(kKinds);
  wrong[3].dtype = static_cast<DType>(kDTypes);
  wrong[4].bundle_size = 2;
  for (const Request& bad : wrong) {
    wire::Writer writer;
    encode(writer, bad);
    const std::vector<std::byte> bytes = writer.take();
    wire::Reader reader(bytes);
    (void)decode_request(reader);
    CHECK(!reader.ok());
  }
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(random() % 120);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % (round % 2 == 0 ? 256 : 4));
    wire::Reader one(bytes), two(bytes);
    (void)decode_request(one);
    (void)decode_bucket(two).bytes();
  }
}

TEST(sizes_do_not_overflow) {
  CHECK_EQUAL(request("t", {}).elements(), 1);
  CHECK_EQUAL(request("t", {1ll << 40, 0, 1ll << 40}).bytes(), 0u);
  CHECK_EQUAL(request("t", {1ll << 40, 1ll << 40}).elements(), std::numeric_limits<std::int64_t>::max());
  CHECK(validate_one(request("t", {1ll << 40, 1ll << 40}), kRanks).code == Code::invalid_argument);
  CHECK(validate_one(request("t", {3, -1}), kRanks).code == Code::invalid_argument);
}

TEST(mismatches_are_errors_on_all_and_the_next_one_works) {
  Request base = request("t", {4, 2});
  expect_mismatch(base, [](Request& r) { r.dtype = DType::int32; }, "Mismatched data types: One rank had type ");
  expect_mismatch(base, [](Request& r) { r.kind = Kind::allgather; }, "Mismatched operations: One rank did an ");
  expect_mismatch(base, [](Request& r) { r.shape = {4, 3}; }, "Mismatched ALLREDUCE tensor shapes");
  expect_mismatch(base, [](Request& r) { r.prescale = 2; }, "Mismatched prescale");
  expect_mismatch(base, [](Request& r) { r.postscale = 2; }, "Mismatched prescale");
  expect_mismatch(base, [](Request& r) { r.op = ReduceOp::max; }, "Mismatched reduction operation");
  expect_mismatch(base, [](Request& r) { r.device = 0; }, "Mismatched ALLREDUCE CPU/GPU device selection");
  expect_mismatch(base, [](Request& r) { r.bundle = "b", r.bundle_size = 1; }, "Mismatched ALLREDUCE groups");
  base = request("t", {4, 2}, Kind::broadcast);
  expect_mismatch(base, [](Request& r) { r.root = 11; }, "Mismatched BROADCAST root ranks");
  expect_mismatch(base, [](Request& r) { r.shape = {2, 4}; }, "Mismatched BROADCAST tensor shapes");
  base = request("t", {3, 2}, Kind::alltoall);
  expect_mismatch(base, [](Request& r) { r.shape = {3, 4}; }, "Mismatched ALLTOALL tensor shapes");
  base = request("t", {4, 2}, Kind::allgather);
  expect_mismatch(base, [](Request& r) { r.shape = {4}; }, "Mismatched ALLGATHER tensor shapes");
  base = request("t", {4, 2}, Kind::reducescatter);
  expect_mismatch(base, [](Request& r) { r.shape = {5, 2}; }, "Mismatched REDUCESCATTER tensor shapes");
  base = request("t", {}, Kind::add_group);
  base.splits = {2, 0, 1};
  expect_mismatch(base, [](Request& r) { r.splits = {2, 0, 2}; }, "Mismatched process sets");
  CHECK_EQUAL(validate({&base, &base, nullptr}, kRanks).message, "");

  Request ints = request("t"), floats = request("t");
  ints.dtype = DType::int32;
  CHECK_EQUAL(validate({&ints, &floats, &floats}, kRanks).message,
              "Mismatched data types: One rank had type int32, but another rank had type float32. Tensor 't': int32 on "
              "rank 10; float32 on ranks 11, 12.");
  Coordinator coordinator(kRanks, {});
  for (int m = 0; m < 3; ++m) coordinator.submit(m, m == 1 ? ints : floats, 0);
  CHECK(coordinator.take_ready()[0].error.failed());
  for (int m = 0; m < 3; ++m) coordinator.submit(m, floats, 0);
  CHECK(!coordinator.take_ready()[0].error.failed());
  CHECK(!coordinator.anything_pending());
}

TEST(one_rank_gets_validation_errors_too) {
  const auto code = [](const Request& r) { return validate_one(r, kRanks).code; };
  Request r = request("t", {6}, Kind::alltoall);
  CHECK(code(r) == Code::ok);
  for (const std::vector<std::int64_t>& splits : std::vector<std::vector<std::int64_t>>{
           {1, 2}, {1, 2, 4}, {-1, 2, 2}, {1, 1, 1, 1}, {6, 1, std::numeric_limits<std::int64_t>::max()}}) {
    r.splits = splits;
    CHECK(code(r) == Code::invalid_argument);
  }
  r.splits = {0, 2, 3};
  CHECK(code(r) == Code::ok);
  CHECK(code(request("t", {7}, Kind::alltoall)) == Code::invalid_argument);
  r = request("t", {1}, Kind::broadcast);
  r.root = 0;
  CHECK(code(r) == Code::invalid_argument);
  for (Kind kind : {Kind::allgather, Kind::alltoall, Kind::reducescatter}) {
    const Error error = validate_one(request("t", {}, kind), kRanks);
    CHECK(error.code == Code::precondition && starts(error.message, "Process-set rank zero tried to "));
  }
  r = request("t", {3}, Kind::reducescatter);
  r.op = ReduceOp::min;
  CHECK(code(r) == Code::aborted);
  CHECK(starts(validate_one(r, kRanks).message, "Reducescatter currently only supports Average and Sum"));
  r = request("t");
  r.dtype = DType::boolean;
  CHECK(code(r) == Code::ok);
  r.op = ReduceOp::average;
  CHECK(code(r) == Code::invalid_argument);
  r.op = ReduceOp::adasum;
  CHECK(code(r) == Code::invalid_argument);
  r.dtype = DType::bfloat16;
  CHECK(code(r) == Code::ok);
}

TEST(rows_and_splits_are_gathered) {
  Bucket bucket = agree({request("t", {1, 2}, Kind::allgather), request("t", {0, 2}, Kind::allgather),
                         request("t", {5, 2}, Kind::allgather)})[0];
  CHECK(bucket.items[0].first_dims == (std::vector<std::int64_t>{1, 0, 5}));
  CHECK_EQUAL(bucket.bytes(), 48u);
  std::vector<Request> requests(3, request("t", {6}, Kind::alltoall));
  requests[1].splits = {1, 0, 4};
  requests[2].shape = {0};
  bucket = agree(requests)[0];
  CHECK(bucket.items[0].splits == (std::vector<std::int64_t>{2, 2, 2, 1, 0, 4, 0, 0, 0}));
  CHECK_EQUAL(bucket.items[0].rows, 11);
}

TEST(bundles_become_ready_together) {
  Coordinator coordinator(kRanks, {});
  for (int m = 0; m < 3; ++m) {
    const std::string mine = "b" + std::to_string(m);  // each member may call the bundle as it likes
    coordinator.submit(m, request("single"), 0);
    coordinator.submit(m, bundled(m == 0 ? "x" : "y", mine, 2), 0);
    if (m == 2) CHECK_EQUAL(coordinator.take_ready().size(), 1u);  // single
    coordinator.submit(m, bundled(m == 0 ? "y" : "x", mine, 2), 0);
  }
  const std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK_EQUAL(buckets[0].items.size(), 2u);
  CHECK(!coordinator.anything_pending());
}

TEST(a_bundle_fails_as_a_whole) {
  Coordinator coordinator(kRanks, {});
  for (int m = 0; m < 3; ++m) {
    Request odd = bundled("y", "b", 2);
    if (m == 1) odd.dtype = DType::int8;
    coordinator.submit(m, bundled("x", "b", 2), 0);
    coordinator.submit(m, odd, 0);
  }
  std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK(starts(buckets[0].error.message, "Mismatched data types"));
  CHECK_EQUAL(buckets[0].items.size(), 2u);
  // A bundle on one rank only: its other tensors, which no other rank may submit, fail with it.
  coordinator.submit(0, bundled("x", "b", 2), 0);
  coordinator.submit(0, bundled("y", "b", 2), 0);
  for (int m = 1; m < 3; ++m) coordinator.submit(m, request("x"), 0);
  buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK_EQUAL(buckets[0].items.size(), 2u);
  CHECK(starts(buckets[0].error.message, "Mismatched ALLREDUCE groups"));
  // Equal sizes, other tensors in the bundle.
  for (int m = 0; m < 3; ++m) {
    coordinator.submit(m, bundled("a", "p", 2), 0);
    coordinator.submit(m, bundled("b", m == 2 ? "q" : "p", 2), 0);
    coordinator.submit(m, bundled("c", m == 2 ? "p" : "q", 2), 0);
    coordinator.submit(m, bundled("d", "q", 2), 0);
  }
  buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 2u);
  CHECK(starts(buckets[0].error.message, "Mismatched groups") && buckets[1].error.failed());
  CHECK(!coordinator.anything_pending());
}

TEST(joined_members_are_counted) {
  const auto join = [] { return request("join", {}, Kind::join); };
  Coordinator coordinator(kRanks, {});
  coordinator.submit(0, request("a"), 0);
  coordinator.submit(2, request("a"), 0);
  coordinator.submit(0, request("g", {2}, Kind::allgather), 0);
  coordinator.submit(0, request("h"), 0);
  coordinator.submit(1, join(), 0);
  coordinator.submit(1, join(), 0);
  CHECK_EQUAL(coordinator.joined(), 1);
  std::vector<Bucket> buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK_EQUAL(buckets[0].joined, 1);
  CHECK(!buckets[0].error.failed());
  coordinator.submit(2, request("g", {2}, Kind::allgather), 0);
  buckets = coordinator.take_ready();
  CHECK(buckets[0].error.code == Code::precondition);
  CHECK(starts(buckets[0].error.message, "Allgather is not supported with Join at this time"));
  coordinator.submit(2, join(), 0);
  CHECK_EQUAL(coordinator.take_ready()[0].joined, 2);  // h
  coordinator.submit(0, join(), 0);
  buckets = coordinator.take_ready();
  CHECK_EQUAL(buckets.size(), 1u);
  CHECK(buckets[0].kind == Kind::join);
  CHECK_EQUAL(buckets[0].last_joined, 10);
  CHECK_EQUAL(coordinator.joined(), 0);
  coordinator.submit(0, join(), 0);
  coordinator.forget_pending();
  CHECK_EQUAL(coordinator.joined(), 0);
}

std::vector<Bucket> singles(const std::vector<Request>& requests) {
  std::vector<Bucket> buckets;
  for (const Request& r : requests) {
    Bucket bucket;
    bucket.kind = r.kind;
    bucket.op = r.op;
    bucket.items = {{r.name, false, r.dtype, r.shape, {}, {}}};
    if (r.kind == Kind::allgather) bucket.items[0].first_dims = r.shape;
    buckets.push_back(bucket);
  }
  return buckets;
}

std::string names(const std::vector<Bucket>& buckets) {
  std::string text;
  for (const Bucket& bucket : buckets) {
    for (const Item& item : bucket.items) text += item.name;
    text += ' ';
  }
  return text;
}

TEST(fusion_keeps_order_and_threshold) {
  const auto sized = [](const char* name, std::int64_t bytes, DType dtype = DType::uint8) {
    Request made = request(name, {bytes});
    made.dtype = dtype;
    return made;
  };
  CoordinatorOptions options;
  options.fusion_threshold = 100;
  CHECK_EQUAL(names(fuse(singles({sized("a", 40), sized("b", 60), sized("c", 1)}), options)), "ab c ");
  CHECK_EQUAL(
      names(fuse(singles({sized("a", 40), sized("x", 20, DType::int8), sized("b", 30), sized("y", 10, DType::int8)}),
                 options)),
      "ab xy ");
  // Past more than the threshold nobody looks.
  CHECK_EQUAL(names(fuse(singles({sized("a", 40), sized("x", 70, DType::int8), sized("b", 30)}), options)), "a x b ");
  CHECK_EQUAL(names(fuse(singles({sized("a", 400), sized("b", 1), sized("c", 1)}), options)), "a bc ");
  Request gather = sized("g", 30), other = sized("h", 30), broadcast = sized("p", 1);
  gather.kind = other.kind = Kind::allgather;
  broadcast.kind = Kind::broadcast;
  CHECK_EQUAL(names(fuse(singles({gather, broadcast, other, broadcast}), options)), "gh p p ");
  Request average = sized("v", 1), barrier = sized("|", 0);
  average.op = ReduceOp::average;
  barrier.kind = Kind::barrier;
  CHECK_EQUAL(names(fuse(singles({sized("a", 1), average, sized("b", 1)}), options)), "ab v ");
  CHECK_EQUAL(names(fuse(singles({sized("a", 1), barrier, sized("b", 1)}), options)), "a | b ");
  options.fusion_threshold = 0;
  CHECK_EQUAL(names(fuse(singles({sized("a", 0), sized("b", 0)}), options)), "a b ");
  std::vector<Bucket> failed = singles({sized("a", 1), sized("b", 1)});
  failed[1].error = {Code::precondition, "no"};
  CHECK_EQUAL(fuse(failed, {}).size(), 2u);
}

TEST(bundles_may_stay_unfused) {
  CoordinatorOptions apart;
  apart.fuse_bundles = false;
  for (bool together : {true, false}) {
    Coordinator coordinator({0}, together ? CoordinatorOptions{} : apart);
    for (const char* name : {"a", "b"}) coordinator.submit(0, request(name), 0);
    for (const char* name : {"x", "y"}) coordinator.submit(0, bundled(name, "1", 2), 0);
    for (const char* name : {"p", "q"}) coordinator.submit(0, bundled(name, "2", 2), 0);
    coordinator.submit(0, request("c"), 0);
    CHECK_EQUAL(names(coordinator.take_ready()), together ? "abxypqc " : "ab xy pq c ");
  }
}

TEST(stalls_name_the_ranks) {
  Coordinator coordinator(kRanks, {});
  coordinator.submit(1, request("late"), 50);
  coordinator.submit(0, request("early"), 20);
  coordinator.submit(2, request("late"), 90);
  CHECK(coordinator.stalls(60, 50).empty());
  std::vector<Stall> stalls = coordinator.stalls(100, 50);
  CHECK_EQUAL(stalls.size(), 2u);
  CHECK_EQUAL(stalls[0].name, "late");
  CHECK_EQUAL(stalls[0].since_ns, 50);
  CHECK(stalls[0].present == (std::vector<int>{11, 12}));
  CHECK(stalls[0].missing == (std::vector<int>{10}));
  coordinator.forget_pending();
  CHECK(!coordinator.anything_pending());
  CHECK_THROWS(coordinator.submit(3, request("t"), 0), Failure);
}

}  // namespace
}  // namespace farandole::negotiate
