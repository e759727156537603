// An engine of the core as a Python class: creation, links, counters and closing; calls.cc has the requests.
// Touches core/api/farandole.h, Python, and what the process is reported of a fork.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "python/calls.h"
#include "python/cuda.h"

namespace farandole::python {

PyTypeObject* engine_type = nullptr;

namespace {

unsigned forks = 0;  // the number of forks between the process that loaded the module and this one

// The result of a call that returns only a code.
PyObject* checked(const Engine* self, const char* doing, int code) {
  if (code == kOk) Py_RETURN_NONE;
  char text[256];
  PyOS_snprintf(text, sizeof text, "%s failed with code %d", doing, code);
  return fail(self, code, text);
}

// --- life ------------------------------------------------------------------------------------------------------------

PyObject* engine_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  auto* self = reinterpret_cast<Engine*>(make(type, 0));
  if (self == nullptr) return nullptr;
  Ref owner(reinterpret_cast<PyObject*>(self));
  self->closed = true;  // until it is made
  self->forks = forks;
  self->pending = PyDict_New();
  return self->pending == nullptr ? nullptr : owner.give();
}

bool read_hosts(PyObject* args, std::unique_ptr<std::int32_t[]>& hosts, std::int32_t& count) {
  const Py_ssize_t size = PySequence_Size(args);
  if (size < 0) return false;
  if (size <= std::numeric_limits<std::int32_t>::max())
    hosts.reset(new (std::nothrow) std::int32_t[static_cast<std::size_t>(size)]);
  if (!hosts) {
    PyErr_NoMemory();
    return false;
  }
  count = static_cast<std::int32_t>(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    Ref item(PySequence_GetItem(args, i));
    if (!item || !read_number(item.get(), hosts[static_cast<std::size_t>(i)])) return false;
  }
  return true;
}

int engine_init(PyObject* object, PyObject* arguments, PyObject* kwargs) {
  Engine* self = engine_of(object);
  farandole_options options{};
  options.interface = FARANDOLE_INTERFACE;
  static const char* const keywords[] = {
      "library",       "rank",     "hosts",        "generation",    "allreduce_algorithm", "fusion_threshold",
      "plan_capacity", "flush_us", "spin_us",      "stall_note_ms", "stall_warning_ms",    "stall_shutdown_ms",
      "slot_bytes",    "slots",    "fuse_bundles", "chunk_bytes",   "tcp_streams",         "record",
      nullptr};
  PyObject *library = nullptr, *args = nullptr;
  if (!PyArg_ParseTupleAndKeywords(
          arguments, kwargs, "O!iOI$iLLLLLLLLiiLii", const_cast<char**>(keywords), library_type, &library,
          &options.rank, &args, &options.generation, &options.allreduce_algorithm, &options.fusion_threshold,
          &options.plan_capacity, &options.flush_us, &options.spin_us, &options.stall_note_ms,
          &options.stall_warning_ms, &options.stall_shutdown_ms, &options.slot_bytes, &options.slots,
          &options.fuse_bundles, &options.chunk_bytes, &options.tcp_streams, &options.record))
    return -1;
  std::unique_ptr<std::int32_t[]> hosts;
  if (!read_hosts(args, hosts, options.size)) return -1;
  options.hosts = hosts.get();
  if (self->engine != nullptr) {
    PyErr_SetString(PyExc_TypeError, "an engine is made once");
    return -1;
  }
  self->library = Ref::borrowed(library).give();
  self->core = reinterpret_cast<Library*>(library)->core;
  self->rank = options.rank;
  self->generation = options.generation;
  if (options.record >= 0) options.record = dup(options.record);  // the core takes ownership
  char error[kErrorBytes] = "";
  const int code = self->core->create(&options, &self->engine, error, sizeof error);
  if (code != kOk || self->engine == nullptr) {
    fail(self, code == kOk ? kInternal : code, error);
    return -1;
  }
  self->closed = false;
  return 0;
}

int engine_traverse(PyObject* object, visitproc visit, void* arg) {
  Engine* self = engine_of(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->library);
  // Not while the core works: the garbage collector could free memory that the core uses.
  if (self->engine == nullptr) Py_VISIT(self->pending);
  return 0;
}

int engine_clear(PyObject*) { return 0; }  // the core uses what is pending until it is done

// An engine that was not closed is not freed: its thread may be using memory in `pending`.
void engine_dealloc(PyObject* object) {
  Engine* self = engine_of(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  destroy_if_unused(self);
  if (self->engine == nullptr) Py_XDECREF(self->pending);
  Py_XDECREF(self->library);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyObject* start(PyObject* object, PyObject* args) {
  Engine* self = engine_of(object);
  double seconds = 0;
  if (!read_real(args, seconds)) return nullptr;
  const double deadline = now() + seconds;
  while (true) {
    ActiveCall active(self);
    if (!active) return nullptr;
    const auto left = std::max<std::int64_t>(0, static_cast<std::int64_t>(std::lround((deadline - now()) * 1e3)));
    char error[kErrorBytes] = "";
    int code = 0;
    Py_BEGIN_ALLOW_THREADS;
    code = self->core->start(self->engine, left, error, sizeof error);
    Py_END_ALLOW_THREADS;
    if (code == kOk) Py_RETURN_NONE;
    if (code != kInProgress || left == 0) return fail(self, code == kInProgress ? kTimedOut : code, error);
    active.leave();
    if (PyErr_CheckSignals() != 0) return nullptr;
  }
}

PyObject* leave(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Arguments<1> arguments;
  if (!arguments.read("leave", {"linger"}, 0, args, nargs, kwnames)) return nullptr;
  double linger = 2.0;
  if (arguments[0] != nullptr && !read_real(arguments[0], linger)) return nullptr;
  Engine* self = engine_of(object);
  const double deadline = now() + std::max(0.0, linger);
  for (;;) {
    ActiveCall active(self);
    if (!active) return nullptr;
    const auto left = static_cast<std::int64_t>(std::lround(std::max(0.0, deadline - now()) * 1e3));
    int code = 0;
    Py_BEGIN_ALLOW_THREADS;
    code = self->core->leave(self->engine, left);
    Py_END_ALLOW_THREADS;
    if (code != kInProgress) return checked(self, "leaving", code);
    active.leave();
    if (PyErr_CheckSignals() != 0) return nullptr;
  }
}

PyObject* stop(PyObject* object, PyObject*) {
  Engine* self = engine_of(object);
  self->closed = true;
  if (self->engine == nullptr || forked(self)) Py_RETURN_NONE;
  Py_BEGIN_ALLOW_THREADS;
  self->core->leave(self->engine, 0);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* free_core(PyObject* object, PyObject*) {
  Engine* self = engine_of(object);
  if (forked(self)) Py_RETURN_NONE;
  self->left = true;
  Ref pending(std::exchange(self->pending, PyDict_New()));  // arrays are freed after the engine's own state is final
  if (self->pending == nullptr) return nullptr;
  destroy_if_unused(self);
  Py_RETURN_NONE;
}

PyObject* revoke(PyObject* object, PyObject* arguments) {
  Engine* self = engine_of(object);
  int code = 0, rank = -1;
  const char* message = nullptr;
  if (!PyArg_ParseTuple(arguments, "iis", &code, &rank, &message)) return nullptr;
  ActiveCall active(self);
  return active ? checked(self, "revoking", self->core->revoke(self->engine, code, rank, message)) : nullptr;
}

PyObject* add_link(PyObject* object, PyObject* arguments) {
  Engine* self = engine_of(object);
  int peer = -1, descriptor = -1, kind = 0;
  if (!PyArg_ParseTuple(arguments, "iii", &peer, &descriptor, &kind)) return nullptr;
  ActiveCall active(self);
  if (!active) {
    close(descriptor);  // the core will never see it
    return nullptr;
  }
  char doing[64];
  PyOS_snprintf(doing, sizeof doing, "the link to rank %d", peer);
  return checked(self, doing, self->core->add_link(self->engine, peer, descriptor, kind));
}

PyObject* share(PyObject* object, PyObject* arguments) {
  Engine* self = engine_of(object);
  int descriptor = -1;
  unsigned long long address = 0;
  Py_ssize_t bytes = 0;
  if (!PyArg_ParseTuple(arguments, "iKn", &descriptor, &address, &bytes)) return nullptr;
  ActiveCall active(self);
  if (!active) return nullptr;
  const int copy = dup(descriptor);  // the core takes ownership
  if (copy < 0) return PyErr_SetFromErrno(PyExc_OSError);
  return PyLong_FromUnsignedLongLong(
      self->core->share(self->engine, copy, reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes)));
}

PyObject* unshare(PyObject* object, PyObject* region) {
  Engine* self = engine_of(object);
  long long number = 0;
  if (!read_number(region, number)) return nullptr;
  ActiveCall active(self);
  if (!active) return nullptr;
  self->core->unshare(self->engine, static_cast<std::uint64_t>(number));
  Py_RETURN_NONE;
}

// Not counted as a call: close() waits for the thread that reads events.
PyObject* next_event(PyObject* object, PyObject*) {
  Engine* self = engine_of(object);
  if (self->engine == nullptr) Py_RETURN_NONE;
  std::unique_ptr<farandole_event> event(new (std::nothrow) farandole_event);
  if (!event) return PyErr_NoMemory();
  int code = kInProgress;
  Py_BEGIN_ALLOW_THREADS;
  while (code == kInProgress) code = self->core->next_event(self->engine, event.get(), -1);
  Py_END_ALLOW_THREADS;
  if (code != kOk) Py_RETURN_NONE;
  Ref text(PyUnicode_DecodeUTF8(event->text, static_cast<Py_ssize_t>(std::char_traits<char>::length(event->text)),
                                "replace"));
  return text ? Py_BuildValue("(iiiO)", event->kind, event->peer, event->level, text.get()) : nullptr;
}

// --- seeing ----------------------------------------------------------------------------------------------------------

PyObject* count(PyObject* object, PyObject* which) {
  Engine* self = engine_of(object);
  int number = 0;
  if (!read_number(which, number)) return nullptr;
  ActiveCall active(self);
  return active ? PyLong_FromLongLong(self->core->counter(self->engine, number)) : nullptr;
}

PyObject* tuning(PyObject* object, PyObject*) {
  Engine* self = engine_of(object);
  ActiveCall active(self);
  if (!active) return nullptr;
  std::int64_t values[5] = {};
  const int code = self->core->tuning(self->engine, values);
  if (code != kOk) return checked(self, "reading the tuning", code);
  return Py_BuildValue("[LLLLL]", static_cast<long long>(values[0]), static_cast<long long>(values[1]),
                       static_cast<long long>(values[2]), static_cast<long long>(values[3]),
                       static_cast<long long>(values[4]));
}

PyObject* trace(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  Arguments<2> arguments;
  if (!arguments.read("trace", {"on", "mark_plans"}, 1, args, nargs, kwnames)) return nullptr;
  const int on = PyObject_IsTrue(arguments[0]), mark = arguments[1] == nullptr ? 0 : PyObject_IsTrue(arguments[1]);
  Engine* self = engine_of(object);
  ActiveCall active(self);
  if (!active || on < 0 || mark < 0) return nullptr;
  return checked(self, "switching the trace", self->core->trace(self->engine, on, mark));
}

PyObject* trace_drain(PyObject* object, PyObject*) {
  Engine* self = engine_of(object);
  ActiveCall active(self);
  if (!active) return nullptr;
  constexpr std::int64_t kBytes = 1 << 20;
  Ref all(PyByteArray_FromStringAndSize(nullptr, 0));
  std::int64_t bytes = 0;
  do {
    const Py_ssize_t before = all ? PyByteArray_Size(all.get()) : 0;
    if (!all || PyByteArray_Resize(all.get(), before + kBytes) != 0) return nullptr;
    char* place = PyByteArray_AsString(all.get()) + before;
    Py_BEGIN_ALLOW_THREADS;
    bytes = self->core->trace_drain(self->engine, place, kBytes);
    Py_END_ALLOW_THREADS;
    if (PyByteArray_Resize(all.get(), before + std::max<Py_ssize_t>(bytes, 0)) != 0) return nullptr;
  } while (bytes > 0);
  return PyBytes_FromObject(all.get());
}

bool has_chaos(const Engine* self) {
  if (self->core->chaos_set != nullptr) return true;
  PyErr_SetString(PyExc_AttributeError, "this library has no failpoints; the one for tests has");
  return false;
}

PyObject* chaos_set(PyObject* object, PyObject* arguments) {
  Engine* self = engine_of(object);
  const char *point = nullptr, *action = nullptr;
  int skip = 0;
  if (!PyArg_ParseTuple(arguments, "ss|i", &point, &action, &skip)) return nullptr;
  ActiveCall active(self);
  if (!active || !has_chaos(self)) return nullptr;
  return checked(self, point, self->core->chaos_set(self->engine, point, action, skip));
}

PyObject* chaos_fired(PyObject* object, PyObject* arguments) {
  Engine* self = engine_of(object);
  const char* point = nullptr;
  if (!PyArg_ParseTuple(arguments, "s", &point)) return nullptr;
  ActiveCall active(self);
  if (!active || !has_chaos(self)) return nullptr;
  return PyLong_FromLongLong(self->core->chaos_fired(self->engine, point));
}

PyObject* calls(PyObject* object, void*) { return PyLong_FromLongLong(engine_of(object)->calls); }
PyObject* loans(PyObject* object, void*) { return PyLong_FromLongLong(engine_of(object)->loans); }
PyObject* pending(PyObject* object, void*) { return PyLong_FromSsize_t(PyDict_Size(engine_of(object)->pending)); }
PyObject* is_forked(PyObject* object, void*) { return PyBool_FromLong(forked(engine_of(object))); }
PyObject* is_freed(PyObject* object, void*) { return PyBool_FromLong(engine_of(object)->engine == nullptr); }

PyMethodDef methods[] = {
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(submit)), METH_FASTCALL | METH_KEYWORDS,
     "submit(requests, bundle=False, prompt=False): accepts all requests or none and gives their handles."},
    {"run", run, METH_O, "run(request): submits one request and waits for it."},
    {"prepare", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(prepare)), METH_FASTCALL,
     "prepare(request, tensor_type, spans): what runs it again and again; None where tensors of that type hide."},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(wait)), METH_FASTCALL | METH_KEYWORDS,
     "wait(handle, timeout=None, passive=False): the outcome; the handle goes."},
    {"poll", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(poll)), METH_FASTCALL | METH_KEYWORDS,
     "poll(handle, seconds=0.0): whether the operation is done within that time."},
    {"next_event", next_event, METH_NOARGS, "(kind, peer, level, text) of what the core has to say; None at the end."},
    {"start", start, METH_O, "start(seconds): begins to work once the first links are there."},
    {"leave", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(leave)), METH_FASTCALL | METH_KEYWORDS,
     "leave(linger=2.0): leaves in good order."},
    {"stop", stop, METH_NOARGS, "No call begins any more, and nothing of the core runs after it."},
    {"free", free_core, METH_NOARGS, "Destroys the core's object once no array lies in its memory."},
    {"revoke", revoke, METH_VARARGS, "revoke(code, rank, message): ends every operation, here and on the peers."},
    {"add_link", add_link, METH_VARARGS, "add_link(peer, descriptor, kind): takes over a connected stream."},
    {"share", share, METH_VARARGS, "share(file, address, bytes): ranks of this host reach that memory; its number."},
    {"unshare", unshare, METH_O, "unshare(number): they do not any more."},
    {"count", count, METH_O, "count(which): a counter of the core, by its number."},
    {"tuning", tuning, METH_NOARGS, "What can be tuned, as it is now."},
    {"trace", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(trace)), METH_FASTCALL | METH_KEYWORDS,
     "trace(on, mark_plans=False): switches the recording of trace events."},
    {"trace_drain", trace_drain, METH_NOARGS, "Recorded events so far, one JSON object per line."},
    {"use_gpus", use_gpus, METH_VARARGS,
     "use_gpus(driver, nvrtc, nccl, use_nccl, start_ms, cache): requests may have memory of GPUs from now on; OSError "
     "says why not."},
    {"chaos_set", chaos_set, METH_VARARGS, "chaos_set(point, action, skip=0): something goes wrong there."},
    {"chaos_fired", chaos_fired, METH_VARARGS, "chaos_fired(point): how often it has."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef members[] = {
    {"calls", calls, nullptr, "Calls of the core that are under way.", nullptr},
    {"loans", loans, nullptr, "Arrays over memory of the core.", nullptr},
    {"pending", pending, nullptr, "Operations whose handles have not been waited for.", nullptr},
    {"forked", is_forked, nullptr, "Whether this process is a child of the one that made it.", nullptr},
    {"freed", is_freed, nullptr, "Whether the core's object is gone.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

PyObject* shut_down(const Engine* self) {
  return raise(package.shut_down, Ref(PyUnicode_FromString("Horovod has been shut down. This rank has left the job")),
               Ref(Py_BuildValue("{s:i}", "rank", self->rank)));
}

bool ActiveCall::enter(Engine* engine) {
  if (forked(engine)) {
    PyErr_Format(package.internal, "this process was forked from rank %d; the engine belongs to the parent process",
                 engine->rank);
  } else if (engine->closed) {
    shut_down(engine);
  } else {
    engine_ = engine;
    ++engine->calls;
  }
  return engine_ != nullptr;
}

bool ActiveCall::signals(Engine* engine) {
  leave();
  return PyErr_CheckSignals() == 0 && enter(engine);
}

void ActiveCall::leave() {
  if (engine_ != nullptr) --engine_->calls;
  engine_ = nullptr;
}

bool forked(const Engine* self) { return self->forks != forks; }

void destroy_if_unused(Engine* self) {
  if (!self->left || self->calls > 0 || self->loans > 0 || self->guards > 0 || self->engine == nullptr) return;
  self->core->destroy(std::exchange(self->engine, nullptr));
}

PyTypeObject* make_engine_type(PyObject* module) {
  static bool watching = false;
  if (!watching) watching = pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0;
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("One rank's engine in the core. Calls are safe from any thread.")},
      {Py_tp_new, reinterpret_cast<void*>(engine_new)},
      {Py_tp_init, reinterpret_cast<void*>(engine_init)},
      {Py_tp_dealloc, reinterpret_cast<void*>(engine_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(engine_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(engine_clear)},
      {Py_tp_methods, methods},
      {Py_tp_getset, members},
      {0, nullptr},
  };
  return engine_type = make_type(module, "farandole.engine.bridge.Engine", sizeof(Engine),
                                 Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots);
}

}  // namespace farandole::python
