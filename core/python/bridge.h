// The types of the module: an opened core, an engine in it, a request that is run again, memory on loan, a pulse.
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
// Codes of the C interface.
constexpr int kOk = 0, kInProgress = 1, kInvalidArgument = 2, kTimedOut = 8, kInternal = 10;
constexpr int kTold = -1;  // farandole_run's word that the outcome is there
// Kinds whose results depend on all ranks.
constexpr int kAllgather = 1, kAlltoall = 3;
inline bool rows_vary(int kind) { return kind == kAllgather || kind == kAlltoall; }

// What the package in Python lends: classes, functions and names, found once.
struct Package {
  PyObject* span = nullptr;         // engine.Span
  PyObject* outcome = nullptr;      // engine.Outcome
  PyObject* array_over = nullptr;   // engine.array_over
  PyObject* with_memory = nullptr;  // engine.with_memory
  PyObject* translate = nullptr;    // errors.translate
  PyObject* shut_down = nullptr;    // errors.ShutDown
  PyObject* internal = nullptr;     // errors.HorovodInternalError
  PyObject* timeout = nullptr;      // errors.FarandoleTimeout
};
extern Package package;
bool find_package();

// Names of attributes, as Python objects.
struct Names {
  // clang-format off
#define FARANDOLE_NAMES(X)                                                                                     \
  X(kind) X(name) X(input) X(output) X(dtype) X(op) X(group) X(peer) X(splits) X(prescale) X(postscale) X(tag) \
  X(pieces) X(device) X(address) X(shape) X(elements) X(data) X(strides) X(__array_interface__) X(__dlpack__)
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
  PyObject* pending;  // a dict of handles: what keeps the memory alive until the core is done with it
  const farandole_functions* core;
  farandole_engine* engine;  // null when it is destroyed
  std::int32_t rank;
  std::uint32_t generation;
  std::int64_t calls;  // of the core, under way
  std::int64_t loans;  // arrays over memory of the core
  unsigned forks;      // how often this process had been forked from another when it was made
  bool closed;         // no call begins any more
  bool left;           // nothing of the core runs any more
};

// A call of the core while it is under way: a closed engine waits for the last of them. Made and ended with the GIL.
class Visit {
 public:
  explicit Visit(Engine* engine);  // refused, with an error set, when the engine is closed or another process's
  ~Visit() { leave(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return engine_ != nullptr; }
  void leave();

 private:
  Engine* engine_ = nullptr;
};

// Seconds of a clock that no one sets.
inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

inline Engine* engine_of(PyObject* object) { return reinterpret_cast<Engine*>(object); }
PyObject* shut_down(const Engine* self);  // sets the exception; null
void destroy_if_unused(Engine* self);
bool forked(const Engine* self);

// Numbers of a request: few lie here, many elsewhere.
class Words {
 public:
  std::int64_t* take(std::size_t count);  // null with an error set when there is no memory

 private:
  std::array<std::int64_t, 12> few_;
  std::size_t used_ = 0;
  std::vector<std::unique_ptr<std::int64_t[]>> many_;
};

// A request of Python as the struct of the C interface, with what that points to.
class Packed {
 public:
  bool read(PyObject* request);  // false with an error set
  farandole_request request{};

 private:
  bool read_memory(PyObject* given);
  bool read_splits(PyObject* splits);
  bool read_pieces(PyObject* pieces);
  Words words_;
  Ref name_;
  std::vector<Ref> exports_;  // of memory that is held by others until they are told that it is free
};

// Where memory lies and what shape it has.
struct Memory {
  void* address = nullptr;
  const std::int64_t* shape = nullptr;
  int dimensions = 0;
  Ref held;  // what keeps an export of it
};
// Of None, a Span, an object with a buffer, an array, or an object with DLPack. `words`: where the shape goes.
bool read_memory(PyObject* object, bool writable, Words& words, Memory& memory);

struct Prepared {
  PyObject_HEAD PyObject* engine;
  PyObject* request;
  Packed* packed;
};
extern PyTypeObject* prepared_type;

// Memory of the core under an array of Python; goes back when the array and its views are gone.
PyObject* lend(Engine* engine, std::int64_t handle, void* memory, std::int64_t bytes);

// The outcome of `handle` as an object of Python; the handle goes, unless its memory goes on loan.
PyObject* tell(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found);
// Raises `type(words, **named)`; null.
PyObject* raise(PyObject* type, Ref words, Ref named);
// Sets the exception for a code of the core; null.
PyObject* fail(const Engine* self, int code, const char* message);

// Made by module.cc; null with an error set.
PyTypeObject* make_library_type(PyObject* module);
PyTypeObject* make_engine_type(PyObject* module);
PyTypeObject* make_prepared_type(PyObject* module);
PyTypeObject* make_loan_type(PyObject* module);
PyTypeObject* make_pulse_type(PyObject* module);
PyTypeObject* make_operations_type(PyObject* module);
extern PyTypeObject* library_type;
extern PyTypeObject* engine_type;

}  // namespace farandole::python
