// Writing the entries of the recorder. See recorder.h.
// Touches base/ and os/.
#include "trace/recorder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "os/clock.h"

namespace farandole {

Recorder::Recorder(os::Descriptor file, int rank, int size, std::uint32_t generation) : generation_(generation) {
  if (!file) return;
  memory_ = os::SharedMemory::open_writable(std::move(file), kBytes);
  memory_.close_file();
  Page* page = this->page();
  const std::int64_t now = os::now_ns();
  for (std::uint64_t i = 0; i < kEntries; ++i) {  // no engine will end what an earlier one left
    Entry* entry = this->entry(i);
    if (const std::uint64_t number = entry->number.load(std::memory_order_relaxed); number != 0)
      done(number, Code::shut_down, 0, now);
  }
  page->layout = kLayout;
  page->entries = kEntries;
  page->epoch_offset_ns = os::epoch_us() * 1000 - now;
  page->rank = rank;
  page->size = size;
  page->generation = generation;
  page->group_words = 0;
}

Recorder::Entry* Recorder::find(std::uint64_t number) const {
  if (number == 0) return nullptr;
  Entry* entry = this->entry(number);
  return entry->number.load(std::memory_order_relaxed) == number ? entry : nullptr;
}

std::uint64_t Recorder::submitted(const Request& request, std::int64_t now) {
  if (!memory_) return 0;
  const std::uint64_t number = page()->submitted.load(std::memory_order_relaxed) + 1;
  Entry* entry = this->entry(number);
  entry->number.store(0, std::memory_order_release);
  entry->submitted_ns = now;
  entry->ready_ns.store(0, std::memory_order_relaxed);
  entry->begun_ns.store(0, std::memory_order_relaxed);
  entry->done_ns.store(0, std::memory_order_relaxed);
  entry->bytes = request.bytes;
  entry->sequence.store(0, std::memory_order_relaxed);
  entry->group = request.group;
  entry->generation = generation_;
  entry->peer = request.peer;
  entry->code.store(0, std::memory_order_relaxed);
  entry->kind = static_cast<std::uint8_t>(request.kind);
  entry->dtype = static_cast<std::uint8_t>(request.dtype);
  entry->op = static_cast<std::uint8_t>(request.op);
  entry->algorithm.store(0, std::memory_order_relaxed);
  const std::vector<std::int64_t>& shape = *request.shape;
  entry->dimensions = static_cast<std::uint8_t>(std::min<std::size_t>(shape.size(), 255));
  std::copy_n(shape.begin(), std::min(shape.size(), entry->shape.size()), entry->shape.begin());
  const std::size_t letters = std::min(request.name.size(), entry->name.size() - 1);
  std::memcpy(entry->name.data(), request.name.data(), letters);
  entry->name[letters] = 0;
  entry->number.store(number, std::memory_order_release);
  page()->submitted.store(number, std::memory_order_release);
  // The next operation then finds its entry in the cache; the ring is larger than the first level.
  const auto* next = reinterpret_cast<const std::byte*>(this->entry(number + 1));
  for (std::size_t line = 0; line < 3 * 64; line += 64) __builtin_prefetch(next + line, 1);
  return number;
}

void Recorder::ready(std::uint64_t number, std::uint64_t sequence, std::int64_t now) {
  Entry* entry = find(number);
  if (entry == nullptr) return;
  entry->sequence.store(sequence, std::memory_order_relaxed);
  entry->ready_ns.store(now, std::memory_order_relaxed);
}

void Recorder::begun(std::uint64_t number, std::int64_t now) {
  if (Entry* entry = find(number)) entry->begun_ns.store(now, std::memory_order_relaxed);
}

void Recorder::done(std::uint64_t number, Code code, std::uint8_t algorithm, std::int64_t now) {
  Entry* entry = find(number);
  if (entry == nullptr || entry->done_ns.load(std::memory_order_relaxed) != 0) return;
  entry->code.store(static_cast<std::int32_t>(code), std::memory_order_relaxed);
  entry->algorithm.store(algorithm, std::memory_order_relaxed);
  entry->done_ns.store(now, std::memory_order_release);
  page()->finished.store(page()->finished.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

// When there is no room for all of them the reader does not know the ranks of the last groups.
void Recorder::group(std::uint32_t id, const std::vector<int>& ranks) {
  if (!memory_) return;
  Page* page = this->page();
  const std::size_t used = page->group_words;
  if (used + 2 + ranks.size() > page->groups.size()) return;
  page->groups[used] = id;
  page->groups[used + 1] = static_cast<std::uint32_t>(ranks.size());
  std::transform(ranks.begin(), ranks.end(), page->groups.begin() + static_cast<std::ptrdiff_t>(used) + 2,
                 [](int rank) { return static_cast<std::uint32_t>(rank); });
  page->group_words = static_cast<std::uint32_t>(used + 2 + ranks.size());
}

}  // namespace farandole
