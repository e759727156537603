// Adasum on many topologies, compared with the formula in double, and bit for bit between the members.
// Touches what world.h touches.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "world.h"

using namespace farandole;
using namespace world;
using collective::Reduction;

namespace {

using Vector = std::vector<double>;

Vector combined(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  double ca = aa < 1e-150 ? 1 : 1 - ab / (2 * aa), cb = bb < 1e-150 ? 1 : 1 - ab / (2 * bb);
  Vector out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) out[i] = ca * a[i] + cb * b[i];
  return out;
}

// Members from the largest power of two on are folded into the first ones; then pairs at distance 1, 2, 4 ...
Vector expected(std::vector<Vector> all) {
  std::size_t power = 1;
  while (power * 2 <= all.size()) power *= 2;
  for (std::size_t i = power; i < all.size(); ++i) all[i - power] = combined(all[i - power], all[i]);
  for (std::size_t distance = 1; distance < power; distance *= 2) {
    for (std::size_t i = 0; i < power; i += 2 * distance) all[i] = combined(all[i], all[i + distance]);
  }
  return all[0];
}

std::vector<float> contribution(std::size_t elements, int rank, std::size_t tensor) {
  std::mt19937 random(static_cast<unsigned>(rank) * 1000 + static_cast<unsigned>(tensor));
  std::normal_distribution<float> normal(0.1f, 1.0f);
  std::vector<float> result(elements);
  for (float& value : result)
    value = tensor == 2 ? 0.0f : normal(random);  // one tensor of zeros: norms below the limit
  return result;
}

}  // namespace

TEST(adasum_on_every_topology) {
  const std::vector<std::vector<int>> topologies = {
      {0},          {0, 0},       {0, 0, 0},          {0, 0, 0, 0, 0},         {0, 1}, {0, 1, 2}, {0, 1, 2, 3},
      {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1, 1, 2}, {0, 0, 0, 0, 1, 1, 1, 1}};
  const std::vector<std::size_t> sizes = {3000, 1, 100, 0, 777};
  for (const std::vector<int>& hosts : topologies) {
    World all(hosts, {});
    std::mutex mutex;
    std::vector<std::vector<float>> first;  // what some member got
    all.run([&](Member& member) {
      Reduction reduction;
      reduction.prescale = 0.5;
      reduction.postscale = 3.0;
      std::vector<std::vector<float>> data;
      std::vector<Pieces> in, out;
      for (std::size_t t = 0; t < sizes.size(); ++t) data.push_back(contribution(sizes[t], member.rank, t));
      for (std::vector<float>& tensor : data) in.emplace_back(tensor.data(), tensor.size() * 4);
      member.finish(collective::adasum(member.context(Kind::allreduce), in, in, reduction));
      for (std::size_t t = 0; t < sizes.size(); ++t) {
        std::vector<Vector> inputs;
        for (int m = 0; m < member.topology.size(); ++m) {
          std::vector<float> values = contribution(sizes[t], m, t);
          Vector scaled(values.begin(), values.end());
          for (double& value : scaled) value *= 0.5;
          inputs.push_back(scaled);
        }
        Vector right = expected(inputs);
        for (std::size_t i = 0; i < sizes[t]; ++i) CHECK(std::abs(data[t][i] - 3.0 * right[i]) < 1e-4);
      }
      std::lock_guard lock(mutex);
      if (first.empty()) first = data;
      CHECK(first == data);
    });
  }
}

// A tensor's bits do not depend on the other tensors in its bucket.
TEST(adasum_with_one_member) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1}, {0, 0, 1}}) {
    World all(hosts, {});
    all.run([&](Member& member) {
      std::vector<float> a = contribution(1234, member.rank, 0), b = contribution(77, member.rank, 1);
      std::vector<float> alone = a, together(a.size()), other(b.size());
      std::vector<Pieces> in(1, Pieces(alone.data(), alone.size() * 4)), sources, results;
      member.finish(collective::adasum(member.context(Kind::allreduce), in, in, Reduction{}));
      sources.emplace_back(b.data(), b.size() * 4);
      sources.emplace_back(a.data(), a.size() * 4);
      results.emplace_back(other.data(), other.size() * 4);
      results.emplace_back(together.data(), together.size() * 4);
      member.finish(collective::adasum(member.context(Kind::allreduce), sources, results, Reduction{}));
      CHECK(alone == together);
    });
  }
}
