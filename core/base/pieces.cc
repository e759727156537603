// Pieces: slicing and copying of scattered memory.
// Touches nothing.
#include "base/pieces.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace farandole {

void Pieces::add(const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const Piece piece{static_cast<std::byte*>(const_cast<void*>(data)), bytes};
  if (empty()) {
    only_ = piece;
  } else {
    if (list_.empty()) {
      list_.push_back(only_);
      ends_.push_back(bytes_);
    }
    list_.push_back(piece);
    ends_.push_back(bytes_ + bytes);
  }
  bytes_ += bytes;
}

void Pieces::add(const Pieces& other) {
  for (const Piece& piece : other.list()) add(piece.data, piece.bytes);
}

Piece Pieces::at(std::size_t offset) const {
  if (offset >= bytes_)
    throw Failure(Code::internal,
                  "Pieces::at: offset " + std::to_string(offset) + " is not below the size " + std::to_string(bytes_));
  if (list_.empty()) return {only_.data + offset, bytes_ - offset};
  auto index = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin());
  std::size_t left = ends_[index] - offset;
  return {list_[index].data + (list_[index].bytes - left), left};
}

Pieces Pieces::slice(std::size_t offset, std::size_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset)
    throw Failure(Code::internal, "Pieces::slice: " + std::to_string(bytes) + " bytes from offset " +
                                      std::to_string(offset) + " exceed the size " + std::to_string(bytes_));
  Pieces result;
  while (bytes > 0) {
    Piece piece = at(offset);
    std::size_t take = std::min(piece.bytes, bytes);
    result.add(piece.data, take);
    offset += take;
    bytes -= take;
  }
  return result;
}

void Pieces::copy_out(std::size_t offset, void* to, std::size_t bytes) const {
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    Piece piece = at(offset);
    std::size_t take = std::min(piece.bytes, bytes);
    std::memcpy(out, piece.data, take);
    out += take;
    offset += take;
    bytes -= take;
  }
}

void Pieces::copy_in(std::size_t offset, const void* from, std::size_t bytes) const {
  const auto* in = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    Piece piece = at(offset);
    std::size_t take = std::min(piece.bytes, bytes);
    std::memcpy(piece.data, in, take);
    in += take;
    offset += take;
    bytes -= take;
  }
}

}  // namespace farandole
