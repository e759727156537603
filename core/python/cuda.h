// Methods of bridge.Library that ask for CUDA's libraries and for GPUs, and one of bridge.Engine to use them.
// Touches bridge.h alone.
#pragma once

#include "python/bridge.h"

namespace farandole::python {

PyObject* cuda_library(PyObject* library, PyObject* arguments);
PyObject* cuda_devices(PyObject* library, PyObject* arguments);
PyObject* use_gpus(PyObject* engine, PyObject* arguments);

}  // namespace farandole::python
