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
constexpr int kOk = FARANDOLE_CODE_OK, kInProgress = FARANDOLE_CODE_IN_PROGRESS,
              kInvalidArgument = FARANDOLE_CODE_INVALID_ARGUMENT, kTimedOut = FARANDOLE_CODE_TIMED_OUT,
              kInternal = FARANDOLE_CODE_INTERNAL;
constexpr int kTold = -1;  // farandole_run's word that the outcome is there
// Kinds whose results depend on all ranks.
inline bool rows_vary(int kind) { return kind == FARANDOLE_KIND_ALLGATHER || kind == FARANDOLE_KIND_ALLTOALL; }
// Bytes of an element; 0: there is no such data type.
std::int64_t element_bytes(int dtype);

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
  X(pieces) X(device) X(address) X(shape) X(elements) X(data) X(strides) X(typestr) X(__array_interface__)     \
  X(__dlpack__)
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
  PyObject* pending;  // a dict of handles: what keeps the memory until the core is done with it (Packed::kept)
  const farandole_functions* core;
  farandole_engine* engine;  // null when it is destroyed
  std::int32_t rank;
  std::uint32_t generation;
  std::int64_t calls;   // of the core, under way
  std::int64_t loans;   // arrays over memory of the core
  std::int64_t guards;  // pulses that may revoke it
  unsigned forks;       // how often this process had been forked from another when it was made
  bool closed;          // no call begins any more
  bool left;            // nothing of the core runs any more
};

// A call of the core while it is under way: a closed engine waits for the last of them. Made and ended with the GIL.
class Visit {
 public:
  explicit Visit(Engine* engine) { enter(engine); }
  ~Visit() { leave(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  explicit operator bool() const { return engine_ != nullptr; }
  bool enter(Engine* engine);  // refused, with an error set, when the engine is closed or another process's
  void leave();
  // Runs Python's signal handlers, which may close the engine; false, with an error set, when the call must end.
  bool signals(Engine* engine);

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

// Where memory lies, what shape it has, and what is known of its elements.
struct Memory {
  void* address = nullptr;
  const std::int64_t* shape = nullptr;
  int dimensions = 0;
  std::int64_t item_bytes = 0;  // 0: nobody says
  int dtype = -1;               // where a tensor of DLPack says it
  Ref held;                     // an export of it, for as long as it is used; null: its object keeps it where it is

  std::int64_t elements() const;
  bool fits(int wanted) const;  // false, with an error set, when its elements are of another type
};

// A request of Python as the struct of the C interface, with what that points to.
class Packed {
 public:
  bool read(PyObject* request);  // false with an error set
  farandole_request request{};
  // What keeps the memory: the request, or where memory is exported a tuple of it and the exports.
  PyObject* kept() const { return kept_.get(); }

 private:
  bool read_memory(PyObject* given);
  bool read_splits(PyObject* splits);
  bool read_pieces(PyObject* pieces);
  bool keep(PyObject* request);
  Words words_;
  Ref name_;
  Ref kept_;
  std::array<Ref, 3> exports_;  // of the input, the output and the pieces, until `kept_` has them
};
// Of None, a Span, an object with a buffer, an array, or an object with DLPack. `words`: where the shape goes.
bool read_memory(PyObject* object, bool writable, Words& words, Memory& memory);

struct Prepared {
  PyObject_HEAD PyObject* engine;  // null: it has been cleared
  Packed* packed;
};
extern PyTypeObject* prepared_type;

// Memory of the core under an array of Python; goes back when the array and its views are gone.
PyObject* lend(Engine* engine, std::int64_t handle, void* memory, std::int64_t bytes);

// The outcome of `handle` as an object of Python; the handle goes, unless its memory goes on loan.
PyObject* tell(Engine* self, std::int64_t handle, PyObject* request, const farandole_outcome& found);
// Raises `type(words, **named)`; null.
PyObject* raise(PyObject* type, Ref words, Ref named);
// Sets the exception for something that was compiled against another header; `theirs` is 0 where it does not say.
void other_build(const char* what, std::uint64_t theirs, const char* remedy);
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
