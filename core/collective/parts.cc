// Shared by the collectives: arithmetic on pieces that are divided at different positions.
// Touches base/ and kernel/.
#include "collective/parts.h"

#include <optional>

#include "collective/cursor.h"
#include "kernel/kernel.h"

namespace farandole::collective {

void reduce(const Reduction& reduction, const std::vector<Pieces>& sources, const Pieces& out, const Pieces* mirror) {
  std::vector<Cursor> from;
  for (const Pieces& source : sources) from.emplace_back(source);
  std::vector<const void*> pointers(sources.size());
  Cursor to(out);
  std::optional<Cursor> also;
  if (mirror != nullptr) also.emplace(*mirror);
  kernel::Reduce work;
  work.dtype = reduction.dtype;
  work.op = reduction.op;
  work.sources = pointers.data();
  work.count = static_cast<int>(pointers.size());
  work.prescale = reduction.prescale;
  work.postscale = reduction.postscale;
  work.divisor = reduction.divisor;
  while (to.run() > 0) {
    std::size_t step = to.run();
    for (std::size_t i = 0; i < from.size(); ++i) {
      step = std::min(step, from[i].run());
      pointers[i] = from[i].data();
    }
    if (also) {
      step = std::min(step, also->run());
      work.mirror = also->data();
    }
    work.out = to.data();
    work.elements = step / size_of(reduction.dtype);
    kernel::reduce(work);
    for (Cursor& cursor : from) cursor.skip(step);
    to.skip(step);
    if (also) also->skip(step);
  }
}

void copy(const Pieces& from, const Pieces& to) {
  Cursor source(from);
  Cursor target(to);
  while (target.run() > 0) {
    std::size_t step = std::min(source.run(), target.run());
    if (source.data() != target.data()) std::memcpy(target.data(), source.data(), step);
    source.skip(step);
    target.skip(step);
  }
}

bool finished(const std::vector<link::TransferPtr>& transfers) {
  for (const link::TransferPtr& transfer : transfers) {
    if (transfer && !transfer->done()) return false;
  }
  return true;
}

}  // namespace farandole::collective
