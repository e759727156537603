// Collectives on shared memory: exchanging the addresses, then reading and writing there.
// Touches base/, link/, group/ and kernel/.
#include "collective/shared.h"

#include <cstring>
#include <span>

#include "collective/cursor.h"
#include "collective/local.h"
#include "collective/numbers.h"
#include "collective/parts.h"
#include "kernel/copy.h"
#include "link/regions.h"

namespace farandole::collective {

namespace {

constexpr std::size_t kChunk = 256 << 10;  // reduced bytes stay in cache until they are copied on
constexpr int kChunksPerStep = 4;          // about 100 microseconds
constexpr std::size_t kNumbersPerPiece = 3;

bool in_place(const Pieces& in, const Pieces& out) {
  return std::equal(in.list().begin(), in.list().end(), out.list().begin(), out.list().end(),
                    [](const Piece& a, const Piece& b) { return a.data == b.data && a.bytes == b.bytes; });
}

// Region, offset and bytes of each piece; empty when one of them is in no region.
Numbers addresses_of(const Context& context, std::span<const Piece> pieces, link::RegionUse use) {
  Numbers numbers;
  if ((kNumbersPerPiece * pieces.size() + 1) * sizeof(std::uint64_t) > context.rings->slot_bytes()) return {};
  for (const Piece& piece : pieces) {
    const link::RegionAddress address =
        piece.bytes == 0 ? link::RegionAddress() : context.regions->find(piece.data, piece.bytes, use);
    if (address.region == 0 && piece.bytes > 0) return {};
    numbers.insert(numbers.end(), {address.region, address.offset, piece.bytes});
  }
  return numbers;
}

// The conditions for another member's addresses.
struct Conditions {
  link::RegionUse use;
  std::size_t bytes;    // of all pieces together
  std::size_t element;  // no piece begins or ends inside an element
};

// The memory at these addresses of a member; empty when a part of it has not arrived here or does not meet the
// conditions.
Pieces find_memory(const Context& context, int local, std::span<const std::uint64_t> numbers,
                   const Conditions& conditions, Held& held) {
  const Topology& topology = *context.topology;
  const int rank = topology.ranks[index(topology.my_host()[index(local)])];
  Pieces found;
  for (std::size_t i = 0; i + kNumbersPerPiece <= numbers.size(); i += kNumbersPerPiece) {
    if (numbers[i + 1] % conditions.element != 0 || numbers[i + 2] % conditions.element != 0) return {};
    auto region = context.regions->find_peer(rank, {numbers[i], numbers[i + 1]}, numbers[i + 2], conditions.use);
    if (region == nullptr) return {};
    found.add(region->data() + numbers[i + 1], numbers[i + 2]);
    held.push_back(std::move(region));
  }
  return found.bytes() == conditions.bytes ? found : Pieces();
}

bool any_empty(const std::vector<Numbers>& all) {
  return std::any_of(all.begin(), all.end(), [](const Numbers& numbers) { return numbers.empty(); });
}

}  // namespace

Task find_shared(const Context& context, const Pieces& in, const Pieces& out, std::size_t element,
                 SharedTensors& tensors) {
  std::vector<Numbers> all;
  Numbers mine = in_place(in, out) ? addresses_of(context, in.list(), link::RegionUse::tensors) : Numbers();
  Task addresses = publish_numbers(context, mine, all);
  co_await addresses;
  if (any_empty(all)) co_return;
  bool complete = true;
  const Conditions conditions{link::RegionUse::tensors, in.bytes(), element};
  for (int local = 0; local < context.rings->members(); ++local) {
    const bool is_me = local == context.rings->me();
    tensors.members.push_back(is_me ? in : find_memory(context, local, all[index(local)], conditions, tensors.held));
    complete = complete && !tensors.members.back().empty();
  }
  // A file may still be under way to one member; then no member uses the shared memory.
  Numbers ready(complete ? 1 : 0, 1);
  Task agreement = publish_numbers(context, ready, all);
  co_await agreement;
  if (any_empty(all)) tensors = SharedTensors();
}

Task allreduce_shared(const Context& context, const SharedTensors& tensors, const Reduction& reduction) {
  const std::vector<Pieces>& memory = tensors.members;
  const std::size_t me = index(context.rings->me()), members = memory.size(), next = (me + 1) % members;
  const Slices slices(memory[me].bytes(), context.rings->members());
  const std::size_t end = slices.begin(context.rings->me()) + slices.size(context.rings->me());
  std::vector<Pieces> parts(members);
  Pause pause;
  int steps = 0;
  for (std::size_t at = slices.begin(context.rings->me()); at < end; at += kChunk) {
    enter(context, "reduce");
    for (std::size_t member = 0; member < members; ++member) {
      parts[member] = memory[member].slice(at, std::min(kChunk, end - at));
    }
    reduce(reduction, parts, parts[me], &parts[next]);
    for (std::size_t member = 0; member < members; ++member) {
      if (member != me && member != next) copy(parts[me], parts[member]);
    }
    if (++steps % kChunksPerStep == 0) co_await pause;
  }
  Task everyone_done = local_barrier(context);
  co_await everyone_done;
  if (context.in_place != nullptr) *context.in_place += static_cast<std::int64_t>(memory[me].bytes());
}

namespace {

// In steps, so that other collectives can run in between.
Task move(const Context& context, const Pieces& from, const Pieces& to, int& steps) {
  Cursor read(from), write(to);
  Pause pause;
  for (std::size_t left = from.bytes(); left > 0;) {
    enter(context, "pack");
    const std::size_t bytes = std::min({kChunk, left, read.run()});
    write.write(read.data(), bytes, kernel::copy_past_cache);
    read.skip(bytes);
    left -= bytes;
    if (++steps % kChunksPerStep == 0) co_await pause;
  }
}

}  // namespace

Task alltoall_shared(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out,
                     bool& done) {
  const std::size_t me = index(context.rings->me()), members = in.size();
  std::vector<Piece> mine;
  for (const Pieces& block : out) mine.push_back(block.empty() ? Piece{nullptr, 0} : block.list().front());
  const Numbers published = addresses_of(context, mine, link::RegionUse::results);
  std::vector<Numbers> all;
  Task addresses = publish_numbers(context, published, all);
  co_await addresses;
  if (any_empty(all)) co_return;
  Held held;
  std::vector<Pieces> to(members);
  bool complete = true;
  for (std::size_t member = 0; member < members; ++member) {
    if (member == me) continue;
    auto address = std::span(all[member]).subspan(std::min(me * kNumbersPerPiece, all[member].size()));
    address = address.first(std::min(address.size(), kNumbersPerPiece));
    complete = complete && address.size() == kNumbersPerPiece && address.back() == in[member].bytes();
    if (in[member].empty()) continue;
    to[member] = find_memory(context, static_cast<int>(member), address,
                             {link::RegionUse::results, in[member].bytes(), 1}, held);
    complete = complete && !to[member].empty();
  }
  const Numbers ready(complete ? 1 : 0, 1);
  Task agreement = publish_numbers(context, ready, all);
  co_await agreement;
  if (any_empty(all)) co_return;
  to[me] = out[me];
  int steps = 0;
  for (std::size_t shift = 1; shift <= members; ++shift) {  // each starts with another member, and ends with itself
    const std::size_t member = (me + shift) % members;
    Task task = move(context, in[member], to[member], steps);
    co_await task;
  }
  Task everyone_done = local_barrier(context);
  co_await everyone_done;
  done = true;
  if (context.in_place == nullptr) co_return;
  for (const Pieces& block : out) *context.in_place += static_cast<std::int64_t>(block.bytes());
}

}  // namespace farandole::collective
