// What the compiled operations of all frameworks share: kinds, and codes as the names of Python's exceptions
// (farandole/errors.py). Touches core/api/farandole.h.
#ifndef FARANDOLE_WORDS_H
#define FARANDOLE_WORDS_H

#include "farandole.h"

namespace farandole {

constexpr int kAllreduce = FARANDOLE_KIND_ALLREDUCE, kAllgather = FARANDOLE_KIND_ALLGATHER,
              kBroadcast = FARANDOLE_KIND_BROADCAST, kAlltoall = FARANDOLE_KIND_ALLTOALL,
              kReducescatter = FARANDOLE_KIND_REDUCESCATTER;
constexpr const char* kNotInitialized = "NotInitialized: Farandole has not been initialized; call init() first.";

inline const char* exception_of(int code) {
  switch (code) {
    case FARANDOLE_CODE_INVALID_ARGUMENT:
      return "ValueError";
    case FARANDOLE_CODE_PRECONDITION:
      return "Mismatch";
    case FARANDOLE_CODE_SHUT_DOWN:
      return "ShutDown";
    case FARANDOLE_CODE_PEER_LOST:
      return "PeerLost";
    case FARANDOLE_CODE_REVOKED:
      return "Revoked";
    case FARANDOLE_CODE_TIMED_OUT:
      return "FarandoleTimeout";
    default:
      return "HorovodInternalError";
  }
}

}  // namespace farandole

#endif
