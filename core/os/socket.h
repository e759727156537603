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

struct Moved {
  enum class What { bytes, would_block, end, failed };
  What what = What::bytes;
  std::size_t bytes = 0;
  int error = 0;  // errno when failed
};

// Gathers `parts`. `descriptors` travel with the first byte: they are sent when anything was.
Moved send_some(int fd, std::span<const iovec> parts, std::span<const Descriptor> descriptors);
// Scatters into `parts`. Descriptors that come along are added to `descriptors`; null where none can come (TCP).
Moved receive_some(int fd, std::span<const iovec> parts, std::vector<Descriptor>* descriptors);

void make_nonblocking(int fd);
void tune_tcp(int fd);
void tune_local(int fd);
void stop_writing(int fd);   // the other side reads an end of file after what was sent
int process_behind(int fd);  // SO_PEERCRED; 0 when unknown
std::string text_of(int error);

}  // namespace farandole::os
