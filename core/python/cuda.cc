// The CUDA libraries and GPUs of this host, as tuples and dicts of Python.
// Touches core/api/farandole.h and Python.
#include "python/cuda.h"

#include <memory>
#include <vector>

namespace farandole::python {

namespace {

constexpr int kDevices = 64;

// A list of (source, path). The strings live as long as the list.
bool read_places(PyObject* list, std::vector<farandole_place>& places) {
  const Py_ssize_t count = PyList_Size(list);
  if (count < 0) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    farandole_place place{};
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "is", &place.source, &place.path)) return false;
    places.push_back(place);
  }
  return true;
}

// A path may have bytes that are not UTF-8; they are kept as Python keeps them in file names.
PyObject* text(const char* bytes) { return PyUnicode_DecodeFSDefault(bytes); }

PyObject* facts_of(const farandole_device& device) {
  return Py_BuildValue("{s:N,s:s,s:L,s:(ii),s:i,s:i,s:i,s:i,s:i}", "name", text(device.name), "uuid", device.uuid,
                       "bytes", static_cast<long long>(device.bytes), "capability", device.major, device.minor,
                       "multiprocessors", device.multiprocessors, "slice", device.slice, "mps", device.mps,
                       "stream_operations", device.stream_operations, "exports_memory", device.exports_memory);
}

const farandole_functions& core_of(PyObject* object) { return *reinterpret_cast<Library*>(object)->core; }

}  // namespace

PyObject* cuda_library(PyObject* library, PyObject* arguments) {
  int which = 0;
  PyObject* list = nullptr;
  std::vector<farandole_place> places;
  if (!PyArg_ParseTuple(arguments, "iO", &which, &list) || !read_places(list, places)) return nullptr;
  auto found = std::make_unique<farandole_library>();
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = core_of(library).cuda_library(which, places.data(), static_cast<std::int32_t>(places.size()), found.get());
  Py_END_ALLOW_THREADS;
  if (code == kInvalidArgument) {
    PyErr_Format(PyExc_ValueError, "CUDA has no library with the number %d", which);
    return nullptr;
  }
  return Py_BuildValue("(OiiNNN)", code == kOk ? Py_True : Py_False, found->source, found->version, text(found->path),
                       text(found->why), text(found->missing));
}

PyObject* cuda_devices(PyObject* library, PyObject* arguments) {
  PyObject* list = nullptr;
  std::vector<farandole_place> places;
  if (!PyArg_ParseTuple(arguments, "O", &list) || !read_places(list, places)) return nullptr;
  std::vector<farandole_device> devices(kDevices);
  std::int32_t count = 0;
  char error[kErrorBytes];
  error[0] = 0;
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = core_of(library).cuda_devices(places.data(), static_cast<std::int32_t>(places.size()), devices.data(),
                                       kDevices, &count, error, sizeof error);
  Py_END_ALLOW_THREADS;
  if (code != kOk) {
    PyErr_SetString(PyExc_OSError, error);
    return nullptr;
  }
  Ref all(PyList_New(0));
  for (int i = 0; all && i < count && i < kDevices; ++i) {
    Ref one(facts_of(devices[static_cast<std::size_t>(i)]));
    if (!one || PyList_Append(all.get(), one.get()) != 0) return nullptr;
  }
  return all.give();
}

PyObject* use_gpus(PyObject* object, PyObject* arguments) {
  PyObject *first = nullptr, *second = nullptr, *third = nullptr;
  std::vector<farandole_place> driver, nvrtc, nccl;
  farandole_gpu_options options{};
  if (!PyArg_ParseTuple(arguments, "OOOiis", &first, &second, &third, &options.use_nccl, &options.start_ms,
                        &options.cache) ||
      !read_places(first, driver) || !read_places(second, nvrtc) || !read_places(third, nccl))
    return nullptr;
  options.driver = driver.data();
  options.nvrtc = nvrtc.data();
  options.nccl = nccl.data();
  options.drivers = static_cast<std::int32_t>(driver.size());
  options.nvrtcs = static_cast<std::int32_t>(nvrtc.size());
  options.nccls = static_cast<std::int32_t>(nccl.size());
  Engine* self = engine_of(object);
  ActiveCall active(self);
  if (!active) return nullptr;
  char error[kErrorBytes] = "";
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = self->core->use_gpus(self->engine, &options, error, sizeof error);
  Py_END_ALLOW_THREADS;
  if (code == kOk) Py_RETURN_NONE;
  PyErr_SetString(PyExc_OSError, error);
  return nullptr;
}

}  // namespace farandole::python
