// The engine of one rank: takes requests, drives groups and links, ends operations. An object; a process may have
// several.
// Touches every room below it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/group.h"
#include "link/status_page.h"
#include "negotiate/messages.h"
#include "os/poller.h"

namespace farandole {

// Transfers, and changes of member groups, bypass negotiation.
bool bypasses_negotiation(const Operation& operation);
constexpr int kAnySource = -1;
// Tags of remove_group for a member group: this rank alone leaves it, or it ends on all members with an error.
constexpr std::int64_t kDrop = 1;
constexpr std::int64_t kAbandon = 2;

// One thread at a time is the driver: it holds the driver lock and makes progress on everything, and never blocks
// meanwhile. Usually that is the engine's own thread, which sleeps in the poller when there is nothing to do. A user's
// thread that waits for an operation becomes the driver when nobody else is, so that short operations need no thread
// switch.
class Engine final : private Services, private link::Listener {
 public:
  explicit Engine(Options options);
  ~Engine() override;

  // These may be called from any thread.
  Error add_link(int peer, os::Descriptor stream, link::StreamKind kind);
  Error start(std::int64_t timeout_ms);  // returns in_progress at least every 100 ms: call it again
  bool leave(std::int64_t linger_ms);    // false after 100 ms when there is still something to send and time for it
  void revoke_from_outside(const Error& error);
  // All or nothing; sets handles and names. `prompt`: the caller will wait at once.
  Error submit(std::vector<OperationPtr> operations, bool bundle, bool prompt);
  // The caller's memory, a mapping of `file`, that local peers may read and write in place. Returns the region's
  // number.
  std::uint64_t share(os::Descriptor file, std::byte* data, std::size_t bytes,
                      link::RegionUse use = link::RegionUse::tensors);
  void unshare(std::uint64_t region);
  OperationPtr find(std::int64_t handle) const { return handles_.find(handle); }
  bool poll(const OperationPtr& operation);
  bool wait(const OperationPtr& operation, std::int64_t timeout_ms, bool aside = false);
  Handles& handles() { return handles_; }
  Events& events() { return events_; }
  Trace& trace() override { return trace_; }
  Results& results() override { return *results_; }
  std::int64_t counter(int which);
  void set_trace(bool on, bool mark_plans);
  Tuning tuned();
  bool forked() const;  // this process is a child of the one that created the engine

 private:
  struct Commands {  // from other threads to the driver
    std::mutex mutex;
    std::atomic<bool> pending{false};
    std::vector<OperationPtr> submitted;
    std::vector<std::pair<std::int32_t, std::int64_t>> awaited;  // group, handle
    struct NewLink {
      int peer;
      os::Descriptor stream;
      link::StreamKind kind;
    };
    std::vector<NewLink> links;
    struct Sharing {
      std::uint64_t region;
      os::Descriptor file;  // none: no longer shared
      std::byte* data;
      std::size_t bytes;
      link::RegionUse use = link::RegionUse::tensors;
    };
    std::vector<Sharing> sharings;
    std::uint64_t regions = 0;  // number of regions so far
    Error revoke;
    bool leave = false;
    using Names = std::unordered_set<std::string>;
    std::unordered_map<std::int32_t, Names> names;  // group -> names of pending operations
    // The operation that ended last. Its name stays taken for a while, so that a second operation of that name is
    // refused even when the first one was fast.
    struct {
      Names::node_type name;
      std::int32_t group = 0;
      std::int64_t at = 0;
      std::atomic<std::int64_t> handle{0};
    } last;
    std::map<std::pair<std::int32_t, Kind>, std::uint64_t> unnamed;  // number of unnamed operations so far
    std::unordered_map<std::int32_t, std::vector<int>> members;      // group -> ranks, for checks in submit()
    Error ended;                                                     // once failed, nothing can be submitted
  };

  // Services for the groups.
  const Options& options() const override { return options_; }
  link::Messenger& messenger() override { return *messenger_; }
  const link::Regions& regions() const override { return regions_; }
  Counters& counters() override { return counters_; }
  void log(Level level, std::string text) override;
  void finish(Operation& operation, const Error& error) override;
  void revoke(const Error& error) override;
  std::int64_t add_groups(const std::vector<std::int64_t>& sets) override;
  void remove_group(std::uint32_t id) override;
  void restart_unnamed_numbers(std::uint32_t id) override;
  const Tuning& tuning() const override { return tuning_; }
  void tune(const Tuning& tuning, std::uint64_t sequence) override;

  // Callbacks from the messenger.
  void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                  std::vector<os::Descriptor> descriptors) override;
  bool may_send(int peer, std::uint32_t group) override;
  void on_lost(int peer, const Error& why) override;
  void on_left(int peer) override;

  // Handlers of control frames (incoming.cc).
  void handle_control(int peer, Control type, std::span<const std::byte> payload,
                      std::vector<os::Descriptor> descriptors);
  void on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors);
  void on_segment(int peer, const control::Segment& segment, os::Descriptor file);
  void on_requests(int peer, negotiate::Requests message);
  void on_answer(int peer, negotiate::Answer message);
  void on_plan_state(int peer, const control::PlanState& word);
  void on_leaving(int peer, control::Leaving leaving);
  void on_revoke(int peer, const Error& error);
  void on_abandon(int peer, const control::Abandon& abandon);
  void on_share(int peer, const control::Share& share, os::Descriptor file);
  void on_unshare(int peer, const control::Unshare& unshare);
  // Null when the group is not created yet, or removed. Throws when this rank and the peer are not both members.
  Group* group_with(std::uint32_t id, int peer, const char* what);
  bool is_local(int peer) const;  // it is on this host
  std::size_t max_early_segments() const;
  void attach_segment(Group& group, int peer, os::Descriptor file);
  void keep_early(int peer, negotiate::Requests message);
  void take_early(Group& group);
  void forget_early(std::uint32_t id);

  // The driver (drive.cc).
  void thread_main();
  enum class DriverThread { engine, user };  // which thread drives
  void pause(DriverThread thread);
  void check_shared_cores(DriverThread thread);
  // Holds the driver lock. Before it is released, everything that has happened meanwhile is checked once more.
  class DriverLock {
   public:
    explicit DriverLock(Engine& engine);             // waits for the lock
    DriverLock(Engine& engine, std::try_to_lock_t);  // false when another thread drives, or the engine does not run
    ~DriverLock();
    DriverLock(const DriverLock&) = delete;
    DriverLock& operator=(const DriverLock&) = delete;
    explicit operator bool() const { return lock_.owns_lock(); }
    // Call it before the release. True when there is more work, which the caller must then do.
    bool prepare_release();
    void release_now() { prepared_ = true; }

   private:
    void take();
    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
    bool prepared_ = false;
  };
  bool prepare_sleep();  // throws nothing
  bool check_before_sleep();
  bool drive();  // one pass; throws nothing
  bool pass();
  template <class Body>
  bool guarded(
      Body body);  // whatever goes wrong in the body revokes the generation and is not thrown; then returns true
  void fail_engine(Error error);
  bool busy() const;
  std::int64_t spin_time() const;
  bool waits_for_network() const;  // the running operations need other hosts
  bool take_commands(std::int64_t now);
  void attach_link(Commands::NewLink& link);
  void send_sharing(Commands::Sharing& sharing);  // to all local peers (sharing.cc)
  void send_control(int peer, Control type, control::Bytes message, std::vector<os::Descriptor> descriptors = {});
  void send_segment(Group& group, int peer);
  void begin_transfer(const OperationPtr& operation);
  bool match_any_source();
  bool check_transfers();
  void end_transfers(const Error& error);  // all of them
  void end_transfers(std::int32_t group, const Error& error);
  bool poll_sockets();
  void execute_revocation();
  void send_revocation();
  void finish_lost();
  void begin_leaving();
  std::int64_t next_deadline() const;
  void wake();
  void await(const Operation& operation);
  static bool is_done(Operation& operation);
  void create_group(std::uint32_t id, Topology topology);
  std::vector<Topology> read_sets(const std::vector<std::int64_t>& sets) const;
  // Member groups (member_groups.cc).
  void change_member_group(Operation& operation);
  void create_member_group(Operation& operation);
  void drop_group(std::uint32_t id);
  void abandon_group(std::uint32_t id, const Error& error);
  void send_abandon(std::uint32_t id, const std::vector<int>& members, const std::string& why);
  bool may_be_created(std::uint32_t id) const { return id >= next_group_ && dropped_.count(id) == 0; }
  void note_milestones();
  std::vector<int> missing_local_peers() const;
  // With the commands' mutex held.
  Error check(const Operation& operation) const;
  std::size_t enter(const std::vector<OperationPtr>& operations, bool bundle);
  void withdraw(const Operation& operation);
  bool name_taken(const Operation& operation) const;

  static constexpr std::int64_t kShortSpin = 30'000;  // when other ranks need the cores, or nothing will come soon
  // Keys in the poller; the messenger's keys are its streams.
  static constexpr std::uint64_t kWakeupKey = 1ull << 40;
  static constexpr std::uint64_t kProcessKey = 1ull << 41;
  static constexpr std::uint64_t kPeerWakeupKey = 1ull << 42;

  const Options options_;
  Tuning tuning_;                      // guarded by the driver lock
  std::atomic<std::int64_t> spin_ns_;  // from tuning_, for threads that wait
  const unsigned fork_depth_;
  const std::shared_ptr<Results> results_;
  Handles handles_;
  Events events_;
  Trace trace_;
  Counters counters_{};
  Commands commands_;

  std::mutex driver_mutex_;  // held by the driver; guards everything below
  os::Poller poller_;
  os::Wakeup wakeup_;
  std::map<int, os::PeerWakeup> peer_wakeups_;  // by the local peer that uses it
  std::uint64_t nonce_;
  link::StatusPage status_page_;
  std::unique_ptr<link::Messenger> messenger_;
  std::map<int, std::unique_ptr<link::LocalPeer>> local_peers_;  // by rank, on this host
  link::Regions regions_;
  std::map<int, os::Descriptor> processes_;  // pidfds of local peers
  std::map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::map<std::uint32_t, Topology> all_groups_;  // also those without this rank
  std::uint32_t next_group_ = 1;
  std::map<std::pair<std::uint32_t, int>, os::Descriptor>
      early_segments_;                                               // (group, rank); the group is not created here yet
  std::vector<std::pair<int, negotiate::Requests>> early_requests_;  // by peer
  std::map<int, negotiate::PendingLoad> early_loads_;                // of these requests, by peer
  std::map<std::pair<std::uint32_t, int>, Error> early_abandoned_;   // (group, rank)
  struct PointToPoint {  // a send or a receive: its bytes, and a second message with its data type
    OperationPtr operation;
    link::TransferPtr data;
    std::unique_ptr<std::uint32_t> dtype;  // this rank's for a send, the sender's for a receive
    link::TransferPtr dtype_transfer;
    bool done() const { return data->done() && dtype_transfer->done(); }
    void cancel() {
      data.reset();
      dtype_transfer.reset();
    }
    Error mismatch() const;
  };
  std::vector<PointToPoint> transfers_;
  std::vector<OperationPtr> any_source_;                   // receives from any source
  std::vector<OperationPtr> taken_;                        // taken from the commands, but in no other list yet
  std::map<int, std::map<std::uint32_t, Progress>> left_;  // rank -> group -> its progress when it left
  std::vector<os::Event> ready_;
  std::vector<std::uint32_t> removed_;
  std::set<std::uint32_t> dropped_;  // IDs of member groups that ended: they are never used again
  Error revoked_;
  bool revoking_ = false;
  bool leaving_ = false;
  bool moved_ = false;          // by the last pass
  std::int64_t now_ = 0;        // when the last pass began
  std::int64_t polled_at_ = 0;  // when the sockets were last looked at
  std::int64_t checked_cores_at_ = 0;

  bool oversubscribed_ = false;  // more ranks than cores: whoever looks for news lets others run
  bool shares_core_ = false;     // this core with another rank, for now
  std::thread thread_;
  std::atomic<bool> running_{false};  // from start() to leave(): threads of the user may drive
  std::atomic<int> waiters_{0};       // threads of the user that sleep until an operation is done
  std::atomic<bool> asleep_{true};    // nobody drives: whoever adds work must wake the engine's thread
  std::atomic<std::int64_t> sleeping_until_{0};
  std::mutex started_mutex_;
  std::condition_variable started_changed_;
  bool started_ = false;
  Error start_error_;
  bool flushed_ = false;
};

}  // namespace farandole
