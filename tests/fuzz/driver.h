// The main program of a fuzzer without libFuzzer: runs saved inputs, or searches for new ones.
// Touches files and the clock. The fuzzer that includes it defines LLVMFuzzerTestOneInput and make_corpus.
//   X_fuzz <corpus>                               runs every file and, if kRunsNear, small changes of it
//   X_fuzz --make-corpus <corpus>                 writes the first inputs
//   X_fuzz --seconds <n> <kept> <found> <corpus>  changes inputs at random and keeps those that reach new code
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

#ifndef FARANDOLE_LIBFUZZER

void make_corpus(const std::filesystem::path& directory);
extern const bool kRunsNear;  // saved inputs are run with small changes too

namespace driver {

inline constexpr std::size_t kPlaces = 1 << 16;
inline constexpr std::size_t kLongestInput = 4096;
inline constexpr unsigned kLongestSeconds = 60;  // for one input; then SIGALRM ends the fuzzer
inline std::array<volatile std::uint8_t, kPlaces> reached{};

inline void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
}

inline std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

inline void write(const std::filesystem::path& path, const std::string& input) {
  std::ofstream file(path, std::ios::binary);
  file.write(input.data(), static_cast<std::streamsize>(input.size()));
}

inline std::vector<std::string> inputs_of(const std::filesystem::path& directory) {
  std::vector<std::string> inputs;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) inputs.push_back(read(entry.path()));
  return inputs;
}

// Every prefix of a small input, and the input with each byte flipped.
inline void run_near(const std::string& input) {
  constexpr std::size_t kSmall = 300;
  for (std::size_t i = 0; input.size() <= kSmall && i < input.size(); ++i) {
    run(input.substr(0, i));
    for (int flip : {0x01, 0x80, 0xff}) {
      std::string changed = input;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      run(changed);
    }
  }
}

inline std::string changed(std::string input, const std::vector<std::string>& others, std::mt19937& random) {
  for (unsigned left = 1 + random() % 6; left > 0; --left) {
    const std::size_t at = input.empty() ? 0 : random() % input.size();
    switch (random() % 6) {
      case 0:
        if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << random() % 8));
        break;
      case 1:
        if (!input.empty()) input[at] = static_cast<char>(random());
        break;
      case 2:
        input.insert(at, 1 + random() % 8, static_cast<char>(random()));
        break;
      case 3:
        input.erase(at, 1 + random() % 8);
        break;
      case 4:
        if (!input.empty()) input.insert(at, input.substr(random() % input.size(), 1 + random() % 16));
        break;
      default: {
        const std::string& other = others[random() % others.size()];
        input = input.substr(0, at) + other.substr(other.empty() ? 0 : random() % other.size());
      }
    }
  }
  return input.substr(0, kLongestInput);
}

// True when the last run reached code that no run had reached before.
inline bool news(std::array<bool, kPlaces>& known) {
  bool any = false;
  for (std::size_t place = 0; place < kPlaces; ++place) {
    if (reached[place] == 0) continue;
    reached[place] = 0;
    any = any || !known[place];
    known[place] = true;
  }
  return any;
}

inline int search(int seconds, const std::filesystem::path& kept, const std::filesystem::path& found,
                  std::vector<std::string> inputs) {
  static std::array<bool, kPlaces> known{};
  std::mt19937 random(std::random_device{}());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const std::filesystem::path current = found / ("input-" + std::to_string(getpid()));
  long runs = 0, new_ones = 0;
  const auto try_one = [&](const std::string& input) {
    write(current, input);  // when the process dies, its input is in the file
    alarm(kLongestSeconds);
    run(input);
    ++runs;
    return news(known);
  };
  for (const std::string& input : inputs) try_one(input);
  while (std::chrono::steady_clock::now() < end) {
    const std::string input = changed(inputs[random() % inputs.size()], inputs, random);
    if (!try_one(input)) continue;
    inputs.push_back(input);
    ++new_ones;
    write(kept / std::to_string(std::hash<std::string>{}(input)), input);
  }
  std::filesystem::remove(current);
  std::printf("Done %ld runs in %d seconds, %ld inputs reached new code\n", runs, seconds, new_ones);
  return 0;
}

}  // namespace driver

// GCC calls it from every basic block of the core (-fsanitize-coverage=trace-pc).
extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
  driver::reached[(place ^ place >> 16) % driver::kPlaces] = 1;
}

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (argc == 3 && first == "--make-corpus") {
    std::filesystem::create_directories(argv[2]);
    make_corpus(argv[2]);
    return 0;
  }
  if (argc == 6 && first == "--seconds") {
    std::vector<std::string> inputs = driver::inputs_of(argv[5]);
    for (std::string& input : driver::inputs_of(argv[3])) inputs.push_back(std::move(input));
    return driver::search(std::atoi(argv[2]), argv[3], argv[4], std::move(inputs));
  }
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s <corpus> | --make-corpus <corpus> | --seconds <n> <kept> <found> <corpus>\n",
                 argv[0]);
    return 2;
  }
  const std::vector<std::string> inputs = driver::inputs_of(argv[1]);
  for (const std::string& input : inputs) driver::run(input);
  if (kRunsNear)
    for (const std::string& input : inputs) driver::run_near(input);
  std::printf("%zu inputs\n", inputs.size());
  return inputs.empty() ? 1 : 0;
}

#endif
