// What the compiled operations of all frameworks share: kinds, and codes as the names of Python's exceptions
// (farandole/base/errors.py). Touches core/api/farandole.h.
#ifndef FARANDOLE_WORDS_H
#define FARANDOLE_WORDS_H

#include <string>

#include "farandole.h"

namespace farandole {

constexpr int kAllreduce = FARANDOLE_KIND_ALLREDUCE, kAllgather = FARANDOLE_KIND_ALLGATHER,
              kBroadcast = FARANDOLE_KIND_BROADCAST, kAlltoall = FARANDOLE_KIND_ALLTOALL,
              kReducescatter = FARANDOLE_KIND_REDUCESCATTER;
constexpr const char* kNotInitialized =
    "NotInitialized: Horovod has not been initialized; use hvd.init(). It joins the job, and has to come before this "
    "call.";

constexpr const char* kShutDown = "Horovod has been shut down";

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

// What users read: Horovod's first words where the generation is over (farandole/errors.py), then ours.
inline std::string words_of(int code, const std::string& message) {
  const bool over =
      code == FARANDOLE_CODE_SHUT_DOWN || code == FARANDOLE_CODE_PEER_LOST || code == FARANDOLE_CODE_REVOKED;
  const bool has_prefix = message.rfind(kShutDown, 0) == 0;
  return std::string(exception_of(code)) + ": " + (over && !has_prefix ? std::string(kShutDown) + ": " : "") + message;
}

}  // namespace farandole

#endif
