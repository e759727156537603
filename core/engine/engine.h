// The engine of one rank: takes requests, drives groups and links, ends operations. An object; a process may have
// several.
// Touches every room below it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/commands.h"
#include "engine/driver.h"
#include "engine/groups.h"
#include "engine/services.h"
#include "engine/transfers.h"
#include "link/status_page.h"
#include "os/poller.h"

namespace farandole {

// It joins its parts: `Commands` has what other threads hand in, `Driver` decides which thread runs a pass, a pass
// moves `Groups` and `Transfers` on. The engine itself has the links to other ranks, and ends: it revokes, or leaves.
class Engine final : private Services, private Driven, private link::Listener {
 public:
  // `record`: the recorder's memory file; it may be empty.
  explicit Engine(Options options, os::Descriptor record = {});
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
  bool wait(const OperationPtr& operation, std::int64_t timeout_ms, bool passive = false);
  Handles& handles() { return handles_; }
  Events& events() { return events_; }
  Trace& trace() override { return trace_; }
  Recorder& recorder() override { return recorder_; }
  std::int64_t now() const override { return driver_.now(); }
  Results& results() override { return *results_; }
  std::int64_t counter(int which);
  // From now on operations may have tensors on devices. Throws Failure(precondition).
  void use_gpus(std::shared_ptr<cuda::Gpus> gpus, collective::NcclOptions nccl);
  cuda::MomentPtr mark(int device, cuda::Stream stream);  // what is in the stream so far; throws Failure
  void set_trace(bool on, bool mark_plans);
  Tuning tuned();
  bool forked() const;  // this process is a child of the one that created the engine

 private:
  // Services for the groups and the transfers.
  const Options& options() const override { return options_; }
  link::Messenger& messenger() override { return *messenger_; }
  const link::Regions& regions() const override { return regions_; }
  const std::shared_ptr<cuda::Waker>& waker() const override { return waker_; }
  std::shared_ptr<collective::Nccl> nccl() override;
  Counters& counters() override { return counters_; }
  void log(Level level, std::string text) override;
  void finish(Operation& operation, const Error& error) override;
  void revoke(const Error& error) override;
  const Topology* topology(std::uint32_t group) const override { return groups_.topology(group); }
  std::int64_t add_groups(const std::vector<std::int64_t>& sets) override { return groups_.add(sets); }
  void remove_group(std::uint32_t id) override { groups_.remove(id); }
  void restart_unnamed_numbers(std::uint32_t id) override;
  const Tuning& tuning() const override { return tuning_; }
  void tune(const Tuning& tuning, std::uint64_t sequence) override;

  // What the driver drives (drive.cc).
  bool pass(std::int64_t now) override;
  bool busy() const override;
  bool waits_for_network() const override;
  bool has_news() override;
  std::int64_t next_deadline() const override;
  void fail(Error error) override;

  // Callbacks from the messenger.
  void on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                  std::vector<os::Descriptor> descriptors) override;
  bool may_send(int peer, std::uint32_t group) override { return groups_.may_send(peer, Transfers::group_of(group)); }
  void on_lost(int peer, const Error& why) override;
  void on_left(int peer) override;

  // Handlers of control frames (incoming.cc).
  void handle_control(int peer, Control type, std::span<const std::byte> payload,
                      std::vector<os::Descriptor> descriptors);
  void on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors);
  void on_share(int peer, const control::Share& share, os::Descriptor file);

  bool take_commands(std::int64_t now);
  void begin(const OperationPtr& operation, std::int64_t now);
  void attach_link(Commands::NewLink& link);
  void send_sharing(Commands::Sharing& sharing);  // to all local peers (sharing.cc)
  bool poll_sockets();
  void execute_revocation();
  void send_revocation();
  void finish_lost();
  void begin_leaving();
  std::vector<int> missing_local_peers() const;
  void note_milestones();

  // Keys in the poller; the messenger's keys are its streams.
  static constexpr std::uint64_t kWakeupKey = 1ull << 40;
  static constexpr std::uint64_t kProcessKey = 1ull << 41;
  static constexpr std::uint64_t kPeerWakeupKey = 1ull << 42;

  const Options options_;
  Tuning tuning_;  // guarded by the driver lock
  const unsigned fork_depth_;
  const std::shared_ptr<cuda::Waker> waker_;
  std::mutex gpus_mutex_;  // of these two
  std::shared_ptr<cuda::Gpus> gpus_;
  std::shared_ptr<collective::Nccl> nccl_;
  const std::shared_ptr<Results> results_;
  Handles handles_;
  Events events_;
  Trace trace_;
  Recorder recorder_;
  Counters counters_;
  Commands commands_;

  // The driver lock guards everything from here to the milestones.
  os::Poller poller_;
  std::uint64_t nonce_;
  link::StatusPage status_page_;
  std::unique_ptr<link::Messenger> messenger_;
  LocalPeers local_peers_;
  std::map<int, os::PeerWakeup> peer_wakeups_;  // by the local peer that uses it
  std::map<int, os::Descriptor> processes_;     // pidfds of local peers
  link::Regions regions_;
  Transfers transfers_;
  Groups groups_;
  std::vector<OperationPtr> taken_;  // taken from the commands, but in no other list yet
  std::vector<os::Event> ready_;
  Error revoked_;
  bool revoking_ = false;
  bool leaving_ = false;
  std::int64_t polled_at_ = 0;  // when the sockets were last looked at
  Driver driver_;

  // Milestones, for threads in start() and leave().
  std::mutex started_mutex_;
  std::condition_variable started_changed_;
  bool started_ = false;
  Error start_error_;
  bool flushed_ = false;
};

}  // namespace farandole
