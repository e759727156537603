// The calls of an engine: requests are submitted and waited for; the GIL is released while a call waits.
// Touches core/api/farandole.h, Python and the clock.
#include "python/calls.h"

#include <algorithm>
#include <cmath>

namespace farandole::python {

namespace {

PyObject* no_such_handle(std::int64_t handle) {
  PyErr_Format(PyExc_ValueError, "there is no handle %lld", static_cast<long long>(handle));
  return nullptr;
}

enum class Ended { yes, no, error };

// Whether the operation has ended before `deadline` (none when it is negative). Python's signal handlers may run.
Ended ended(Engine* self, ActiveCall& active, std::int64_t handle, double deadline, bool passive) {
  auto* wait = passive ? self->core->wait_passive : self->core->wait;
  while (true) {
    std::int64_t slice = kSliceMs;
    if (deadline >= 0)
      slice = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil((deadline - now()) * 1e3)), 0, kSliceMs);
    int code = 0;
    Py_BEGIN_ALLOW_THREADS;
    code = wait(self->engine, handle, slice);
    Py_END_ALLOW_THREADS;
    if (code == kOk) return Ended::yes;
    if (code == kInvalidArgument) no_such_handle(handle);
    if (code == kInvalidArgument || !active.signals(self)) return Ended::error;
    if (deadline >= 0 && now() >= deadline) return Ended::no;
  }
}

// The outcome of a finished operation. When several threads wait for one handle, the first to take the request takes
// all.
PyObject* take(Engine* self, std::int64_t handle) {
  Ref key(PyLong_FromLongLong(handle));
  if (!key) return nullptr;
  Ref kept = Ref::borrowed(PyDict_GetItemWithError(self->pending, key.get()));
  if (!kept) return PyErr_Occurred() ? nullptr : no_such_handle(handle);
  if (PyDict_DelItem(self->pending, key.get()) != 0) return nullptr;
  farandole_outcome found{};
  if (self->core->outcome_of(self->engine, handle, &found) != kOk) return no_such_handle(handle);
  return take_outcome(self, handle, request_in(kept.get()), found);
}

PyObject* not_done(const Engine* self, std::int64_t handle, double seconds) {
  Ref key(PyLong_FromLongLong(handle));
  if (!key) return nullptr;
  PyObject* kept = PyDict_GetItemWithError(self->pending, key.get());
  PyObject* request = kept == nullptr ? nullptr : request_in(kept);
  Ref kind(request == nullptr ? nullptr : PyObject_GetAttr(request, names.kind));
  Ref title(kind ? PyObject_GetAttr(kind.get(), names.name) : PyUnicode_FromString("the operation"));
  Ref name(kind ? PyObject_GetAttr(request, names.name) : PyUnicode_FromString(""));
  if (!title || !name) return nullptr;
  if (name.get() == Py_None) name = Ref(PyUnicode_FromString("(unnamed)"));
  char time[32];
  PyOS_snprintf(time, sizeof time, "%g", seconds);
  Ref text(PyUnicode_FromFormat(kind ? "%U %U was not done after %s s" : "%U%U was not done after %s s", title.get(),
                                name.get(), time));
  return raise(package.timeout, std::move(text), Ref(Py_BuildValue("{s:d}", "seconds", seconds)));
}

PyObject* wait_for(Engine* self, std::int64_t handle, double seconds, bool passive) {
  ActiveCall active(self);
  if (!active) return nullptr;
  switch (ended(self, active, handle, seconds < 0 ? -1 : now() + seconds, passive)) {
    case Ended::yes:
      return take(self, handle);
    case Ended::no:
      return not_done(self, handle, seconds);
    case Ended::error:
      break;
  }
  return nullptr;
}

PyObject* submit_all(Engine* self, PyObject* requests, Py_ssize_t count, int flags) {
  std::unique_ptr<Packed[]> packed(new (std::nothrow) Packed[static_cast<std::size_t>(count)]);
  std::unique_ptr<farandole_request[]> structs(new (std::nothrow) farandole_request[static_cast<std::size_t>(count)]);
  std::unique_ptr<std::int64_t[]> handles(new (std::nothrow) std::int64_t[static_cast<std::size_t>(count)]);
  if (!packed || !structs || !handles) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!packed[static_cast<std::size_t>(i)].read(PyTuple_GetItem(requests, i))) return nullptr;
    structs[static_cast<std::size_t>(i)] = packed[static_cast<std::size_t>(i)].request;
  }
  Ref result(PyList_New(count));
  if (!result) return nullptr;
  char error[kErrorBytes] = "";
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = self->core->submit(self->engine, structs.get(), static_cast<std::int32_t>(count), flags, 0, handles.get(),
                            error, sizeof error);
  Py_END_ALLOW_THREADS;
  if (code != kOk) return fail(self, code, error);
  bool all = true;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    Ref key = keep(self, handles[i], packed[i].kept());
    all = all && key;
    if (key) PyList_SetItem(result.get(), static_cast<Py_ssize_t>(i), key.give());
  }
  return all ? result.give() : nullptr;
}

}  // namespace

Ref keep(Engine* self, std::int64_t handle, PyObject* kept) {
  Ref key(PyLong_FromLongLong(handle));
  if (key && PyDict_SetItem(self->pending, key.get(), kept) == 0) return key;
  Py_INCREF(kept);
  return Ref();
}

PyObject* wait_longer(Engine* self, ActiveCall& active, std::int64_t handle, PyObject* kept) {
  if (!keep(self, handle, kept)) return nullptr;
  active.leave();
  if (PyErr_CheckSignals() != 0) return nullptr;
  return wait_for(self, handle, -1, false);
}

PyObject* wait(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Arguments<3> arguments;
  if (!arguments.read("wait", {"handle", "timeout", "passive"}, 1, args, nargs, kwnames)) return nullptr;
  long long handle = 0;
  double seconds = -1;
  if (!read_number(arguments[0], handle)) return nullptr;
  if (arguments[1] != nullptr && arguments[1] != Py_None) {
    if (!read_real(arguments[1], seconds)) return nullptr;
    seconds = std::max(seconds, 0.0);
  }
  const int passive = arguments[2] == nullptr ? 0 : PyObject_IsTrue(arguments[2]);
  return passive < 0 ? nullptr : wait_for(engine_of(object), handle, seconds, passive != 0);
}

PyObject* poll(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Arguments<2> arguments;
  if (!arguments.read("poll", {"handle", "seconds"}, 1, args, nargs, kwnames)) return nullptr;
  Engine* self = engine_of(object);
  long long handle = 0;
  double seconds = 0;
  if (!read_number(arguments[0], handle) || (arguments[1] != nullptr && !read_real(arguments[1], seconds)))
    return nullptr;
  ActiveCall active(self);
  if (!active) return nullptr;
  if (seconds > 0 && ended(self, active, handle, now() + seconds, false) == Ended::error) return nullptr;
  int state = 0;
  Py_BEGIN_ALLOW_THREADS;
  state = self->core->poll(self->engine, handle);
  Py_END_ALLOW_THREADS;
  Ref key(PyLong_FromLongLong(handle));
  const int known = key ? PyDict_Contains(self->pending, key.get()) : -1;
  if (known < 0) return nullptr;
  if (state < 0 || known == 0) return no_such_handle(handle);
  return PyBool_FromLong(state);
}

PyObject* submit(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Arguments<3> arguments;
  if (!arguments.read("submit", {"requests", "bundle", "prompt"}, 1, args, nargs, kwnames)) return nullptr;
  Ref requests(PySequence_Tuple(arguments[0]));  // a copy, so that nobody changes it meanwhile
  if (!requests) return nullptr;
  const int bundle = arguments[1] == nullptr ? 0 : PyObject_IsTrue(arguments[1]);
  const int prompt = arguments[2] == nullptr ? 0 : PyObject_IsTrue(arguments[2]);
  if (bundle < 0 || prompt < 0) return nullptr;
  const Py_ssize_t count = PyTuple_Size(requests.get());
  if (count == 0) return PyList_New(0);
  ActiveCall active(engine_of(object));
  return active ? submit_all(engine_of(object), requests.get(), count, bundle + 2 * prompt) : nullptr;
}

PyObject* run(PyObject* object, PyObject* request) {
  Engine* self = engine_of(object);
  ActiveCall active(self);
  if (!active) return nullptr;
  Packed packed;
  if (!packed.read(request)) return nullptr;
  char error[kErrorBytes] = "";
  farandole_outcome found{};
  farandole_call call{self->engine, &packed.request, error, sizeof error, kSliceMs, &found, 0};
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = self->core->run(&call);
  Py_END_ALLOW_THREADS;
  if (code == kReported) return take_outcome(self, call.handle, request, found);
  if (code == kInProgress) return wait_longer(self, active, call.handle, packed.kept());
  if (code != kOk) return fail(self, code, error);
  Ref output(PyObject_GetAttr(request, names.output));
  return output ? PyObject_CallFunctionObjArgs(package.outcome, output.get(), nullptr) : nullptr;
}

}  // namespace farandole::python
