// Do the members' requests for one tensor match? The messages of Horovod's contract, with the tensor, the ranks and
// their values.
// Pure. Touches base/.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <utility>

#include "negotiate/coordinator.h"

namespace farandole::negotiate {
namespace {

using Members = std::vector<const Request*>;
using Describe = std::function<std::string(const Request&)>;

constexpr std::size_t kNamed = 8;  // ranks or values that a message lists before it gives only the number of the others

std::string text_of(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ", ";
    if (i == 4 * kNamed) return text + "...]";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

std::string text_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

std::string lower(const char* name) {
  std::string text(name);
  for (char& letter : text) letter = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  return text;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == kNamed) return text + " and " + std::to_string(ranks.size() - kNamed) + " more";
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

// "int32 on ranks 0, 1; float32 on rank 2"
std::string who_has_what(const Members& members, const std::vector<int>& ranks, const Describe& describe) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (std::size_t m = 0; m < members.size(); ++m) {
    if (members[m] == nullptr) continue;
    const std::string value = describe(*members[m]);
    auto known = std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.first == value; });
    if (known == values.end()) known = values.insert(values.end(), {value, {}});
    known->second.push_back(ranks[m]);
  }
  std::string text;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += "; ";
    if (i == kNamed) return text + std::to_string(values.size() - kNamed) + " other values";
    text += values[i].first + " on " + ranks_text(values[i].second);
  }
  return text;
}

// Compares every member's request with the first one's. `sentence(a, b)` is the contract's text about the two values.
struct Comparison {
  const Members& members;
  const std::vector<int>& ranks;
  const Request& first;

  template <class Same, class Sentence>
  Error operator()(Same same, Sentence sentence, const Describe& describe) const {
    for (const Request* other : members) {
      if (other == nullptr || same(first, *other)) continue;
      return {Code::precondition, sentence(first, *other) + " Tensor '" + first.name +
                                      "': " + who_has_what(members, ranks, describe) + "."};
    }
    return {};
  }
};

std::string device_text(const Request& request) { return request.device < 0 ? "CPU" : "GPU"; }

std::string scales_text(const Request& request) {
  return "prescale " + text_of(request.prescale) + ", postscale " + text_of(request.postscale);
}

std::string bundle_text(const Request& request) {
  return request.bundle.empty() ? "alone" : "in a group of " + std::to_string(request.bundle_size);
}

bool has_shape(Kind kind) { return kind <= Kind::reducescatter; }

bool same_shape(const Request& a, const Request& b) {
  if (!rows_vary(a.kind)) return a.shape == b.shape;
  return a.shape.size() == b.shape.size() &&
         (a.shape.empty() || std::equal(a.shape.begin() + 1, a.shape.end(), b.shape.begin() + 1));
}

std::string shapes_sentence(const Request& a, const Request& b) {
  const std::string start = std::string("Mismatched ") + name_of(a.kind) + " tensor shapes: ";
  if (!rows_vary(a.kind)) {
    return start + "One rank sent a tensor of shape " + text_of(a.shape) +
           ", but another rank sent a tensor of shape " + text_of(b.shape) + ".";
  }
  if (a.shape.size() != b.shape.size()) {
    return start + "One rank sent a tensor of rank " + std::to_string(a.shape.size()) +
           ", but another rank sent a tensor of rank " + std::to_string(b.shape.size()) + ".";
  }
  std::size_t i = 1;
  while (a.shape[i] == b.shape[i]) ++i;
  return start + "One rank sent a tensor with dimension " + std::to_string(i) + " equal to " +
         std::to_string(a.shape[i]) + ", but another rank sent a tensor with dimension " + std::to_string(i) +
         " equal to " + std::to_string(b.shape[i]) + ".";
}

// "Mismatched `what`: One rank `did` A, but another rank `did` B.", where `describe` gives A and B.
template <class Same>
Error differing(const Comparison& compare, Same same, const Describe& describe, const std::string& what,
                const std::string& did) {
  const auto sentence = [&](const Request& a, const Request& b) {
    return "Mismatched " + what + ": One rank " + did + " " + describe(a) + ", but another rank " + did + " " +
           describe(b) + ".";
  };
  return compare(same, sentence, describe);
}

Error types_and_kinds(const Comparison& compare) {
  const Describe dtype = [](const Request& r) { return std::string(name_of(r.dtype)); };
  const auto same_dtype = [](const Request& a, const Request& b) { return a.dtype == b.dtype; };
  Error error = differing(compare, same_dtype, dtype, "data types", "had type");
  if (error.failed()) return error;
  const Describe kind = [](const Request& r) { return lower(name_of(r.kind)); };
  const auto same_kind = [](const Request& a, const Request& b) { return a.kind == b.kind; };
  return differing(compare, same_kind, kind, "operations", "did an");
}

Error reductions(const Comparison& compare) {
  const Describe op = [](const Request& r) { return std::string(name_of(r.op)); };
  const auto same_op = [](const Request& a, const Request& b) { return a.op == b.op; };
  Error error = differing(compare, same_op, op, "reduction operation", "specified");
  if (error.failed()) return error;
  const auto same_scales = [](const Request& a, const Request& b) {
    return a.prescale == b.prescale && a.postscale == b.postscale;
  };
  return differing(compare, same_scales, scales_text, "prescale and/or postscale factors", "had");
}

Error groups_and_roots(const Comparison& compare) {
  const Describe splits = [](const Request& r) { return text_of(r.splits); };
  const Describe root = [](const Request& r) { return std::to_string(r.root); };
  if (compare.first.kind == Kind::broadcast) {
    const auto same_root = [](const Request& a, const Request& b) { return a.root == b.root; };
    return differing(compare, same_root, root, "BROADCAST root ranks", "specified root rank");
  }
  if (compare.first.kind != Kind::add_group && compare.first.kind != Kind::remove_group) return {};
  const auto same_splits = [](const Request& a, const Request& b) { return a.splits == b.splits; };
  return differing(compare, same_splits, splits, "process sets", "had");
}

Error devices_and_bundles(const Comparison& compare) {
  const std::string kind = name_of(compare.first.kind);
  const auto same_device = [](const Request& a, const Request& b) { return (a.device < 0) == (b.device < 0); };
  Error error = differing(compare, same_device, device_text, kind + " CPU/GPU device selection", "specified device");
  if (error.failed()) return error;
  return compare([](const Request& a, const Request& b) { return a.bundle_size == b.bundle_size; },
                 [&](const Request& a, const Request& b) {
                   return "Mismatched " + kind + " groups: One rank submitted the tensor " + bundle_text(a) +
                          ", but another rank submitted it " + bundle_text(b) + ".";
                 },
                 bundle_text);
}

std::string tensor(const Request& request) { return "Tensor '" + request.name + "'."; }

Error invalid(std::string message) { return {Code::invalid_argument, std::move(message)}; }

bool needs_rows(Kind kind) { return rows_vary(kind) || kind == Kind::reducescatter; }

Error scalar(const Request& request) {
  if (!needs_rows(request.kind) || !request.shape.empty()) return {};
  return {Code::precondition,
          "Process-set rank zero tried to " + lower(name_of(request.kind)) + " a rank-zero tensor. " + tensor(request)};
}

Error check_splits(const Request& request, std::size_t members) {
  const std::int64_t rows = request.shape.front();
  if (request.splits.empty()) {
    if (rows % static_cast<std::int64_t>(members) == 0) return {};
    return invalid("Without splits the first dimension (" + std::to_string(rows) +
                   ") must be divisible by the number of ranks (" + std::to_string(members) + "). " + tensor(request));
  }
  if (request.splits.size() != members) {
    return invalid("Expected " + std::to_string(members) + " splits, one for each rank, but got " +
                   std::to_string(request.splits.size()) + ". " + tensor(request));
  }
  std::int64_t left = rows;
  for (std::int64_t split : request.splits) {
    if (split < 0) return invalid("Splits must not be negative: " + text_of(request.splits) + ". " + tensor(request));
    if (split > left) {
      return invalid("Sum of splits " + text_of(request.splits) + " is greater than the first dimension (" +
                     std::to_string(rows) + "). " + tensor(request));
    }
    left -= split;
  }
  return {};
}

Error check_reduction(const Request& request) {
  const bool averages = request.op == ReduceOp::average;
  if (request.kind == Kind::reducescatter && !averages && request.op != ReduceOp::sum) {
    return {Code::aborted, std::string("Reducescatter currently only supports Average and Sum, not ") +
                               name_of(request.op) + ". " + tensor(request)};
  }
  if (averages && request.dtype == DType::boolean) {
    return invalid("Average is not defined for bool. " + tensor(request));
  }
  if (request.op == ReduceOp::adasum && !is_floating(request.dtype)) {
    return invalid(std::string("Adasum needs a floating-point type, not ") + name_of(request.dtype) + ". " +
                   tensor(request));
  }
  return {};
}

}  // namespace

Error validate(const std::vector<const Request*>& by_member, const std::vector<int>& ranks) {
  const auto present = std::find_if(by_member.begin(), by_member.end(), [](const Request* r) { return r != nullptr; });
  if (present == by_member.end()) return {};
  const Request& first = **present;
  const Comparison compare{by_member, ranks, first};
  Error error = types_and_kinds(compare);
  if (error.failed()) return error;
  for (const Request* request : by_member) {
    if (request != nullptr && (error = scalar(*request)).failed()) return error;
  }
  if (has_shape(first.kind)) {
    error = compare(same_shape, shapes_sentence, [](const Request& r) { return text_of(r.shape); });
    if (error.failed()) return error;
  }
  if (first.kind == Kind::allreduce || first.kind == Kind::reducescatter) {
    error = reductions(compare);
    if (error.failed()) return error;
  }
  error = groups_and_roots(compare);
  if (error.failed()) return error;
  return devices_and_bundles(compare);
}

Error validate_one(const Request& request, const std::vector<int>& ranks) {
  std::int64_t bytes = 0;
  if (!volume(request.shape, static_cast<std::int64_t>(size_of(request.dtype)), bytes)) {
    return invalid("A tensor of shape " + text_of(request.shape) + " cannot exist. " + tensor(request));
  }
  if (Error error = scalar(request); error.failed()) return error;
  switch (request.kind) {
    case Kind::allreduce:
    case Kind::reducescatter:
      return check_reduction(request);
    case Kind::alltoall:
      return check_splits(request, ranks.size());
    case Kind::broadcast:
      if (std::find(ranks.begin(), ranks.end(), request.root) != ranks.end()) return {};
      return invalid("Broadcast root rank " + std::to_string(request.root) + " is not in the process set " +
                     text_of({ranks.begin(), ranks.end()}) + ". " + tensor(request));
    default:
      return {};
  }
}

}  // namespace farandole::negotiate
