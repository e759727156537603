// What happens to the core in a forked child: descriptors are closed, mappings are absent, calls are refused; results
// on loan are in arena.h. Touches the operating system. Its registry is global: pthread_atfork knows no object.
#pragma once

namespace farandole::os {

void watch_descriptor(int fd);  // close it in forked children
// To be called before closing it. False when it was not watched: a forked child has closed it already, and its number
// may belong to somebody else.
bool forget_descriptor(int fd);
// Counts up in every forked child; an engine that remembers another number belongs to the parent.
unsigned fork_depth();

}  // namespace farandole::os
