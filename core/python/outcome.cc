// Results and errors of the core as Python objects and exceptions; results in the core's memory are lent to arrays.
// Touches core/api/farandole.h and Python.
#include <cstring>

#include "python/bridge.h"

namespace farandole::python {

namespace {

// Results up to this size are copied at once, which is cheaper than lending the core's memory.
constexpr std::int64_t kCopiedBytes = 64 << 10;

struct Loan {
  PyObject_HEAD PyObject* engine;
  std::int64_t handle;
  void* memory;
  std::int64_t bytes;
};
PyTypeObject* loan_type = nullptr;

int loan_buffer(PyObject* object, Py_buffer* view, int flags) {
  auto* self = reinterpret_cast<Loan*>(object);
  return PyBuffer_FillInfo(view, object, self->memory, self->bytes, 0, flags);
}

void loan_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Loan*>(object);
  PyTypeObject* type = Py_TYPE(object);
  auto* engine = reinterpret_cast<Engine*>(self->engine);
  if (engine != nullptr) {
    if (!forked(engine)) {  // else the memory belongs to the parent's engine
      engine->core->release(engine->engine, self->handle);
      --engine->loans;
      destroy_if_unused(engine);
    }
    Py_DECREF(self->engine);
  }
  PyObject_Free(object);
  Py_DECREF(type);
}

Ref numbers(const std::int64_t* args, std::int32_t count, bool as_tuple) {
  Ref all(as_tuple ? PyTuple_New(count) : PyList_New(count));
  for (std::int32_t i = 0; all && i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(args[i]);
    if (number == nullptr) return Ref();
    if (as_tuple)
      PyTuple_SetItem(all.get(), i, number);
    else
      PyList_SetItem(all.get(), i, number);
  }
  return all;
}

PyObject* raise(PyObject* exception) {
  if (exception == nullptr) return nullptr;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
  Py_DECREF(exception);
  return nullptr;
}

PyObject* raise_outcome(const Engine* self, PyObject* request, const farandole_outcome& found) {
  Ref name(PyObject_GetAttr(request, names.name));
  if (!name) return nullptr;
  Ref text(PyUnicode_DecodeUTF8(found.message, static_cast<Py_ssize_t>(std::char_traits<char>::length(found.message)),
                                "replace"));
  if (!text) return nullptr;
  Ref arguments(Py_BuildValue("(iO)", found.code, text.get()));
  Ref attributes(Py_BuildValue("{s:i,s:s,s:I,s:O}", "rank", found.rank, "phase",
                               found.phase == nullptr ? "" : found.phase, "generation", self->generation, "name",
                               name.get()));
  if (!arguments || !attributes) return nullptr;
  if (name.get() == Py_None) {
    Ref none(PyUnicode_FromString(""));
    if (!none || PyDict_SetItemString(attributes.get(), "name", none.get()) != 0) return nullptr;
  }
  return raise(PyObject_Call(package.translate, arguments.get(), attributes.get()));
}

// A copy of the result in an array of its own.
Ref copied(PyObject* shape, PyObject* dtype, const farandole_outcome& found) {
  Ref array(PyObject_CallFunctionObjArgs(package.new_array, shape, dtype, nullptr));
  Py_buffer view;
  if (!array || PyObject_GetBuffer(array.get(), &view, PyBUF_WRITABLE) != 0) return Ref();
  const bool fits = view.len == found.output_bytes;
  if (fits && view.len > 0) std::memcpy(view.buf, found.output, static_cast<std::size_t>(view.len));
  PyBuffer_Release(&view);
  if (!fits) PyErr_SetString(PyExc_SystemError, "the result has another size than its shape says");
  return fits ? std::move(array) : Ref();
}

// The result in the core's memory as an array; small ones are copied.
Ref received(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found, bool& on_loan) {
  Ref dtype(PyObject_CallMethodObjArgs(request, names.elements, nullptr));
  Ref shape = numbers(found.shape, found.dimensions, true);
  if (!dtype || !shape) return Ref();
  if (found.output_bytes <= kCopiedBytes) return copied(shape.get(), dtype.get(), found);
  Ref loan(lend(self, handle, found.output, found.output_bytes));
  if (!loan) return Ref();
  on_loan = true;  // from now on the array releases the handle
  return Ref(PyObject_CallFunctionObjArgs(package.array_over, loan.get(), shape.get(), dtype.get(), nullptr));
}

PyObject* succeed(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found, bool& on_loan) {
  Ref kind(PyObject_GetAttr(request, names.kind)), output(PyObject_GetAttr(request, names.output));
  int number = 0;
  // Before the memory: a loan that ends takes all of this along.
  Ref splits = found.splits_count > 0 ? numbers(found.splits, found.splits_count, false) : Ref::borrowed(Py_None);
  Ref value(PyLong_FromLongLong(found.value));
  if (!kind || !output || !splits || !value || !read_number(kind.get(), number)) return nullptr;
  if (rows_vary(number)) {
    Numbers numbers;
    Memory memory;
    if (!read_memory(output.get(), false, numbers, memory)) return nullptr;
    if (memory.address != found.output || output.get() == Py_None) {
      output = received(self, handle, request, found, on_loan);
      if (!output) return nullptr;
    }
  }
  return PyObject_CallFunctionObjArgs(package.outcome, output.get(), splits.get(), value.get(), nullptr);
}

}  // namespace

PyObject* lend(Engine* engine, std::int64_t handle, void* memory, std::int64_t bytes) {
  auto* self = PyObject_New(Loan, loan_type);
  if (self == nullptr) return nullptr;
  self->engine = Ref::borrowed(reinterpret_cast<PyObject*>(engine)).give();
  self->handle = handle;
  self->memory = memory;
  self->bytes = bytes;
  ++engine->loans;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* take_outcome(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found) {
  bool on_loan = false;
  PyObject* outcome =
      found.code == kOk ? succeed(self, handle, request, found, on_loan) : raise_outcome(self, request, found);
  if (!on_loan) self->core->release(self->engine, handle);
  return outcome;
}

PyObject* raise(PyObject* type, Ref text, Ref attributes) {
  Ref arguments(text ? PyTuple_New(1) : nullptr);
  if (!arguments || !attributes) return nullptr;
  PyTuple_SetItem(arguments.get(), 0, text.give());
  Ref error(PyObject_Call(type, arguments.get(), attributes.get()));
  if (error) PyErr_SetObject(type, error.get());
  return nullptr;
}

PyObject* fail(const Engine* self, int code, const char* message) {
  Ref text(PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::char_traits<char>::length(message)), "replace"));
  if (!text) return nullptr;
  Ref arguments(Py_BuildValue("(iO)", code, text.get()));
  Ref attributes(Py_BuildValue("{s:I}", "generation", self == nullptr ? 0u : self->generation));
  if (!arguments || !attributes) return nullptr;
  return raise(PyObject_Call(package.translate, arguments.get(), attributes.get()));
}

PyTypeObject* make_loan_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("Memory of the core under an array; goes back when nobody uses it.")},
      {Py_bf_getbuffer, reinterpret_cast<void*>(loan_buffer)},
      {Py_tp_dealloc, reinterpret_cast<void*>(loan_dealloc)},
      {0, nullptr},
  };
  return loan_type =
             make_type(module, "farandole.engine.bridge.Loan", sizeof(Loan), Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);
}

}  // namespace farandole::python
