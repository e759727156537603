// Errors as values, and the one exception type that carries them through a collective.
// Touches nothing.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace farandole {

// The values are part of the C interface.
enum class Code : int {
  ok = 0,
  in_progress = 1,
  invalid_argument = 2,  // the caller's mistake: ValueError
  precondition = 3,      // the ranks disagree: HorovodInternalError on all of them, and the job goes on
  aborted = 4,           // not supported in this form: HorovodInternalError
  shut_down = 5,         // this or another rank has shut down normally
  peer_lost = 6,         // a rank died or cannot be reached; `rank` is its number
  revoked = 7,           // the generation ended for another reason
  timed_out = 8,
  no_memory = 9,
  internal = 10,
};

// Whether this number is a code of a failure.
inline bool names_failure(int code) {
  return code >= static_cast<int>(Code::invalid_argument) && code <= static_cast<int>(Code::internal);
}

struct Error {
  Code code = Code::ok;
  std::string message;
  int rank = -1;  // the rank that caused it, or -1

  bool failed() const { return code != Code::ok; }
};

class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  Failure(Code code, std::string message, int rank = -1) : error_{code, std::move(message), rank} {}
  const char* what() const noexcept override { return error_.message.c_str(); }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

}  // namespace farandole
