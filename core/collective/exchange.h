// Exchange: chunks of one collective on their way through the rings of a host, in all directions at once.
// Touches base/, link/ and kernel/.
#pragma once

#include <optional>
#include <vector>

#include "collective/collective.h"
#include "collective/cursor.h"
#include "kernel/kernel.h"

namespace farandole::collective {

// Filled by a local collective, then run: each step moves at most one chunk per lane in each direction, so that what
// one member writes is still in cache when another reads it, and nobody waits for a stage to end. All members cut each
// run of bytes into the same chunks; nothing about them is sent.
class Exchange {
 public:
  // `chunk`: a multiple of 64, at most a slot.
  Exchange(const Context& context, std::size_t chunk);

  // The next `bytes` at `from` go into my lane (a local member or Rings::everyone).
  void give(int lane, Cursor from, std::size_t bytes);
  // The same, once they are there: `allowed` counts those from the first on that may go, and grows while this runs.
  void give(int lane, Cursor from, std::size_t bytes, const std::size_t* allowed);
  // As the first, and in the same pass a copy of them goes to `also`.
  void give(int lane, Cursor from, std::size_t bytes, Cursor also);
  // `bytes` come from a lane of `writer` to `to`.
  void take(int writer, bool from_everyone, Cursor to, std::size_t bytes);
  // `bytes` at `from` stay with me: they go to `to` while there is nothing to do for others.
  void keep(Cursor from, Cursor to, std::size_t bytes);
  // Sizes that members have been told, and cannot know from their own requests: an empty slot says that there is
  // nothing. Before the first give() or take().
  void tell_empty() { tells_empty_ = true; }
  // What is taken and kept goes to memory that this collective has not read: if it is much, past the cache.
  void write_anew() { anew_ = true; }
  // `bytes` at `in` and what the other members' lanes to me bring are reduced to `out`, in local order; with `mirror`,
  // the result goes to my lane `everyone` in the same pass. `folded`, when given, counts the bytes that are done.
  void fold(Cursor in, Cursor out, std::size_t bytes, const Reduction& reduction, bool mirror,
            std::size_t* folded = nullptr);

  // Until all of it has moved. The exchange outlives the task.
  Task run();

 private:
  struct Outgoing {
    int lane;
    Cursor from;
    std::size_t left;
    std::optional<Cursor> also;
    const std::size_t* allowed = nullptr;
    std::size_t given = 0;
    bool open = true;  // one more slot is to be filled
  };
  struct Incoming {
    int writer;
    bool from_everyone;
    Cursor to;
    std::size_t left;
    bool open = true;  // one more slot is to come
  };

  bool done() const;
  bool ready() const;
  bool step();
  std::byte* can_give(const Outgoing& outgoing) const;  // the slot to fill, or null
  bool give_one(Outgoing& outgoing);
  bool take_one(Incoming& incoming);
  const std::byte* next_of(const Incoming& incoming) const;
  bool keep_one();
  void store(Cursor& to, const std::byte* from, std::size_t bytes) const;
  bool can_fold() const;
  bool fold_one();

  const Context& context_;
  link::Rings& rings_;
  std::size_t chunk_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::size_t incoming_bytes_ = 0;
  bool anew_ = false;
  bool tells_empty_ = false;
  Cursor keep_from_;
  Cursor keep_to_;
  std::size_t keep_left_ = 0;
  Cursor fold_in_;
  Cursor fold_out_;
  std::size_t fold_left_ = 0;
  bool mirror_ = false;
  std::size_t* folded_ = nullptr;
  kernel::Reduce work_;
  std::vector<const std::byte*> slots_;  // of the chunk being folded, by local member
  std::vector<const void*> sources_;
};

}  // namespace farandole::collective
