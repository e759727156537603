// One message and its state. The caller owns it; the matcher of its peer refers to it until it has ended.
// Touches base/ and wire/.
#pragma once

#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/pieces.h"
#include "link/messenger.h"
#include "wire/frame.h"

namespace farandole::link {

class Matcher;

class Message final : public Transfer {
 public:
  enum class State { waiting, done, failed };

  Message(Tag message_tag, Pieces memory, bool is_send) : tag(message_tag), pieces(std::move(memory)), sends(is_send) {}
  ~Message() override;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  bool done() const override {
    if (state == State::failed) throw Failure(error);
    return state == State::done;
  }
  void finish() {
    state = State::done;
    matcher = nullptr;
  }
  void fail(const Error& why) {
    state = State::failed;
    error = why;
    matcher = nullptr;
  }

  const Tag tag;
  const Pieces pieces;
  const bool sends;
  Matcher* matcher = nullptr;  // must be told when this is dropped
  State state = State::waiting;
  Error error;
  // For a send:
  bool announced = false;   // the peer knows its size
  bool enqueued = false;    // the frame writer has it
  std::size_t staged = 0;   // bytes put into frames
  std::size_t written = 0;  // bytes that the kernel has
};

}  // namespace farandole::link
