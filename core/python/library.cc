// An opened core, the product's or the one with failpoints, of the build that this module was compiled for.
// Touches the loader of shared libraries, core/api/farandole.h and Python.
#include <dlfcn.h>

#include "python/bridge.h"
#include "python/cuda.h"

namespace farandole::python {

PyTypeObject* library_type = nullptr;

namespace {}  // namespace

void other_build(const char* what, std::uint64_t theirs, const char* remedy) {
  char text[1200];
  PyOS_snprintf(text, sizeof text,
                "%s is %016llx, that of the extension module is %016llx: they are of different builds; %s", what,
                static_cast<unsigned long long>(theirs), static_cast<unsigned long long>(FARANDOLE_INTERFACE), remedy);
  PyErr_SetString(PyExc_ImportError, text);
}

namespace {

const farandole_functions* open_core(const char* path) {
  // Never closed: engines and framework operations may outlive the object that opened it.
  void* image = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (image == nullptr) {
    PyErr_Format(PyExc_ImportError, "%s", dlerror());
    return nullptr;
  }
  auto number = reinterpret_cast<decltype(&farandole_interface)>(dlsym(image, "farandole_interface"));
  auto table = reinterpret_cast<decltype(&farandole_table)>(dlsym(image, "farandole_table"));
  const farandole_functions* found = table == nullptr ? nullptr : table(FARANDOLE_INTERFACE);
  if (found == nullptr) other_build("its interface", number == nullptr ? 0 : number(), "they must be built together");
  return found;
}

PyObject* library_new(PyTypeObject* type, PyObject* arguments, PyObject* kwargs) {
  static const char* const keywords[] = {"path", nullptr};
  const char* path = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, kwargs, "s", const_cast<char**>(keywords), &path)) return nullptr;
  const farandole_functions* core = open_core(path);
  if (core == nullptr) return nullptr;
  auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<Library*>(make(type, 0));
  if (self != nullptr) self->core = core;
  return reinterpret_cast<PyObject*>(self);
}

void library_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

const farandole_functions& core_of(PyObject* object) { return *reinterpret_cast<Library*>(object)->core; }

PyObject* version(PyObject* self, void*) { return PyUnicode_FromString(core_of(self).version()); }
PyObject* kernels(PyObject* self, void*) { return PyUnicode_FromString(core_of(self).kernels()); }
PyObject* wire(PyObject* self, void*) { return PyLong_FromUnsignedLongLong(core_of(self).wire()); }

PyObject* add(PyObject* self, PyObject* arguments) {
  int dtype = 0;
  PyObject *left = nullptr, *right = nullptr, *out = nullptr;
  if (!PyArg_ParseTuple(arguments, "iOOO", &dtype, &left, &right, &out)) return nullptr;
  Numbers numbers;
  Memory memory[3];
  if (!read_memory(left, false, numbers, memory[0]) || !read_memory(right, false, numbers, memory[1]) ||
      !read_memory(out, true, numbers, memory[2]))
    return nullptr;
  if (element_bytes(dtype) == 0) {
    PyErr_Format(PyExc_ValueError, "the kernel knows no data type %d", dtype);
    return nullptr;
  }
  const std::int64_t elements = memory[0].elements();
  for (const Memory& one : memory) {
    if (!one.fits(dtype)) return nullptr;
    if (one.elements() == elements && (one.address != nullptr || elements == 0)) continue;
    PyErr_SetString(PyExc_ValueError, "left, right and out must have the same number of elements");
    return nullptr;
  }
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = core_of(self).add(dtype, memory[0].address, memory[1].address, memory[2].address, elements);
  Py_END_ALLOW_THREADS;
  if (code == kOk) Py_RETURN_NONE;
  return fail(nullptr, code, "the kernel refused the addition");
}

PyObject* use_huge_pages(PyObject* self, PyObject* arguments) {
  unsigned long long address = 0;
  Py_ssize_t bytes = 0;
  if (!PyArg_ParseTuple(arguments, "Kn", &address, &bytes)) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  core_of(self).use_huge_pages(reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

}  // namespace

PyTypeObject* make_library_type(PyObject* module) {
  static PyMethodDef methods[] = {
      {"add", add, METH_VARARGS, "add(dtype, left, right, out): out = left + right by the core's kernel alone."},
      {"use_huge_pages", use_huge_pages, METH_VARARGS,
       "use_huge_pages(address, bytes): for memory that is used repeatedly."},
      {"cuda_library", cuda_library, METH_VARARGS,
       "cuda_library(which, places): (usable, source, version, path, why not, missing functions)."},
      {"cuda_devices", cuda_devices, METH_VARARGS, "cuda_devices(places): facts about each GPU; OSError says why not."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef members[] = {
      {"version", version, nullptr, "Of the package that the core was built with.", nullptr},
      {"kernels", kernels, nullptr, "Which arithmetic it uses here.", nullptr},
      {"wire", wire, nullptr, "A number of what all ranks of a job must have in common.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("A core that is opened, from a file.")},
      {Py_tp_new, reinterpret_cast<void*>(library_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(library_dealloc)},
      {Py_tp_methods, methods},
      {Py_tp_getset, members},
      {0, nullptr},
  };
  return library_type = make_type(module, "farandole.engine.bridge.Library", sizeof(Library), 0, slots);
}

}  // namespace farandole::python
