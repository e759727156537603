// Candidates in their order, their versions, and their functions.
// Touches base/ and os/.
#include "cuda/open.h"

#include <cstring>

namespace farandole::cuda {

namespace {

// Fills the table, and the report's `missing` or `why`.
void fill(const LibraryDescription& wanted, const os::Library& library, Report& report, void* table) {
  for (const Symbol& symbol : wanted.symbols) {
    void* found = report.version >= symbol.since ? library.symbol(symbol.name) : nullptr;
    std::memcpy(static_cast<std::byte*>(table) + symbol.offset, &found, sizeof found);
    if (found != nullptr) continue;
    const bool older = report.version < symbol.since;
    const std::string reason = older ? "since " + wanted.text(symbol.since) : "the library lacks it";
    if (symbol.needed && report.why.empty())
      report.why = std::string(wanted.name) + " " + wanted.text(report.version) + " has no " + symbol.name;
    report.missing.push_back(std::string(symbol.name) + " (" + reason + ")");
  }
}

Report look(const LibraryDescription& wanted, const os::Library& library, Source source, void* table) {
  Report report;
  report.source = source;
  report.path = library.path();
  report.version = wanted.version(library, report.why);
  if (report.version == 0) {
    if (report.why.empty()) report.why = std::string("it does not report its version as ") + wanted.name + " does";
    return report;
  }
  if (report.version < wanted.oldest) {
    report.why = std::string(wanted.name) + " " + wanted.text(report.version) +
                 " is too old: " + wanted.text(wanted.oldest) + " or newer is needed";
    return report;
  }
  fill(wanted, library, report, table);
  report.usable = report.why.empty();
  return report;
}

Report look(const LibraryDescription& wanted, const Place& place, void* table) {
  Report report;
  report.source = place.source;
  report.path = place.path;
  if (os::Library library = os::Library::open(place.path, report.why))
    return look(wanted, library, place.source, table);
  return report;
}

}  // namespace

int asked_version(const os::Library& library, const char* symbol, std::string& error) {
  auto ask = reinterpret_cast<int (*)(int*)>(library.symbol(symbol));
  int version = 0;
  if (ask == nullptr) return 0;
  if (const int result = ask(&version); result != 0) {
    error = std::string(symbol) + " fails with " + std::to_string(result);
    return 0;
  }
  return version;
}

Report open(const LibraryDescription& wanted, std::span<const Place> places, void* table) {
  for (const char* name : wanted.names)
    if (os::Library library = os::Library::loaded(name)) return look(wanted, library, Source::process, table);
  std::vector<Place> all(places.begin(), places.end());
  for (const char* name : wanted.names) all.push_back({Source::system, name});
  Report first;  // that can be loaded and not used; it explains more than one that does not exist
  for (const Place& place : all) {
    Report report = look(wanted, place, table);
    if (report.usable || place.source == Source::setting) return report;
    const bool exists = report.version != 0 || place.source == Source::package;
    if (first.source == Source::none && exists) first = std::move(report);
  }
  if (first.source == Source::none) first.why = std::string("there is no ") + wanted.names.front();
  return first;
}

}  // namespace farandole::cuda
