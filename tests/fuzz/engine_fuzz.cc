// Fuzzing of whole engines with their negotiation, links and shared memory: a hostile rank that knows the secret does
// what the input says (tests/core/hostile.h) to two engines of its job.
// Touches what hostile.h touches. driver.h says how to call it.
#include "../core/hostile.h"
#include "driver.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kLongest = 256;  // so that one input does not take the time of many
  hostile::Report report;
  try {
    hostile::play(std::as_bytes(std::span(data, std::min(size, kLongest))), report);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine_fuzz: %s\n", error.what());
    std::abort();
  }
  return 0;
}

#ifndef FARANDOLE_LIBFUZZER

const bool kRunsNear = false;  // a run takes milliseconds; hostile_test runs thousands of other inputs

// One input per kind of job and per kind of frame; some also run background operations. The first byte chooses the job,
// the second whether the hostile rank acts before `hello`, the third how many honest rounds come first (on one host).
void make_corpus(const std::filesystem::path& directory) {
  for (int shape = 0; shape < 4 * hostile::Background::kWhats; ++shape)
    for (int kind = 0; kind < hostile::kActs; kind += shape < 4 ? 1 : 4) {
      const bool one_host = shape % 4 < 2;
      std::string input{static_cast<char>(shape), 0};
      if (one_host) input += static_cast<char>(kind % 5);
      input += std::string{1, static_cast<char>(kind % 6), static_cast<char>(kind % 2), 0, static_cast<char>(kind)};
      for (int i = 0; i < 12; ++i) input += static_cast<char>(kind * 7 + i * 11 + shape);
      driver::write(directory / ("game_" + std::to_string(shape) + "_" + std::to_string(kind)), input);
    }
}

#endif
