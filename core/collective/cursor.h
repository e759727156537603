// Cursor: a position that moves through pieces, so that copying the next chunk needs no search.
// Touches only base/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/pieces.h"

namespace farandole::collective {

// Points into the list of a Pieces that must live longer.
class Cursor {
 public:
  Cursor() = default;
  explicit Cursor(const Pieces& pieces)
      : piece_(pieces.list().data()), end_(pieces.list().data() + pieces.list().size()) {}

  // The address of the position, and how many bytes are contiguous from there on; 0 at the end.
  std::byte* data() const { return piece_->data + offset_; }
  std::size_t run() const { return piece_ == end_ ? 0 : piece_->bytes - offset_; }

  void skip(std::size_t bytes) {
    while (bytes > 0 && piece_ != end_) {
      std::size_t step = std::min(bytes, run());
      offset_ += step;
      bytes -= step;
      if (offset_ == piece_->bytes) {
        ++piece_;
        offset_ = 0;
      }
    }
  }
  void read(std::byte* to, std::size_t bytes) {
    while (bytes > 0) {
      std::size_t step = std::min(bytes, run());
      std::memcpy(to, data(), step);
      skip(step);
      to += step;
      bytes -= step;
    }
  }
  void write(const std::byte* from, std::size_t bytes) {
    write(from, bytes, [](void* to, const void* source, std::size_t count) { std::memcpy(to, source, count); });
  }
  template <class Copy>
  void write(const std::byte* from, std::size_t bytes, Copy copy) {
    while (bytes > 0) {
      std::size_t step = std::min(bytes, run());
      copy(data(), from, step);
      skip(step);
      from += step;
      bytes -= step;
    }
  }

 private:
  const Piece* piece_ = nullptr;
  const Piece* end_ = nullptr;
  std::size_t offset_ = 0;
};

}  // namespace farandole::collective
