// The C interface over cuda/: which of CUDA's libraries are here, and which GPUs; and for an engine that uses them.
// Touches cuda/ and engine/.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>

#include "api/engine.h"
#include "api/farandole.h"
#include "base/error.h"
#include "cuda/devices.h"
#include "cuda/nccl.h"
#include "cuda/nvrtc.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda = farandole::cuda;

namespace {

template <std::size_t capacity>
void write(char (&to)[capacity], const std::string& text) {
  std::snprintf(to, capacity, "%s", text.c_str());
}

std::vector<cuda::Place> read(const farandole_place* places, int32_t count) {
  std::vector<cuda::Place> found;
  for (int32_t i = 0; i < count; ++i)
    found.push_back({static_cast<cuda::Source>(places[i].source), places[i].path == nullptr ? "" : places[i].path});
  return found;
}

cuda::Report look(int32_t which, std::span<const cuda::Place> places) {
  cuda::Driver driver;
  cuda::Nvrtc nvrtc;
  cuda::Nccl nccl;
  if (which == 0) return cuda::open(cuda::driver_library, places, &driver);
  if (which == 1) return cuda::open(cuda::nvrtc_library, places, &nvrtc);
  return cuda::open(cuda::nccl_library, places, &nccl);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

farandole_device plain(const cuda::DeviceFacts& facts) {
  farandole_device device{};
  write(device.name, facts.name);
  write(device.uuid, facts.uuid);
  device.bytes = facts.bytes;
  device.major = facts.major;
  device.minor = facts.minor;
  device.multiprocessors = facts.multiprocessors;
  device.slice = static_cast<int>(facts.slice);
  device.mps = static_cast<int>(facts.mps);
  device.stream_operations = facts.stream_operations ? 1 : 0;
  device.exports_memory = facts.exports_memory ? 1 : 0;
  return device;
}

// Runs `body`; an exception becomes its code and text.
template <class Body>
int guarded(Body body, char* error, size_t capacity) {
  try {
    body();
    return FARANDOLE_CODE_OK;
  } catch (const farandole::Failure& failure) {
    std::snprintf(error, capacity, "%s", failure.what());
    return static_cast<int>(failure.error().code);
  } catch (const std::exception& exception) {
    std::snprintf(error, capacity, "%s", exception.what());
    return FARANDOLE_CODE_INTERNAL;
  }
}

}  // namespace

EXPORT int farandole_cuda_library(int32_t which, const farandole_place* places, int32_t count,
                                  farandole_library* found) {
  *found = {};
  if (which < 0 || which > 2 || count < 0 || (places == nullptr && count > 0)) return FARANDOLE_CODE_INVALID_ARGUMENT;
  bool usable = false;
  const int code = guarded(
      [&] {
        const cuda::Report report = look(which, read(places, count));
        found->source = static_cast<int>(report.source);
        found->version = report.version;
        write(found->path, report.path);
        write(found->why, report.why);
        write(found->missing, joined(report.missing));
        usable = report.usable;
      },
      found->why, sizeof found->why);
  return code == FARANDOLE_CODE_OK && !usable ? int{FARANDOLE_CODE_PRECONDITION} : code;
}

EXPORT int farandole_cuda_devices(const farandole_place* places, int32_t count, farandole_device* devices,
                                  int32_t capacity, int32_t* found, char* error, size_t error_capacity) {
  *found = 0;
  return guarded(
      [&] {
        cuda::Driver driver;
        const cuda::Report report = cuda::open(cuda::driver_library, read(places, count), &driver);
        if (!report.usable) throw farandole::Failure(farandole::Code::precondition, report.why);
        const std::vector<cuda::DeviceFacts> all = cuda::find_devices(driver);
        *found = static_cast<int32_t>(all.size());
        for (int32_t i = 0; i < std::min(capacity, *found); ++i) devices[i] = plain(all[static_cast<std::size_t>(i)]);
      },
      error, error_capacity);
}

EXPORT int farandole_use_gpus(farandole_engine* engine, const farandole_gpu_options* options, char* error,
                              size_t capacity) {
  return guarded(
      [&] {
        if (options->use_nccl < 0 || options->use_nccl > 2 || options->start_ms < 1)
          throw farandole::Failure(farandole::Code::invalid_argument,
                                   "use_nccl is 0, 1 or 2, and start_ms at least 1, not " +
                                       std::to_string(options->use_nccl) + " and " + std::to_string(options->start_ms));
        const std::vector<cuda::Place> driver = read(options->driver, options->drivers),
                                       nvrtc = read(options->nvrtc, options->nvrtcs);
        farandole::collective::NcclOptions nccl;
        nccl.use = static_cast<farandole::collective::NcclUse>(options->use_nccl);
        nccl.places = read(options->nccl, options->nccls);
        nccl.start_limit = std::chrono::milliseconds(options->start_ms);
        engine->engine.use_gpus(
            std::make_shared<cuda::Gpus>(driver, nvrtc, options->cache == nullptr ? "" : options->cache),
            std::move(nccl));
      },
      error, capacity);
}
