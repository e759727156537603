// What comes in from one peer: headers are checked, payloads go straight to where they belong.
// Touches os/ and wire/.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/pieces.h"
#include "link/messenger.h"
#include "os/descriptor.h"
#include "os/socket.h"
#include "wire/frame.h"

namespace farandole::link {

// Whom the inbox asks and tells.
class Recipient {
 public:
  // A data frame begins. False when it cannot be right.
  virtual bool data_begins(const wire::Frame& frame) = 0;
  // Where the payload's bytes from `offset` on go now; nothing when they are not wanted. Asked again for every read, so
  // that memory may be withdrawn in the middle of a frame.
  virtual Pieces place(const wire::Frame& frame, std::size_t offset) = 0;
  virtual void data_arrived(const wire::Frame& frame) = 0;
  // Any other frame. False: read no further.
  virtual bool frame_arrived(const wire::Frame& frame, std::vector<std::byte> payload,
                             std::vector<os::Descriptor> descriptors) = 0;

 protected:
  ~Recipient() = default;
};

class Inbox {
 public:
  // more: there may be more to read now. empty: certainly not. stopped: the recipient wants no more.
  enum class Result { more, empty, stopped, ended, failed };

  explicit Inbox(const MessengerOptions& options) : options_(options) {}
  void expect(StreamKind kind, bool checksums) { kind_ = kind, checksums_ = checksums; }

  // Reads what the socket holds, but not for ever: the others should have a turn.
  Result read(int fd, Recipient& recipient, Traffic& traffic);
  std::uint64_t bytes() const { return bytes_; }  // that were read
  // After `failed`: what went wrong, and the errno when it was a system call.
  const std::string& reason() const { return reason_; }
  int error() const { return error_; }

 private:
  static constexpr std::size_t kBuffer = 32 << 10;

  Result corrupt(const char* what);
  std::optional<Result> consume(Recipient& recipient, Traffic& traffic);  // what is in the buffer
  bool begin(Recipient& recipient);
  std::optional<Result> end(Recipient& recipient, Traffic& traffic);
  bool unclaimed() const;  // descriptors have come with what cannot have any
  void take(Recipient& recipient, const std::byte* from, std::size_t bytes);
  std::size_t gather(Recipient& recipient);
  os::Moved fill(int fd, std::size_t direct);
  void accept(std::size_t bytes, std::size_t direct);

  const MessengerOptions& options_;
  StreamKind kind_ = StreamKind::local;
  bool checksums_ = false;

  std::array<std::byte, kBuffer> buffer_;
  std::size_t begin_ = 0, end_ = 0;   // unread bytes of it
  std::optional<wire::Frame> frame_;  // whose payload is being read
  bool wanted_ = false;               // false: of another generation
  std::size_t got_ = 0;
  std::uint32_t crc_ = 0;
  std::vector<std::byte> payload_;       // of a control frame
  std::vector<os::Descriptor> arrived_;  // that no frame has claimed yet
  std::vector<iovec> parts_;
  std::uint64_t bytes_ = 0;
  std::string reason_;
  int error_ = 0;
};

}  // namespace farandole::link
