// Shared libraries that are opened at run time and never closed.
// Touches the loader of the operating system.
#pragma once

#include <string>

namespace farandole::os {

class Library {
 public:
  Library() = default;
  // The copy that this process has loaded already, found by its name ("libnccl.so.2"); empty when there is none.
  static Library loaded(const char* name);
  // Loads a file, or what the loader finds for a name without a slash. Empty when that fails; `error` says why.
  static Library open(const std::string& file, std::string& error);

  explicit operator bool() const { return handle_ != nullptr; }
  void* symbol(const char* name) const;  // null: it has no such symbol
  std::string path() const;              // of the file it came from

 private:
  explicit Library(void* handle) : handle_(handle) {}
  void* handle_ = nullptr;
};

}  // namespace farandole::os
