// The address of memory that Python objects have: spans, buffers, arrays without buffers, DLPack tensors.
// Touches Python alone.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "python/bridge.h"
#include "python/dlpack.h"

namespace farandole::python {

namespace {

bool not_contiguous() {
  PyErr_SetString(PyExc_ValueError, "the array is not contiguous; pass numpy.ascontiguousarray(array)");
  return false;
}

bool keep_shape(const std::int64_t* shape, int dimensions, Numbers& numbers, Memory& memory) {
  std::int64_t* kept = numbers.take(static_cast<std::size_t>(dimensions));
  if (kept == nullptr) return false;
  std::copy(shape, shape + dimensions, kept);
  memory.shape = kept;
  memory.dimensions = dimensions;
  return true;
}

bool keep_shape(PyObject* shape, Numbers& numbers, Memory& memory) {
  const Py_ssize_t dimensions = PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
  if (dimensions < 0) {
    PyErr_SetString(PyExc_TypeError, "a shape is a tuple");
    return false;
  }
  std::int64_t* kept = numbers.take(static_cast<std::size_t>(dimensions));
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

bool read_span(PyObject* span, Numbers& numbers, Memory& memory) {
  Ref address(PyObject_GetAttr(span, names.address)), shape(PyObject_GetAttr(span, names.shape));
  return address && shape && read_address(address.get(), memory) && keep_shape(shape.get(), numbers, memory);
}

// For NumPy arrays the export ends at once: the request keeps the array, and its memory does not move. Memory of other
// objects may move without an export: bytearrays grow, mappings are closed.
bool read_buffer(PyObject* object, bool writable, Numbers& numbers, Memory& memory) {
  if (!PyObject_TypeCheck(object, package.ndarray)) {
    memory.held = Ref(PyMemoryView_FromObject(object));
    if (!memory.held) return false;
    object = memory.held.get();
  }
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_ND | (writable ? PyBUF_WRITABLE : 0)) != 0) return false;
  memory.address = view.buf;
  memory.item_bytes = view.itemsize;
  std::int64_t shape[64] = {};
  const int dimensions = view.ndim;
  for (int i = 0; i < dimensions; ++i) shape[i] = view.shape == nullptr ? view.len : view.shape[i];
  PyBuffer_Release(&view);
  return keep_shape(shape, dimensions, numbers, memory);
}

// Arrays of types that the buffer protocol does not know, such as those of ml_dtypes, and the error text for others.
bool read_interface(PyObject* object, PyObject* interface, bool writable, Numbers& numbers, Memory& memory) {
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
  // "<f4": a byte order, a kind, and the bytes of an element.
  PyObject* type = PyDict_GetItemWithError(interface, names.typestr);
  const char* text = type == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(type, nullptr);
  if (text == nullptr && PyErr_Occurred()) return false;
  if (text != nullptr && std::strlen(text) > 2) memory.item_bytes = std::strtoll(text + 2, nullptr, 10);
  return read_address(PyTuple_GetItem(data, 0), memory) && keep_shape(shape, numbers, memory);
}

// The capsule, of the newest version that its owner knows. Before 1.0 it does not say whether the memory may be
// written.
const DLTensor* open_dlpack(PyObject* object, bool writable, Ref& capsule) {
  Ref export_it(PyObject_GetAttr(object, names.__dlpack__)), nothing(PyTuple_New(0));
  if (!export_it || !nothing) return nullptr;
  capsule = Ref(PyObject_Call(export_it.get(), nothing.get(), package.newest));
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    capsule = Ref(PyObject_CallObject(export_it.get(), nullptr));
  }
  if (!capsule) return nullptr;
  if (!PyCapsule_IsValid(capsule.get(), "dltensor_versioned"))
    return static_cast<DLTensor*>(PyCapsule_GetPointer(capsule.get(), "dltensor"));
  auto* found = static_cast<DLVersioned*>(PyCapsule_GetPointer(capsule.get(), "dltensor_versioned"));
  if (found->major != 1) {
    PyErr_Format(PyExc_BufferError, "a tensor of DLPack %u.%u is not known here, only up to 1", found->major,
                 found->minor);
    return nullptr;
  }
  if (writable && (found->flags & (kReadOnly | kCopied)) != 0) {
    PyErr_SetString(PyExc_ValueError, "the tensor cannot be written to: it is read-only, or a copy");
    return nullptr;
  }
  return &found->tensor;
}

bool read_dlpack(PyObject* object, bool writable, Numbers& numbers, Memory& memory) {
  const DLTensor* tensor = open_dlpack(object, writable, memory.held);
  if (tensor == nullptr) return false;
  if (tensor->device_type != kCpu) {
    PyErr_SetString(PyExc_ValueError, "the engine works on memory of the CPU alone");
    return false;
  }
  if (!contiguous(*tensor)) return not_contiguous();
  memory.dtype = dtype_of(*tensor);
  if (memory.dtype < 0) {
    PyErr_Format(PyExc_ValueError, "elements of DLPack's code %d with %d bits and %d lanes are not supported",
                 tensor->code, tensor->bits, tensor->lanes);
    return false;
  }
  memory.item_bytes = element_bytes(memory.dtype);
  memory.address = static_cast<char*>(tensor->data) + tensor->byte_offset;
  return keep_shape(tensor->shape, tensor->dimensions, numbers, memory);
}

}  // namespace

bool read_memory(PyObject* object, bool writable, Numbers& numbers, Memory& memory) {
  if (object == Py_None) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == package.span) return read_span(object, numbers, memory);
  if (PyObject_CheckBuffer(object)) {
    if (read_buffer(object, writable, numbers, memory)) return true;
    if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return false;
    PyErr_Clear();
    memory.held = Ref();
  }
  Ref interface(PyObject_GetAttr(object, names.__array_interface__));
  if (interface) return read_interface(object, interface.get(), writable, numbers, memory);
  PyErr_Clear();
  if (PyObject_HasAttr(object, names.__dlpack__)) return read_dlpack(object, writable, numbers, memory);
  if (PyObject_CheckBuffer(object)) {
    PyErr_Format(PyExc_ValueError, "the memory of %R is not contiguous%s", Py_TYPE(object),
                 writable ? ", or cannot be written to" : "");
    return false;
  }
  PyErr_Format(PyExc_TypeError, "%R has no memory that can be read: pass an array, a buffer or a DLPack tensor",
               Py_TYPE(object));
  return false;
}

std::int64_t Memory::elements() const {
  std::int64_t count = 1;
  for (int i = 0; i < dimensions; ++i) count *= shape[i];
  return count;
}

bool Memory::fits(int wanted) const {
  const std::int64_t bytes = element_bytes(wanted);
  if (item_bytes == 0 || bytes == 0) return true;  // the core itself refuses types that it does not know
  if (item_bytes != bytes) {
    PyErr_Format(
        PyExc_ValueError,
        "the request's elements have %lld bytes (dtype %d), those of the memory have %lld: pass it as an array "
        "of the request's type",
        static_cast<long long>(bytes), wanted, static_cast<long long>(item_bytes));
    return false;
  }
  // Types that a framework may not know are sent as plain bits.
  const bool same = dtype < 0 || dtype == wanted || dtype == FARANDOLE_DTYPE_UINT8 || dtype == FARANDOLE_DTYPE_UINT16;
  if (!same) PyErr_Format(PyExc_ValueError, "the request's dtype is %d, that of the tensor %d", wanted, dtype);
  return same;
}

std::int64_t* Numbers::take(std::size_t count) {
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
