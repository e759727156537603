// The engine of one rank: takes requests, drives groups and links, ends handles. An object; a process may hold several.
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
#include "link/board.h"
#include "negotiate/messages.h"
#include "os/poller.h"

namespace farandole {

// Never negotiated: transfers, and groups that only their members make.
bool beside(const Operation& operation);
constexpr int kAnySource = -1;
// Tags of remove_group: such a group is left by this rank alone, or ended on all of its members, with an error.
constexpr std::int64_t kDrop = 1;
constexpr std::int64_t kAbandon = 2;

// One thread at a time sits in the driver's seat and advances everything; it never blocks there. Mostly that is the
// engine's own thread, which sleeps in the poller when there is nothing to do. A user's thread that waits for a handle
// takes the seat when it is free, so that short operations need no switch of threads.
class Engine final : private Services, private link::Listener {
 public:
  explicit Engine(Options options);
  ~Engine() override;

  // From any thread.
  Error add_link(int peer, os::Descriptor stream, link::StreamKind kind);
  Error start(std::int64_t timeout_ms);  // in_progress at least every 100 ms: call again
  void leave(std::int64_t linger_ms);
  void revoke_from_outside(const Error& error);
  // All or nothing; fills in handles and names. `prompt`: the caller waits at once.
  Error submit(std::vector<OperationPtr> operations, bool bundle, bool prompt);
  // Memory of the caller's, a mapping of `file`, that neighbours may read and write where it lies; its number.
  std::uint64_t share(os::Descriptor file, std::byte* data, std::size_t bytes, link::Use use = link::Use::tensors);
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
  bool forked() const;  // in a child of the process that made it

 private:
  struct Inbox {  // what other threads ask of the driver
    std::mutex mutex;
    std::atomic<bool> full{false};
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
      os::Descriptor file;  // none: it is shared no more
      std::byte* data;
      std::size_t bytes;
      link::Use use = link::Use::tensors;
    };
    std::vector<Sharing> sharings;
    std::uint64_t regions = 0;  // how many so far
    Error revoke;
    bool leave = false;
    using Names = std::unordered_set<std::string>;
    std::unordered_map<std::int32_t, Names> names;  // group -> pending
    // The operation that ended last: its name stays taken for a while, so that a second one of its name is refused
    // however quick the first was.
    struct {
      Names::node_type name;
      std::int32_t group = 0;
      std::int64_t at = 0;
      std::atomic<std::int64_t> handle{0};
    } last;
    std::map<std::pair<std::int32_t, Kind>, std::uint64_t> unnamed;  // how many so far
    std::unordered_map<std::int32_t, std::vector<int>> members;      // group -> ranks, for checks by the submitter
    Error ended;                                                     // nothing can be submitted any more
  };

  // Services, for the groups.
  const Options& options() const override { return options_; }
  link::Messenger& messenger() override { return *messenger_; }
  const link::Regions& regions() const override { return regions_; }
  Counters& counters() override { return counters_; }
  void log(Level level, std::string text) override;
  void finish(Operation& operation, const Error& error) override;
  void revoke(const Error& error) override;
  std::int64_t add_groups(const std::vector<std::int64_t>& sets) override;
  void remove_group(std::uint32_t id) override;
  void count_unnamed_anew(std::uint32_t id) override;
  const Tuning& tuning() const override { return tuning_; }
  void tune(const Tuning& tuning, std::uint64_t sequence) override;

  // Listener, for the messenger.
  void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                  std::vector<os::Descriptor> descriptors) override;
  bool may_send(int peer, std::uint32_t group) override;
  void on_lost(int peer, const Error& why) override;
  void on_left(int peer) override;

  // What they bring (incoming.cc).
  void hear(int peer, Control type, std::span<const std::byte> payload, std::vector<os::Descriptor> descriptors);
  void on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors);
  void on_segment(int peer, const control::Segment& segment, os::Descriptor file);
  void on_requests(int peer, negotiate::Requests message);
  void on_answer(int peer, negotiate::Answer message);
  void on_word(int peer, const control::Word& word);
  void on_leaving(int peer, control::Leaving leaving);
  void on_revoke(int peer, const Error& error);
  void on_abandon(int peer, const control::Abandon& abandon);
  void on_share(int peer, const control::Share& share, os::Descriptor file);
  void on_unshare(int peer, const control::Unshare& unshare);
  // Null when there is none yet, or no more. Throws when this rank and the peer are not both in it.
  Group* group_with(std::uint32_t id, int peer, const char* what);
  bool neighbour(int peer) const;  // it is on this host
  std::size_t most_early_segments() const;
  void attach_segment(Group& group, int peer, os::Descriptor file);
  void keep_early(int peer, negotiate::Requests message);
  void take_early(Group& group);
  void forget_early(std::uint32_t id);

  // The driver's side (drive.cc).
  void thread_main();
  enum class Whose { ours, users };  // the thread that drives
  void pause(Whose thread);
  void look_at_cores(Whose thread);
  // Holds the driver's seat. However its holder goes, what came meanwhile is looked at once more, and the seat is free.
  class Seat {
   public:
    explicit Seat(Engine& engine);             // waits until it is free
    Seat(Engine& engine, std::try_to_lock_t);  // false when it is taken, or the engine does not run
    ~Seat();
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    explicit operator bool() const { return lock_.owns_lock(); }
    // Before it is left: true when something more can be done. Then it is for the caller to do it.
    bool settle();
    void leave_unsettled() { settled_ = true; }

   private:
    void take();
    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
    bool settled_ = false;
  };
  bool settle();  // throws nothing
  bool look_once_more();
  bool drive();  // one pass; throws nothing
  bool pass();
  template <class Body>
  bool guarded(Body body);  // whatever goes wrong in it revokes, and never gets out; then true
  void give_up(Error error);
  bool busy() const;
  std::int64_t patience() const;
  bool waits_for_a_wire() const;  // what is under way needs other hosts
  bool take_inbox(std::int64_t now);
  void welcome(Inbox::NewLink& link);
  void spread(Inbox::Sharing& sharing);  // to all neighbours (sharing.cc)
  void tell(int peer, Control type, control::Bytes message, std::vector<os::Descriptor> descriptors = {});
  void send_segment(Group& group, int peer);
  void begin_transfer(const OperationPtr& operation);
  bool find_sources();
  bool check_transfers();
  void end_transfers(const Error& error);  // all of them
  void end_transfers(std::int32_t group, const Error& error);
  bool look_at_sockets();
  void execute_revocation();
  void tell_revocation();
  void finish_lost();
  void begin_leaving();
  std::int64_t next_deadline() const;
  void wake();
  void await(const Operation& operation);
  static bool is_done(Operation& operation);
  void create_group(std::uint32_t id, Topology topology);
  std::vector<Topology> read_sets(const std::vector<std::int64_t>& sets) const;
  // Groups that only their members make (founding.cc).
  void change_founded(Operation& operation);
  void found_group(Operation& operation);
  void drop_group(std::uint32_t id);
  void abandon_group(std::uint32_t id, const Error& error);
  void tell_abandoned(std::uint32_t id, const std::vector<int>& members, const std::string& why);
  bool awaits_founding(std::uint32_t id) const { return id >= next_group_ && dropped_.count(id) == 0; }
  void note_milestones();
  std::vector<int> neighbours_missing() const;
  // With inbox_.mutex held.
  Error check(const Operation& operation) const;
  std::size_t enter(const std::vector<OperationPtr>& operations, bool bundle);
  void take_back(const Operation& operation);
  bool name_taken(const Operation& operation) const;

  static constexpr std::int64_t kShortSpin = 30'000;  // where others compute, or nothing will come soon
  // Keys of the poller; the messenger's are peers.
  static constexpr std::uint64_t kBellKey = 1ull << 40;
  static constexpr std::uint64_t kProcessKey = 1ull << 41;
  static constexpr std::uint64_t kFarBellKey = 1ull << 42;

  const Options options_;
  Tuning tuning_;                      // guarded by the seat
  std::atomic<std::int64_t> spin_ns_;  // of tuning_, for threads that wait
  const unsigned fork_depth_;
  const std::shared_ptr<Results> results_;
  Handles handles_;
  Events events_;
  Trace trace_;
  Counters counters_{};
  Inbox inbox_;

  std::mutex seat_;  // whoever holds it drives; guards everything below
  os::Poller poller_;
  os::Doorbell bell_;
  std::map<int, os::Farbell> far_bells_;  // by the neighbour that rings it
  std::uint64_t nonce_;
  link::Board board_;
  std::unique_ptr<link::Messenger> messenger_;
  std::map<int, std::unique_ptr<link::Neighbour>> neighbours_;  // by rank, on this host
  link::Regions regions_;
  std::map<int, os::Descriptor> processes_;  // pidfds of neighbours
  std::map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::map<std::uint32_t, Topology> all_groups_;  // also those this rank is not in
  std::uint32_t next_group_ = 1;
  std::map<std::pair<std::uint32_t, int>, os::Descriptor> early_segments_;  // (group, rank): group not made here yet
  std::vector<std::pair<int, negotiate::Requests>> early_requests_;         // by peer
  std::map<int, negotiate::Load> early_loads_;                              // of these requests, by peer
  std::map<std::pair<std::uint32_t, int>, Error> early_abandoned_;          // (group, rank)
  struct PointToPoint {  // a send or a receive: its bytes, and a word beside them that says what they are
    OperationPtr operation;
    link::TransferPtr data;
    std::unique_ptr<std::uint32_t> dtype;  // mine when sending, the sender's when receiving
    link::TransferPtr about;
    bool done() const { return data->done() && about->done(); }
    void drop() {
      data.reset();
      about.reset();
    }
    Error mismatch() const;
  };
  std::vector<PointToPoint> transfers_;
  std::vector<OperationPtr> unsourced_;                    // receives from whoever sends first
  std::vector<OperationPtr> taken_;                        // out of the inbox, and in nobody else's hands yet
  std::map<int, std::map<std::uint32_t, Progress>> left_;  // rank -> group -> how far it had come
  std::vector<os::Event> ready_;
  std::vector<std::uint32_t> removed_;
  std::set<std::uint32_t> dropped_;  // numbers of groups that members made: they never come again
  Error revoked_;
  bool revoking_ = false;
  bool leaving_ = false;
  bool moved_ = false;          // by the last pass
  std::int64_t now_ = 0;        // when the last pass began
  std::int64_t looked_at_ = 0;  // when the sockets were last looked at
  std::int64_t looked_at_cores_ = 0;

  bool crowded_ = false;  // more ranks than cores: whoever looks for news lets others run
  bool sharing_ = false;  // this core with another rank, for now
  std::thread thread_;
  std::atomic<bool> running_{false};  // from start() to leave(): the seat may be taken
  std::atomic<int> waiters_{0};       // threads of the user that sleep until an operation is done
  std::atomic<bool> asleep_{true};    // nobody drives: who brings work must ring
  std::atomic<std::int64_t> sleeping_until_{0};
  std::mutex started_mutex_;
  std::condition_variable started_changed_;
  bool started_ = false;
  Error start_error_;
  bool flushed_ = false;
};

}  // namespace farandole
