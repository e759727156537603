// Requests for the tests of plans and negotiation.
// Touches only negotiate/.
#pragma once

#include <cstdint>
#include <string>

#include "negotiate/request.h"

namespace farandole::negotiate {

inline Request named(const std::string& name, std::int64_t rows = 4) {
  Request request;
  request.name = name;
  request.shape = {rows};
  return request;
}

inline Request unnamed(int number, std::int64_t rows = 4) {
  Request request = named("allreduce.noname." + std::to_string(number), rows);
  request.unnamed = true;
  return request;
}

inline Request bundled(const std::string& name, const std::string& bundle, std::uint32_t size) {
  Request request = named(name);
  request.bundle = bundle;
  request.bundle_size = size;
  return request;
}

}  // namespace farandole::negotiate
