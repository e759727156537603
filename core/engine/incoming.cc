// Control frames of other ranks. Each is decoded, checked against the current state, and handled. An invalid one ends
// the generation and names its sender. Touches every room below it.
#include "engine/engine.h"

namespace farandole {
namespace {

template <class Message>
Message read(int peer, std::span<const std::byte> payload, const char* what) {
  Message message;
  if (!decode(payload, message)) throw control::violation(peer, std::string("sent ") + what + " that cannot be read");
  return message;
}

}  // namespace

void Engine::on_control(int peer, std::uint32_t type, std::span<const std::byte> payload,
                        std::vector<os::Descriptor> descriptors) {
  if (revoked_.failed()) return;  // the generation has ended
  try {
    if (type == 0 || type > kControls) throw control::violation(peer, "sent a control frame of an unknown type");
    const auto known = static_cast<Control>(type);
    if (descriptors.size() != control::descriptors_with(known))
      throw control::violation(peer, "sent a control frame with " + std::to_string(descriptors.size()) +
                                         " file descriptors instead of " +
                                         std::to_string(control::descriptors_with(known)));
    handle_control(peer, known, payload, std::move(descriptors));
  } catch (const Failure& failure) {
    revoke(failure.error());
  }
}

void Engine::handle_control(int peer, Control type, std::span<const std::byte> payload,
                            std::vector<os::Descriptor> descriptors) {
  switch (type) {
    case Control::hello:
      return on_hello(peer, read<control::Hello>(peer, payload, "a hello message"), std::move(descriptors));
    case Control::segment:
      return groups_.on_segment(peer, read<control::Segment>(peer, payload, "memory"), std::move(descriptors[0]));
    case Control::requests:
      return groups_.on_requests(peer, read<negotiate::Requests>(peer, payload, "requests"));
    case Control::buckets:
      return groups_.on_answer(peer, read<negotiate::Answer>(peer, payload, "an answer"));
    case Control::plan_state:
      return groups_.on_plan_state(peer, read<control::PlanState>(peer, payload, "a plan state"));
    case Control::leaving:
      return groups_.on_leaving(peer, read<control::Leaving>(peer, payload, "a leaving message"));
    case Control::revoke:
      // The rank that it names may not be in this job: the launcher may name a rank by its number in another
      // generation.
      return revoke(read<control::Revocation>(peer, payload, "a revocation").error);
    case Control::abandon:
      return groups_.on_abandon(peer, read<control::Abandon>(peer, payload, "the end of a process set"));
    case Control::share:
      return on_share(peer, read<control::Share>(peer, payload, "shared memory"), std::move(descriptors[0]));
    case Control::unshare:
      return regions_.detach(peer, read<control::Unshare>(peer, payload, "the end of shared memory").region);
  }
}

// Once per peer: the rings keep a pointer to the first one's page.
void Engine::on_hello(int peer, const control::Hello& hello, std::vector<os::Descriptor> descriptors) {
  if (local_peers_.count(peer) != 0) throw control::violation(peer, "sent a second hello message");
  if (!options_.on_my_host(peer)) throw control::violation(peer, "sent a hello message from another host");
  if (hello.rank != peer || hello.generation != options_.generation)
    throw control::violation(peer, "sent a hello message of rank " + std::to_string(hello.rank) + " and generation " +
                                       std::to_string(hello.generation) + "; expected its own rank and generation " +
                                       std::to_string(options_.generation));
  control::with_file_of(peer, [&] {
    local_peers_[peer] = std::make_unique<link::LocalPeer>(std::move(descriptors[0]), std::move(descriptors[1]),
                                                           hello.generation, hello.rank, hello.nonce);
  });
}

// When this fails, collectives copy through the rings instead.
void Engine::on_share(int peer, const control::Share& share, os::Descriptor file) {
  if (local_peers_.count(peer) == 0) throw control::violation(peer, "shared memory before its hello message");
  if (regions_.attached(peer, share.region)) throw control::violation(peer, "shared the same memory twice");
  const auto use = share.results ? link::RegionUse::results : link::RegionUse::tensors;
  try {
    if (!regions_.can_attach(peer, share.bytes))
      throw Failure(Code::no_memory, "it has shared more than the machine has, or more than 4096 regions");
    // Engines seal their files of results. Files of tensors can be torch's, which are not sealed.
    regions_.attach(peer, share.region, os::SharedMemory::open_shared(std::move(file), share.bytes, share.results),
                    use);
  } catch (const Failure& failure) {
    log(Level::warning, "memory of rank " + std::to_string(peer) + " is not used in place: " + failure.error().message);
  }
}

void Engine::on_left(int peer) {
  if (!revoked_.failed()) groups_.on_left(peer);
}

// A rank that has sent its progress has left, also when its link ends before its frame `leave`.
void Engine::on_lost(int peer, const Error& why) {
  if (groups_.announced_leave(peer)) return on_left(peer);
  Error error = why;
  if (error.rank < 0) error.rank = peer;
  revoke(error);
}

}  // namespace farandole
