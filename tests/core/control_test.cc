// Control frames: what an engine writes comes back, and nothing else does.
// Touches engine/control.h.
#include "engine/control.h"

#include "check.h"

namespace farandole::control {
namespace {

// Every part of it and everything longer is refused; returns the copy.
template <class Message>
Message comes_back(const Message& message) {
  Bytes bytes = encode(message);
  Message copy;
  CHECK(decode(bytes, copy));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    Message part;
    CHECK(!decode(std::span<const std::byte>(bytes).first(length), part));
  }
  bytes.push_back(std::byte{0});
  Message longer;
  CHECK(!decode(bytes, longer));
  return copy;
}

template <class Message>
bool readable(const Message& message) {
  Message copy;
  return decode(encode(message), copy);
}

TEST(frames_come_back) {
  const Hello hello = comes_back(Hello{3, 7, 1ull << 60});
  CHECK(hello.generation == 3 && hello.rank == 7 && hello.nonce == 1ull << 60);
  CHECK_EQUAL(comes_back(Segment{4}).group, 4u);
  CHECK_EQUAL(comes_back(PlanState{4, 1ull << 63}).bits, 1ull << 63);
  const Leaving leaving = comes_back(Leaving{{{0, {1, 2}}, {kFirstMemberGroup, {3, 4}}}});
  CHECK(leaving.groups.at(0).completed == 2 && leaving.groups.at(kFirstMemberGroup).agreed == 3);
  const Revocation revocation = comes_back(Revocation{{Code::peer_lost, "why", 2}});
  CHECK(revocation.error.code == Code::peer_lost && revocation.error.message == "why" && revocation.error.rank == 2);
  CHECK_EQUAL(comes_back(Abandon{kFirstMemberGroup, "why"}).why, "why");
  CHECK_EQUAL(comes_back(Share{1, 4096}).bytes, 4096u);
  CHECK_EQUAL(comes_back(Unshare{9}).region, 9u);
}

TEST(a_revocation_is_a_failure) {
  for (int code = -2; code < 20; ++code)
    CHECK_EQUAL(readable(Revocation{{static_cast<Code>(code), "", 0}}), code >= 2 && code <= 10);
  CHECK(readable(Revocation{{Code::revoked, "", -1}}));
  CHECK(!readable(Revocation{{static_cast<Code>(256), "", -1}}));
  CHECK(!readable(Revocation{{Code::peer_lost, "", -2}}));
  CHECK(!readable(Revocation{{Code::no_memory, "whose?", -1}}));
}

TEST(control_frames_with_impossible_numbers_are_refused) {
  CHECK(!readable(Segment{kLastMemberGroup}));
  CHECK(!readable(PlanState{0xffffffff, 0}));
  CHECK(!readable(Abandon{0, "the first group is never abandoned"}));
  CHECK(!readable(Abandon{kLastMemberGroup, ""}));
  CHECK(!readable(Share{0, 4096}));
  CHECK(!readable(Share{1, 0}));
  CHECK(!readable(Unshare{0}));
}

TEST(a_violation_names_its_sender) {
  const Error error = violation(5, "sent nonsense").error();
  CHECK_EQUAL(error.rank, 5);
  CHECK(error.code == Code::peer_lost);
  CHECK(error.message.find("rank 5 sent nonsense") == 0);
}

}  // namespace
}  // namespace farandole::control
