// Puts frames together and writes them with as few system calls as possible.
// Touches os/ and wire/.
#include "link/frame_writer.h"

#include <algorithm>
#include <utility>

#include "link/chaos.h"

namespace farandole::link {

namespace {

constexpr std::size_t kFramesPerCall = 32;
constexpr std::size_t kPartsPerFrame = 256;  // a frame of many small tensors is cut here
constexpr std::size_t kPartsPerCall = 512;   // below IOV_MAX
constexpr int kCallsPerWrite = 32;           // then the other peers get their turn

}  // namespace

void FrameWriter::push(wire::Frame frame, std::vector<std::byte> payload, std::vector<os::Descriptor> descriptors) {
  if (leave_ == Leave::sent) return;
  frame.generation = options_.generation;
  frame.length = static_cast<std::uint32_t>(payload.size());
  urgent_.push_back({frame, std::move(payload), std::move(descriptors)});
  schedule();
}

void FrameWriter::enqueue(Message& message) {
  active_.push_back(&message);
  schedule();
}

void FrameWriter::send_leave() {
  if (leave_ != Leave::none) return;
  leave_ = Leave::requested;
  schedule();
}

void FrameWriter::schedule() {
  if (std::exchange(scheduled_, true)) return;
  waiting_.push_back(peer_);
}

bool FrameWriter::drop(Message& message) {
  std::erase(active_, &message);
  for (Staged& frame : staged_) {
    if (frame.message != &message) continue;
    frame.owned.resize(frame.length);
    message.pieces.copy_out(frame.offset, frame.owned.data(), frame.length);
    frame.message = nullptr;
  }
  return message.staged == 0 || message.staged == message.pieces.bytes();
}

void FrameWriter::clear() {
  staged_.clear();
  staged_bytes_ = 0;
  urgent_.clear();
  active_.clear();
  leave_ = Leave::sent;
}

void FrameWriter::stage_urgent() {
  Urgent& next = urgent_.front();
  if (checksums_) next.frame.crc = wire::crc32c(0, next.payload.data(), next.payload.size());
  Staged& frame = staged_.emplace_back();
  wire::encode(next.frame, frame.header);
  frame.length = next.payload.size();
  frame.owned = std::move(next.payload);
  frame.descriptors = std::move(next.descriptors);
  urgent_.pop_front();
  staged_bytes_ += wire::kFrameBytes + frame.length;
}

void FrameWriter::stage_data() {
  Message& message = *active_.front();
  active_.pop_front();
  const std::size_t total = message.pieces.bytes();
  const std::size_t most = std::min({options_.frame_bytes, std::size_t{wire::kMaxDataPayload}, total - message.staged});
  std::size_t length = 0;
  std::uint32_t crc = 0;
  for (std::size_t parts = 0; length < most && parts < kPartsPerFrame; ++parts) {
    const Piece piece = message.pieces.at(message.staged + length);
    const std::size_t bytes = std::min(piece.bytes, most - length);
    if (checksums_) crc = wire::crc32c(crc, piece.data, bytes);
    length += bytes;
  }
  wire::Frame header;
  header.type = wire::FrameType::data;
  header.generation = options_.generation;
  header.tag = message.tag;
  header.total = total;
  header.length = static_cast<std::uint32_t>(length);
  header.crc = crc;
  Staged& frame = staged_.emplace_back();
  wire::encode(header, frame.header);
  frame.message = &message;
  frame.offset = message.staged;
  frame.length = length;
  frame.data = true;
  message.staged += length;
  staged_bytes_ += wire::kFrameBytes + length;
  if (message.staged < total) active_.push_back(&message);
}

// Staged frames can no longer be overtaken; they hold about one frame of data.
void FrameWriter::stage() {
  while (staged_.size() < kFramesPerCall && staged_bytes_ < options_.frame_bytes) {
    if (!urgent_.empty()) {
      // Descriptors are sent with the first byte of a call, so their frame must be the first of it.
      if (!urgent_.front().descriptors.empty() && !staged_.empty()) return;
      stage_urgent();
    } else if (!active_.empty()) {
      stage_data();
    } else if (leave_ == Leave::requested) {
      wire::Frame frame;
      frame.type = wire::FrameType::leave;
      push(frame);
      leave_ = Leave::sent;
    } else {
      return;
    }
  }
}

void FrameWriter::gather(std::vector<iovec>& parts) const {
  parts.clear();
  for (const Staged& frame : staged_) {
    std::size_t done = frame.written;
    if (done < wire::kFrameBytes) {
      parts.push_back({const_cast<std::byte*>(frame.header.data()) + done, wire::kFrameBytes - done});
      done = wire::kFrameBytes;
    }
    done -= wire::kFrameBytes;
    if (frame.message == nullptr) {
      if (done < frame.length)
        parts.push_back({const_cast<std::byte*>(frame.owned.data()) + done, frame.length - done});
      continue;
    }
    while (done < frame.length) {
      const Piece piece = frame.message->pieces.at(frame.offset + done);
      const std::size_t bytes = std::min(piece.bytes, frame.length - done);
      parts.push_back({piece.data, bytes});
      done += bytes;
    }
    if (parts.size() + kPartsPerFrame > kPartsPerCall) return;
  }
}

void FrameWriter::advance(std::size_t bytes, std::vector<Message*>& finished, Traffic& traffic) {
  staged_bytes_ -= bytes;
  while (!staged_.empty()) {
    Staged& frame = staged_.front();
    const std::size_t whole = wire::kFrameBytes + frame.length;
    const std::size_t step = std::min(bytes, whole - frame.written);
    frame.written += step;
    bytes -= step;
    if (frame.written < whole) return;
    ++traffic.frames;
    if (frame.data) traffic.sent += frame.length;
    if (frame.message != nullptr) {
      frame.message->written += frame.length;
      if (frame.message->written == frame.message->pieces.bytes()) finished.push_back(frame.message);
    }
    staged_.pop_front();
  }
}

FrameWriter::Result FrameWriter::write(int fd, std::vector<Message*>& finished, Traffic& traffic, bool& moved,
                                       int& error) {
  for (int call = 0; call < kCallsPerWrite; ++call) {
    stage();
    if (staged_.empty()) return Result::written;
    gather(parts_);
    if (chaos_fires(options_.engine, "stream.short")) {
      parts_.resize(1);
      parts_[0].iov_len = 1;
    }
    const os::IoResult sent = os::send_some(fd, parts_, staged_.front().descriptors);
    if (sent.status == os::IoResult::Status::would_block) return Result::blocked;
    if (sent.status == os::IoResult::Status::failed) {
      error = sent.error;
      return Result::failed;
    }
    moved = true;
    staged_.front().descriptors.clear();
    advance(sent.bytes, finished, traffic);
  }
  return Result::written;
}

}  // namespace farandole::link
