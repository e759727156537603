// Pieces: memory in several places that is used as one sequence of bytes. A bucket is one, so fusing copies nothing.
// Touches nothing.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace farandole {

struct Piece {
  std::byte* data;
  std::size_t bytes;
};

class Pieces {
 public:
  Pieces() = default;
  Pieces(const void* data, std::size_t bytes) { add(data, bytes); }

  // Inputs are added too; the pieces of an input are never written.
  void add(const void* data, std::size_t bytes);
  void add(const Pieces& other);

  std::size_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }
  std::span<const Piece> list() const {  // valid until this object changes or moves
    return list_.empty() ? std::span(&only_, empty() ? 0 : 1) : std::span<const Piece>(list_);
  }

  // The same memory, `bytes` from `offset` on. Throws Failure(internal) when that is past the end.
  Pieces slice(std::size_t offset, std::size_t bytes) const;
  // The address of `offset`, and how many bytes follow it contiguously.
  Piece at(std::size_t offset) const;

  void copy_out(std::size_t offset, void* to, std::size_t bytes) const;
  void copy_in(std::size_t offset, const void* from, std::size_t bytes) const;

 private:
  Piece only_{};                   // the common case: a single piece
  std::vector<Piece> list_;        // of more than one
  std::vector<std::size_t> ends_;  // running sum of their bytes, for binary search
  std::size_t bytes_ = 0;
};

}  // namespace farandole
