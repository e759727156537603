// An engine as the C interface hands it out.
// Touches engine/.
#pragma once

#include <utility>

#include "engine/engine.h"

struct farandole_engine {
  explicit farandole_engine(farandole::Options options) : engine(std::move(options)) {}
  farandole::Engine engine;
};
