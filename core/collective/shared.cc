// Collectives on shared memory: who has it where, and what is read and written there.
// Touches base/, link/, group/ and kernel/.
#include "collective/shared.h"

#include <cstring>
#include <span>

#include "collective/cursor.h"
#include "collective/local.h"
#include "collective/parts.h"
#include "kernel/copy.h"
#include "link/regions.h"

namespace farandole::collective {

namespace {

using link::Rings;
using Words = std::vector<std::uint64_t>;

constexpr std::size_t kChunk = 256 << 10;  // what is reduced stays in cache until it is copied on
constexpr int kChunksAtOnce = 4;           // some 100 microseconds
constexpr std::size_t kWordsOfPiece = 3;
constexpr std::uint32_t kAnyWords = ~0u;  // in the stamp of a slot that says itself how many words it has

// Everyone shows a few words (at most a slot's) and reads the others'.
Task show(const Context& context, const Words& mine, std::vector<Words>& all) {
  Rings& rings = *context.rings;
  const std::uint64_t any_words = stamp(context, kAnyWords);
  auto free = until([&rings] { return rings.claim(Rings::everyone) != nullptr; });
  co_await free;
  enter(context, "send");
  std::byte* slot = rings.claim(Rings::everyone);
  const std::uint64_t count = mine.size();
  std::memcpy(slot, &count, sizeof count);
  if (count > 0) std::memcpy(slot + sizeof count, mine.data(), count * sizeof count);
  rings.publish(Rings::everyone, any_words);
  enter(context, "recv");
  all.assign(index(rings.members()), mine);
  for (int member = 0; member < rings.members(); ++member) {
    if (member == rings.me()) continue;
    auto here = until([&rings, member, any_words] { return rings.peek(member, true, any_words) != nullptr; });
    co_await here;
    const std::byte* shown = rings.peek(member, true, any_words);
    // Read once: who shows it may change it.
    const std::uint64_t said = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(shown), __ATOMIC_RELAXED);
    const std::uint64_t theirs = std::min<std::uint64_t>(said, rings.slot_bytes() / sizeof said - 1);
    Words& words = all[index(member)];
    words.resize(theirs);
    if (theirs > 0) std::memcpy(words.data(), shown + sizeof theirs, theirs * sizeof theirs);
    rings.consume(member, true);
  }
}

bool in_place(const Pieces& in, const Pieces& out) {
  return std::equal(in.list().begin(), in.list().end(), out.list().begin(), out.list().end(),
                    [](const Piece& a, const Piece& b) { return a.data == b.data && a.bytes == b.bytes; });
}

// Region, offset and bytes of each piece; nothing when one of them is in no region.
Words places_of(const Context& context, const std::vector<Piece>& pieces, link::Use use) {
  Words words;
  if ((kWordsOfPiece * pieces.size() + 1) * sizeof(std::uint64_t) > context.rings->slot_bytes()) return {};
  for (const Piece& piece : pieces) {
    const link::Place place = piece.bytes == 0 ? link::Place() : context.regions->find(piece.data, piece.bytes, use);
    if (place.region == 0 && piece.bytes > 0) return {};
    words.insert(words.end(), {place.region, place.offset, piece.bytes});
  }
  return words;
}

// What places must be like to be used.
struct Wanted {
  link::Use use;
  std::size_t bytes;    // of all of them together
  std::size_t element;  // no place begins or ends within one
};

// The memory at these places of a member's; empty when some of it is not here, or it is not as wanted.
Pieces reach(const Context& context, int local, std::span<const std::uint64_t> words, const Wanted& wanted,
             Held& held) {
  const Topology& topology = *context.topology;
  const int rank = topology.ranks[index(topology.my_host()[index(local)])];
  Pieces found;
  for (std::size_t i = 0; i + kWordsOfPiece <= words.size(); i += kWordsOfPiece) {
    if (words[i + 1] % wanted.element != 0 || words[i + 2] % wanted.element != 0) return {};
    auto region = context.regions->with(rank, {words[i], words[i + 1]}, words[i + 2], wanted.use);
    if (region == nullptr) return {};
    found.add(region->data() + words[i + 1], words[i + 2]);
    held.push_back(std::move(region));
  }
  return found.bytes() == wanted.bytes ? found : Pieces();
}

bool any_empty(const std::vector<Words>& all) {
  return std::any_of(all.begin(), all.end(), [](const Words& words) { return words.empty(); });
}

}  // namespace

Task find_shared(const Context& context, const Pieces& in, const Pieces& out, std::size_t element,
                 SharedTensors& tensors) {
  std::vector<Words> all;
  Words mine = in_place(in, out) ? places_of(context, in.list(), link::Use::tensors) : Words();
  Task places = show(context, mine, all);
  co_await places;
  if (any_empty(all)) co_return;
  bool complete = true;
  const Wanted wanted{link::Use::tensors, in.bytes(), element};
  for (int local = 0; local < context.rings->members(); ++local) {
    const bool is_me = local == context.rings->me();
    tensors.members.push_back(is_me ? in : reach(context, local, all[index(local)], wanted, tensors.held));
    complete = complete && !tensors.members.back().empty();
  }
  // A file may still be under way to one of us: then nobody uses any.
  Words ready(complete ? 1 : 0, 1);
  Task agreement = show(context, ready, all);
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
    if (++steps % kChunksAtOnce == 0) co_await pause;
  }
  Task everyone_done = local_barrier(context);
  co_await everyone_done;
  if (context.in_place != nullptr) *context.in_place += static_cast<std::int64_t>(memory[me].bytes());
}

namespace {

// In steps, so that others may do something in between.
Task move(const Context& context, const Pieces& from, const Pieces& to, int& steps) {
  Cursor read(from), write(to);
  Pause pause;
  for (std::size_t left = from.bytes(); left > 0;) {
    enter(context, "pack");
    const std::size_t bytes = std::min({kChunk, left, read.run()});
    write.write(read.data(), bytes, kernel::copy_past_cache);
    read.skip(bytes);
    left -= bytes;
    if (++steps % kChunksAtOnce == 0) co_await pause;
  }
}

}  // namespace

Task alltoall_shared(const Context& context, const std::vector<Pieces>& in, const std::vector<Pieces>& out,
                     bool& done) {
  const std::size_t me = index(context.rings->me()), members = in.size();
  std::vector<Piece> mine;
  for (const Pieces& block : out) mine.push_back(block.empty() ? Piece{nullptr, 0} : block.list().front());
  const Words shown = places_of(context, mine, link::Use::results);
  std::vector<Words> all;
  Task places = show(context, shown, all);
  co_await places;
  if (any_empty(all)) co_return;
  Held held;
  std::vector<Pieces> to(members);
  bool complete = true;
  for (std::size_t member = 0; member < members; ++member) {
    if (member == me) continue;
    auto place = std::span(all[member]).subspan(std::min(me * kWordsOfPiece, all[member].size()));
    place = place.first(std::min(place.size(), kWordsOfPiece));
    complete = complete && place.size() == kWordsOfPiece && place.back() == in[member].bytes();
    if (in[member].empty()) continue;
    to[member] = reach(context, static_cast<int>(member), place, {link::Use::results, in[member].bytes(), 1}, held);
    complete = complete && !to[member].empty();
  }
  const Words ready(complete ? 1 : 0, 1);
  Task agreement = show(context, ready, all);
  co_await agreement;
  if (any_empty(all)) co_return;
  to[me] = out[me];
  int steps = 0;
  for (std::size_t shift = 1; shift <= members; ++shift) {  // each begins with another member, and ends with itself
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
