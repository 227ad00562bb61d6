// Kernels in profilers' traces: a torch event for each step, and an NVTX or ITT range for each call.
#pragma once

#include "programs.h"

namespace {

constexpr unsigned kUnasked = 15;  // small calls of a thread between two checks for observers of the whole process

// Whether this thread is observed. torch's profiler observes single threads: its list of a thread's observers is read
// in place. Observers of the whole process are behind a lock, 15 ns: `large` calls check for them, and each 16th of
// the others.
inline bool is_watched(ThreadState& ts, bool large) {
  if (!ts.observers) {
    if (!torch.thread_observers) return false;
    ts.observers = torch.thread_observers();
  }
  if (ts.observers->begin != ts.observers->end) return true;
  if (large || !(ts.unasked++ & kUnasked)) ts.process_watched = torch.process_observers && torch.process_observers();
  return ts.process_watched;
}

// One event, which begins and ends in the same thread, with or without the GIL.
class Event {
  void* record = nullptr;

 public:
  void begin(const char* name) {
    end();
    if (name && torch.record_start(name, nullptr, nullptr, 0, &record)) record = nullptr;
  }
  void end() {
    if (record) torch.record_end(record);
    record = nullptr;
  }
  ~Event() { end(); }
};

// The name of entry `i`. Needs no GIL: names of kernels are ASCII, whose text is inside the object.
inline const char* name_of(PyObject* names, int64_t i) {
  PyObject* name = names ? PyTuple_GET_ITEM(names, i) : nullptr;
  return name && PyUnicode_IS_COMPACT_ASCII(name) ? (const char*)PyUnicode_1BYTE_DATA(name) : nullptr;
}

// The functions given to `ranges`, which open and close a range; null if ranges are off.
struct {
  PyObject *push, *pop;
} ranges;

// A range around one call of a kernel, named after its first step. Under the GIL; errors in it are ignored.
class Range {
  PyObject* pop = nullptr;

 public:
  explicit Range(PyObject* names) {
    if (!ranges.push || !names || !PyTuple_GET_SIZE(names)) return;
    pop = ranges.pop;
    Py_INCREF(pop);
    Py_XDECREF(PyObject_CallOneArg(ranges.push, PyTuple_GET_ITEM(names, 0)));
    PyErr_Clear();
  }
  ~Range() {
    if (!pop) return;
    PyObject *type, *value, *trace;  // of a call that failed
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(pop));
    PyErr_Restore(type, value, trace);
    Py_DECREF(pop);
  }
};

}  // namespace
