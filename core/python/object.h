// Python's header for the stable ABI, references that release themselves, and arguments of calls.
// Touches Python alone.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

namespace farandole::python {

// A reference that this code owns.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* give() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The arguments of one call, by position or name; `names` are the method's, and the first `least` are required.
template <std::size_t count>
class Arguments {
 public:
  bool read(const char* method, const std::array<const char*, count>& names, std::size_t least, PyObject* const* args,
            Py_ssize_t nargs, PyObject* kwnames) {
    if (nargs > static_cast<Py_ssize_t>(count)) {
      PyErr_Format(PyExc_TypeError, "%s() takes at most %zu arguments, %zd were given", method, count, nargs);
      return false;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) values_[static_cast<std::size_t>(i)] = args[i];
    const Py_ssize_t more = kwnames == nullptr ? 0 : PyTuple_Size(kwnames);
    for (Py_ssize_t i = 0; i < more; ++i) {
      PyObject* name = PyTuple_GetItem(kwnames, i);
      std::size_t index = 0;
      while (index < count && PyUnicode_CompareWithASCIIString(name, names[index]) != 0) ++index;
      if (index == count || values_[index] != nullptr) {
        PyErr_Format(PyExc_TypeError, "%s() got the argument %R, which it does not know or has already", method, name);
        return false;
      }
      values_[index] = args[nargs + i];
    }
    for (std::size_t index = 0; index < least; ++index) {
      if (values_[index] != nullptr) continue;
      PyErr_Format(PyExc_TypeError, "%s() needs the argument %s", method, names[index]);
      return false;
    }
    return true;
  }
  PyObject* operator[](std::size_t index) const { return values_[index]; }  // null: not given

 private:
  std::array<PyObject*, count> values_{};
};

// An integer from a Python object; false with an error set when it is not one, or out of range.
bool read_number(PyObject* object, long long& number);
bool read_number(PyObject* object, int& number);
bool read_real(PyObject* object, double& number);

}  // namespace farandole::python
