// Moving bytes and descriptors through a connected stream socket without blocking.
// Touches the operating system.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "os/descriptor.h"

namespace farandole::os {

struct IoResult {
  enum class Status { bytes, would_block, end, failed };
  Status status = Status::bytes;
  std::size_t bytes = 0;
  int error = 0;  // errno when failed
};

// Sends `parts`. `descriptors` are sent together with the first byte.
IoResult send_some(int fd, std::span<const iovec> parts, std::span<const Descriptor> descriptors);
// Reads into `parts`. Received descriptors are appended to `descriptors`; pass null where none can come (TCP).
IoResult receive_some(int fd, std::span<const iovec> parts, std::vector<Descriptor>* descriptors);

void make_nonblocking(int fd);
void tune_tcp(int fd);
void tune_local(int fd);
void shutdown_write(int fd);  // the other side reads an end of file after what was sent
int peer_process(int fd);     // SO_PEERCRED; 0 when unknown
std::string errno_text(int error);

}  // namespace farandole::os
