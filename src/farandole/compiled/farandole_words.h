// What the compiled operations of all frameworks share: the core's functions, found in the library that Python has
// loaded, and codes as the names of Python's exceptions (farandole/errors.py). Touches core/api/farandole.h.
#ifndef FARANDOLE_WORDS_H
#define FARANDOLE_WORDS_H

#include <dlfcn.h>

#include "farandole.h"

namespace farandole {

constexpr int kAllreduce = 0, kAllgather = 1, kBroadcast = 2, kAlltoall = 3, kReducescatter = 4;
constexpr const char* kNotInitialized = "NotInitialized: Farandole has not been initialized; call init() first.";

struct Core {
  decltype(&farandole_submit) submit = nullptr;
  decltype(&farandole_wait) wait = nullptr;
  decltype(&farandole_next_completion) next_completion = nullptr;
  decltype(&farandole_outcome_of) outcome_of = nullptr;
  decltype(&farandole_release) release = nullptr;

  bool load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return false;
    find(library, "farandole_submit", submit);
    find(library, "farandole_wait", wait);
    find(library, "farandole_next_completion", next_completion);
    find(library, "farandole_outcome_of", outcome_of);
    find(library, "farandole_release", release);
    return submit && wait && next_completion && outcome_of && release;
  }

 private:
  template <typename Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

inline const char* exception_of(int code) {
  switch (code) {
    case 2:
      return "ValueError";
    case 3:
      return "Mismatch";
    case 5:
      return "ShutDown";
    case 6:
      return "PeerLost";
    case 7:
      return "Revoked";
    case 8:
      return "FarandoleTimeout";
    default:
      return "HorovodInternalError";
  }
}

}  // namespace farandole

#endif
