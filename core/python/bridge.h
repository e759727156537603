// The types of the module: an opened core, an engine, a prepared request, memory of the core lent to arrays, a
// heartbeat.
// Touches core/api/farandole.h, Python and the clock.
#pragma once

#include <time.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "api/farandole.h"
#include "python/object.h"

namespace farandole::python {

constexpr int kErrorBytes = 1024;
constexpr std::int64_t kSliceMs = 100;  // so that Python's signal handlers run while a thread waits
constexpr int kOk = FARANDOLE_CODE_OK, kInProgress = FARANDOLE_CODE_IN_PROGRESS,
              kInvalidArgument = FARANDOLE_CODE_INVALID_ARGUMENT, kTimedOut = FARANDOLE_CODE_TIMED_OUT,
              kInternal = FARANDOLE_CODE_INTERNAL;
constexpr int kReported = -1;  // farandole_run returns it when the outcome is filled in
// Kinds whose results depend on all ranks.
inline bool rows_vary(int kind) { return kind == FARANDOLE_KIND_ALLGATHER || kind == FARANDOLE_KIND_ALLTOALL; }
// Bytes of an element; 0: no such data type.
std::int64_t element_bytes(int dtype);

// Classes, functions and names of the Python package, looked up once.
struct Package {
  PyObject* span = nullptr;         // engine.Span
  PyObject* outcome = nullptr;      // engine.Outcome
  PyObject* array_over = nullptr;   // engine.array_over
  PyObject* new_array = nullptr;    // engine.new_array
  PyObject* with_memory = nullptr;  // engine.with_memory
  PyObject* translate = nullptr;    // errors.translate
  PyObject* shut_down = nullptr;    // errors.ShutDown
  PyObject* internal = nullptr;     // errors.HorovodInternalError
  PyObject* timeout = nullptr;      // errors.FarandoleTimeout
  PyTypeObject* ndarray = nullptr;  // numpy.ndarray
  PyObject* newest = nullptr;       // {"max_version": (1, 0)}: the newest DLPack that is read here
};
extern Package package;
bool find_package();

// Names of attributes, as Python objects.
struct Names {
  // clang-format off
#define FARANDOLE_NAMES(X)                                                                                     \
  X(kind) X(name) X(input) X(output) X(dtype) X(op) X(group) X(peer) X(splits) X(prescale) X(postscale) X(tag) \
  X(pieces) X(device) X(gpu) X(address) X(shape) X(elements) X(data) X(strides) X(typestr) X(__array_interface__)     \
  X(__dlpack__) X(__dlpack_c_exchange_api__)
  // clang-format on
#define FARANDOLE_NAME(name) PyObject* name = nullptr;
  FARANDOLE_NAMES(FARANDOLE_NAME)
#undef FARANDOLE_NAME
};
extern Names names;
bool find_names();

struct Library {
  PyObject_HEAD const farandole_functions* core;
};

struct Engine {
  PyObject_HEAD PyObject* library;
  PyObject* pending;  // dict of handles: keeps the memory until the core is done with it (Packed::kept)
  const farandole_functions* core;
  farandole_engine* engine;  // null when it is destroyed
  std::int32_t rank;
  std::uint32_t generation;
  std::int64_t calls;   // calls of the core under way
  std::int64_t loans;   // arrays over memory of the core
  std::int64_t guards;  // heartbeats that may revoke it
  unsigned forks;       // the process's fork count when it was created
  bool closed;          // no new calls are allowed
  bool left;            // nothing of the core runs any more
};

// A call of the core while it is under way; close() waits for the last one. Created and ended with the GIL.
class ActiveCall {
 public:
  explicit ActiveCall(Engine* engine) { enter(engine); }
  ~ActiveCall() { leave(); }
  ActiveCall(const ActiveCall&) = delete;
  ActiveCall& operator=(const ActiveCall&) = delete;
  explicit operator bool() const { return engine_ != nullptr; }
  bool enter(Engine* engine);  // refused, with an error set, when the engine is closed or belongs to another process
  void leave();
  // Runs Python's signal handlers, which may close the engine. False, with an error set, when the call must end.
  bool signals(Engine* engine);

 private:
  Engine* engine_ = nullptr;
};

// Seconds of the monotonic clock.
inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

inline Engine* engine_of(PyObject* object) { return reinterpret_cast<Engine*>(object); }
PyObject* shut_down(const Engine* self);  // sets the exception and returns null
void destroy_if_unused(Engine* self);
bool forked(const Engine* self);

// Memory for the numbers of a request: a few lie in this object, more are allocated.
class Numbers {
 public:
  std::int64_t* take(std::size_t count);  // null with an error set when there is no memory

 private:
  std::array<std::int64_t, 12> few_;
  std::size_t used_ = 0;
  std::vector<std::unique_ptr<std::int64_t[]>> many_;
};

// The address of memory, its shape, and what is known of its elements.
struct Memory {
  void* address = nullptr;
  const std::int64_t* shape = nullptr;
  int dimensions = 0;
  std::int64_t item_bytes = 0;  // 0: unknown
  int dtype = -1;               // set for DLPack tensors
  Ref held;                     // an export of it, as long as it is used; null: its object keeps the memory in place

  std::int64_t elements() const;
  bool fits(int wanted) const;  // false, with an error set, when its elements have another type
};

// A Python request as the struct of the C interface, with everything that it points to.
class Packed {
 public:
  bool read(PyObject* request);  // false with an error set
  farandole_request request{};
  // The owner of the memory: the request or, where memory is exported, a tuple of the request and the exports.
  PyObject* kept() const { return kept_.get(); }

 private:
  bool read_memory(PyObject* args);
  bool read_splits(PyObject* splits);
  bool read_pieces(PyObject* pieces);
  bool keep(PyObject* request);
  Numbers numbers_;
  Ref name_;
  Ref kept_;
  std::array<Ref, 3> exports_;  // of the input, the output and the pieces, until `kept_` has them
};
// Reads the memory of None, a Span, an object with a buffer, an array, or an object with DLPack. `numbers`: gets the
// shape.
bool read_memory(PyObject* object, bool writable, Numbers& numbers, Memory& memory);

// Memory of the core under a Python array; released when the array and its views are gone.
PyObject* lend(Engine* engine, std::int64_t handle, void* memory, std::int64_t bytes);

// The outcome of `handle` as a Python object. The handle is released, unless its memory is lent to an array.
PyObject* take_outcome(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found);
// Raises `type(text, **attributes)`; returns null.
PyObject* raise(PyObject* type, Ref text, Ref attributes);
// Sets the exception for a caller that was compiled against another header; `theirs` is 0 when it does not say.
void other_build(const char* what, std::uint64_t theirs, const char* remedy);
// Sets the exception for a code of the core; returns null.
PyObject* fail(const Engine* self, int code, const char* message);

// A type of the module; null with an error set. `flags`: those besides Py_TPFLAGS_DEFAULT.
PyTypeObject* make_type(PyObject* module, const char* name, std::size_t bytes, unsigned flags, PyType_Slot* slots);

// Created by module.cc; null with an error set.
PyTypeObject* make_library_type(PyObject* module);
PyTypeObject* make_engine_type(PyObject* module);
PyTypeObject* make_prepared_type(PyObject* module);
PyTypeObject* make_loan_type(PyObject* module);
PyTypeObject* make_heartbeat_type(PyObject* module);
PyTypeObject* make_operations_type(PyObject* module);
extern PyTypeObject* library_type;
extern PyTypeObject* engine_type;

}  // namespace farandole::python
