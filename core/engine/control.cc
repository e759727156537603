// Control frames: encoding and checked decoding, field by field.
// Pure. Touches base/ and wire/.
#include "engine/control.h"

#include "wire/buffer.h"

namespace farandole::control {

namespace {

void write(wire::Writer& writer, std::uint32_t value) { writer.u32(value); }
void write(wire::Writer& writer, std::int32_t value) { writer.i32(value); }
void write(wire::Writer& writer, std::uint64_t value) { writer.u64(value); }
void write(wire::Writer& writer, const std::string& value) { writer.text(value); }
void write(wire::Writer& writer, bool value) { writer.u32(value ? 1 : 0); }

template <class... Fields>
Bytes written(const Fields&... fields) {
  wire::Writer writer;
  (write(writer, fields), ...);
  return writer.take();
}

}  // namespace

Bytes encode(const Hello& hello) { return written(hello.generation, hello.rank, hello.nonce); }
Bytes encode(const Segment& segment) { return written(segment.group); }
Bytes encode(const PlanState& state) { return written(state.group, state.bits); }
Bytes encode(const Abandon& abandon) { return written(abandon.group, abandon.why); }
Bytes encode(const Share& share) { return written(share.region, share.bytes, share.results); }
Bytes encode(const Unshare& unshare) { return written(unshare.region); }
Bytes encode(const Revocation& revocation) {
  const Error& error = revocation.error;
  return written(static_cast<std::int32_t>(error.code), error.rank, error.message);
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
