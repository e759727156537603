// What a fork does to the core in the child: descriptors are closed, mappings are absent, calls are refused. (Results
// in shared memory: arena.h.) Touches the operating system. The registry is global, because pthread_atfork passes no
// object.
#pragma once

namespace farandole::os {

void register_descriptor(int fd);  // forked children close it
// Call this before closing it. False when it is not registered: a forked child has closed it already, and its number
// may now belong to another file.
bool unregister_descriptor(int fd);
// One higher in every forked child. An engine that stored another number belongs to the parent.
unsigned fork_depth();

}  // namespace farandole::os
