// Exchange: the chunks of one collective that pass through the rings of a host, in all directions at once.
// Touches base/, link/ and kernel/.
#pragma once

#include <optional>
#include <vector>

#include "collective/collective.h"
#include "collective/cursor.h"
#include "kernel/kernel.h"

namespace farandole::collective {

// A local collective fills it and then runs it. Each step moves at most one chunk per ring and direction, so a chunk is
// still in cache when another member reads it, and no member waits for a stage to end. All members cut each block into
// the same chunks, so nothing about chunks is sent.
class Exchange {
 public:
  // `chunk`: a multiple of 64, at most a slot.
  Exchange(const Context& context, std::size_t chunk);

  // Writes the next `bytes` at `from` to this member's ring for `reader` (a local member or Rings::everyone).
  void send(int reader, Cursor from, std::size_t bytes);
  // The same, but only as far as they exist: `allowed` is the number of leading bytes that may go; it grows while this
  // runs.
  void send(int reader, Cursor from, std::size_t bytes, const std::size_t* allowed);
  // Like the first; in the same pass it also copies the bytes to `also`.
  void send(int reader, Cursor from, std::size_t bytes, Cursor also);
  // Reads `bytes` from a ring of `writer` into `to`.
  void receive(int writer, bool from_everyone, Cursor to, std::size_t bytes);
  // Copies `bytes` at `from` to `to` on this member, when there is nothing to do for others.
  void copy(Cursor from, Cursor to, std::size_t bytes);
  // For sizes that members received in messages and cannot check against their own requests: an empty block is sent as
  // an empty slot. Call it before the first send() or receive().
  void send_empty() { sends_empty_ = true; }
  // The targets of receive() and copy() are memory that this collective has not read; large ones are written past the
  // cache.
  void write_past_cache() { past_cache_ = true; }
  // Reduces `bytes` at `in` and the other members' rings to this member into `out`, in local order. With `mirror`, the
  // result is written to this member's ring `everyone` in the same pass. `reduced`, if given, counts the bytes that are
  // done.
  void reduce(Cursor in, Cursor out, std::size_t bytes, const Reduction& reduction, bool mirror,
              std::size_t* reduced = nullptr);

  // Runs until everything has moved. The exchange must live longer than the task.
  Task run();

 private:
  struct Outgoing {
    int reader;
    Cursor from;
    std::size_t left;
    std::optional<Cursor> also;
    const std::size_t* allowed = nullptr;
    std::size_t sent = 0;
    bool open = true;  // one more slot must be filled
  };
  struct Incoming {
    int writer;
    bool from_everyone;
    Cursor to;
    std::size_t left;
    bool open = true;  // one more slot must arrive
  };

  bool done() const;
  bool ready() const;
  bool step();
  std::byte* free_slot(const Outgoing& outgoing) const;  // the slot to fill, or null
  bool send_one(Outgoing& outgoing);
  bool receive_one(Incoming& incoming);
  const std::byte* next_of(const Incoming& incoming) const;
  bool copy_one();
  void store(Cursor& to, const std::byte* from, std::size_t bytes) const;
  bool can_reduce() const;
  bool reduce_one();

  const Context& context_;
  link::Rings& rings_;
  std::size_t chunk_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::size_t incoming_bytes_ = 0;
  bool past_cache_ = false;
  bool sends_empty_ = false;
  Cursor copy_from_;
  Cursor copy_to_;
  std::size_t copy_left_ = 0;
  Cursor reduce_in_;
  Cursor reduce_out_;
  std::size_t reduce_left_ = 0;
  bool mirror_ = false;
  std::size_t* reduced_ = nullptr;
  kernel::Reduce work_;
  std::vector<const std::byte*> slots_;  // of the chunk being reduced, by local member
  std::vector<const void*> sources_;
};

}  // namespace farandole::collective
