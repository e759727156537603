// The heartbeat of an elastic job's rank: the native thread that sends and checks it, as a Python object.
// Touches core/api/farandole.h and Python; closes nothing that it was not given.
#include <unistd.h>

#include "python/bridge.h"

namespace farandole::python {

namespace {

struct Heartbeat {
  PyObject_HEAD PyObject* library;
  const farandole_functions* core;
  farandole_heartbeat* heartbeat;  // null when it has ended
  PyObject* guarded;               // an engine that must not be destroyed meanwhile; null: none
  pid_t process;
};

PyObject* heartbeat_new(PyTypeObject* type, PyObject* arguments, PyObject* kwargs) {
  static const char* const keywords[] = {"library", "mine", "theirs", "beat_ms", nullptr};
  PyObject* library = nullptr;
  int mine = -1, theirs = -1;
  long long beat_ms = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, kwargs, "O!iiL", const_cast<char**>(keywords), library_type, &library,
                                   &mine, &theirs, &beat_ms))
    return nullptr;
  auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<Heartbeat*>(make(type, 0));
  if (self == nullptr) return nullptr;
  Ref owner(reinterpret_cast<PyObject*>(self));
  self->library = Ref::borrowed(library).give();
  self->core = reinterpret_cast<Library*>(library)->core;
  self->process = getpid();
  char error[kErrorBytes] = "";
  // The core takes ownership, so it gets copies.
  const int code = self->core->heartbeat_start(dup(mine), theirs < 0 ? -1 : dup(theirs), beat_ms, &self->heartbeat,
                                               error, sizeof error);
  return code == kOk ? owner.give() : fail(nullptr, code, error);
}

// The engine that was guarded may be destroyed.
void let_go(Heartbeat* self) {
  Ref engine(std::exchange(self->guarded, nullptr));
  if (!engine) return;
  --engine_of(engine.get())->guards;
  destroy_if_unused(engine_of(engine.get()));
}

bool ours(const Heartbeat* self) { return self->heartbeat != nullptr && self->process == getpid(); }

void end(Heartbeat* self) {
  farandole_heartbeat* heartbeat = std::exchange(self->heartbeat, nullptr);
  if (heartbeat == nullptr || self->process != getpid()) return;
  Py_BEGIN_ALLOW_THREADS;
  self->core->heartbeat_stop(heartbeat);
  Py_END_ALLOW_THREADS;
  let_go(self);
}

void heartbeat_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Heartbeat*>(object);
  PyTypeObject* type = Py_TYPE(object);
  end(self);
  let_go(self);
  Py_XDECREF(self->library);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* guard(PyObject* object, PyObject* arguments) {
  auto* self = reinterpret_cast<Heartbeat*>(object);
  PyObject* engine = nullptr;
  long long lease_ms = 0;
  if (!PyArg_ParseTuple(arguments, "O|L", &engine, &lease_ms)) return nullptr;
  if (!ours(self)) Py_RETURN_NONE;
  const bool native = PyObject_TypeCheck(engine, engine_type) != 0;  // the Python engine cannot be guarded
  Engine* next = native && engine_of(engine)->engine != nullptr ? engine_of(engine) : nullptr;
  // With the GIL, so that the guarded engine and the held one are always the same; the heartbeat's lock is held
  // briefly.
  self->core->heartbeat_guard(self->heartbeat, next == nullptr ? nullptr : next->engine, lease_ms);
  if (next != nullptr) ++next->guards;
  let_go(self);
  if (next != nullptr) self->guarded = Ref::borrowed(engine).give();
  Py_RETURN_NONE;
}

PyObject* silence(PyObject* object, void*) {
  auto* self = reinterpret_cast<Heartbeat*>(object);
  return PyFloat_FromDouble(ours(self) ? static_cast<double>(self->core->heartbeat_silence(self->heartbeat)) / 1000
                                       : 0.0);
}

PyObject* stop(PyObject* object, PyObject*) {
  end(reinterpret_cast<Heartbeat*>(object));
  Py_RETURN_NONE;
}

}  // namespace

PyTypeObject* make_heartbeat_type(PyObject* module) {
  static PyMethodDef methods[] = {
      {"guard", guard, METH_VARARGS,
       "guard(engine, lease_ms=0): revokes all in `engine` when the agent has been silent for so long; None before the "
       "engine is closed."},
      {"stop", stop, METH_NOARGS, "Ends the thread; again does nothing, nor does it in a forked child."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyGetSetDef members[] = {
      {"silence", silence, nullptr, "Seconds for which the agent has been silent.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("A native thread that shows signs of life in one memory file, and looks for the "
                                    "agent's in another (-1: there is none).")},
      {Py_tp_new, reinterpret_cast<void*>(heartbeat_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(heartbeat_dealloc)},
      {Py_tp_methods, methods},
      {Py_tp_getset, members},
      {0, nullptr},
  };
  return make_type(module, "farandole.engine.bridge.Heartbeat", sizeof(Heartbeat), 0, slots);
}

}  // namespace farandole::python
