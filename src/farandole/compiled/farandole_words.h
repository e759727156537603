// What the compiled operations of all frameworks share: kinds, and codes as the names of Python's exceptions
// (farandole/errors.py). Touches core/api/farandole.h.
#ifndef FARANDOLE_WORDS_H
#define FARANDOLE_WORDS_H

#include "farandole.h"

namespace farandole {

constexpr int kAllreduce = 0, kAllgather = 1, kBroadcast = 2, kAlltoall = 3, kReducescatter = 4;
constexpr const char* kNotInitialized = "NotInitialized: Farandole has not been initialized; call init() first.";

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
