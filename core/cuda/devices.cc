// Asks CUDA's driver for its devices.
// Touches base/, os/ and cuda/.
#include "cuda/devices.h"

#include "base/error.h"

namespace farandole::cuda {

namespace {

void check(const Driver& driver, Result result, const char* call) {
  if (result != kSuccess)
    throw Failure(Code::precondition, std::string(call) + " fails with " + error_name(driver, result));
}

int attribute(const Driver& driver, Device device, int which, int otherwise) {
  int value = 0;
  return driver.device_get_attribute(&value, which, device) == kSuccess ? value : otherwise;
}

std::string uuid_text(const Uuid& uuid, bool slice) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = slice ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid.bytes[i] >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return text;
}

DeviceFacts facts_of(const Driver& driver, int ordinal) {
  DeviceFacts facts;
  Device device = 0;
  check(driver, driver.device_get(&device, ordinal), "cuDeviceGet");
  char name[256] = {};
  check(driver, driver.device_get_name(name, sizeof name - 1, device), "cuDeviceGetName");
  facts.name = name;
  facts.slice = facts.name.find(" MIG ") == std::string::npos ? Answer::no : Answer::yes;
  std::size_t bytes = 0;
  check(driver, driver.device_total_mem(&bytes, device), "cuDeviceTotalMem");
  facts.bytes = static_cast<std::int64_t>(bytes);
  Uuid uuid{};
  if (driver.device_get_uuid != nullptr && driver.device_get_uuid(&uuid, device) == kSuccess)
    facts.uuid = uuid_text(uuid, facts.slice == Answer::yes);
  facts.major = attribute(driver, device, kMajor, 0);
  facts.minor = attribute(driver, device, kMinor, 0);
  facts.multiprocessors = attribute(driver, device, kMultiprocessors, 0);
  const int mps = attribute(driver, device, kMps, -1);
  facts.mps = mps < 0 ? Answer::unknown : mps > 0 ? Answer::yes : Answer::no;
  facts.stream_operations = driver.waits_on_streams() && attribute(driver, device, kStreamOperations64, 0) == 1;
  facts.exports_memory = driver.maps_memory() && attribute(driver, device, kVirtualMemory, 0) == 1 &&
                         attribute(driver, device, kDescriptors, 0) == 1;
  return facts;
}

}  // namespace

std::vector<DeviceFacts> find_devices(const Driver& driver) {
  const Result started = driver.init(0);
  if (started == kNoDevice) return {};
  check(driver, started, "cuInit");
  int count = 0;
  check(driver, driver.device_get_count(&count), "cuDeviceGetCount");
  std::vector<DeviceFacts> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) found.push_back(facts_of(driver, ordinal));
  return found;
}

}  // namespace farandole::cuda
