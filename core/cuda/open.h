// Finds a library of CUDA at run time and fills a table of its functions.
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

// One function of a table. `since`: the first version of the library that has it. If the library is older, the pointer
// stays null, even if there is a symbol of this name. `needed`: the library cannot be used without it.
struct Symbol {
  const char* name;
  int since;
  bool needed;
  std::size_t offset;  // of its pointer in the table
};

// An entry of FARANDOLE_..._FUNCTIONS as a Symbol of `Table`.
#define FARANDOLE_SYMBOL(member, symbol, since, needed, parameters) {#symbol, since, needed, offsetof(Table, member)},

struct LibraryDescription {
  const char* name;                    // for messages: "NCCL"
  std::span<const char* const> names;  // file names for the loader, the preferred one first
  int oldest;                          // the oldest version that can be used
  // The version of an opened library; 0 and `error` if the version cannot be read.
  int (*version)(const os::Library& library, std::string& error);
  std::string (*text)(int version);  // as people write it: "2.28.9"
  std::span<const Symbol> symbols;
};

// The version that `symbol`, a function int(int* version) that gives 0 on success, tells; as
// LibraryDescription::version.
int asked_version(const os::Library& library, const char* symbol, std::string& error);

struct Report {
  bool usable = false;
  Source source = Source::none;
  int version = 0;
  std::string path;
  std::string why;                   // the reason if it is not usable
  std::vector<std::string> missing;  // functions that it does not have, with the reason
};

// Looks for a usable copy: the one that the process has loaded, then `places` in their order, then what the loader
// finds. A copy that the process has loaded or a setting names is the only candidate: two copies of such a library in
// one process do not see each other's objects. Functions that are not there are null in `table`.
Report open(const LibraryDescription& wanted, std::span<const Place> places, void* table);

}  // namespace farandole::cuda
