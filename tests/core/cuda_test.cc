// How the core finds CUDA's libraries: which copy comes first, which functions a version has, what it says otherwise.
// Touches cuda/ and the stand-ins, each case in a process of its own.
#include <cstdlib>

#include "base/error.h"
#include "check.h"
#include "cuda/devices.h"
#include "cuda/nccl.h"
#include "cuda/nvrtc.h"
#include "processes.h"

namespace {

using namespace farandole::cuda;
using processes::alone;

const std::string kStandins = FARANDOLE_STANDINS;
const std::string kDriver = kStandins + "/libcuda.so.1", kNccl = kStandins + "/libnccl.so.2",
                  kNvrtc = kStandins + "/libnvrtc.so.13";

void set(const char* variable, const char* value) { ::setenv(variable, value, 1); }

Report open_nccl(Nccl& nccl, const std::string& path = kNccl, Source source = Source::setting) {
  const Place place{source, path};
  return open(nccl_library, {&place, 1}, &nccl);
}

Report open_driver(Driver& driver, const std::string& path = kDriver) {
  const Place place{Source::setting, path};
  return open(driver_library, {&place, 1}, &driver);
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(a_library_is_found_where_a_setting_says_with_all_its_functions) {
  alone([] {
    Driver driver;
    const Report report = open_driver(driver);
    CHECK_EQUAL(report.why, "");
    CHECK(report.usable && report.source == Source::setting && report.missing.empty());
    CHECK_EQUAL(report.version, 13000);
    CHECK_EQUAL(report.path, kDriver);
    CHECK(driver.waits_on_streams() && driver.maps_memory());
    Nvrtc nvrtc;
    const Place place{Source::setting, kNvrtc};
    CHECK(open(nvrtc_library, {&place, 1}, &nvrtc).usable && nvrtc.compile != nullptr);
  });
}

TEST(the_copy_that_the_process_has_loaded_comes_before_a_setting) {
  alone([] {
    const std::string copy = kStandins + "/lacking/libnccl.so.2";
    std::string error;
    CHECK(farandole::os::Library::open(copy, error));
    Nccl nccl;
    const Report report = open_nccl(nccl);
    CHECK(report.usable && report.source == Source::process);
    CHECK_EQUAL(report.path, copy);
  });
}

TEST(a_setting_that_names_no_library_is_reported_and_nothing_else_is_tried) {
  alone([] {
    const Place places[] = {{Source::setting, "/nowhere/libnccl.so.2"}, {Source::package, kNccl}};
    Nccl nccl;
    const Report report = open(nccl_library, places, &nccl);
    CHECK(!report.usable && contains(report.why, "/nowhere/libnccl.so.2"));
  });
}

TEST(a_package_that_cannot_be_used_is_passed_over) {
  alone([] {
    const Place places[] = {{Source::package, "/nowhere/libnccl.so.2"}, {Source::package, kNccl}};
    Nccl nccl;
    const Report report = open(nccl_library, places, &nccl);
    CHECK(report.usable && report.source == Source::package);
    CHECK_EQUAL(report.path, kNccl);
  });
}

TEST(a_library_that_is_another_one_is_refused) {
  alone([] {
    Nccl nccl;
    const Report report = open_nccl(nccl, kNvrtc);
    CHECK(!report.usable && contains(report.why, "does not report its version as NCCL does"));
  });
}

TEST(functions_of_newer_versions_stay_away_from_older_ones) {
  for (auto [version, revokes, registers] :
       {std::tuple{"22807", true, true}, {"22806", false, true}, {"21999", false, true}, {"21805", false, false}}) {
    alone([=] {
      set("STANDIN_NCCL_VERSION", version);
      Nccl nccl;
      const Report report = open_nccl(nccl);
      CHECK(report.usable);
      CHECK_EQUAL(nccl.comm_revoke != nullptr, revokes);
      CHECK_EQUAL(nccl.comm_register != nullptr, registers);
      CHECK(nccl.all_reduce != nullptr);
      bool told = false;
      for (const std::string& one : report.missing) told = told || one == "ncclCommRevoke (since 2.28.7)";
      CHECK_EQUAL(told, !revokes);
    });
  }
}

TEST(an_old_version_is_refused_with_both_versions) {
  alone([] {
    set("STANDIN_NCCL_VERSION", "21706");
    Nccl nccl;
    CHECK_EQUAL(open_nccl(nccl).why, "NCCL 2.17.6 is too old: 2.18.0 or newer is needed");
    CHECK(nccl.all_reduce == nullptr);
    set("STANDIN_CUDA_VERSION", "11060");
    Driver driver;
    const Report report = open_driver(driver);
    CHECK(report.usable && !driver.waits_on_streams() && driver.maps_memory());
  });
  alone([] {
    set("STANDIN_CUDA_VERSION", "9020");
    Driver driver;
    CHECK_EQUAL(open_driver(driver).why, "the driver for CUDA 9.2 is too old: 10.2 or newer is needed");
  });
}

TEST(a_missing_symbol_is_named_and_ends_the_use_only_when_it_is_needed) {
  alone([] {
    Nccl nccl;
    const Report report = open_nccl(nccl, kStandins + "/lacking/libnccl.so.2");
    CHECK(report.usable && nccl.comm_revoke == nullptr);
    bool told = false;
    for (const std::string& one : report.missing) told = told || one == "ncclCommRevoke (the library lacks it)";
    CHECK(told);
  });
  alone([] {
    Driver driver;
    const Report report = open_driver(driver, kStandins + "/lacking/libcuda.so.1");
    CHECK(!report.usable);
    CHECK_EQUAL(report.why, "the driver for CUDA 13.0 has no cuLaunchKernel");
  });
}

TEST(devices_are_named_with_mig_and_mps) {
  alone([] {
    set("STANDIN_CUDA_DEVICES", "2");
    set("STANDIN_CUDA_MPS", "1");
    set("STANDIN_CUDA_NAME", "NVIDIA H200 MIG 1g.18gb");
    Driver driver;
    CHECK(open_driver(driver).usable);
    const std::vector<DeviceFacts> found = find_devices(driver);
    CHECK_EQUAL(found.size(), 2u);
    CHECK(found[1].slice == Answer::yes && found[1].mps == Answer::yes);
    CHECK_EQUAL(found[1].uuid, "MIG-10111213-1415-1617-1819-1a1b1c1d1e1f");
    CHECK_EQUAL(found[1].multiprocessors, 132);
    CHECK(found[1].stream_operations && found[1].exports_memory);
    set("STANDIN_CUDA_MPS", "-1");
    set("STANDIN_CUDA_NAME", "NVIDIA H200");
    CHECK(find_devices(driver)[0].mps == Answer::unknown && find_devices(driver)[0].slice == Answer::no);
  });
}

TEST(a_driver_that_does_not_start_says_why_and_one_without_gpus_has_none) {
  alone([] {
    Driver driver;
    CHECK(open_driver(driver).usable);
    set("STANDIN_CUDA_INIT", "100");
    CHECK(find_devices(driver).empty());
    set("STANDIN_CUDA_INIT", "803");
    std::string words;
    try {
      find_devices(driver);
    } catch (const farandole::Failure& failure) {
      words = failure.what();
    }
    CHECK_EQUAL(words, "cuInit fails with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
  });
}

TEST(versions_whose_abort_hangs_are_known) {
  CHECK(abort_may_hang(22501) && abort_may_hang(22601) && !abort_may_hang(22602) && !abort_may_hang(22406));
}
