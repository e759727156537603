// Where memory that Python names lies: spans, buffers, arrays that export none, tensors by DLPack.
// Touches Python alone.
#include <cstring>

#include "python/bridge.h"

namespace farandole::python {

namespace {

// The part of DLPack's tensor that is read here, as its specification lays it out (versions before 1.0).
struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device;
  std::int32_t dimensions;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // null: contiguous
  std::uint64_t byte_offset;
};
constexpr std::int32_t kCpu = 1;

bool not_contiguous() {
  PyErr_SetString(PyExc_ValueError, "the array is not contiguous; pass numpy.ascontiguousarray(array)");
  return false;
}

bool keep_shape(const std::int64_t* shape, int dimensions, Words& words, Memory& memory) {
  std::int64_t* kept = words.take(static_cast<std::size_t>(dimensions));
  if (kept == nullptr) return false;
  std::copy(shape, shape + dimensions, kept);
  memory.shape = kept;
  memory.dimensions = dimensions;
  return true;
}

bool keep_shape(PyObject* shape, Words& words, Memory& memory) {
  const Py_ssize_t dimensions = PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
  if (dimensions < 0) {
    PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
    return false;
  }
  std::int64_t* kept = words.take(static_cast<std::size_t>(dimensions));
  if (kept == nullptr) return false;
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    long long number = 0;
    if (!read_number(PyTuple_GetItem(shape, i), number)) return false;
    kept[i] = number;
  }
  memory.shape = kept;
  memory.dimensions = static_cast<int>(dimensions);
  return true;
}

bool read_address(PyObject* number, Memory& memory) {
  memory.address = PyLong_AsVoidPtr(number);
  return memory.address != nullptr || !PyErr_Occurred();
}

bool read_span(PyObject* span, Words& words, Memory& memory) {
  Ref address(PyObject_GetAttr(span, names.address)), shape(PyObject_GetAttr(span, names.shape));
  return address && shape && read_address(address.get(), memory) && keep_shape(shape.get(), words, memory);
}

// The export ends at once: whoever made the request keeps the array, and NumPy's do not move.
bool read_buffer(PyObject* object, bool writable, Words& words, Memory& memory) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_ND | (writable ? PyBUF_WRITABLE : 0)) != 0) return false;
  memory.address = view.buf;
  std::int64_t shape[64] = {};
  const int dimensions = view.ndim;
  for (int i = 0; i < dimensions; ++i) shape[i] = view.shape == nullptr ? view.len : view.shape[i];
  PyBuffer_Release(&view);
  return keep_shape(shape, dimensions, words, memory);
}

// Arrays of types that the buffer protocol does not know, such as those of ml_dtypes, and the clear words for others.
bool read_interface(PyObject* object, PyObject* interface, bool writable, Words& words, Memory& memory) {
  PyObject* data = PyDict_GetItemWithError(interface, names.data);
  PyObject* shape = PyDict_GetItemWithError(interface, names.shape);
  PyObject* strides = PyDict_GetItemWithError(interface, names.strides);
  if (data == nullptr || shape == nullptr || !PyTuple_Check(data) || PyTuple_Size(data) != 2) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%R does not say where its memory lies", Py_TYPE(object));
    return false;
  }
  if (strides != nullptr && strides != Py_None) return not_contiguous();
  const int read_only = PyObject_IsTrue(PyTuple_GetItem(data, 1));
  if (read_only < 0) return false;
  if (writable && read_only) {
    PyErr_SetString(PyExc_ValueError, "the array cannot be written to");
    return false;
  }
  return read_address(PyTuple_GetItem(data, 0), memory) && keep_shape(shape, words, memory);
}

bool contiguous(const DLTensor& tensor) {
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.dimensions - 1; tensor.strides != nullptr && i >= 0; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

bool read_dlpack(PyObject* object, Words& words, Memory& memory) {
  memory.held = Ref(PyObject_CallMethodObjArgs(object, names.__dlpack__, nullptr));
  if (!memory.held) return false;
  auto* tensor = static_cast<DLTensor*>(PyCapsule_GetPointer(memory.held.get(), "dltensor"));
  if (tensor == nullptr) return false;
  if (tensor->device_type != kCpu) {
    PyErr_SetString(PyExc_ValueError, "the engine works on memory of the CPU alone");
    return false;
  }
  if (!contiguous(*tensor)) return not_contiguous();
  memory.address = static_cast<char*>(tensor->data) + tensor->byte_offset;
  return keep_shape(tensor->shape, tensor->dimensions, words, memory);
}

}  // namespace

bool read_memory(PyObject* object, bool writable, Words& words, Memory& memory) {
  if (object == Py_None) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == package.span) return read_span(object, words, memory);
  if (PyObject_CheckBuffer(object)) {
    if (read_buffer(object, writable, words, memory)) return true;
    if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return false;
    PyErr_Clear();
  }
  Ref interface(PyObject_GetAttr(object, names.__array_interface__));
  if (interface) return read_interface(object, interface.get(), writable, words, memory);
  PyErr_Clear();
  if (PyObject_HasAttr(object, names.__dlpack__)) return read_dlpack(object, words, memory);
  PyErr_Format(PyExc_TypeError, "%R has no memory that can be read: pass an array, a buffer or a DLPack tensor",
               Py_TYPE(object));
  return false;
}

std::int64_t* Words::take(std::size_t count) {
  if (count <= few_.size() - used_) {
    std::int64_t* place = few_.data() + used_;
    used_ += count;
    return place;
  }
  try {
    many_.push_back(std::make_unique<std::int64_t[]>(count));
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return nullptr;
  }
  return many_.back().get();
}

}  // namespace farandole::python
