// The recorder: the last operations of this rank, in a memory file that other processes can read after its death.
// Touches base/ and os/.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/kind.h"
#include "os/memory.h"

namespace farandole {

// The file has one page about the rank and its groups, and then a ring of entries. An entry belongs to the operation
// whose number it has; the operation after the last one of the ring takes the oldest entry. Writing costs a few stores,
// no lock and no system call. Python reads the file (src/farandole/observe/records.py has the same layout).
//
// submitted() and group() are called with a lock of the caller, the rest by the driver alone.
class Recorder {
 public:
  static constexpr std::uint64_t kLayout = 0x0000'0001'4344'5246;  // "FRDC" and the version of the layout
  static constexpr std::size_t kEntries = 1024;
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kEntryBytes = 256;
  static constexpr std::size_t kBytes = kPage + kEntries * kEntryBytes;

  struct Request {
    std::string_view name;
    const std::vector<std::int64_t>* shape;
    std::int64_t bytes;
    std::int32_t group;
    std::int32_t peer;  // the root, or the other side; -1: none
    Kind kind;
    DType dtype;
    ReduceOp op;
  };
  // The way of a finished collective. The numbers below 16 are those of the C interface's algorithms.
  static constexpr std::uint8_t kInsideHost = 16;

  // Without a file nothing is recorded. Continues what an earlier engine of this process recorded in the file.
  Recorder(os::Descriptor file, int rank, int size, std::uint32_t generation);

  // Returns the operation's number, from 1; 0: not recorded.
  std::uint64_t submitted(const Request& request, std::int64_t now);
  void ready(std::uint64_t number, std::uint64_t sequence, std::int64_t now);  // on all ranks; its place in the group
  void begun(std::uint64_t number, std::int64_t now);
  // Only the first call for an operation counts.
  void done(std::uint64_t number, Code code, std::uint8_t algorithm, std::int64_t now);
  void group(std::uint32_t id, const std::vector<int>& ranks);

 private:
  struct Page {
    std::uint64_t layout;
    std::uint64_t entries;
    std::atomic<std::uint64_t> submitted;  // operations so far
    std::atomic<std::uint64_t> finished;
    std::int64_t epoch_offset_ns;  // wall-clock time minus the time of the entries
    std::int32_t rank, size;
    std::uint32_t generation;
    std::uint32_t group_words;  // used in `groups`
    std::int64_t pid;           // Python writes these four
    std::uint64_t main_thread;
    std::int64_t note_ms, warning_ms;
    std::array<std::uint32_t, (kPage - 88) / 4> groups;  // ID, number of ranks, ranks; and again
  };
  static_assert(sizeof(Page) == kPage);
  struct Entry {
    std::atomic<std::uint64_t> number;  // 0 while it is being written
    std::int64_t submitted_ns;
    std::atomic<std::int64_t> ready_ns, begun_ns, done_ns;  // 0: not yet
    std::int64_t bytes;
    std::atomic<std::uint64_t> sequence;
    std::int32_t group;
    std::uint32_t generation;
    std::int32_t peer;
    std::atomic<std::int32_t> code;
    std::uint8_t kind, dtype, op;
    std::atomic<std::uint8_t> algorithm;
    std::uint8_t dimensions;
    std::uint8_t reserved[11];
    std::array<std::int64_t, 4> shape;  // the first dimensions
    std::array<char, 136> name;         // cut; ends with 0
  };
  static_assert(sizeof(Entry) == kEntryBytes);

  Page* page() const { return reinterpret_cast<Page*>(memory_.data()); }
  Entry* entry(std::uint64_t number) const {
    return reinterpret_cast<Entry*>(memory_.data() + kPage) + number % kEntries;
  }
  Entry* find(std::uint64_t number) const;  // null when a later operation has its entry

  os::SharedMemory memory_;
  std::uint32_t generation_;
};

}  // namespace farandole
