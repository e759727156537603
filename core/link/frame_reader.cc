// Parses a stream of frames. One read fetches the rest of a payload and the next header.
// Touches base/, os/ and wire/.
#include "link/frame_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "link/chaos.h"

namespace farandole::link {

namespace {

constexpr std::size_t kPartsPerCall = 256;
constexpr std::size_t kBytesPerRead = 8 << 20;  // then the other peers get their turn
constexpr std::size_t kControlStep = 1 << 20;   // so that a header alone cannot cause a larger allocation
constexpr std::size_t kReadAhead =
    wire::kFrameBytes;  // read after a payload: the next header, and no bytes that would need a copy

}  // namespace

FrameReader::Result FrameReader::corrupt(const char* what) {
  reason_ = std::string("a corrupted frame (") + what + ")";
  return Result::failed;
}

bool FrameReader::begin(FrameHandler& handler) {
  frame_ = wire::decode(std::span<const std::byte, wire::kFrameBytes>(buffer_.data() + begin_, wire::kFrameBytes));
  begin_ += wire::kFrameBytes;
  if (!frame_) return false;
  got_ = 0;
  crc_ = 0;
  payload_.clear();
  current_generation_ = frame_->generation == options_.generation;
  if (current_generation_ && frame_->type == wire::FrameType::data) return handler.on_data_begin(*frame_);
  return true;
}

// Bytes of the payload that were read into the buffer.
void FrameReader::take(FrameHandler& handler, const std::byte* from, std::size_t bytes) {
  if (checksums_) crc_ = wire::crc32c(crc_, from, bytes);
  if (current_generation_ && frame_->type == wire::FrameType::control) {
    payload_.resize(got_);  // a prepared read may have made it longer
    payload_.insert(payload_.end(), from, from + bytes);
  } else if (current_generation_) {
    const Pieces memory = handler.destination(*frame_, got_);
    if (!memory.empty()) memory.copy_in(0, from, bytes);
  }
  got_ += bytes;
}

// Descriptors arrive with the first byte of the frame that owns them. So the unread bytes start inside or before that
// frame, and at most the descriptors of the next frame follow them.
bool FrameReader::unclaimed() const {
  const bool control = frame_ && frame_->type == wire::FrameType::control;
  return arrived_.size() > 2 * wire::kMaxDescriptors || (!arrived_.empty() && begin_ == end_ && !control);
}

std::optional<FrameReader::Result> FrameReader::end(FrameHandler& handler, Traffic& traffic) {
  const wire::Frame frame = *frame_;
  frame_.reset();
  if (checksums_ && crc_ != frame.crc) return corrupt("wrong checksum");
  if (frame.type == wire::FrameType::data) {
    traffic.received += frame.length;
    if (current_generation_) handler.on_data_arrived(frame);
    return std::nullopt;
  }
  std::vector<os::Descriptor> descriptors;
  if (frame.type == wire::FrameType::control) {
    if (frame.total > arrived_.size()) return corrupt("descriptors are missing");
    const auto last = arrived_.begin() + static_cast<std::ptrdiff_t>(frame.total);
    std::move(arrived_.begin(), last, std::back_inserter(descriptors));
    arrived_.erase(arrived_.begin(), last);
  }
  if (!current_generation_) return std::nullopt;
  payload_.resize(got_);
  if (!handler.on_frame(frame, std::move(payload_), std::move(descriptors))) return Result::stopped;
  return std::nullopt;
}

std::optional<FrameReader::Result> FrameReader::consume(FrameHandler& handler, Traffic& traffic) {
  while (true) {
    if (!frame_) {
      if (end_ - begin_ < wire::kFrameBytes) return std::nullopt;
      if (!begin(handler)) return corrupt("impossible header");
    }
    const std::size_t bytes = std::min<std::size_t>(end_ - begin_, frame_->length - got_);
    if (bytes > 0) take(handler, buffer_.data() + begin_, bytes);
    begin_ += bytes;
    if (got_ < frame_->length) return std::nullopt;
    if (const auto result = end(handler, traffic)) return result;
  }
}

// Fills parts_: the memory of the payload, then the buffer. Returns the number of bytes of the former.
std::size_t FrameReader::gather(FrameHandler& handler) {
  parts_.clear();
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  std::size_t direct = 0;
  std::size_t left = frame_ ? frame_->length - got_ : 0;
  if (left > 0 && current_generation_) {
    if (frame_->type == wire::FrameType::control) {
      const std::size_t step = std::min(left, kControlStep);
      payload_.resize(got_ + step);
      parts_.push_back({payload_.data() + got_, step});
      direct = step;
    } else {
      const Pieces memory = handler.destination(*frame_, got_);
      for (const Piece& piece : memory.list()) {
        if (parts_.size() == kPartsPerCall) break;
        parts_.push_back({piece.data, piece.bytes});
        direct += piece.bytes;
      }
    }
    left -= direct;
    if (direct > 0 && left > 0)
      return direct;  // the payload continues after these parts, so nothing else may follow them
  }
  const std::size_t room = direct > 0 ? kReadAhead : buffer_.size() - end_;
  parts_.push_back({buffer_.data() + end_, room});
  return direct;
}

os::IoResult FrameReader::fill(int fd, std::size_t direct) {
  if (chaos_fires(options_.engine, "stream.truncate")) return {os::IoResult::Status::end, 0, 0};
  if (chaos_fires(options_.engine, "stream.short")) {
    parts_.resize(1);
    parts_[0].iov_len = 1;
  }
  const os::IoResult moved = os::receive_some(fd, parts_, kind_ == StreamKind::local ? &arrived_ : nullptr);
  if (moved.status == os::IoResult::Status::bytes && chaos_fires(options_.engine, "stream.corrupt")) {
    std::byte& first = *static_cast<std::byte*>(parts_[0].iov_base);
    first ^= std::byte{0x10};
  }
  if (moved.status == os::IoResult::Status::bytes) accept(moved.bytes, direct);
  return moved;
}

void FrameReader::accept(std::size_t bytes, std::size_t direct) {
  const std::size_t placed = std::min(bytes, direct);
  got_ += placed;
  end_ += bytes - placed;
  if (!checksums_) return;
  std::size_t left = placed;  // computed while the bytes are in the cache
  for (const iovec& part : parts_) {
    if (left == 0) break;
    const std::size_t length = std::min(left, part.iov_len);
    crc_ = wire::crc32c(crc_, part.iov_base, length);
    left -= length;
  }
}

FrameReader::Result FrameReader::read(int fd, FrameHandler& handler, Traffic& traffic) {
  for (std::size_t total = 0; total < kBytesPerRead;) {
    const std::size_t direct = gather(handler);
    std::size_t asked = 0;
    for (const iovec& part : parts_) asked += part.iov_len;
    const os::IoResult moved = fill(fd, direct);
    switch (moved.status) {
      case os::IoResult::Status::would_block:
        return Result::empty;
      case os::IoResult::Status::end:
        return Result::ended;
      case os::IoResult::Status::failed:
        error_ = moved.error;
        reason_ = error_ == EMFILE ? "too few file descriptors" : os::errno_text(moved.error);
        return Result::failed;
      case os::IoResult::Status::bytes:
        break;
    }
    total += moved.bytes;
    bytes_ += moved.bytes;
    if (const auto result = consume(handler, traffic)) return *result;
    if (unclaimed()) return corrupt("descriptors that belong to nothing");
    // A read that returned less than was asked has emptied the socket, or stopped at descriptors: the poller will
    // report it.
    if (moved.bytes < asked) return Result::more;
  }
  return Result::more;
}

}  // namespace farandole::link
