// An allreduce overlaps its messages with the local reduction before them and the distribution after them.
// Touches what world.h touches.
#include <algorithm>
#include <atomic>

#include "collective/remote.h"
#include "world.h"

using namespace farandole;
using namespace world;
using collective::Algorithm;
using collective::Reduction;

// Reduction and distribution follow these orders: every byte once, and equal chunks per round or segment.
TEST(allreduce_orders_cover_every_byte_once) {
  collective::Context context;
  for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct, Algorithm::doubling, Algorithm::tree}) {
    context.algorithm = algorithm;
    context.chunk_bytes = 192;
    for (std::size_t bytes : {1u, 64u, 65u, 1000u, 4096u, 5003u}) {
      for (int hosts = 2; hosts < 6; ++hosts) {
        for (int me = 0; me < hosts; ++me) {
          collective::Order order = collective::remote_order(context, bytes, hosts, me);
          for (const std::vector<collective::Range>& ranges : {order.in, order.out}) {
            std::vector<int> seen(bytes, 0);
            for (const collective::Range& range : ranges) {
              for (std::size_t i = 0; i < range.bytes; ++i) ++seen.at(range.begin + i);
            }
            CHECK(std::count(seen.begin(), seen.end(), 1) == static_cast<std::ptrdiff_t>(bytes));
          }
        }
      }
    }
  }
}

// A slice without a reduced part sends nothing. A reduced part is sent at once, before the rest is reduced.
TEST(allreduce_sends_what_is_reduced_at_once) {
  for (Algorithm algorithm : {Algorithm::ring, Algorithm::direct}) {
    Options options;
    options.algorithm = algorithm;
    options.chunk_bytes = 64;
    World all({0, 1}, options);
    std::atomic<int> early{0};  // members that had a final chunk while the other half of their input was missing
    all.run([&](Member& member) {
      std::vector<float> values(4096, 1.0f);
      Pieces bytes(values.data(), values.size() * 4);
      collective::Context context = member.context(Kind::allreduce);
      collective::Party party{{0, 1}, member.topology.host_of[static_cast<std::size_t>(member.topology.me)]};
      Reduction reduction;
      collective::Flow flow;
      auto feed = [&]() -> Task {
        flow.ready = bytes.bytes() / 2 + bytes.bytes() / 4;
        auto some = until([&] { return flow.finished > 0; });
        co_await some;
        ++early;
        auto both = until([&] { return early == 2; });
        co_await both;
        CHECK(flow.finished < bytes.bytes());
        flow.ready = bytes.bytes();
      };
      member.finish(side_by_side(collective::remote_allreduce(context, party, bytes, bytes, reduction, flow), feed()));
      CHECK_EQUAL(flow.finished, bytes.bytes());
      CHECK(values == std::vector<float>(4096, 2.0f));
    });
  }
}
