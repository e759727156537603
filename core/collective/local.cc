// Collectives among the members of one host, each as one exchange.
// Touches base/, link/, group/ and kernel/.
#include "collective/local.h"

#include "collective/exchange.h"
#include "collective/parts.h"
#include "collective/select.h"
#include "collective/shared.h"

namespace farandole::collective {

namespace {

using link::Rings;

Task nothing() { co_return; }

// Every member publishes its whole contribution and reduces all of them itself: one hop, for contributions that fit a
// slot.
Task allreduce_by_one_hop(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  Rings& rings = *context.rings;
  auto free = until([&rings] { return rings.claim(Rings::everyone) != nullptr; });
  co_await free;
  std::byte* mine = rings.claim(Rings::everyone);
  enter(context, "pack");
  in.copy_out(0, mine, in.bytes());
  enter(context, "send");
  const std::uint64_t expected = stamp(context, in.bytes());
  rings.publish(Rings::everyone, expected);

  enter(context, "recv");
  int next = 0;  // all before it have arrived
  auto all_here = until([&rings, &next, expected] {
    while (next < rings.members() && (next == rings.me() || rings.peek(next, true, expected) != nullptr)) ++next;
    return next == rings.members();
  });
  co_await all_here;

  enter(context, "reduce");
  // This member's own slot is a source too, because `out` may be the memory of `in`.
  std::vector<Pieces> sources(index(rings.members()));
  for (int member = 0; member < rings.members(); ++member) {
    sources[index(member)].add(member == rings.me() ? mine : rings.peek(member, true, expected), in.bytes());
  }
  reduce(reduction, sources, out);
  for (int member = 0; member < rings.members(); ++member) {
    if (member != rings.me()) rings.consume(member, true);
  }
  enter(context, "unpack");
}

// Every member reduces its own slice; contributions, sums and results are under way at the same time. In place is safe:
// a result arrives only after its owner has read this member's contribution to it.
Task allreduce_by_slices(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  Rings& rings = *context.rings;
  Slices slices(in.bytes(), rings.members());
  Exchange exchange(context, local_chunk(slices.each, rings.slot_bytes()));
  std::vector<Cursor> reads, writes;
  Cursor read(in), write(out);
  for (int member = 0; member < rings.members(); ++member) {
    reads.push_back(read);
    writes.push_back(write);
    read.skip(slices.size(member));
    write.skip(slices.size(member));
  }
  for (int shift = 1; shift < rings.members();
       ++shift) {  // each starts with another ring, so that members do not all write to one reader first
    int member = (rings.me() + shift) % rings.members();
    exchange.send(member, reads[index(member)], slices.size(member));
    exchange.receive(member, true, writes[index(member)], slices.size(member));
  }
  exchange.reduce(reads[index(rings.me())], writes[index(rings.me())], slices.size(rings.me()), reduction, true);
  Task task = exchange.run();
  co_await task;
}

Task allreduce_large(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  SharedTensors tensors;
  Task asking = find_shared(context, in, out, size_of(reduction.dtype), tensors);
  co_await asking;
  Task task = tensors.members.empty() ? allreduce_by_slices(context, in, out, reduction)
                                      : allreduce_shared(context, tensors, reduction);
  co_await task;
}

}  // namespace

Task local_allreduce(const Context& context, const Pieces& in, const Pieces& out, const Reduction& reduction) {
  if (in.empty()) return nothing();
  if (context.regions != nullptr && in.bytes() >= kAskForShared) return allreduce_large(context, in, out, reduction);
  bool fits = local_one_hop(in.bytes(), context.rings->members(), context.rings->slot_bytes());
  return fits ? allreduce_by_one_hop(context, in, out, reduction) : allreduce_by_slices(context, in, out, reduction);
}

Task local_reduce_scatter(const Context& context, const std::vector<Pieces>& in, const Pieces& out,
                          const Reduction& reduction) {
  Rings& rings = *context.rings;
  Exchange exchange(context, rings.slot_bytes());
  for (int shift = 1; shift < rings.members(); ++shift) {
    int member = (rings.me() + shift) % rings.members();
    exchange.send(member, Cursor(in[index(member)]), in[index(member)].bytes());
  }
  exchange.reduce(Cursor(in[index(rings.me())]), Cursor(out), out.bytes(), reduction, false);
  Task task = exchange.run();
  co_await task;
}

Task local_allgather(const Context& context, const Pieces& mine, const std::vector<Pieces>& out) {
  Rings& rings = *context.rings;
  Exchange exchange(context, rings.slot_bytes());
  exchange.write_past_cache();
  if (rows_vary(context.kind)) exchange.send_empty();
  const Pieces& own = out[index(rings.me())];
  if (&mine == &own) {  // a broadcast: the data is there already
    exchange.send(Rings::everyone, Cursor(mine), mine.bytes());
  } else {
    exchange.send(Rings::everyone, Cursor(mine), mine.bytes(), Cursor(own));
  }
  for (int shift = 1; shift < rings.members(); ++shift) {
    int member = (rings.me() + shift) % rings.members();
    exchange.receive(member, true, Cursor(out[index(member)]), out[index(member)].bytes());
  }
  Task task = exchange.run();
  co_await task;
}

Task local_alltoall(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out, bool large) {
  Rings& rings = *context.rings;
  if (large && context.regions != nullptr) {
    bool done = false;
    Task task = alltoall_shared(context, in, out, done);
    co_await task;
    if (done) co_return;
  }
  Exchange exchange(context, rings.slot_bytes());
  exchange.write_past_cache();
  if (rows_vary(context.kind)) exchange.send_empty();
  for (int shift = 1; shift < rings.members(); ++shift) {
    int to = (rings.me() + shift) % rings.members();
    int from = (rings.me() + rings.members() - shift) % rings.members();
    exchange.send(to, Cursor(in[index(to)]), in[index(to)].bytes());
    exchange.receive(from, false, Cursor(out[index(from)]), out[index(from)].bytes());
  }
  exchange.copy(Cursor(in[index(rings.me())]), Cursor(out[index(rings.me())]), in[index(rings.me())].bytes());
  Task task = exchange.run();
  co_await task;
}

Task local_barrier(const Context& context) {
  Rings& rings = *context.rings;
  auto free = until([&rings] { return rings.claim(Rings::everyone) != nullptr; });
  co_await free;
  enter(context, "send");
  const std::uint64_t expected = stamp(context, 0);
  rings.publish(Rings::everyone, expected);
  enter(context, "recv");
  for (int member = 0; member < rings.members(); ++member) {
    if (member == rings.me()) continue;
    auto here = until([&rings, member, expected] { return rings.peek(member, true, expected) != nullptr; });
    co_await here;
    rings.consume(member, true);
  }
}

}  // namespace farandole::collective
