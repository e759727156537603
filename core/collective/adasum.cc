// Adasum: contributions are combined in pairs, level by level. Each member works on its slice of all tensors.
// Touches base/, link/, group/ and kernel/.
#include <memory>

#include "collective/blocks.h"
#include "collective/collective.h"
#include "collective/parts.h"
#include "kernel/kernel.h"

namespace farandole::collective {

namespace {

struct Pair {
  int first, second;  // members; the result replaces the contribution of `first`
};

// P is the largest power of two <= N. If P < N, the first level combines each member r >= P with member r - P. The
// other levels combine the members below P at distance 1, 2, 4 ... P/2. A member's slice is the same part of every
// tensor, so the result of a tensor depends on the tensor and N, not on the other tensors in the bucket.
std::vector<std::vector<Pair>> levels(int size) {
  std::vector<std::vector<Pair>> result;
  int power = 1;
  while (power * 2 <= size) power *= 2;
  std::vector<Pair> extra;
  for (int member = power; member < size; ++member) extra.push_back({member - power, member});
  if (!extra.empty()) result.push_back(extra);
  for (int distance = 1; distance < power; distance *= 2) {
    std::vector<Pair> level;
    for (int member = 0; member < power; member += 2 * distance) level.push_back({member, member + distance});
    result.push_back(level);
  }
  return result;
}

// This member's slice of every member's tensors, one member after another.
struct Workspace {
  DType dtype;
  std::size_t stride = 0;                  // bytes of one member's slices
  std::vector<std::size_t> offset, bytes;  // of each tensor's slice, in one member's slices
  std::unique_ptr<std::byte[]> memory;

  std::byte* at(int member, std::size_t tensor) const { return memory.get() + stride * index(member) + offset[tensor]; }
  std::size_t elements(std::size_t tensor) const { return bytes[tensor] / size_of(dtype); }
  Pieces block(int member) const { return Pieces(memory.get() + stride * index(member), stride); }
};

// Computes the dot products of a level over whole tensors: adds the parts of all members, in member order.
Task sum_dots(const Context& context, const Workspace& work, const std::vector<Pair>& level, std::uint32_t step,
              std::vector<kernel::Dots>& dots) {
  std::size_t members = index(context.topology->size());
  std::vector<kernel::Dots> all(dots.size() * members);
  std::vector<Pieces> blocks(members);
  for (std::size_t member = 0; member < members; ++member) {
    blocks[member].add(all.data() + dots.size() * member, dots.size() * sizeof(kernel::Dots));
  }
  std::size_t tensors = work.bytes.size();
  enter(context, "reduce");
  for (std::size_t pair = 0; pair < level.size(); ++pair) {
    for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
      dots[pair * tensors + tensor] = kernel::dots(work.dtype, work.at(level[pair].first, tensor),
                                                   work.at(level[pair].second, tensor), work.elements(tensor));
    }
  }
  Pieces own(dots.data(), dots.size() * sizeof(kernel::Dots));
  Task gather = gather_blocks(context, own, blocks, step);
  co_await gather;
  for (std::size_t i = 0; i < dots.size(); ++i) {
    kernel::Dots sum;
    for (std::size_t member = 0; member < members; ++member) {
      const kernel::Dots& part = all[member * dots.size() + i];
      sum.ab += part.ab;
      sum.aa += part.aa;
      sum.bb += part.bb;
    }
    dots[i] = sum;
  }
}

Task combine_all(const Context& context, const Workspace& work) {
  std::size_t tensors = work.bytes.size();
  std::uint32_t step = 1;
  std::vector<std::vector<Pair>> plan = levels(context.topology->size());
  for (const std::vector<Pair>& level : plan) {
    std::vector<kernel::Dots> dots(level.size() * tensors);
    Task sum = sum_dots(context, work, level, step++, dots);
    co_await sum;
    enter(context, "reduce");
    for (std::size_t pair = 0; pair < level.size(); ++pair) {
      for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
        std::byte* first = work.at(level[pair].first, tensor);
        std::byte* second = work.at(level[pair].second, tensor);
        kernel::combine(work.dtype, first, second, dots[pair * tensors + tensor], first, work.elements(tensor));
      }
    }
  }
}

void scale(const Workspace& work, int members, double prescale, double postscale, std::int64_t divisor) {
  if (prescale == 1.0 && postscale == 1.0 && divisor == 1) return;
  Reduction scaling;
  scaling.dtype = work.dtype;
  scaling.prescale = prescale;
  scaling.postscale = postscale;
  scaling.divisor = divisor;
  Pieces all(work.memory.get(), work.stride * index(members));
  reduce(scaling, std::vector<Pieces>(1, all), all);
}

}  // namespace

Task adasum(Context context, std::vector<Pieces> in, std::vector<Pieces> out, Reduction reduction) {
  int members = context.topology->size();
  std::vector<Pieces> sources(index(members)), blocks(index(members)), results(index(members));
  Workspace work;
  work.dtype = reduction.dtype;
  for (std::size_t tensor = 0; tensor < in.size(); ++tensor) {
    Slices slices(in[tensor].bytes(), members);
    work.offset.push_back(work.stride);
    work.bytes.push_back(slices.size(context.topology->me));
    work.stride += work.bytes.back();
    for (int member = 0; member < members; ++member) {
      sources[index(member)].add(in[tensor].slice(slices.begin(member), slices.size(member)));
      results[index(member)].add(out[tensor].slice(slices.begin(member), slices.size(member)));
    }
  }
  work.memory = std::make_unique_for_overwrite<std::byte[]>(work.stride * index(members));
  for (int member = 0; member < members; ++member) blocks[index(member)] = work.block(member);
  enter(context, "pack");
  Task swap = swap_blocks(context, sources, blocks, 0, false);
  co_await swap;
  scale(work, members, reduction.prescale, 1.0, 1);
  Task combine = combine_all(context, work);
  co_await combine;
  scale(work, 1, 1.0, reduction.postscale, reduction.divisor);
  Task gather = gather_blocks(context, blocks[0], results, 1000);  // a step above those of all levels
  co_await gather;
  enter(context, "unpack");
}

}  // namespace farandole::collective
