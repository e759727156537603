// What is asked of an engine: requests are submitted and waited for, with the GIL free while a call waits.
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
Ended ended(Engine* self, Visit& visit, std::int64_t handle, double deadline, bool aside) {
  auto* wait = aside ? self->core->wait_aside : self->core->wait;
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
    if (code == kInvalidArgument || !visit.signals(self)) return Ended::error;
    if (deadline >= 0 && now() >= deadline) return Ended::no;
  }
}

// The request in what `pending` keeps: the beginning of a tuple, or all of it.
PyObject* request_in(PyObject* kept) { return PyTuple_CheckExact(kept) ? PyTuple_GetItem(kept, 0) : kept; }

// The outcome of a finished operation. Of several threads that wait for one handle, who takes the request takes it all.
PyObject* take(Engine* self, std::int64_t handle) {
  Ref key(PyLong_FromLongLong(handle));
  if (!key) return nullptr;
  Ref kept = Ref::borrowed(PyDict_GetItemWithError(self->pending, key.get()));
  if (!kept) return PyErr_Occurred() ? nullptr : no_such_handle(handle);
  if (PyDict_DelItem(self->pending, key.get()) != 0) return nullptr;
  farandole_outcome found{};
  if (self->core->outcome_of(self->engine, handle, &found) != kOk) return no_such_handle(handle);
  return tell(self, handle, request_in(kept.get()), found);
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
  Ref words(PyUnicode_FromFormat(kind ? "%U %U was not done after %s s" : "%U%U was not done after %s s", title.get(),
                                 name.get(), time));
  return raise(package.timeout, std::move(words), Ref(Py_BuildValue("{s:d}", "seconds", seconds)));
}

PyObject* wait_for(Engine* self, std::int64_t handle, double seconds, bool aside) {
  Visit visit(self);
  if (!visit) return nullptr;
  switch (ended(self, visit, handle, seconds < 0 ? -1 : now() + seconds, aside)) {
    case Ended::yes:
      return take(self, handle);
    case Ended::no:
      return not_done(self, handle, seconds);
    case Ended::error:
      break;
  }
  return nullptr;
}

// What keeps the memory of an operation stays until its outcome is taken; the handle, as an object. Null with an error
// set when there is no memory for that: then it stays for ever, for the core works on what it keeps.
Ref keep(Engine* self, std::int64_t handle, PyObject* kept) {
  Ref key(PyLong_FromLongLong(handle));
  if (key && PyDict_SetItem(self->pending, key.get(), kept) == 0) return key;
  Py_INCREF(kept);
  return Ref();
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

// What is under way is waited for; its memory is kept, whatever a signal handler does.
PyObject* go_on(Engine* self, Visit& visit, std::int64_t handle, PyObject* kept) {
  if (!keep(self, handle, kept)) return nullptr;
  visit.leave();
  if (PyErr_CheckSignals() != 0) return nullptr;
  return wait_for(self, handle, -1, false);
}

// The request of a prepared call with the memory that it was run on: only slow calls and failures need it.
Ref with_spans(PyObject* request, PyObject* spans, PyObject* owners) {
  Ref found(PyObject_CallObject(spans, owners));
  if (!found) return Ref();
  Ref first(PySequence_GetItem(found.get(), 0)), output(PySequence_GetItem(found.get(), 1));
  if (!first || !output) return Ref();
  return Ref(PyObject_CallFunctionObjArgs(package.with_memory, request, first.get(), output.get(), nullptr));
}

// A tuple of a request, what it was prepared as, and what owns its memory; kept for ever when there is no memory for
// it.
Ref kept_with(PyObject* request, PyObject* prepared, PyObject* owners) {
  Ref all(PyTuple_Pack(3, request, prepared, owners));
  if (!all) Py_INCREF(owners);
  return all;
}

// The outcome of a prepared call that is not simply done.
PyObject* look_closer(Engine* self, Visit& visit, const farandole_call& call, bool told, Prepared* prepared,
                      PyObject* spans, PyObject* owners) {
  PyObject* const request = request_in(prepared->packed->kept());
  PyObject* const itself = reinterpret_cast<PyObject*>(prepared);
  // Python's signal handlers may raise in the next call: what is under way has its memory kept before.
  if (!told) {
    Ref kept = kept_with(request, itself, owners);
    if (!kept || !keep(self, call.handle, kept.get())) return nullptr;
  }
  Ref whole = with_spans(request, spans, owners);
  if (whole && told) return tell(self, call.handle, whole.get(), *call.outcome);
  if (told) self->core->release(self->engine, call.handle);
  if (!whole) return nullptr;
  Ref kept = kept_with(whole.get(), itself, owners);
  return kept ? go_on(self, visit, call.handle, kept.get()) : nullptr;
}

}  // namespace

PyObject* wait(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named) {
  Arguments<3> arguments;
  if (!arguments.read("wait", {"handle", "timeout", "aside"}, 1, given, places, named)) return nullptr;
  long long handle = 0;
  double seconds = -1;
  if (!read_number(arguments[0], handle)) return nullptr;
  if (arguments[1] != nullptr && arguments[1] != Py_None) {
    if (!read_real(arguments[1], seconds)) return nullptr;
    seconds = std::max(seconds, 0.0);
  }
  const int aside = arguments[2] == nullptr ? 0 : PyObject_IsTrue(arguments[2]);
  return aside < 0 ? nullptr : wait_for(engine_of(object), handle, seconds, aside != 0);
}

PyObject* poll(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named) {
  Arguments<2> arguments;
  if (!arguments.read("poll", {"handle", "seconds"}, 1, given, places, named)) return nullptr;
  Engine* self = engine_of(object);
  long long handle = 0;
  double seconds = 0;
  if (!read_number(arguments[0], handle) || (arguments[1] != nullptr && !read_real(arguments[1], seconds)))
    return nullptr;
  Visit visit(self);
  if (!visit) return nullptr;
  if (seconds > 0 && ended(self, visit, handle, now() + seconds, false) == Ended::error) return nullptr;
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

PyObject* submit(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named) {
  Arguments<3> arguments;
  if (!arguments.read("submit", {"requests", "bundle", "prompt"}, 1, given, places, named)) return nullptr;
  Ref requests(PySequence_Tuple(arguments[0]));  // a copy: nobody changes it meanwhile
  if (!requests) return nullptr;
  const int bundle = arguments[1] == nullptr ? 0 : PyObject_IsTrue(arguments[1]);
  const int prompt = arguments[2] == nullptr ? 0 : PyObject_IsTrue(arguments[2]);
  if (bundle < 0 || prompt < 0) return nullptr;
  const Py_ssize_t count = PyTuple_Size(requests.get());
  if (count == 0) return PyList_New(0);
  Visit visit(engine_of(object));
  return visit ? submit_all(engine_of(object), requests.get(), count, bundle + 2 * prompt) : nullptr;
}

PyObject* run(PyObject* object, PyObject* request) {
  Engine* self = engine_of(object);
  Visit visit(self);
  if (!visit) return nullptr;
  Packed packed;
  if (!packed.read(request)) return nullptr;
  char error[kErrorBytes] = "";
  farandole_outcome found{};
  farandole_call call{self->engine, &packed.request, error, sizeof error, kSliceMs, &found, 0};
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = self->core->run(&call);
  Py_END_ALLOW_THREADS;
  if (code == kTold) return tell(self, call.handle, request, found);
  if (code == kInProgress) return go_on(self, visit, call.handle, packed.kept());
  if (code != kOk) return fail(self, code, error);
  Ref output(PyObject_GetAttr(request, names.output));
  return output ? PyObject_CallFunctionObjArgs(package.outcome, output.get(), nullptr) : nullptr;
}

PyObject* prepare(PyObject* object, PyObject* request) {
  auto* made = PyObject_GC_New(Prepared, prepared_type);
  if (made == nullptr) return nullptr;
  Ref owner(reinterpret_cast<PyObject*>(made));
  made->engine = Ref::borrowed(object).give();
  made->packed = new (std::nothrow) Packed;
  PyObject_GC_Track(made);
  if (made->packed == nullptr) return PyErr_NoMemory();
  return made->packed->read(request) ? owner.give() : nullptr;
}

PyObject* run_again(PyObject* object, PyObject* const* given, Py_ssize_t places) {
  Engine* self = engine_of(object);
  if (places < 4 || !PyObject_TypeCheck(given[0], prepared_type)) {
    PyErr_SetString(PyExc_TypeError, "run_again(prepared, input_at, output_at, spans, *owners)");
    return nullptr;
  }
  auto* prepared = reinterpret_cast<Prepared*>(given[0]);
  if (prepared->engine != object) {
    PyErr_SetString(PyExc_ValueError, "the request was prepared for another engine");
    return nullptr;
  }
  farandole_request request = prepared->packed->request;  // of this call alone: other threads may be in it too
  request.input = PyLong_AsVoidPtr(given[1]);
  request.output = PyLong_AsVoidPtr(given[2]);
  if (PyErr_Occurred()) return nullptr;
  Visit visit(self);
  if (!visit) return nullptr;
  char error[kErrorBytes] = "";
  farandole_outcome found{};
  farandole_call call{self->engine, &request, error, sizeof error, kSliceMs, &found, 0};
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = self->core->run(&call);
  Py_END_ALLOW_THREADS;
  if (code == kOk) Py_RETURN_NONE;
  if (code != kTold && code != kInProgress) return fail(self, code, error);
  Ref owners(PyTuple_New(places - 4));
  for (Py_ssize_t i = 4; i < places; ++i) {
    Ref owner = Ref::borrowed(given[i]);
    if (owners)
      PyTuple_SetItem(owners.get(), i - 4, owner.give());
    else
      owner.give();  // for ever: the core works on its memory
  }
  return owners ? look_closer(self, visit, call, code == kTold, prepared, given[3], owners.get()) : nullptr;
}

}  // namespace farandole::python
