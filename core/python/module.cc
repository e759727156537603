// The extension module farandole.engine.bridge: the one place where Python and the core meet.
// Touches Python, and of the package engine/interface.py and base/errors.py.
#include "python/bridge.h"

namespace farandole::python {

Package package;
Names names;

namespace {

PyObject* attribute(const char* module, const char* name) {
  Ref found(PyImport_ImportModule(module));
  return found ? PyObject_GetAttrString(found.get(), name) : nullptr;
}

bool add_number(PyObject* tables, const char* table, const char* name, int number) {
  PyObject* found = PyDict_GetItemString(tables, table);
  Ref made(found == nullptr ? PyDict_New() : nullptr), value(PyLong_FromLong(number));
  if (found == nullptr && (!made || PyDict_SetItemString(tables, table, made.get()) != 0)) return false;
  return value && PyDict_SetItemString(found == nullptr ? made.get() : found, name, value.get()) == 0;
}

// NUMBERS: those of the C interface, by name; library.py checks Python's against them.
bool add_numbers(PyObject* module) {
  constexpr struct {
    const char *table, *name;
    int number;
  } numbers[] = {
#define FARANDOLE_CODE(name, NAME, number) {"Code", #NAME, number},
#define FARANDOLE_KIND(name, NAME, number) {"Kind", #NAME, number},
#define FARANDOLE_OP(name, NAME, number) {"ReduceOp", #NAME, number},
#define FARANDOLE_ALGORITHM(name, NAME, number) {"Algorithm", #NAME, number},
#define FARANDOLE_DTYPE(name, NAME, number, bytes) {"DType", #NAME, number}, {"bytes", #NAME, bytes},
      FARANDOLE_CODES(FARANDOLE_CODE) FARANDOLE_KINDS(FARANDOLE_KIND) FARANDOLE_OPS(FARANDOLE_OP)
          FARANDOLE_ALGORITHMS(FARANDOLE_ALGORITHM) FARANDOLE_DTYPES(FARANDOLE_DTYPE)};
  Ref tables(PyDict_New());
  for (const auto& one : numbers)
    if (!tables || !add_number(tables.get(), one.table, one.name, one.number)) return false;
  return PyModule_AddObjectRef(module, "NUMBERS", tables.get()) == 0;
}

bool add_type(PyObject* module, PyTypeObject* type) { return type != nullptr && PyModule_AddType(module, type) == 0; }

}  // namespace

PyTypeObject* make_type(PyObject* module, const char* name, std::size_t bytes, unsigned flags, PyType_Slot* slots) {
  PyType_Spec spec = {name, static_cast<int>(bytes), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT) | flags, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &spec, nullptr));
}

bool find_package() {
  package.span = attribute("farandole.engine.interface", "Span");
  package.outcome = attribute("farandole.engine.interface", "Outcome");
  package.array_over = attribute("farandole.engine.interface", "array_over");
  package.new_array = attribute("farandole.engine.interface", "new_array");
  package.with_memory = attribute("farandole.engine.interface", "with_memory");
  package.translate = attribute("farandole.base.errors", "translate");
  package.shut_down = attribute("farandole.base.errors", "ShutDown");
  package.internal = attribute("farandole.base.errors", "HorovodInternalError");
  package.timeout = attribute("farandole.base.errors", "FarandoleTimeout");
  package.ndarray = reinterpret_cast<PyTypeObject*>(attribute("numpy", "ndarray"));
  package.newest = Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
  return !PyErr_Occurred();
}

bool find_names() {
#define FARANDOLE_NAME(name) names.name = PyUnicode_InternFromString(#name);
  FARANDOLE_NAMES(FARANDOLE_NAME)
#undef FARANDOLE_NAME
  return !PyErr_Occurred();
}

}  // namespace farandole::python

PyMODINIT_FUNC PyInit_bridge(void) {
  using namespace farandole::python;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                   "farandole.engine.bridge",
                                   "Opens a core and hands it the requests of Python.",
                                   -1,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};
  Ref module(PyModule_Create(&definition));
  if (!module || !find_names() || !find_package()) return nullptr;
  if (!add_numbers(module.get()) || !add_type(module.get(), make_library_type(module.get())) ||
      !add_type(module.get(), make_engine_type(module.get())) ||
      !add_type(module.get(), make_prepared_type(module.get())) ||
      !add_type(module.get(), make_loan_type(module.get())) ||
      !add_type(module.get(), make_operations_type(module.get())) ||
      !add_type(module.get(), make_heartbeat_type(module.get())))
    return nullptr;
  return module.give();
}
