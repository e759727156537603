// Sends frames to one peer: control frames first, then the data messages in turn, one frame each.
// Touches os/ and wire/.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <vector>

#include "link/message.h"
#include "os/descriptor.h"
#include "os/socket.h"

namespace farandole::link {

class FrameWriter {
 public:
  enum class Result { written, blocked, failed };

  // Appends `peer` to the list `waiting` when it has something to write.
  FrameWriter(const MessengerOptions& options, int peer, std::vector<int>& waiting)
      : options_(options), peer_(peer), waiting_(waiting) {}
  void use_checksums(bool on) { checksums_ = on; }

  // Overtakes all data that is not in a frame yet.
  void push(wire::Frame frame, std::vector<std::byte> payload = {}, std::vector<os::Descriptor> descriptors = {});
  // The message's memory is read frame by frame until it is written or dropped.
  void enqueue(Message& message);
  // Stops reading its memory. False when the peer will not get all of the message.
  bool drop(Message& message);
  // The frame `leave` is sent when nothing else is left; nothing may follow it.
  void send_leave();
  void clear();
  void schedule();  // asks for a call of write()
  void unschedule() { scheduled_ = false; }
  bool empty() const { return staged_.empty() && urgent_.empty() && active_.empty() && leave_ != Leave::requested; }

  // Writes until the socket is full or empty() is true. Messages that the kernel now holds completely are added to
  // `finished`. `moved` is set when anything was written; `error` is the errno of a failure.
  Result write(int fd, std::vector<Message*>& finished, Traffic& traffic, bool& moved, int& error);

 private:
  enum class Leave { none, requested, sent };
  // A frame that is being written: its bytes no longer change.
  struct Staged {
    std::array<std::byte, wire::kFrameBytes> header;
    std::vector<std::byte> owned;  // the payload, unless it is still in a message's memory
    Message* message = nullptr;
    std::size_t offset = 0;   // in the message
    std::size_t length = 0;   // of the payload
    std::size_t written = 0;  // of header and payload
    std::vector<os::Descriptor> descriptors;
    bool data = false;
  };
  struct Urgent {
    wire::Frame frame;
    std::vector<std::byte> payload;
    std::vector<os::Descriptor> descriptors;
  };

  void stage();
  void stage_urgent();
  void stage_data();
  void gather(std::vector<iovec>& parts) const;
  void advance(std::size_t bytes, std::vector<Message*>& finished, Traffic& traffic);

  const MessengerOptions& options_;
  const int peer_;
  std::vector<int>& waiting_;
  bool scheduled_ = false;
  bool checksums_ = false;
  std::deque<Urgent> urgent_;
  std::deque<Message*> active_;
  Leave leave_ = Leave::none;
  std::deque<Staged> staged_;
  std::size_t staged_bytes_ = 0;
  std::vector<iovec> parts_;  // a member to reuse its memory between calls
};

}  // namespace farandole::link
