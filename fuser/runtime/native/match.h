// Records of kernels and handles; a call's arguments are read and compared with a kernel's patterns.
#pragma once

#include "libraries.h"

namespace {

struct Kernel {
  int64_t n_inputs, n_slots, n_floats, n_buffers, n_steps, n_pointers, n_dims, depth, words;
  uint64_t hits;
  StepEntry* entries;  // of a GPU kernel: the driver's handles
  PyObject* dtypes;    // of the buffers, for allocation through Python
  PyObject* library;   // of a GPU kernel: it owns the driver's handles and explains failures
  Library* code;       // of a CPU kernel: the library of its entries
  PyObject* names;     // of these entries
  uint64_t loaded;     // the load of `code` to which `entries` belong
  int64_t* batch;      // of a GPU kernel, for each step: its form for many argument sets (see BatchForm); null: not asked
  bool no_batch;       // there is none
  mutable int64_t* seen;  // slots of the last observed call; null: none was observed
  mutable bool varied;    // earlier ones had other slots
  int64_t stream[1];
};

// Calls that a kernel accepts from this point on, unless an earlier turn accepts them.
struct Turn {
  Kernel* kernel;
  uint64_t magnitudes;  // bit b: calls whose largest tensor has an element count of b binary digits
};

// Calls that run on ATen: of one form (dtypes, sizes and strides of the tensors, kinds of the numbers), or all.
struct Refusal {
  PyObject *function, *reason;
  uint64_t calls;
  Py_ssize_t turn;  // turns before this one take precedence over it
  size_t words;
  int64_t form[1];
};

struct Handle {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow, *weakrefs;
  Kernel** kernels;
  Turn* turns;  // in the order in which they were added: equal calls run equal code, whatever runs between them
  Py_ssize_t n_kernels, n_turns;
  int64_t* latest;  // the latest call that a turn after the first accepted: see `find_kernel`; null: none
  size_t latest_words;
  Py_ssize_t latest_turn;
  Refusal **refusals, *all;  // `all`: every call of `arity` arguments that no kernel accepts
  Py_ssize_t n_refusals, last_refusal, arity;
  bool refuses;                         // some forms, not only all calls
  Py_ssize_t first_refusal, new_refusal;  // the turns of the earliest and of the latest refusal
  int64_t words;  // the most scratch words that a kernel needs for a call
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

// Keeps the sizes of an observed call.
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

// Looks up a kernel's entries in its library, which is loaded if needed. False if that fails, with a Python error only
// if `explain`.
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

// Loads the library of a kernel again, from a file that is checked first. This runs Python, and so other threads: if
// one has loaded the library, it may be running its entries, which are then not overwritten.
bool reload(Kernel* k) {
  Library* l = k->code;
  if (!l->handle && !truth(PyObject_CallFunction(torch.py_is_whole, "s", l->path))) return false;
  return (l->handle && k->loaded == l->loads) || load_entries(k, false);
}

// Starts a call of a kernel: its library stays loaded until `end_call`. False if it is not loaded.
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

// Whether no mode, transform, autocast or forward-mode AD is active in this thread.
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

// For a TensorImpl that can be read without Python.
bool impl_is_plain(const char* impl, bool grad) { return !(grad && torch.impl_requires_grad(impl)) && has_plain_keys(impl); }

bool tensor_is_plain(PyObject* o, bool grad) {
  if (torch.keys_offset < 0) {
    return !(grad && requires_grad(o)) && truth(PyObject_CallOneArg(torch.plain_tensor, o));
  }
  const char* impl = *(const char* const*)((const char*)o + torch.impl_offset);
  if (grad && (torch.impl_requires_grad ? torch.impl_requires_grad(impl) : requires_grad(o))) return false;
  return has_plain_keys(impl);
}

// A Python object's tensor in the form of the shim: a reference to its TensorImpl.
inline void* handle_in(PyObject* o) { return (char*)o + torch.impl_offset; }

bool is_tensor(PyObject* o) { return Py_TYPE(o) == torch.tensor || Py_TYPE(o) == torch.parameter; }

// Never runs Python: if that is needed to decide whether tensors are plain, the caller has done so.
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

// The number of binary digits in the element count of the largest tensor; 0 without tensors.
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

// Whether a turn accepts calls of this magnitude: any, unless its kernel is on trial for some.
bool takes_magnitude(const Turn& turn, const Arg* args, Py_ssize_t n) {
  return !~turn.magnitudes || turn.magnitudes >> (magnitude_of(args, n) & 63) & 1;
}

// Matches `k` with these arguments. Returns the rest of the program with the slots bound, or null.
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
