// Source text to binary to function; the files of compiled kernels.
// Touches base/, os/ and cuda/.
#include "cuda/kernels.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "base/error.h"
#include "cuda/reduce_source.h"

namespace farandole::cuda {

namespace {

constexpr std::size_t kMostHeld = 8;  // sources of which a thread holds a vector each

const char* element_of(DType dtype) {
  constexpr const char* names[] = {"Boolean",
                                   "Integer<u8>",
                                   "Integer<signed char>",
                                   "Integer<u16>",
                                   "Integer<short>",
                                   "Integer<int>",
                                   "Integer<long long>",
                                   "Float16",
                                   "Plain<float>",
                                   "Plain<double>",
                                   "BFloat16"};
  static_assert(std::size(names) == kDTypes);
  return names[static_cast<int>(dtype)];
}

const char* word_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::product:
      return "product";
    default:
      return "sum";
  }
}

// FNV-1a of 64 bits: the key of a file, no protection.
std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 0xcbf29ce484222325ull;
  for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3ull;
  return value;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Other processes may write the same file at the same time, so each has a name of its own first. Without room on the
// disk there is no file.
void write_file(const std::filesystem::path& path, const std::string& content, const void* me) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  std::filesystem::path mine = path;
  mine += "." + std::to_string(std::random_device()()) + std::to_string(reinterpret_cast<std::uintptr_t>(me));
  std::ofstream file(mine, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  if (file.good()) std::filesystem::rename(mine, path, error);
  if (!file.good() || error) std::filesystem::remove(mine, error);
}

}  // namespace

std::string Kernels::compile(const std::string& source) const {
  Program program = nullptr;
  if (nvrtc_.create(&program, source.c_str(), "farandole.cu", 0, nullptr, nullptr) != 0)
    throw Failure(Code::precondition, "NVRTC cannot create a program");
  const std::string architecture = "--gpu-architecture=sm_" + std::to_string(architecture_);
  const char* options[] = {architecture.c_str(), "--std=c++17", "--fmad=false"};
  const CompileResult result = nvrtc_.compile(program, 3, options);
  std::string text;
  std::size_t bytes = 0;
  if (result == 0 && nvrtc_.cubin_size(program, &bytes) == 0 && bytes > 0) {
    text.resize(bytes);
    if (nvrtc_.cubin(program, text.data()) != 0) text.clear();
  } else if (nvrtc_.log_size(program, &bytes) == 0 && bytes > 0) {
    std::string log(bytes, 0);
    nvrtc_.log(program, log.data());
    nvrtc_.destroy(&program);
    throw Failure(Code::precondition, "NVRTC cannot compile the kernels: " + log);
  }
  nvrtc_.destroy(&program);
  if (text.empty()) throw Failure(Code::precondition, "NVRTC gave no binary for sm_" + std::to_string(architecture_));
  return text;
}

// From the file of this source, compiler and architecture; else compiled, and kept for the next time.
std::string Kernels::binary(const std::string& source) const {
  if (folder_.empty()) return compile(source);
  const std::string key = source + " " + std::to_string(version_) + " " + std::to_string(architecture_);
  char name[64];
  std::snprintf(name, sizeof name, "%016llx.cubin", static_cast<unsigned long long>(hash(key)));
  const std::filesystem::path path = std::filesystem::path(folder_) / name;
  const std::string found = read_file(path);  // the key comes first: two keys may have one hash
  if (found.size() > key.size() && found.compare(0, key.size(), key) == 0) return found.substr(key.size());
  std::string made = compile(source);
  write_file(path, key + made, this);
  return made;
}

Function Kernels::reduce(DType dtype, ReduceOp op, std::size_t ins, bool scaled) {
  if (ins > kMostHeld) ins = 0;
  Function& function = loaded_[{dtype, op, ins, scaled}];
  if (function != nullptr) return function;
  const std::string word = word_of(op), name = "farandole_" + word + "_" + name_of(dtype);
  std::string upper = word, body = kReduceSource;
  for (char& letter : upper) letter = static_cast<char>(letter - 'a' + 'A');
  body.replace(body.find("KERNEL"), 6, name);
  const std::string source = "#define ELEMENT " + std::string(element_of(dtype)) + "\n#define OP_" + upper +
                             "\n#define INS " + std::to_string(ins) + "\n#define SCALED " + (scaled ? "1" : "0") +
                             "\n#define TILE_BYTES " + std::to_string(kTileBytes) + "\n" + body;
  const std::string image = binary(source);
  Module module = nullptr;
  Result result = driver_.module_load(&module, image.data());
  if (result == kSuccess) result = driver_.module_function(&function, module, name.c_str());
  if (result != kSuccess)
    throw Failure(Code::precondition, "the kernel " + name + " cannot be loaded: " + error_name(driver_, result));
  return function;
}

}  // namespace farandole::cuda
