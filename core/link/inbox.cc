// Parsing a stream of frames. One read fetches the rest of a payload and the header behind it.
// Touches os/ and wire/.
#include "link/inbox.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "link/chaos.h"

namespace farandole::link {

namespace {

constexpr std::size_t kPartsAtOnce = 256;
constexpr std::size_t kBytesAtOnce = 8 << 20;           // then the other peers have their turn
constexpr std::size_t kControlStep = 1 << 20;           // a header alone makes nobody allocate more than this
constexpr std::size_t kLooksAhead = wire::kFrameBytes;  // behind a payload: the next header, and no bytes to be copied

}  // namespace

Inbox::Result Inbox::corrupt(const char* what) {
  reason_ = std::string("a corrupted frame (") + what + ")";
  return Result::failed;
}

bool Inbox::begin(Recipient& recipient) {
  frame_ = wire::decode(std::span<const std::byte, wire::kFrameBytes>(buffer_.data() + begin_, wire::kFrameBytes));
  begin_ += wire::kFrameBytes;
  if (!frame_) return false;
  got_ = 0;
  crc_ = 0;
  payload_.clear();
  wanted_ = frame_->generation == options_.generation;
  if (wanted_ && frame_->type == wire::FrameType::data) return recipient.data_begins(*frame_);
  return true;
}

// Bytes of the payload that came through the buffer.
void Inbox::take(Recipient& recipient, const std::byte* from, std::size_t bytes) {
  if (checksums_) crc_ = wire::crc32c(crc_, from, bytes);
  if (wanted_ && frame_->type == wire::FrameType::control) {
    payload_.resize(got_);  // a read that was prepared may have made it longer
    payload_.insert(payload_.end(), from, from + bytes);
  } else if (wanted_) {
    const Pieces place = recipient.place(*frame_, got_);
    if (!place.empty()) place.copy_in(0, from, bytes);
  }
  got_ += bytes;
}

// They come with the first byte of the frame that claims them, so that frame is not far: what is unread begins or goes
// on with it, or is bytes that were read together with it. Behind it stand at most those of the next one.
bool Inbox::unclaimed() const {
  const bool control = frame_ && frame_->type == wire::FrameType::control;
  return arrived_.size() > 2 * wire::kMostDescriptors || (!arrived_.empty() && begin_ == end_ && !control);
}

std::optional<Inbox::Result> Inbox::end(Recipient& recipient, Traffic& traffic) {
  const wire::Frame frame = *frame_;
  frame_.reset();
  if (checksums_ && crc_ != frame.crc) return corrupt("wrong checksum");
  if (frame.type == wire::FrameType::data) {
    traffic.received += frame.length;
    if (wanted_) recipient.data_arrived(frame);
    return std::nullopt;
  }
  std::vector<os::Descriptor> descriptors;
  if (frame.type == wire::FrameType::control) {
    if (frame.total > arrived_.size()) return corrupt("descriptors are missing");
    const auto last = arrived_.begin() + static_cast<std::ptrdiff_t>(frame.total);
    std::move(arrived_.begin(), last, std::back_inserter(descriptors));
    arrived_.erase(arrived_.begin(), last);
  }
  if (!wanted_) return std::nullopt;
  payload_.resize(got_);
  if (!recipient.frame_arrived(frame, std::move(payload_), std::move(descriptors))) return Result::stopped;
  return std::nullopt;
}

std::optional<Inbox::Result> Inbox::consume(Recipient& recipient, Traffic& traffic) {
  while (true) {
    if (!frame_) {
      if (end_ - begin_ < wire::kFrameBytes) return std::nullopt;
      if (!begin(recipient)) return corrupt("impossible header");
    }
    const std::size_t bytes = std::min<std::size_t>(end_ - begin_, frame_->length - got_);
    if (bytes > 0) take(recipient, buffer_.data() + begin_, bytes);
    begin_ += bytes;
    if (got_ < frame_->length) return std::nullopt;
    if (const auto result = end(recipient, traffic)) return result;
  }
}

// Fills parts_: the memory of the payload, then the buffer. Returns the bytes of the former.
std::size_t Inbox::gather(Recipient& recipient) {
  parts_.clear();
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
  std::size_t direct = 0;
  std::size_t left = frame_ ? frame_->length - got_ : 0;
  if (left > 0 && wanted_) {
    if (frame_->type == wire::FrameType::control) {
      const std::size_t step = std::min(left, kControlStep);
      payload_.resize(got_ + step);
      parts_.push_back({payload_.data() + got_, step});
      direct = step;
    } else {
      const Pieces place = recipient.place(*frame_, got_);
      for (const Piece& piece : place.list()) {
        if (parts_.size() == kPartsAtOnce) break;
        parts_.push_back({piece.data, piece.bytes});
        direct += piece.bytes;
      }
    }
    left -= direct;
    if (direct > 0 && left > 0) return direct;  // the payload goes on behind these parts: nothing may follow them
  }
  const std::size_t room = direct > 0 ? kLooksAhead : buffer_.size() - end_;
  parts_.push_back({buffer_.data() + end_, room});
  return direct;
}

os::Moved Inbox::fill(int fd, std::size_t direct) {
  if (chaos_fires(options_.engine, "stream.truncate")) return {os::Moved::What::end, 0, 0};
  if (chaos_fires(options_.engine, "stream.short")) {
    parts_.resize(1);
    parts_[0].iov_len = 1;
  }
  const os::Moved moved = os::receive_some(fd, parts_, kind_ == StreamKind::local ? &arrived_ : nullptr);
  if (moved.what == os::Moved::What::bytes && chaos_fires(options_.engine, "stream.corrupt")) {
    std::byte& first = *static_cast<std::byte*>(parts_[0].iov_base);
    first ^= std::byte{0x10};
  }
  if (moved.what == os::Moved::What::bytes) accept(moved.bytes, direct);
  return moved;
}

void Inbox::accept(std::size_t bytes, std::size_t direct) {
  const std::size_t placed = std::min(bytes, direct);
  got_ += placed;
  end_ += bytes - placed;
  if (!checksums_) return;
  std::size_t left = placed;  // while it is still in the cache
  for (const iovec& part : parts_) {
    if (left == 0) break;
    const std::size_t length = std::min(left, part.iov_len);
    crc_ = wire::crc32c(crc_, part.iov_base, length);
    left -= length;
  }
}

Inbox::Result Inbox::read(int fd, Recipient& recipient, Traffic& traffic) {
  for (std::size_t total = 0; total < kBytesAtOnce;) {
    const std::size_t direct = gather(recipient);
    std::size_t asked = 0;
    for (const iovec& part : parts_) asked += part.iov_len;
    const os::Moved moved = fill(fd, direct);
    switch (moved.what) {
      case os::Moved::What::would_block:
        return Result::empty;
      case os::Moved::What::end:
        return Result::ended;
      case os::Moved::What::failed:
        error_ = moved.error;
        reason_ = error_ == EMFILE ? "too few file descriptors" : os::text_of(moved.error);
        return Result::failed;
      case os::Moved::What::bytes:
        break;
    }
    total += moved.bytes;
    bytes_ += moved.bytes;
    if (const auto result = consume(recipient, traffic)) return *result;
    if (unclaimed()) return corrupt("descriptors that belong to nothing");
    // A read that did not fill its memory has emptied the socket, or met descriptors: the poller will say so.
    if (moved.bytes < asked) return Result::more;
  }
  return Result::more;
}

}  // namespace farandole::link
