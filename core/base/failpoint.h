// Failpoints: named places where a test can inject a fault. In the product library they compile to nothing.
// Includes nothing; link/chaos.cc, in the library for tests, has the actions.
#pragma once

#include "base/kind.h"

namespace farandole {

#ifdef FARANDOLE_CHAOS
// May kill or stop the process, delay it, or throw Failure, as the test set it for "<kind>.<phase>" (or "*.<phase>").
void failpoint(const void* engine, Kind kind, const char* phase);
#define FARANDOLE_FAILPOINT(engine, kind, phase) ::farandole::failpoint(engine, kind, phase)
#else
#define FARANDOLE_FAILPOINT(engine, kind, phase) (static_cast<void>(0))
#endif

}  // namespace farandole
