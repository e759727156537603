// Pieces: memory in several places that counts as one run of bytes. A bucket is one, so fusing copies nothing.
// Touches nothing.
#pragma once

#include <cstddef>
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

  // Inputs are added too; nobody writes through the pieces of an input.
  void add(const void* data, std::size_t bytes);
  void add(const Pieces& other);

  std::size_t bytes() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }
  const std::vector<Piece>& list() const { return list_; }

  // The same memory, from `offset` for `bytes`. Throws Failure(internal) past the end.
  Pieces slice(std::size_t offset, std::size_t bytes) const;
  // Where `offset` lies, and how many bytes follow it there without a break.
  Piece at(std::size_t offset) const;

  void copy_out(std::size_t offset, void* to, std::size_t bytes) const;
  void copy_in(std::size_t offset, const void* from, std::size_t bytes) const;

 private:
  std::vector<Piece> list_;
  std::vector<std::size_t> ends_;  // running sum of bytes, for binary search
  std::size_t bytes_ = 0;
};

}  // namespace farandole
