// What other threads hand to the driver: operations, links, memory to share, a revocation, a leave. Checks of
// operations that need no other rank are made here, and the names in use are known here. Touches base/, os/, link/ and
// negotiate/. Safe from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/operation.h"
#include "engine/services.h"
#include "link/regions.h"
#include "os/descriptor.h"

namespace farandole {

class Commands {
 public:
  struct NewLink {
    int peer;
    os::Descriptor stream;
    link::StreamKind kind;
  };
  struct Sharing {
    std::uint64_t region;
    os::Descriptor file;  // none: no longer shared
    std::byte* data;
    std::size_t bytes;
    link::RegionUse use = link::RegionUse::tensors;
  };
  // What the driver takes at once; the operations go to a list of its own.
  struct Taken {
    std::vector<std::pair<std::int32_t, std::int64_t>> awaited;  // group, handle
    std::vector<NewLink> links;
    std::vector<Sharing> sharings;
    Error revoke;
    bool leave = false;
  };
  struct Submitted {
    Error error;
    bool queued = false;  // else there is nothing for the driver
    std::size_t bytes = 0;
  };

  // `services` is only for failpoints.
  Commands(const Options& options, Handles& handles, Recorder& recorder, Services* services)
      : options_(options), handles_(handles), recorder_(recorder), services_(services) {}

  // All or nothing; sets handles and names. After end(), the operations fail at once.
  Submitted submit(const std::vector<OperationPtr>& operations, bool bundle);
  void await(const Operation& operation);  // its user waits for it or polls it
  void add_link(NewLink link);
  std::uint64_t share(os::Descriptor file, std::byte* data, std::size_t bytes, link::RegionUse use);
  void unshare(std::uint64_t region);
  void revoke(const Error& error);
  void leave();

  // For the driver.
  bool pending() const { return pending_.load(std::memory_order_acquire); }
  void look_again() { pending_.store(true, std::memory_order_release); }
  Taken take(std::vector<OperationPtr>& operations);
  void finished(const Operation& operation, std::int64_t now);  // call it before its waiters are woken
  void end(const Error& error);                                 // later submissions end with the error
  void take_unfinished(std::vector<OperationPtr>& unfinished, std::vector<OperationPtr>& waiting);
  void forget_sharings();
  void add_group(std::int32_t group, const std::vector<int>& ranks);
  void remove_group(std::int32_t group);  // no operation can be submitted to it
  void forget_names(std::int32_t group);  // of its operations, and their numbers
  void restart_unnamed_numbers(std::int32_t group);

 private:
  // With the mutex held.
  Error check(const Operation& operation) const;
  bool name_taken(const Operation& operation) const;
  std::size_t enter(const std::vector<OperationPtr>& operations, bool bundle);
  void withdraw(const Operation& operation);

  const Options& options_;
  Handles& handles_;
  Recorder& recorder_;
  Services* services_;
  std::atomic<bool> pending_{false};
  std::mutex mutex_;
  std::vector<OperationPtr> submitted_;
  Taken taken_;
  std::uint64_t regions_ = 0;  // number of regions so far
  using Names = std::unordered_set<std::string>;
  std::unordered_map<std::int32_t, Names> names_;  // group -> names of pending operations
  // The operation that ended last. Its name stays taken for a while, so that a second operation of that name is refused
  // even when the first one was fast.
  struct {
    Names::node_type name;
    std::int32_t group = 0;
    std::int64_t at = 0;
    std::atomic<std::int64_t> handle{0};
  } last_;
  std::map<std::pair<std::int32_t, Kind>, std::uint64_t> unnamed_;  // number of unnamed operations so far
  std::unordered_map<std::int32_t, std::vector<int>> members_;      // group -> ranks
  Error ended_;                                                     // once failed, nothing can be submitted
};

}  // namespace farandole
