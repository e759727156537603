// Memory that this rank and its neighbours share: what they hear of it, and when it is no more.
// Touches every room below it.
#include "engine/engine.h"

namespace farandole {

std::uint64_t Engine::share(os::Descriptor file, std::byte* data, std::size_t bytes, link::Use use) {
  std::uint64_t region = 0;
  {
    std::lock_guard lock(inbox_.mutex);
    region = ++inbox_.regions;
    inbox_.sharings.push_back({region, std::move(file), data, bytes, use});
    inbox_.full.store(true, std::memory_order_release);
  }
  wake();
  return region;
}

// The memory may be gone as soon as this returns: what was shared and not yet told is forgotten.
void Engine::unshare(std::uint64_t region) {
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.sharings.push_back({region, os::Descriptor(), nullptr, 0});
    inbox_.full.store(true, std::memory_order_release);
  }
  wake();
}

void Engine::spread(Inbox::Sharing& sharing) {
  const bool ends = !sharing.file;
  if (ends)
    regions_.remove(sharing.region);
  else
    regions_.add(sharing.region, sharing.data, sharing.bytes, sharing.use);
  const control::Bytes message =
      ends ? control::encode(control::Unshare{sharing.region})
           : control::encode(control::Share{sharing.region, sharing.bytes, sharing.use == link::Use::results});
  for (const auto& [rank, neighbour] : neighbours_) {
    if (!messenger_->has(rank)) continue;
    std::vector<os::Descriptor> files;
    try {
      if (!ends) files.push_back(sharing.file.duplicate());
    } catch (const Failure& failure) {
      log(Level::warning, "memory is not shared with rank " + std::to_string(rank) + ": " + failure.error().message);
      continue;
    }
    tell(rank, ends ? Control::unshare : Control::share, message, std::move(files));
  }
}

}  // namespace farandole
