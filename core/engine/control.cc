// Control frames: encoding and checked decoding, field by field.
// Pure. Touches base/ and wire/.
#include "engine/control.h"

#include "wire/buffer.h"

namespace farandole::control {

Bytes encode(const Hello& hello) {
  wire::Writer writer;
  writer.u32(hello.generation);
  writer.i32(hello.rank);
  writer.u64(hello.nonce);
  return writer.take();
}

Bytes encode(const Segment& segment) {
  wire::Writer writer;
  writer.u32(segment.group);
  return writer.take();
}

Bytes encode(const PlanState& state) {
  wire::Writer writer;
  writer.u32(state.group);
  writer.u64(state.bits);
  return writer.take();
}

Bytes encode(const Leaving& leaving) {
  wire::Writer writer;
  writer.u32(static_cast<std::uint32_t>(leaving.groups.size()));
  for (const auto& [id, progress] : leaving.groups) {
    writer.u32(id);
    writer.u64(progress.agreed);
    writer.u64(progress.completed);
  }
  return writer.take();
}

Bytes encode(const Revocation& revocation) {
  wire::Writer writer;
  writer.i32(static_cast<std::int32_t>(revocation.error.code));
  writer.i32(revocation.error.rank);
  writer.text(revocation.error.message);
  return writer.take();
}

Bytes encode(const Abandon& abandon) {
  wire::Writer writer;
  writer.u32(abandon.group);
  writer.text(abandon.why);
  return writer.take();
}

Bytes encode(const Share& share) {
  wire::Writer writer;
  writer.u64(share.region);
  writer.u64(share.bytes);
  writer.u32(share.results ? 1 : 0);
  return writer.take();
}

Bytes encode(const Unshare& unshare) {
  wire::Writer writer;
  writer.u64(unshare.region);
  return writer.take();
}

bool decode(std::span<const std::byte> bytes, Hello& hello) {
  wire::Reader reader(bytes);
  hello.generation = reader.u32();
  hello.rank = reader.i32();
  hello.nonce = reader.u64();
  return reader.finished();
}

bool decode(std::span<const std::byte> bytes, Segment& segment) {
  wire::Reader reader(bytes);
  segment.group = reader.u32();
  return reader.finished() && segment.group < kLastMemberGroup;
}

bool decode(std::span<const std::byte> bytes, PlanState& state) {
  wire::Reader reader(bytes);
  state.group = reader.u32();
  state.bits = reader.u64();
  return reader.finished() && state.group < kLastMemberGroup;
}

bool decode(std::span<const std::byte> bytes, Leaving& leaving) {
  constexpr std::size_t kGroupBytes = 20;
  wire::Reader reader(bytes);
  const std::uint32_t count = reader.count(kGroupBytes);
  for (std::uint32_t i = 0; i < count; ++i) {
    Progress& progress = leaving.groups[reader.u32()];
    progress.agreed = reader.u64();
    progress.completed = reader.u64();
  }
  return reader.finished() && leaving.groups.size() == count;
}

bool decode(std::span<const std::byte> bytes, Revocation& revocation) {
  wire::Reader reader(bytes);
  const std::int32_t code = reader.i32();
  revocation.error.rank = reader.i32();
  revocation.error.message = reader.text();
  // `ok` and `in_progress` do not end a generation.
  const bool failure = names_failure(code);
  revocation.error.code = failure ? static_cast<Code>(code) : Code::internal;
  // A rank that has no memory must send its number. Without it the receiver would think that its own memory is full.
  const bool unnamed = revocation.error.code == Code::no_memory && revocation.error.rank < 0;
  return reader.finished() && failure && revocation.error.rank >= -1 && !unnamed;
}

bool decode(std::span<const std::byte> bytes, Abandon& abandon) {
  wire::Reader reader(bytes);
  abandon.group = reader.u32();
  abandon.why = reader.text();
  return reader.finished() && abandon.group >= kFirstMemberGroup && abandon.group < kLastMemberGroup;
}

bool decode(std::span<const std::byte> bytes, Share& share) {
  wire::Reader reader(bytes);
  share.region = reader.u64();
  share.bytes = reader.u64();
  const std::uint32_t results = reader.u32();
  share.results = results == 1;
  return reader.finished() && share.region > 0 && share.bytes > 0 && results <= 1;
}

bool decode(std::span<const std::byte> bytes, Unshare& unshare) {
  wire::Reader reader(bytes);
  unshare.region = reader.u64();
  return reader.finished() && unshare.region > 0;
}

std::size_t descriptors_with(Control type) {
  if (type == Control::hello) return 2;
  return type == Control::segment || type == Control::share ? 1 : 0;
}

Failure violation(int peer, const std::string& what) {
  return Failure(Code::peer_lost,
                 "rank " + std::to_string(peer) + " " + what +
                     ", which breaks the protocol. Install the same build of Farandole for all ranks; if it is the "
                     "same, report this as a bug.",
                 peer);
}

}  // namespace farandole::control
