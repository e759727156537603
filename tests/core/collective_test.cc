// Every collective on many topologies, compared bit for bit with plain loops in the order that docs/algorithms.md
// gives. Touches what world.h touches, and kernel/.
#include "collective/collective.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "collective/select.h"
#include "kernel/kernel.h"
#include "world.h"

using namespace farandole;
using namespace world;
using collective::Algorithm;
using collective::Reduction;

namespace {

using Bytes = std::vector<std::byte>;
std::size_t at(int value) { return static_cast<std::size_t>(value); }

const std::vector<std::vector<int>> kOneHost = {{0},          {0, 0},          {0, 0, 0},
                                                {0, 0, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0, 0, 0}};
const std::vector<std::vector<int>> kManyHosts = {
    {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5, 6, 7}};
const std::vector<std::vector<int>> kMixed = {
    {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1, 1}, {1, 0, 0}, {0, 0, 1, 2, 2, 2}};
const std::size_t kElements[] = {0, 1, 3, 17, 500, 1024, 5003, 12007};

std::vector<std::vector<int>> everywhere() {
  std::vector<std::vector<int>> all = kOneHost;
  all.insert(all.end(), kManyHosts.begin(), kManyHosts.end());
  all.insert(all.end(), kMixed.begin(), kMixed.end());
  return all;
}

// What member `rank` contributes: floats of different magnitudes, so that the order of additions shows in the bits.
Bytes contribution(DType dtype, std::size_t elements, int rank, unsigned seed) {
  Bytes result(elements * size_of(dtype));
  std::uint64_t state = seed * 100 + static_cast<unsigned>(rank) + 1;  // cheap to seed: every member makes them all
  for (std::size_t i = 0; i < elements; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    auto bits = static_cast<unsigned>(state >> 32);
    float value =
        std::ldexp(static_cast<float>(static_cast<int>(bits % 4001) - 2000), static_cast<int>(bits >> 28) - 11);
    if (dtype == DType::float32) {
      std::memcpy(result.data() + 4 * i, &value, 4);
    } else if (dtype == DType::bfloat16) {
      std::memcpy(result.data() + 2 * i, reinterpret_cast<char*>(&value) + 2, 2);  // little-endian: the upper half
    } else {
      std::uint64_t wide = bits * 0x9e3779b97f4a7c15u;
      std::memcpy(result.data() + size_of(dtype) * i, &wide, size_of(dtype));  // integers
    }
  }
  return result;
}

Bytes reduced(const std::vector<Bytes>& sources, const Reduction& reduction) {
  Bytes out(sources[0].size());
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  kernel::Reduce work;
  work.dtype = reduction.dtype;
  work.op = reduction.op;
  work.sources = pointers.data();
  work.count = static_cast<int>(pointers.size());
  work.out = out.data();
  work.elements = out.size() / size_of(reduction.dtype);
  work.prescale = reduction.prescale;
  work.postscale = reduction.postscale;
  work.divisor = reduction.divisor;
  if (work.elements > 0) kernel::reduce(work);
  return out;
}

// Sums of hosts, then the sum over hosts; plain loops for float sums, the kernels (tested on their own) for the rest.
Bytes expected(const Topology& topology, const std::vector<Bytes>& inputs, const Reduction& reduction) {
  if (topology.host_count() == 1) return reduced(inputs, reduction);
  Reduction first = reduction, last = reduction;
  first.postscale = 1;
  first.divisor = 1;
  last.prescale = 1;
  std::vector<Bytes> partials;
  for (const std::vector<int>& host : topology.hosts) {
    std::vector<Bytes> sources;
    for (int member : host) sources.push_back(inputs[at(member)]);
    partials.push_back(reduced(sources, first));
  }
  return reduced(partials, last);
}

Bytes plain_float_sum(const Topology& topology, const std::vector<Bytes>& inputs) {
  Bytes out(inputs[0].size());
  for (std::size_t i = 0; i < out.size() / 4; ++i) {
    float total = 0;
    for (std::size_t host = 0; host < topology.hosts.size(); ++host) {
      float sum = 0;
      for (std::size_t local = 0; local < topology.hosts[host].size(); ++local) {
        float value = 0;
        std::memcpy(&value, inputs[at(topology.hosts[host][local])].data() + 4 * i, 4);
        sum = local == 0 ? value : sum + value;
      }
      total = host == 0 ? sum : total + sum;
    }
    std::memcpy(out.data() + 4 * i, &total, 4);
  }
  return out;
}

std::vector<Bytes> contributions(const Topology& topology, DType dtype, std::size_t elements, unsigned seed) {
  std::vector<Bytes> inputs;
  for (int member = 0; member < topology.size(); ++member) {
    inputs.push_back(contribution(dtype, elements, member, seed));
  }
  return inputs;
}

void check_allreduce(Member& member, std::size_t elements, const Reduction& reduction, bool in_place, bool exact) {
  auto seed = static_cast<unsigned>(member.sequence);
  std::vector<Bytes> inputs = contributions(member.topology, reduction.dtype, elements, seed);
  const Bytes& mine = inputs[at(member.topology.me)];
  Buffer in(mine.size(), size_of(reduction.dtype), member.own), out(mine.size(), size_of(reduction.dtype), member.own);
  in.fill(mine);
  member.finish(collective::allreduce(member.context(Kind::allreduce), in.pieces(),
                                      in_place ? in.pieces() : out.pieces(), reduction));
  const Bytes result = in_place ? in.contents() : out.contents();
  CHECK(in.gaps_untouched());
  CHECK(out.gaps_untouched());
  if (!in_place) CHECK(in.contents() == mine);
  if (exact) {
    CHECK(result == expected(member.topology, inputs, reduction));
    if (reduction.dtype == DType::float32 && reduction.op == ReduceOp::sum && reduction.prescale == 1 &&
        reduction.postscale == 1 && reduction.divisor == 1) {
      CHECK(result == plain_float_sum(member.topology, inputs));
    }
    return;
  }
  Bytes right = expected(member.topology, inputs, reduction);
  for (std::size_t i = 0; i < elements; ++i) {  // a ring adds in another order
    float a = 0, b = 0;
    std::memcpy(&a, result.data() + 4 * i, 4);
    std::memcpy(&b, right.data() + 4 * i, 4);
    CHECK(std::abs(a - b) <= 0.2f);
  }
}

Reduction summing(DType dtype = DType::float32) {
  Reduction reduction;
  reduction.dtype = dtype;
  return reduction;
}

// Runs `body` on every member of each world of everywhere().
template <class Body>
void on_every_member(const Body& body) {
  for (const std::vector<int>& hosts : everywhere()) {
    World all(hosts, {});
    all.run(body);
  }
}

}  // namespace

TEST(allreduce_on_every_topology) {
  on_every_member([](Member& member) {
    for (std::size_t elements : kElements) {
      check_allreduce(member, elements, summing(), false, true);
      check_allreduce(member, elements, summing(), true, true);
    }
  });
}

TEST(allreduce_types_and_scales) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 2}, {0, 0, 1}, {0, 0, 1, 1}}) {
    World all(hosts, {});
    all.run([&](Member& member) {
      for (DType dtype : {DType::bfloat16, DType::int8, DType::int64, DType::float32}) {
        Reduction reduction = summing(dtype);
        check_allreduce(member, 3001, reduction, true, true);
        reduction.prescale = 0.3;
        reduction.postscale = 1.7;
        check_allreduce(member, 3001, reduction, false, true);
        check_allreduce(member, 301, reduction, true, true);
        reduction = summing(dtype);
        reduction.divisor = member.topology.size();
        check_allreduce(member, 3001, reduction, false, true);
        for (ReduceOp op : {ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
          reduction = summing(dtype);
          reduction.op = op;
          check_allreduce(member, 3001, reduction, op == ReduceOp::min, true);
        }
      }
    });
  }
}

TEST(allreduce_algorithms) {
  for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct, Algorithm::doubling, Algorithm::tree}) {
    for (std::vector<std::vector<int>> topologies : {kManyHosts, kMixed}) {
      for (const std::vector<int>& hosts : topologies) {
        Options options;
        options.algorithm = algorithm;
        World all(hosts, options);
        all.run([&](Member& member) {
          for (std::size_t elements : kElements) {
            if (elements > 6000 && hosts.size() > 5) continue;
            check_allreduce(member, elements, summing(), false, algorithm != Algorithm::ring);
            check_allreduce(member, elements, summing(), true, algorithm != Algorithm::ring);
            Reduction average = summing();
            average.prescale = 0.7;
            average.divisor = member.topology.size();
            check_allreduce(member, elements, average, false, algorithm != Algorithm::ring);
            check_allreduce(member, elements, summing(DType::int64), true, true);  // integers: even in a ring
          }
        });
      }
    }
  }
}

TEST(allreduce_chunks_in_flight) {
  Options options;
  options.slot_bytes = 64;
  options.slots = 1;
  options.chunk_bytes = 64;
  for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct}) {
    options.algorithm = algorithm;
    World all({0, 0, 1, 1, 2, 2}, options);
    all.run([&](Member& member) {
      for (std::size_t elements : {999u, 4000u}) check_allreduce(member, elements, summing(DType::int64), true, true);
    });
  }
}

TEST(allreduce_bytes_on_the_wire) {
  constexpr std::size_t kBytes = 64 * 8 * 9 * 5 * 7;  // divides evenly for all sizes below
  for (int size : {2, 3, 4, 5, 7, 8}) {
    std::vector<int> hosts;
    for (int host = 0; host < size; ++host) hosts.push_back(host);
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct, Algorithm::doubling, Algorithm::tree}) {
      Options options;
      options.algorithm = algorithm;
      World all(hosts, options);
      all.run([&](Member& member) { check_allreduce(member, kBytes / 8, summing(DType::int64), true, true); });
      std::uint64_t total = 0;
      auto n = static_cast<std::uint64_t>(size);
      for (int rank = 0; rank < size; ++rank) {
        std::uint64_t sent = all[rank].messenger->traffic().sent;
        std::uint64_t received = all[rank].messenger->traffic().received;
        total += sent;
        if (algorithm == Algorithm::ring || algorithm == Algorithm::direct) {
          CHECK_EQUAL(sent, 2 * (n - 1) * kBytes / n);
          CHECK_EQUAL(received, sent);
        } else if (algorithm == Algorithm::doubling) {
          CHECK_EQUAL(sent, (n - 1) * kBytes);
        }
      }
      if (algorithm == Algorithm::tree) CHECK(total >= 2 * (n - 1) * kBytes);
    }
  }
}

TEST(allgather_on_every_topology) {
  on_every_member([](Member& member) {
    for (unsigned round = 0; round < 6; ++round) {
      std::vector<std::size_t> sizes;
      for (int m = 0; m < member.topology.size(); ++m) {
        sizes.push_back(member.shared() % 3 == 0 ? 0 : member.shared() % (round % 2 == 0 ? 50 : 20000));
      }
      std::vector<std::unique_ptr<Buffer>> out;
      std::vector<Pieces> targets;
      for (std::size_t bytes : sizes) {
        out.push_back(std::make_unique<Buffer>(bytes, 1, member.own));
        targets.push_back(out.back()->pieces());
      }
      Bytes mine = contribution(DType::uint8, sizes[at(member.topology.me)], member.rank, round);
      Pieces in(mine.data(), mine.size());
      if (round >= 4) {  // in place: the block lies where it belongs already
        out[at(member.topology.me)]->fill(mine);
        in = targets[at(member.topology.me)];
      }
      member.finish(collective::allgather(member.context(Kind::allgather), in, targets));
      for (int m = 0; m < member.topology.size(); ++m) {
        CHECK(out[at(m)]->contents() == contribution(DType::uint8, sizes[at(m)], m, round));
        CHECK(out[at(m)]->gaps_untouched());
      }
    }
  });
}

TEST(broadcast_on_every_topology) {
  on_every_member([](Member& member) {
    for (int root = 0; root < member.topology.size(); ++root) {
      for (std::size_t bytes : {0u, 1u, 77u, 4096u, 50001u}) {
        Buffer data(bytes, 1, member.own);
        Bytes right = contribution(DType::uint8, bytes, root, 5);
        if (member.topology.me == root) data.fill(right);
        member.finish(collective::broadcast(member.context(Kind::broadcast), data.pieces(), root));
        CHECK(data.contents() == right);
        CHECK(data.gaps_untouched());
      }
    }
  });
}

TEST(alltoall_on_every_topology) {
  on_every_member([](Member& member) {
    int size = member.topology.size();
    for (unsigned round = 0; round < 4; ++round) {
      std::vector<std::vector<std::size_t>> sizes(at(size));
      for (auto& row : sizes) {
        for (int m = 0; m < size; ++m) row.push_back(member.shared() % 4 == 0 ? 0 : member.shared() % 9000);
      }
      std::vector<Bytes> inputs;
      std::vector<std::unique_ptr<Buffer>> outputs;
      std::vector<Pieces> in, out;
      for (int m = 0; m < size; ++m) {
        inputs.push_back(contribution(DType::uint8, sizes[at(member.rank)][at(m)], member.rank, round + 10 * at(m)));
        outputs.push_back(std::make_unique<Buffer>(sizes[at(m)][at(member.rank)], 1, member.own));
        out.push_back(outputs.back()->pieces());
      }
      for (const Bytes& input : inputs) in.emplace_back(input.data(), input.size());
      member.finish(collective::alltoall(member.context(Kind::alltoall), in, out, false));
      for (int m = 0; m < size; ++m) {
        CHECK(outputs[at(m)]->contents() ==
              contribution(DType::uint8, sizes[at(m)][at(member.rank)], m, round + 10 * at(member.rank)));
      }
    }
  });
}

TEST(reducescatter_equals_allreduce) {
  on_every_member([](Member& member) {
    int size = member.topology.size();
    for (unsigned round = 0; round < 4; ++round) {
      Reduction reduction = summing(round % 2 == 0 ? DType::float32 : DType::bfloat16);
      if (round == 2) reduction.prescale = 0.37;
      if (round == 3) reduction.divisor = size;
      std::size_t element = size_of(reduction.dtype);
      std::vector<std::size_t> sizes;
      std::size_t total = 0;
      for (int m = 0; m < size; ++m) {
        sizes.push_back(member.shared() % 4 == 0 ? 0 : member.shared() % 5000 * element);
        total += sizes.back();
      }
      std::vector<Bytes> inputs = contributions(member.topology, reduction.dtype, total / element, round);
      Bytes right = expected(member.topology, inputs, reduction);
      std::vector<Pieces> in;
      std::size_t offset = 0, begin = 0;
      for (int m = 0; m < size; ++m) {
        in.emplace_back(inputs[at(member.topology.me)].data() + offset, sizes[at(m)]);
        if (m == member.topology.me) begin = offset;
        offset += sizes[at(m)];
      }
      Buffer out(sizes[at(member.topology.me)], element, member.own);
      member.finish(collective::reducescatter(member.context(Kind::reducescatter), in, out.pieces(), reduction));
      right = Bytes(right.begin() + static_cast<long>(begin),
                    right.begin() + static_cast<long>(begin + sizes[at(member.topology.me)]));
      CHECK(out.contents() == right);
      CHECK(out.gaps_untouched());
    }
  });
}

TEST(barrier_waits_for_all) {
  for (const std::vector<int>& hosts : everywhere()) {
    World all(hosts, {});
    std::atomic<int> entered{0};
    all.run([&](Member& member) {
      for (int round = 1; round <= 5; ++round) {
        if (member.rank == round % member.topology.size()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: who does not wait for it continues now
        }
        ++entered;
        member.finish(collective::barrier(member.context(Kind::barrier)));
        CHECK(entered.load() >= round * member.topology.size());
      }
    });
  }
}

// Different collectives one after another, without a barrier: some members are ahead of others on the same rings.
TEST(collectives_run_one_after_another) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 0, 0, 0}, {0, 0, 1, 1, 1}, {0, 1, 2}}) {
    World all(hosts, {});
    all.run([&](Member& member) {
      for (int round = 0; round < 60; ++round) {
        int root = static_cast<int>(member.shared() % at(member.topology.size()));
        std::size_t elements = member.shared() % 3000;
        switch (member.shared() % 3) {
          case 0:
            check_allreduce(member, elements, summing(), true, true);
            break;
          case 1:
            member.finish(collective::barrier(member.context(Kind::barrier)));
            break;
          default: {
            Bytes data = contribution(DType::uint8, elements, member.rank, 3);
            member.finish(collective::broadcast(member.context(Kind::broadcast), Pieces(data.data(), elements), root));
            CHECK(data == contribution(DType::uint8, elements, root, 3));
          }
        }
      }
    });
  }
}

// Destroyed at any point, a task takes its messages back: nobody reads or writes its memory afterwards.
TEST(a_collective_is_cancelled_in_the_middle) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1, 2}, {0, 0, 1, 1}}) {
    for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct, Algorithm::doubling, Algorithm::tree}) {
      for (int kind = 0; kind < 5; ++kind) {
        Options options;
        options.algorithm = algorithm;
        World all(hosts, options);
        all.run([&](Member& member) {
          int size = member.topology.size();
          Bytes memory(at(size) * 8000), target(at(size) * 8000);
          std::vector<Pieces> in, out;
          for (int m = 0; m < size; ++m) {
            in.emplace_back(memory.data() + 8000 * m, 8000);
            out.emplace_back(target.data() + 8000 * m, 8000);
          }
          Pieces whole(memory.data(), memory.size());
          auto context = member.context(Kind::allreduce);
          Task task;
          if (kind == 0) task = collective::allreduce(context, whole, whole, summing());
          if (kind == 1) task = collective::allgather(context, in[0], out);
          if (kind == 2) task = collective::broadcast(context, whole, 0);
          if (kind == 3) task = collective::reducescatter(context, in, out[at(member.topology.me)], summing());
          if (kind == 4) task = collective::adasum(context, in, in, summing());
          member.abandon(std::move(task), static_cast<int>(member.own() % 60));
          memory = target = Bytes();
          member.abandon(Task(), 20);
        });
      }
    }
  }
}

TEST(selector_chooses_by_bytes_and_hosts) {
  using collective::choose;
  CHECK(choose(Algorithm::tree, 1 << 20, 2).algorithm == Algorithm::tree);
  CHECK(choose(Algorithm::automatic, 100, 2).algorithm == Algorithm::doubling);
  CHECK(choose(Algorithm::automatic, 100, 100).algorithm == Algorithm::doubling);
  CHECK(choose(Algorithm::automatic, 64 << 20, 2).algorithm == Algorithm::direct);
  CHECK(choose(Algorithm::automatic, 64 << 20, 100).algorithm == Algorithm::ring);
  CHECK(choose(Algorithm::automatic, 100 << 10, 100).algorithm == Algorithm::tree);
  CHECK(choose(Algorithm::automatic, 0, 2).reason != nullptr);
  CHECK(collective::local_one_hop(1024, 2, 64 << 10));
  CHECK(!collective::local_one_hop(1 << 20, 2, 64 << 10));
  CHECK(!collective::local_one_hop(1024, 2, 512));
  for (std::size_t slice = 0; slice < 400000; slice += 997) {
    std::size_t chunk = collective::local_chunk(slice, 64 << 10);
    CHECK(chunk > 0 && chunk % 64 == 0 && chunk <= 64 << 10);
    CHECK(collective::local_chunk(slice, 64) == 64);
  }
}
