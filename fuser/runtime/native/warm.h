// Large results in the storages that warm.py holds, without running Python: see there for the rules.
#pragma once

#include "match.h"

namespace {

constexpr size_t kMapped = size_t(32) << 20;  // MAPPED of warm.py

// The state of a held storage when only its record referenced it, as `_Held.words` packs it.
struct HeldWords {
  int64_t bytes, inference;
  uint64_t address, storage;  // of its memory; of its StorageImpl
  int64_t tensors, names;     // references to it: torch's count, and Python's of its object
};

struct {
  PyObject *held, *acquire, *release, *in_inference;  // the list and its lock; torch.is_inference_mode_enabled
  PyObject *base_name, *storage_name, *words_name;
  double* clock;         // last call, longest pause, hits, and whether the timer runs: `WarmOutputs.clock`
  int64_t count_offset;  // offset of the reference count in a StorageImpl; -1: Python handles storages
  int64_t limit;         // config.output_limit_bytes, for threads without an override
} warm;

int64_t warm_limit(const ThreadState& ts) { return ts.output_limit < 0 ? warm.limit : ts.output_limit; }

// Whether only its record references a storage, and it is unchanged. `base` is a tensor in it.
bool is_free(const HeldWords& w, PyObject* base, PyObject* storage) {
  if (*(const uint32_t*)(w.storage + warm.count_offset) != uint32_t(w.tensors) || Py_REFCNT(storage) != w.names) return false;
  int64_t bytes = 0;
  void* data = nullptr;
  if (torch.storage_size(handle_in(base), &bytes) || bytes != w.bytes) return false;
  return !torch.data_ptr(handle_in(base), &data) && uint64_t(data) == w.address;
}

void use_again(Py_ssize_t i) {  // the most recently used one is the last
  PyObject* held = PyList_GET_ITEM(warm.held, i);
  for (; i + 1 < PyList_GET_SIZE(warm.held); i++) PyList_SET_ITEM(warm.held, i, PyList_GET_ITEM(warm.held, i + 1));
  PyList_SET_ITEM(warm.held, i, held);
  double now = double(now_ns()) * 1e-9, pause = now - warm.clock[0], least = 0.9 * warm.clock[1];
  PyObject* idle = torch.settings ? PyDict_GetItemWithError(torch.settings, torch.idle_name) : nullptr;
  if (!idle || pause >= 4 * PyFloat_AsDouble(idle)) pause = 0;
  warm.clock[0] = now;
  warm.clock[1] = pause > least ? pause : least;
  warm.clock[2]++;
}

// A tensor in the memory of record `i`, if that has this size and dtype and is free; else null.
void* tensor_of(Py_ssize_t i, size_t bytes, int32_t scalar, bool inference, const int64_t* sizes, const int64_t* strides,
                int64_t n) {
  PyObject* held = PyList_GET_ITEM(warm.held, i);
  PyObject* packed = PyObject_GetAttr(held, warm.words_name);
  void* made = nullptr;
  HeldWords w;
  bool fits = packed && PyBytes_Check(packed) && PyBytes_GET_SIZE(packed) == sizeof w;
  if (fits) memcpy(&w, PyBytes_AS_STRING(packed), sizeof w);
  Py_XDECREF(packed);
  if (fits && w.bytes == int64_t(bytes) && w.inference == inference) {
    PyObject *base = PyObject_GetAttr(held, warm.base_name), *storage = PyObject_GetAttr(held, warm.storage_name);
    int32_t own = -1;
    bool alike = base && storage && !torch.dtype(handle_in(base), &own) && own == scalar;
    if (alike && is_free(w, base, storage)) {
      if (torch.reinterpret(handle_in(base), n, sizes, strides, 0, &made)) made = nullptr;
    }
    Py_XDECREF(base);
    Py_XDECREF(storage);
  }
  PyErr_Clear();
  return made;
}

// A tensor in held, free memory; null, without a Python error, if `warm.empty_strided` has to find or make one. Under
// the GIL; the lock excludes threads that are between two steps of Python code.
void* take_warm(const ThreadState& ts, int32_t scalar, int64_t itemsize, const int64_t* sizes, const int64_t* strides,
                int64_t n) {
  int64_t bytes = 1;
  for (int64_t d = 0; d < n; d++) bytes += (sizes[d] - 1) * strides[d];
  bytes *= itemsize;
  if (!warm.held || warm.count_offset < 0 || scalar < 0 || !warm.clock[3] || bytes > warm_limit(ts)) return nullptr;
  bool inference = truth(PyObject_CallNoArgs(warm.in_inference));
  if (!truth(PyObject_CallOneArg(warm.acquire, Py_False))) return nullptr;
  void* made = nullptr;
  for (Py_ssize_t i = PyList_GET_SIZE(warm.held); i-- > 0 && !made;) {
    made = tensor_of(i, bytes, scalar, inference, sizes, strides, n);
    if (made) use_again(i);
  }
  Py_XDECREF(PyObject_CallNoArgs(warm.release));
  PyErr_Clear();
  return made;
}

}  // namespace
