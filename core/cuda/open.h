// Finds a library of CUDA at run time and fills a table of its functions, each only from the version that brought it.
// Touches base/ and os/.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "os/library.h"

namespace farandole::cuda {

// Where a copy of a library comes from. The numbers are part of the C interface.
enum class Source : int { none = 0, process = 1, setting = 2, package = 3, system = 4 };

struct Place {
  Source source = Source::none;
  std::string path;
};

// One function of a table. `since`: the version that brought it; older libraries do not get it, even if they have a
// symbol of this name. `needed`: the library cannot be used without it.
struct Symbol {
  const char* name;
  int since;
  bool needed;
  std::size_t offset;  // of its pointer in the table
};

struct Kind {
  const char* what;                    // for messages: "NCCL"
  std::span<const char* const> names;  // as the loader knows it, the preferred one first
  int oldest;                          // version that can be used
  // The version of an opened library; 0 and `error` when it does not tell.
  int (*version)(const os::Library& library, std::string& error);
  std::string (*text)(int version);  // as people write it: "2.28.9"
  std::span<const Symbol> symbols;
};

struct Report {
  bool usable = false;
  Source source = Source::none;
  int version = 0;
  std::string path;
  std::string why;                   // it is not usable
  std::vector<std::string> missing;  // functions that it does not have, with the reason
};

// Looks for a usable copy: the one that the process has loaded, then `places` in their order, then what the loader
// finds. A copy that the process has loaded or a setting names is the only candidate: two copies of such a library in
// one process do not see each other's objects. Functions that are not there are null in `table`.
Report open(const Kind& kind, std::span<const Place> places, void* table);

}  // namespace farandole::cuda
