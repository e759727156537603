// Memory that this rank shares with its local peers: sending it to them, and withdrawing it.
// Touches every room below it.
#include "engine/engine.h"

namespace farandole {

std::uint64_t Engine::share(os::Descriptor file, std::byte* data, std::size_t bytes, link::RegionUse use) {
  const std::uint64_t region = commands_.share(std::move(file), data, bytes, use);
  driver_.wake();
  return region;
}

// The memory may be freed as soon as this returns, so what is queued and not yet sent is dropped.
void Engine::unshare(std::uint64_t region) {
  commands_.unshare(region);
  driver_.wake();
}

void Engine::send_sharing(Commands::Sharing& sharing) {
  const bool ends = !sharing.file;
  if (ends)
    regions_.remove(sharing.region);
  else
    regions_.add(sharing.region, sharing.data, sharing.bytes, sharing.use);
  const control::Bytes message =
      ends ? control::encode(control::Unshare{sharing.region})
           : control::encode(control::Share{sharing.region, sharing.bytes, sharing.use == link::RegionUse::results});
  for (const auto& [rank, local_peer] : local_peers_) {
    if (!messenger_->has(rank)) continue;
    std::vector<os::Descriptor> files;
    try {
      if (!ends) files.push_back(sharing.file.duplicate());
    } catch (const Failure& failure) {
      log(Level::warning, "memory is not shared with rank " + std::to_string(rank) + ": " + failure.error().message);
      continue;
    }
    send_control(rank, ends ? Control::unshare : Control::share, message, std::move(files));
  }
}

}  // namespace farandole
