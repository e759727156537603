// An engine as the C interface hands it out.
// Touches engine/.
#pragma once

#include <utility>

#include "engine/engine.h"

struct farandole_engine {
  farandole_engine(farandole::Options options, farandole::os::Descriptor record)
      : engine(std::move(options), std::move(record)) {}
  farandole::Engine engine;
};
