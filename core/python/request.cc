// A Python request (farandole/engine/interface.py) as the struct of the C interface.
// Touches core/api/farandole.h and Python.
#include <algorithm>
#include <cstring>
#include <limits>

#include "python/bridge.h"

namespace farandole::python {

namespace {

bool out_of_range() {
  PyErr_SetString(PyExc_ValueError, "a number in the request is out of range");
  return false;
}

template <class Number>
bool read_attribute(PyObject* object, PyObject* name, Number& number) {
  Ref value(PyObject_GetAttr(object, name));
  return value && read_number(value.get(), number);
}

bool read_attribute(PyObject* object, PyObject* name, double& number) {
  Ref value(PyObject_GetAttr(object, name));
  return value && read_real(value.get(), number);
}

// The element type, given or detected.
bool read_dtype(PyObject* object, std::int32_t& dtype) {
  Ref said(PyObject_GetAttr(object, names.dtype));
  if (!said) return false;
  if (said.get() != Py_None) return read_number(said.get(), dtype);
  Ref found(PyObject_CallMethodObjArgs(object, names.elements, nullptr));
  return found && read_number(found.get(), dtype);
}

// The device and the stream of memory that is not the CPU's.
bool read_gpu(PyObject* object, farandole_request& request) {
  Ref gpu(PyObject_GetAttr(object, names.gpu));
  if (!gpu) return false;
  if (gpu.get() == Py_None) return true;
  int device = 0;
  unsigned long long stream = 0;
  if (!PyArg_ParseTuple(gpu.get(), "iK", &device, &stream)) return false;
  if (device < 0) return out_of_range();
  request.on_device = device + 1;
  request.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream));
  return true;
}

}  // namespace

bool read_number(PyObject* object, long long& number) {
  number = PyLong_AsLongLong(object);
  if (number != -1 || !PyErr_Occurred()) return true;
  if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return false;
  PyErr_Clear();
  return out_of_range();
}

bool read_number(PyObject* object, int& number) {
  long long wide = 0;
  if (!read_number(object, wide)) return false;
  if (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max()) return out_of_range();
  number = static_cast<int>(wide);
  return true;
}

bool read_real(PyObject* object, double& number) {
  number = PyFloat_AsDouble(object);
  return number != -1.0 || !PyErr_Occurred();
}

std::int64_t element_bytes(int dtype) {
  switch (dtype) {
#define FARANDOLE_BYTES(name, NAME, number, bytes) \
  case FARANDOLE_DTYPE_##NAME:                     \
    return bytes;
    FARANDOLE_DTYPES(FARANDOLE_BYTES)
#undef FARANDOLE_BYTES
    default:
      return 0;
  }
}

bool Packed::read(PyObject* args) {
  long long tag = 0;
  if (!read_attribute(args, names.kind, request.kind) || !read_dtype(args, request.dtype) ||
      !read_attribute(args, names.op, request.op) || !read_attribute(args, names.group, request.group) ||
      !read_attribute(args, names.peer, request.peer) || !read_attribute(args, names.device, request.device) ||
      !read_attribute(args, names.prescale, request.prescale) ||
      !read_attribute(args, names.postscale, request.postscale) || !read_attribute(args, names.tag, tag))
    return false;
  request.tag = tag;
  if (!read_gpu(args, request)) return false;
  name_ = Ref(PyObject_GetAttr(args, names.name));
  if (!name_) return false;
  if (name_.get() != Py_None) {
    Py_ssize_t length = 0;
    request.name = PyUnicode_AsUTF8AndSize(name_.get(), &length);
    if (request.name == nullptr) return false;
    if (std::strlen(request.name) != static_cast<std::size_t>(length)) {
      PyErr_SetString(PyExc_ValueError, "a name has no zero bytes");
      return false;
    }
  }
  return read_memory(args) && keep(args);
}

bool Packed::read_memory(PyObject* args) {
  Ref input(PyObject_GetAttr(args, names.input)), output(PyObject_GetAttr(args, names.output));
  Ref splits(PyObject_GetAttr(args, names.splits)), pieces(PyObject_GetAttr(args, names.pieces));
  if (!input || !output || !splits || !pieces) return false;
  Memory first, second;
  const bool in_place = input.get() == output.get();
  if (!python::read_memory(input.get(), in_place, numbers_, first)) return false;
  if (!in_place && !python::read_memory(output.get(), true, numbers_, second)) return false;
  if (!first.fits(request.dtype) || !second.fits(request.dtype)) return false;
  const Memory& shaped = input.get() == Py_None ? second : first;
  request.input = first.address;
  request.output = in_place ? first.address : second.address;
  request.shape = shaped.shape;
  request.dimensions = shaped.dimensions;
  if (rows_vary(request.kind) && output.get() != Py_None) {
    if (element_bytes(request.dtype) == 0) return out_of_range();
    request.output_bytes = element_bytes(request.dtype) * (in_place ? first : second).elements();
  }
  exports_[0] = std::move(first.held);
  exports_[1] = std::move(second.held);
  return read_splits(splits.get()) && read_pieces(pieces.get());
}

bool Packed::read_splits(PyObject* splits) {
  if (splits == Py_None) return true;
  const Py_ssize_t count = PySequence_Size(splits);
  if (count < 0) return false;
  if (count > std::numeric_limits<std::int32_t>::max()) return out_of_range();
  std::int64_t* kept = numbers_.take(static_cast<std::size_t>(count));
  if (kept == nullptr) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Ref item(PySequence_GetItem(splits, i));
    long long number = 0;
    if (!item || !read_number(item.get(), number)) return false;
    kept[i] = number;
  }
  request.splits = kept;
  request.splits_count = static_cast<std::int32_t>(count);
  return true;
}

// Rows of address and bytes: an array of int64.
bool Packed::read_pieces(PyObject* pieces) {
  if (pieces == Py_None) return true;
  Memory rows;
  if (!python::read_memory(pieces, false, numbers_, rows)) return false;
  if (rows.dimensions != 2 || rows.shape[1] != 2) {
    PyErr_SetString(PyExc_ValueError, "pieces are rows of an address and a number of bytes");
    return false;
  }
  if (!rows.fits(FARANDOLE_DTYPE_INT64)) return false;
  request.pieces = static_cast<const std::int64_t*>(rows.address);
  request.pieces_count = rows.shape[0];
  exports_[2] = std::move(rows.held);
  return true;
}

bool Packed::keep(PyObject* args) {
  const auto exported = std::count_if(exports_.begin(), exports_.end(), [](const Ref& one) { return bool(one); });
  kept_ = exported == 0 ? Ref::borrowed(args) : Ref(PyTuple_New(1 + exported));
  if (exported == 0 || !kept_) return bool(kept_);
  Py_ssize_t place = 0;
  PyTuple_SetItem(kept_.get(), place++, Ref::borrowed(args).give());
  for (Ref& one : exports_)
    if (one) PyTuple_SetItem(kept_.get(), place++, one.give());
  return true;
}

}  // namespace farandole::python
