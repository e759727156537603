// Shared libraries that are opened at run time: dlopen, dlsym, dlinfo.
// Touches the loader of the operating system.
#include "os/library.h"

#include <dlfcn.h>
#include <link.h>

namespace farandole::os {

Library Library::loaded(const char* name) { return Library(::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)); }

Library Library::open(const std::string& file, std::string& error) {
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    error = why != nullptr ? why : "the loader refuses it";
  }
  return Library(handle);
}

void* Library::symbol(const char* name) const { return handle_ == nullptr ? nullptr : ::dlsym(handle_, name); }

std::string Library::path() const {
  link_map* map = nullptr;
  if (handle_ == nullptr || ::dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return "";
  return map->l_name;
}

}  // namespace farandole::os
