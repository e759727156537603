// A prepared request: a script repeats it on tensors of one kind, so only what may differ is checked.
// Touches core/api/farandole.h and Python.
#include <algorithm>
#include <cstring>

#include "python/calls.h"
#include "python/dlpack.h"

namespace farandole::python {

namespace {

struct Prepared {
  PyObject_HEAD PyObject* engine;  // null: it has been cleared
  Packed* packed;
  PyObject* tensor_type;
  PyObject* spans;
  int (*read_tensor)(void* object, DLTensor* tensor);
  bool running;
};

// The kind of elements in DLPack's numbers, by the letter that Python's struct module has for them; -1: none of ours.
int code_of(const char* format) {
  if (format == nullptr || format[0] == 0 || format[1] != 0) return -1;
  if (std::strchr("bhilq", format[0]) != nullptr) return 0;
  if (std::strchr("BHILQ", format[0]) != nullptr) return 1;
  if (std::strchr("efd", format[0]) != nullptr) return 2;
  return format[0] == '?' ? 6 : -1;
}

// A NumPy array by its buffer, which has no strides and can be written to. The shape is valid until this thread's next
// call.
int read_array(void* object, DLTensor* tensor) {
  thread_local std::int64_t shape[64];
  Py_buffer view;
  if (PyObject_GetBuffer(static_cast<PyObject*>(object), &view, PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE) != 0)
    return -1;
  const int code = code_of(view.format);
  *tensor = {
      view.buf, kCpu,    0, view.ndim, static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * view.itemsize), 1,
      shape,    nullptr, 0};
  for (int i = 0; i < view.ndim; ++i) shape[i] = view.shape[i];
  PyBuffer_Release(&view);
  if (code >= 0) return 0;
  PyErr_SetString(PyExc_ValueError, "elements of a type that the core does not know");
  return -1;
}

// How to read tensors of this type; null without an error: not possible.
auto find_reader(PyObject* type) -> decltype(DLExchange::read) {
  if (reinterpret_cast<PyTypeObject*>(type) == package.ndarray) return read_array;
  Ref capsule(PyObject_GetAttr(type, names.__dlpack_c_exchange_api__));
  if (!capsule) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return nullptr;
  }
  const auto* found = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (found != nullptr && found->major != 1) found = found->previous;
  return found == nullptr ? nullptr : found->read;
}

// Whether `object` is a tensor like that of the request; finds its address.
bool fits(const Prepared* self, PyObject* object, void** address) {
  DLTensor tensor{};
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(self->tensor_type)) return false;
  if (self->read_tensor(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const farandole_request& request = self->packed->request;
  *address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return tensor.device_type == kCpu && tensor.dimensions == request.dimensions && dtype_of(tensor) == request.dtype &&
         std::equal(tensor.shape, tensor.shape + tensor.dimensions, request.shape) && contiguous(tensor);
}

bool find_address(const Prepared* self, PyObject* result, void** address) {
  DLTensor tensor{};
  if (result == Py_None) return true;
  if (self->read_tensor(result, &tensor) != 0) return false;
  *address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return true;
}

// The request of a prepared call with its memory; only slow calls and failures need it.
Ref with_spans(PyObject* request, PyObject* spans, PyObject* owners) {
  Ref found(PyObject_CallObject(spans, owners));
  if (!found) return Ref();
  Ref first(PySequence_GetItem(found.get(), 0)), output(PySequence_GetItem(found.get(), 1));
  if (!first || !output) return Ref();
  return Ref(PyObject_CallFunctionObjArgs(package.with_memory, request, first.get(), output.get(), nullptr));
}

// A tuple of a request, its prepared form, and the owners of its memory. If there is no memory for the tuple, the
// owners are never freed.
Ref with_owners(PyObject* request, PyObject* prepared, PyObject* owners) {
  Ref all(PyTuple_Pack(3, request, prepared, owners));
  if (!all) Py_INCREF(owners);
  return all;
}

// The outcome of a prepared call that is not done yet or has failed.
PyObject* finish_slow_call(Engine* self, ActiveCall& active, const farandole_call& call, bool reported,
                           Prepared* prepared, PyObject* owners) {
  PyObject* const request = request_in(prepared->packed->kept());
  PyObject* const itself = reinterpret_cast<PyObject*>(prepared);
  // Python's signal handlers may raise in the next call, so the memory of what is under way is kept first.
  if (!reported) {
    Ref kept = with_owners(request, itself, owners);
    if (!kept || !keep(self, call.handle, kept.get())) return nullptr;
  }
  Ref whole = with_spans(request, prepared->spans, owners);
  if (whole && reported) return take_outcome(self, call.handle, whole.get(), *call.outcome);
  if (reported) self->core->release(self->engine, call.handle);
  if (!whole) return nullptr;
  Ref kept = with_owners(whole.get(), itself, owners);
  return kept ? wait_longer(self, active, call.handle, kept.get()) : nullptr;
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Prepared*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  delete self->packed;
  Py_XDECREF(self->engine);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->spans);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Prepared*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->engine);
  Py_VISIT(self->tensor_type);
  Py_VISIT(self->spans);
  if (self->packed != nullptr) Py_VISIT(self->packed->kept());
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<Prepared*>(object);
  Py_CLEAR(self->engine);
  Py_CLEAR(self->tensor_type);
  Py_CLEAR(self->spans);
  delete std::exchange(self->packed, nullptr);
  return 0;
}

// Runs the request on memory that fits it.
PyObject* run_on(Prepared* self, void* input, void* output, PyObject* tensor, PyObject* result) {
  Engine* engine = engine_of(self->engine);
  farandole_request request = self->packed->request;
  request.input = input;
  request.output = output;
  ActiveCall active(engine);
  if (!active) return nullptr;
  char error[kErrorBytes];
  error[0] = 0;
  farandole_outcome found{};
  farandole_call call{engine->engine, &request, error, sizeof error, kSliceMs, &found, 0};
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = engine->core->run(&call);
  Py_END_ALLOW_THREADS;
  if (code == kOk) Py_RETURN_NONE;
  if (code != kReported && code != kInProgress) return fail(engine, code, error);
  Ref owners(PyTuple_Pack(2, tensor, result));
  if (owners) return finish_slow_call(engine, active, call, code == kReported, self, owners.get());
  Py_INCREF(tensor);  // it is never freed: the core uses its memory
  Py_INCREF(result);
  return nullptr;
}

PyObject* run_tensor(PyObject* object, PyObject* const* args, Py_ssize_t nargs) {
  auto* self = reinterpret_cast<Prepared*>(object);
  if (nargs != 2 || self->engine == nullptr) {
    PyErr_SetString(PyExc_TypeError, "run(tensor, result)");
    return nullptr;
  }
  void *input = nullptr, *output = nullptr;
  if (self->running || !fits(self, args[0], &input)) Py_RETURN_NOTIMPLEMENTED;
  if (args[1] == args[0])
    output = input;
  else if (!find_address(self, args[1], &output))
    return nullptr;
  self->running = true;
  Ref owner = Ref::borrowed(object);
  PyObject* outcome = run_on(self, input, output, args[0], args[1]);
  self->running = false;
  return outcome;
}

PyMethodDef methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_tensor)), METH_FASTCALL,
     "run(tensor, result): None when the result lies in `result`, NotImplemented when the tensor is of another kind."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject* prepared_type = nullptr;

}  // namespace

PyObject* prepare(PyObject* object, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3) {
    PyErr_SetString(PyExc_TypeError, "prepare(request, tensor_type, spans)");
    return nullptr;
  }
  auto* reader = find_reader(args[1]);
  if (reader == nullptr) return PyErr_Occurred() ? nullptr : Ref::borrowed(Py_None).give();
  auto* made = PyObject_GC_New(Prepared, prepared_type);
  if (made == nullptr) return nullptr;
  Ref owner(reinterpret_cast<PyObject*>(made));
  made->engine = Ref::borrowed(object).give();
  made->packed = new (std::nothrow) Packed;
  made->tensor_type = Ref::borrowed(args[1]).give();
  made->spans = Ref::borrowed(args[2]).give();
  made->read_tensor = reader;
  made->running = false;
  PyObject_GC_Track(made);
  if (made->packed == nullptr) return PyErr_NoMemory();
  return made->packed->read(args[0]) ? owner.give() : nullptr;
}

PyTypeObject* make_prepared_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("A request that is run any number of times, by one caller at a time.")},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(clear)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  return prepared_type = make_type(module, "farandole.engine.bridge.Prepared", sizeof(Prepared),
                                   Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);
}

}  // namespace farandole::python
