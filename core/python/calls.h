// The methods of bridge.Engine that take requests and give outcomes.
// Touches bridge.h alone.
#pragma once

#include "python/bridge.h"

namespace farandole::python {

PyObject* submit(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named);
PyObject* run(PyObject* object, PyObject* request);
PyObject* prepare(PyObject* object, PyObject* request);
PyObject* run_again(PyObject* object, PyObject* const* given, Py_ssize_t places);
PyObject* wait(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named);
PyObject* poll(PyObject* object, PyObject* const* given, Py_ssize_t places, PyObject* named);

}  // namespace farandole::python
