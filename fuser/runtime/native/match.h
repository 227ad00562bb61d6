// Kernels and handles as records; a call's arguments read and compared with what a kernel was made for.
#pragma once

#include "libraries.h"

namespace {

struct Kernel {
  int64_t n_inputs, n_slots, n_floats, n_buffers, n_steps, n_pointers, n_dims, depth, words;
  uint64_t hits;
  StepEntry* entries;  // of a GPU kernel: the driver's handles
  PyObject* dtypes;    // of the buffers, for the stand-in that allocates through Python
  PyObject* library;   // of a GPU kernel: what its handles come from, and what explains failures
  Library* code;       // of a CPU kernel: where its entries are
  PyObject* names;     // of these entries
  uint64_t loaded;     // the load of `code` that `entries` are of
  int64_t* batch;      // of a GPU kernel, for each step: its form for many argument sets (see BatchForm); null: not asked
  bool no_batch;       // there is none
  mutable int64_t* seen;  // slots of the last call that a profiler watched; null: it watched none
  mutable bool varied;    // earlier ones had others
  int64_t stream[1];
};

// Calls that a kernel takes from now on, unless an earlier turn takes them.
struct Turn {
  Kernel* kernel;
  uint64_t magnitudes;  // bit b: calls whose largest tensor has a number of elements of b binary digits
};

// Calls that are left to ATen: of one form (dtypes, sizes and strides of the tensors, kinds of the numbers), or all.
struct Refusal {
  PyObject *function, *reason;
  uint64_t calls;
  Py_ssize_t turn;  // turns before this one go before it
  size_t words;
  int64_t form[1];
};

struct Handle {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow, *weakrefs;
  Kernel** kernels;
  Turn* turns;  // in the order in which they were given: equal calls run equal code, whatever comes between them
  Py_ssize_t n_kernels, n_turns;
  int64_t* latest;  // the latest call that a turn behind the first took: see `find_kernel`; null: there was none
  size_t latest_words;
  Py_ssize_t latest_turn;
  Refusal **refusals, *all;  // `all`: every call of `arity` arguments that no kernel takes
  Py_ssize_t n_refusals, last_refusal, arity;
  bool refuses;                         // forms, not all calls alone
  Py_ssize_t first_refusal, new_refusal;  // the turns of the earliest and of the latest one
  int64_t words;  // scratch words that the hungriest kernel needs for a call
  unsigned long long hits, misses;
};

enum ArgKind { TENSOR, INT, BOOL, FLOAT };

struct Arg {
  int kind;
  double real;
  int64_t integer;
  DLTensor tensor;
};

// One call's numbers, in one piece of memory.
struct Frame {
  int64_t *slots, *dims, *stack;
  double* floats;
  char** pointers;
  uintptr_t* outputs;  // a handle of torch's C shim, or a PyObject* with the lowest bit set
  int64_t* steps;  // units, work, threads for each step
};

Frame frame_of(const Kernel* k, int64_t* w) {
  Frame f;
  f.slots = w, w += k->n_slots;
  f.floats = (double*)w, w += k->n_floats;
  f.pointers = (char**)w, w += k->n_pointers;
  f.outputs = (uintptr_t*)w, w += k->n_buffers;
  f.steps = w, w += 3 * k->n_steps;
  f.dims = w, w += k->n_dims;
  f.stack = w;
  return f;
}

// Keeps the sizes of a call that a profiler watches.
void remember(const Kernel* k, const Frame& f) {
  size_t bytes = sizeof(int64_t) * size_t(k->n_slots);
  if (k->seen && memcmp(k->seen, f.slots, bytes)) k->varied = true;
  if (!k->seen) k->seen = (int64_t*)malloc(bytes + 1);
  if (k->seen) memcpy(k->seen, f.slots, bytes);
}

bool truth(PyObject* answer) {  // steals; an error counts as no
  if (!answer) {
    PyErr_Clear();
    return false;
  }
  bool yes = answer == Py_True;
  Py_DECREF(answer);
  return yes;
}

// The addresses of a kernel's entries in its library, which is loaded if it is not. False, with no Python error unless
// `explain`, if that cannot be.
bool load_entries(Kernel* k, bool explain) {
  Library* l = k->code;
  if (!load_library(l)) {
    if (explain) PyErr_Format(PyExc_OSError, "kernel library %s cannot be loaded: %s", l->path, dlerror());
    return false;
  }
  for (int64_t i = 0; i < k->n_steps; i++) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(k->names, i));
    k->entries[i] = name ? (StepEntry)dlsym(l->handle, name) : nullptr;
    if (k->entries[i]) continue;
    if (explain && name) PyErr_Format(PyExc_OSError, "kernel library %s has no entry %s", l->path, name);
    if (!explain) PyErr_Clear();
    return false;
  }
  k->loaded = l->loads;
  return true;
}

// Loads the library of a kernel again, from a file that is checked first. Runs Python, and so other threads: one that
// has loaded it meanwhile may be running its entries, which are not written then.
bool reload(Kernel* k) {
  Library* l = k->code;
  if (!l->handle && !truth(PyObject_CallFunction(torch.py_is_whole, "s", l->path))) return false;
  return (l->handle && k->loaded == l->loads) || load_entries(k, false);
}

// Begins a call of a kernel: its library stays until `end_call`. False if it is not loaded.
inline bool begin_call(Kernel* k) {
  Library* l = k->code;
  if (!l) return true;
  if (k->loaded != l->loads) return false;
  l->used = ++library_calls;
  l->running++;
  return true;
}

inline void end_call(Kernel* k) {
  if (k->code) k->code->running--;
}

// Whether no mode, transform, autocast or forward derivative is at work in this thread.
bool context_is_plain(ThreadState& ts) {
  if (ts.enabled ? ts.enabled < 0 : switched_off) return false;
  if (torch.c10_library && torch.function_mode) {
    if (!ts.dispatch_keys) {
      ts.dispatch_keys = (const uint64_t*)dlsym(torch.c10_library, "_ZN3c104impl26raw_local_dispatch_key_setE");
    }
    const uint64_t* keys = ts.dispatch_keys;
    bool usual = keys && !(keys[0] & ~torch.harmless_included) && !(keys[1] & torch.harmful_excluded);
    if (usual && !torch.function_mode()) {
      PyObject* level = PyDict_GetItemWithError(torch.forward_ad, torch.level_name);
      if (level && PyLong_CheckExact(level) && PyLong_AsLong(level) < 0) return true;
    }
  }
  return truth(PyObject_CallNoArgs(torch.plain_context));
}

bool requires_grad(PyObject* o) {  // an error counts as yes
  PyObject* answer = torch.requires_grad(o, torch.requires_grad_closure);
  if (!answer) PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

bool has_plain_keys(const char* impl) {
  uint64_t keys = *(const uint64_t*)(impl + torch.keys_offset);
  for (int i = 0; i < torch.n_plain_keys; i++) {
    if (torch.plain_keys[i] == keys) return true;
  }
  return false;
}

// Where a TensorImpl can be read and asked without Python.
bool impl_is_plain(const char* impl, bool grad) { return !(grad && torch.impl_requires_grad(impl)) && has_plain_keys(impl); }

bool tensor_is_plain(PyObject* o, bool grad) {
  if (torch.keys_offset < 0) {
    return !(grad && requires_grad(o)) && truth(PyObject_CallOneArg(torch.plain_tensor, o));
  }
  const char* impl = *(const char* const*)((const char*)o + torch.impl_offset);
  if (grad && (torch.impl_requires_grad ? torch.impl_requires_grad(impl) : requires_grad(o))) return false;
  return has_plain_keys(impl);
}

// A Python object's tensor as the shim sees it: a reference to its TensorImpl.
inline void* handle_in(PyObject* o) { return (char*)o + torch.impl_offset; }

bool is_tensor(PyObject* o) { return Py_TYPE(o) == torch.tensor || Py_TYPE(o) == torch.parameter; }

// Never runs Python: where that is needed to tell whether tensors are plain, the caller did so.
bool read_arg(PyObject* o, bool grad, Arg& a, uint64_t& devices) {
  PyTypeObject* type = Py_TYPE(o);
  if (is_tensor(o)) {
    if (torch.keys_offset >= 0 && !tensor_is_plain(o, grad)) return false;
    if (torch.dlpack->parse(o, &a.tensor)) {
      PyErr_Clear();
      return false;
    }
    a.kind = TENSOR;
    devices |= uint64_t(1) << (a.tensor.device_type & 63);
    return true;
  }
  if (type == &PyBool_Type) {
    a.kind = BOOL;
    a.integer = o == Py_True;
    return true;
  }
  if (type == &PyLong_Type) {
    int overflow = 0;
    a.kind = INT;
    a.integer = PyLong_AsLongLongAndOverflow(o, &overflow);
    return !overflow;
  }
  if (PyFloat_Check(o)) {
    a.kind = FLOAT;
    a.real = PyFloat_AS_DOUBLE(o);
    return true;
  }
  return false;
}

bool match_tensor(const DLTensor& t, const int64_t*& p, const Frame& f) {
  if (uint32_t(p[0]) != t.dtype || (p[1] & 255) != t.device_type || p[2] != t.ndim) return false;
  if (p[1] & 256 && ((uintptr_t)t.data + t.byte_offset) % 16) return false;
  bool every = p[1] & 512;
  int n = t.ndim;
  p += 3;
  bool empty = false;
  for (int d = 0; d < 2 * n; d++) {
    int64_t found = d < n ? t.shape[d] : t.strides[d - n];
    empty |= d < n && found == 0;
    if (*p == BIND) {
      f.slots[p[1]] = found;
      p += 2;
    } else if (value(p, f.slots, f.stack) != found && (d < n || !(empty || (t.shape[d - n] <= 1 && !every)))) {
      return false;
    }
  }
  return true;
}

// The binary digits of the number of elements of the largest tensor; 0 where there is none.
int magnitude_of(const Arg* args, Py_ssize_t n) {
  uint64_t most = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (args[i].kind != TENSOR) continue;
    uint64_t elements = 1;
    for (int d = 0; d < args[i].tensor.ndim; d++) elements *= uint64_t(args[i].tensor.shape[d]);
    if (elements > most) most = elements;
  }
  return most ? 64 - __builtin_clzll(most) : 0;
}

// Whether a turn is for calls of this magnitude: for all, unless its kernel is on trial for some.
bool takes_magnitude(const Turn& turn, const Arg* args, Py_ssize_t n) {
  return !~turn.magnitudes || turn.magnitudes >> (magnitude_of(args, n) & 63) & 1;
}

// Whether `k` takes these arguments. Leaves the slots bound and returns the stream's rest, or null.
const int64_t* match(const Kernel* k, const Arg* args, Py_ssize_t n, const Frame& f) {
  if (k->n_inputs != n) return nullptr;
  const int64_t* p = k->stream;
  char** pointer = f.pointers;
  for (Py_ssize_t i = 0; i < n; i++) {
    const Arg& a = args[i];
    int64_t kind = *p++;
    if (kind == TENSOR) {
      if (a.kind != TENSOR || !match_tensor(a.tensor, p, f)) return nullptr;
      *pointer++ = a.tensor.data + a.tensor.byte_offset;
    } else if (kind == FLOAT) {
      if (a.kind != FLOAT && a.kind != INT) return nullptr;
      f.floats[*p++] = a.kind == FLOAT ? a.real : double(a.integer);
    } else {
      if (a.kind != kind) return nullptr;
      f.slots[*p++] = a.integer;
    }
  }
  for (int64_t guards = *p++; guards > 0; guards--) {
    if (!value(p, f.slots, f.stack)) return nullptr;
  }
  return p;
}

}  // namespace
