// What the two engines of hostile.h do in the background of the operation under test: groups, unnamed operations,
// bundles, transfers, shared memory. These may fail, but all must end, and bytes between honest ranks must be right.
// Touches api/, negotiate/ and memory files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/control.h"
#include "job.h"
#include "negotiate/request.h"

namespace hostile {

class Background {
 public:
  enum What { kNothing, kFounded, kNegotiated, kBundle, kTransfers, kShared, kWhats };

  Background(std::array<farandole_engine*, 2> engines, std::array<int, 2> ranks, int hostile)
      : engines_(engines), ranks_(ranks), hostile_(hostile) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  ~Background() {
    for (void* memory : memory_) munmap(memory, kBytes);
  }

  void begin(unsigned what) {
    for (std::size_t i = 0; i < 2; ++i) {
      if (what == kFounded) found(i);
      if (what == kNegotiated) submit(i, {make(kAddGroup, i, "pair", {2, ranks_[0], ranks_[1]})});
      if (what == kBundle) submit(i, {make(kAllreduce, i), make(kAllreduce, i)}, 1);
      if (what == kTransfers) transfer(i);
      if (what == kShared) share(i);
    }
  }
  // What the hostile rank submits when it takes part, and in which group.
  static std::uint32_t group_of(unsigned what) { return what == kFounded ? farandole::kFirstMemberGroup : 0; }
  std::vector<farandole::negotiate::Request> same(unsigned what) const {
    using namespace farandole;
    negotiate::Request request;
    request.shape = {kElements};
    if (what == kFounded) {
      request.kind = Kind::broadcast;
      request.root = ranks_[0];
      request.unnamed = true;
      request.name = "broadcast.noname.1";
      return {request};
    }
    if (what == kNegotiated) {
      request.kind = Kind::add_group;
      request.name = "pair";
      request.splits = {2, ranks_[0], ranks_[1]};
      return {request};
    }
    if (what != kBundle) return {};
    std::vector<negotiate::Request> both(2, request);
    for (std::size_t i = 0; i < 2; ++i) {
      both[i].unnamed = true;
      both[i].name = "allreduce.noname." + std::to_string(i + 1);
      both[i].bundle = "allreduce.noname.1";
      both[i].bundle_size = 2;
    }
    return both;
  }
  // Call it when the hostile rank has gone.
  template <class Check>
  void finish(Check check) {
    for (const Under& one : under_) {
      int code = 1;
      for (int slices = 0; code == 1 && slices < 200; ++slices)
        code = farandole_wait(engines_[one.engine], one.handle, 100);
      if (code == 1) throw std::runtime_error("a background operation does not end after the hostile rank has gone");
      farandole_outcome outcome{};
      if (farandole_outcome_of(engines_[one.engine], one.handle, &outcome) != 0)
        throw std::runtime_error("a background operation has no outcome");
      check(outcome);
      if (outcome.code == 0 && one.honest && received_ != std::vector<float>(kElements, kSent))
        throw std::runtime_error("what one honest rank sent to the other has changed");
    }
  }

 private:
  enum { kAllreduce = 0, kBroadcast = 2, kAddGroup = 7, kRemoveGroup = 8, kSend = 9, kReceive = 10 };
  static constexpr std::size_t kElements = 12, kBytes = 4096;
  static constexpr float kSent = 42;
  struct Under {
    std::size_t engine;
    std::int64_t handle;
    bool honest;  // a receive from the other honest rank
  };

  farandole_request make(int kind, std::size_t i, const char* name = nullptr, std::vector<std::int64_t> splits = {}) {
    job::Tensor& tensor = *tensors_.emplace_back(std::make_unique<job::Tensor>(kElements, kSent));
    farandole_request made = job::request(kind, name, tensor);
    if (kind == kBroadcast) made.peer = ranks_[0];
    if (kind == kSend || kind == kReceive) made.peer = ranks_[1 - i];
    splits_.push_back(std::move(splits));
    made.splits = splits_.back().data();
    made.splits_count = static_cast<std::int32_t>(splits_.back().size());
    return made;
  }
  // An operation that the engine refuses, because the hostile rank has ended the job, is skipped.
  void submit(std::size_t i, const std::vector<farandole_request>& asked, int flags = 0, bool honest = false) {
    std::vector<std::int64_t> handles(asked.size());
    char text[512];
    if (farandole_submit(engines_[i], asked.data(), static_cast<int>(asked.size()), flags, 0, handles.data(), text,
                         sizeof text) != 0)
      return;
    for (const std::int64_t handle : handles) under_.push_back({i, handle, honest});
  }

  void found(std::size_t i) {
    farandole_request made = make(kAddGroup, i, "founded", {3, 0, 1, 2});
    made.tag = farandole::kFirstMemberGroup;
    submit(i, {made});
    for (int times = 0; times < 2; ++times) {
      farandole_request unnamed = make(kBroadcast, i);
      unnamed.group = farandole::kFirstMemberGroup;
      submit(i, {unnamed});
    }
    farandole_request removed = make(kRemoveGroup, i, "dropped", {farandole::kFirstMemberGroup});
    removed.tag = 1;
    if (i == 1) submit(i, {removed});
  }
  void transfer(std::size_t i) {
    farandole_request made = make(i == 0 ? kSend : kReceive, i, "transfer");
    if (i == 1) made.output = received_.data();
    submit(i, {made}, 0, i == 1);
    farandole_request from = make(kReceive, i, "from the hostile rank");
    from.peer = hostile_;
    submit(i, {from});
  }
  void share(std::size_t i) {
    const int file = memfd_create("background", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kBytes) != 0) throw std::runtime_error("no memory file");
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("a memory file cannot be mapped");
    memory_.push_back(memory);
    farandole_share(engines_[i], file, memory, kBytes);
    farandole_request made = make(kAllreduce, i, "shared");
    made.input = made.output = memory;
    submit(i, {made});
  }

  const std::array<farandole_engine*, 2> engines_;
  const std::array<int, 2> ranks_;
  const int hostile_;
  std::vector<Under> under_;
  std::vector<std::unique_ptr<job::Tensor>> tensors_;
  std::vector<std::vector<std::int64_t>> splits_;
  std::vector<float> received_ = std::vector<float>(kElements, 0);
  std::vector<void*> memory_;
};

}  // namespace hostile
