// The methods of bridge.Engine that take requests and give outcomes, and what prepared requests share with them.
// Touches bridge.h alone.
#pragma once

#include "python/bridge.h"

namespace farandole::python {

PyObject* submit(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);
PyObject* run(PyObject* object, PyObject* request);
PyObject* prepare(PyObject* object, PyObject* const* args, Py_ssize_t nargs);
PyObject* wait(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);
PyObject* poll(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames);

// The memory of an operation is kept until its outcome is taken. Returns the handle as an object, or null with an error
// set when out of memory: then the memory is never freed, because the core uses it.
Ref keep(Engine* self, std::int64_t handle, PyObject* kept);
// The request in what is kept: the first entry of a tuple, or the object itself.
inline PyObject* request_in(PyObject* kept) { return PyTuple_CheckExact(kept) ? PyTuple_GetItem(kept, 0) : kept; }
// Waits for an operation under way; its memory is kept, whatever a signal handler does.
PyObject* wait_longer(Engine* self, ActiveCall& active, std::int64_t handle, PyObject* kept);

}  // namespace farandole::python
