// What goes out to one peer: frames of its own kind first, then the data messages in turn, frame by frame.
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

class Outbox {
 public:
  enum class Result { written, blocked, failed };

  // Puts `peer` on the list `waiting` when it gets something to write.
  Outbox(const MessengerOptions& options, int peer, std::vector<int>& waiting)
      : options_(options), peer_(peer), waiting_(waiting) {}
  void use_checksums(bool on) { checksums_ = on; }

  // Overtakes all data that has not been put into a frame yet.
  void push(wire::Frame frame, std::vector<std::byte> payload = {}, std::vector<os::Descriptor> descriptors = {});
  // Its memory is read frame by frame until it is written or dropped.
  void enqueue(Message& message);
  // Reads its memory no more. False when the peer will miss a part of it.
  bool drop(Message& message);
  // `leave` goes out when nothing else is left, and nothing after it.
  void say_leave();
  void clear();
  void note();  // asks for a write
  void taken_off_the_list() { noted_ = false; }
  bool empty() const { return staged_.empty() && urgent_.empty() && active_.empty() && leave_ != Leave::wanted; }

  // Writes until the socket takes no more or `empty()`. Messages that are now in the kernel's hands are added to
  // `finished`. `moved` is set when anything was written; `error` is the errno of a failure.
  Result write(int fd, std::vector<Message*>& finished, Traffic& traffic, bool& moved, int& error);

 private:
  enum class Leave { none, wanted, said };
  // A frame that is being written: its bytes are fixed.
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
  bool noted_ = false;
  bool checksums_ = false;
  std::deque<Urgent> urgent_;
  std::deque<Message*> active_;
  Leave leave_ = Leave::none;
  std::deque<Staged> staged_;
  std::size_t staged_bytes_ = 0;
  std::vector<iovec> parts_;  // kept between calls for its memory
};

}  // namespace farandole::link
