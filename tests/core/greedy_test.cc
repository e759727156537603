// A rank that has proven the secret, and makes another take memory as long as it is let: it is named before that hurts.
// Touches api/ through job.h, and what peer.h touches.
#include <sys/mman.h>

#include "check.h"
#include "job.h"
#include "peer.h"

namespace {

using namespace farandole;
using peer::Bytes;

enum { kAllreduce = 0 };
enum { kPeerLost = 6 };

// The engine of one rank, and the other, which is none.
class Prey {
 public:
  explicit Prey(bool neighbours, int rank = 0)
      : rank_(rank),
        hosts_{0, neighbours ? 0 : 1},
        options_(options_of()),
        liar(1 - rank, {hosts_[0], hosts_[1]}, options_) {
    char text[512];
    CHECK_EQUAL(farandole_create(&options_, &engine_, text, sizeof text), 0);
    liar.connect(rank_, engine_);
    liar.greet(rank_);
    int code = 1;
    for (int turn = 0; code == 1 && turn < 100; ++turn) code = farandole_start(engine_, 100, text, sizeof text);
    CHECK_EQUAL(code, 0);
  }
  Prey(const Prey&) = delete;
  Prey& operator=(const Prey&) = delete;
  ~Prey() {
    liar.hang_up();
    farandole_leave(engine_, 100);
    farandole_destroy(engine_);
  }

  // An operation that needs the other rank ends with these words, and its number.
  void blames(const std::string& words) {
    job::Tensor tensor(10, 1);
    const int64_t handle = job::submit(engine_, job::request(kAllreduce, "mine", tensor));
    std::string text;
    CHECK_EQUAL(job::finish(engine_, handle, &text), kPeerLost);
    const std::string start = "rank " + std::to_string(1 - rank_) + " ";
    if (text.find(start + words) == std::string::npos) check::fail(__FILE__, __LINE__, text);
  }

 private:
  farandole_options options_of() const {
    farandole_options options = job::default_options();
    options.hosts = hosts_;
    options.size = 2;
    options.rank = rank_;
    options.tcp_streams = 1;
    return options;
  }

  const int rank_;
  const int32_t hosts_[2];
  farandole_options options_;
  farandole_engine* engine_ = nullptr;

 public:
  peer::Peer liar;
};

std::vector<negotiate::Request> many_requests() {
  std::vector<negotiate::Request> requests((1 << 19) + 1);
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].name = std::to_string(i);
  return requests;
}

TEST(requests_that_never_end) {
  Prey prey(false);
  for (const Bytes& message : negotiate::encode_requests(0, 0, many_requests()))
    prey.liar.say(0, Control::requests, message);
  prey.blames("asked for more at once than any program does");
}

}  // namespace
