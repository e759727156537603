// Reads frames from one peer: checks the headers, and puts payloads directly into their final memory.
// Touches base/, os/ and wire/.
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

// Receives the frames of a FrameReader.
class FrameHandler {
 public:
  // A data frame starts. Returns false if the frame is invalid.
  virtual bool on_data_begin(const wire::Frame& frame) = 0;
  // The memory for the payload's bytes from `offset` on; empty if they are not needed. Called again for every read,
  // because the memory may be withdrawn in the middle of a frame.
  virtual Pieces destination(const wire::Frame& frame, std::size_t offset) = 0;
  virtual void on_data_arrived(const wire::Frame& frame) = 0;
  // Any other frame. Returns false if nothing more may be read from this stream.
  virtual bool on_frame(const wire::Frame& frame, std::vector<std::byte> payload,
                        std::vector<os::Descriptor> descriptors) = 0;

 protected:
  ~FrameHandler() = default;
};

class FrameReader {
 public:
  // more: there may be more to read now. empty: there is not. stopped: the handler wants no more.
  enum class Result { more, empty, stopped, ended, failed };

  explicit FrameReader(const MessengerOptions& options) : options_(options) {}
  void expect(StreamKind kind, bool checksums) { kind_ = kind, checksums_ = checksums; }

  // Reads what the socket holds, up to a limit, so that other peers get their turn.
  Result read(int fd, FrameHandler& handler, Traffic& traffic);
  std::uint64_t bytes() const { return bytes_; }  // read so far
  // After `failed`: the reason, and the errno when a system call failed.
  const std::string& reason() const { return reason_; }
  int error() const { return error_; }

 private:
  static constexpr std::size_t kBuffer = 32 << 10;

  Result corrupt(const char* what);
  std::optional<Result> consume(FrameHandler& handler, Traffic& traffic);  // handles what is in the buffer
  bool begin(FrameHandler& handler);
  std::optional<Result> end(FrameHandler& handler, Traffic& traffic);
  bool unclaimed() const;  // descriptors came with a frame that cannot have any
  void take(FrameHandler& handler, const std::byte* from, std::size_t bytes);
  std::size_t gather(FrameHandler& handler);
  os::IoResult fill(int fd, std::size_t direct);
  void accept(std::size_t bytes, std::size_t direct);

  const MessengerOptions& options_;
  StreamKind kind_ = StreamKind::local;
  bool checksums_ = false;

  std::array<std::byte, kBuffer> buffer_;
  std::size_t begin_ = 0, end_ = 0;   // unread part of the buffer
  std::optional<wire::Frame> frame_;  // the frame whose payload is being read
  bool current_generation_ = false;   // false: the frame is of another generation
  std::size_t got_ = 0;
  std::uint32_t crc_ = 0;
  std::vector<std::byte> payload_;       // of a control frame
  std::vector<os::Descriptor> arrived_;  // not yet assigned to a frame
  std::vector<iovec> parts_;
  std::uint64_t bytes_ = 0;
  std::string reason_;
  int error_ = 0;
};

}  // namespace farandole::link
