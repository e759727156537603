// Operations that a framework compiles into a library of its own: they get an engine and the core's functions.
// Touches the loader of shared libraries, core/api/farandole.h and Python.
#include <dlfcn.h>

#include "python/bridge.h"

namespace farandole::python {

namespace {

struct Operations {
  PyObject_HEAD PyObject* engine;
  void (*serve)(farandole_engine*);   // null: nobody has to be served
  void (*detach)(farandole_engine*);  // null: serving ends by itself
};

using Attach = int (*)(std::uint64_t, const farandole_functions*, farandole_engine*, std::int32_t, std::int32_t);

bool attach(Operations* self, const char* path, Engine* engine, int size) {
  void* image = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // the framework has opened it already and never closes it
  auto begin = image == nullptr ? nullptr : reinterpret_cast<Attach>(dlsym(image, "farandole_attach"));
  if (begin == nullptr) {
    PyErr_Format(PyExc_ImportError, "the operations in %s cannot be used: %s", path, dlerror());
    return false;
  }
  auto number = reinterpret_cast<std::uint64_t (*)()>(dlsym(image, "farandole_compiled_for"));
  if (number == nullptr || number() != FARANDOLE_INTERFACE) {
    char what[1100];
    PyOS_snprintf(what, sizeof what, "the interface of the operations in %.1000s", path);
    other_build(what, number == nullptr ? 0 : number(), "remove that file, and it is made again");
    return false;
  }
  self->serve = reinterpret_cast<void (*)(farandole_engine*)>(dlsym(image, "farandole_serve"));
  self->detach = reinterpret_cast<void (*)(farandole_engine*)>(dlsym(image, "farandole_detach"));
  if (begin(FARANDOLE_INTERFACE, engine->core, engine->engine, engine->rank, size) == kOk) return true;
  PyErr_Format(PyExc_ImportError, "the operations in %s cannot use this engine: memory is short", path);
  return false;
}

PyObject* operations_new(PyTypeObject* type, PyObject* arguments, PyObject* kwargs) {
  static const char* const keywords[] = {"path", "engine", nullptr};
  const char* path = nullptr;
  PyObject* engine = nullptr;
  if (!PyArg_ParseTupleAndKeywords(arguments, kwargs, "sO!", const_cast<char**>(keywords), &path, engine_type, &engine))
    return nullptr;
  Ref size(PyObject_GetAttrString(engine, "size"));
  int ranks = 0;
  if (!size || !read_number(size.get(), ranks)) return nullptr;
  auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<Operations*>(make(type, 0));
  if (self == nullptr) return nullptr;
  Ref owner(reinterpret_cast<PyObject*>(self));
  self->engine = Ref::borrowed(engine).give();
  auto* lent = reinterpret_cast<Engine*>(engine);
  ActiveCall active(lent);
  if (!active || !attach(self, path, lent, ranks)) return nullptr;
  if (self->serve != nullptr) ++lent->calls;  // until it has been served
  return owner.give();
}

void operations_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(reinterpret_cast<Operations*>(object)->engine);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* serve(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Operations*>(object);
  auto* engine = reinterpret_cast<Engine*>(self->engine);
  auto* run = std::exchange(self->serve, nullptr);
  if (run == nullptr) Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS;
  run(engine->engine);
  Py_END_ALLOW_THREADS;
  --engine->calls;
  Py_RETURN_NONE;
}

PyObject* detach(PyObject* object, PyObject*) {
  auto* self = reinterpret_cast<Operations*>(object);
  auto* end = std::exchange(self->detach, nullptr);
  if (end == nullptr) Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS;
  end(reinterpret_cast<Engine*>(self->engine)->engine);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

}  // namespace

PyTypeObject* make_operations_type(PyObject* module) {
  static PyMethodDef methods[] = {
      {"serve", serve, METH_NOARGS, "Serves them until the engine has ended; for a thread of its own."},
      {"detach", detach, METH_NOARGS, "They use the engine no more; returns when none of them does."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("Operations of a framework, in a library of its own, that use an engine.")},
      {Py_tp_new, reinterpret_cast<void*>(operations_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(operations_dealloc)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  return make_type(module, "farandole.engine.bridge.Operations", sizeof(Operations), 0, slots);
}

}  // namespace farandole::python
