// The records of a `Sequence` (sequence.h): values in slots, steps and their arguments, built once from Python's
// tuples.
#pragma once

#include "scripted.h"

namespace {

// -- Values -----------------------------------------------------------------------------------------------------------
// The value of a slot: a tensor as an owned handle of torch's shim; a Python object, whose tensor is `handle` if it is
// one; or a view of another value that no step has needed as a tensor yet. All zeros: nothing.
struct Value {
  void* handle;
  PyObject* object;
  Value* base;     // of a view without a tensor: `t` is its geometry, `offset` its distance from the base in elements
  int64_t offset;
  bool read;       // `t` is known
  DLTensor t;

  void take_object(PyObject* o) {  // steals
    object = o;
    handle = is_tensor(o) && torch.impl_offset >= 0 ? handle_in(o) : nullptr;
  }

  void drop() {
    PyObject* o = object;
    void* owned = o ? nullptr : handle;
    *this = Value();
    if (owned) torch.delete_tensor(owned);
    Py_XDECREF(o);
  }

  void replace(const Value& by) {
    drop();
    *this = by;
  }
};

// Whether `v` is an ordinary tensor; it is then in `v.t`.
bool read_value(Value& v) {
  if (v.read) return true;
  if (!v.handle || !has_plain_keys(*(const char* const*)v.handle)) return false;
  return v.read = read_handle(v.handle, v.t, true);
}

// The shim's handle of a value; a view gets one now. False if it is no tensor, or torch could not create it.
bool handle_of(Value& v) {
  if (v.handle) return true;
  if (!v.base || !handle_of(*v.base)) return false;
  return !torch.reinterpret(v.base->handle, v.t.ndim, v.t.shape, v.t.strides, v.offset, &v.handle);
}

// A value as a borrowed Python object, which the value holds from now on; null with a Python error.
PyObject* object_of(Value& v) {
  if (v.object) return v.object;
  if (!handle_of(v)) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a value of a sequence is no tensor");
    return nullptr;
  }
  PyObject* o = wrap_output((uintptr_t)v.handle);
  v.handle = nullptr;
  if (o) v.take_object(o);
  return o;
}

// Reads a value's geometry again when needed: a Python function might have changed sizes.
inline void forget_reading(Value& v) {
  if (v.object) v.read = false;
}

// -- Steps ------------------------------------------------------------------------------------------------------------
struct Argument {  // an argument: a slot, a constant, or a list or tuple of `n` items
  int slot;
  int n;  // negative: not a list
  bool tuple;
  PyObject* object;
  Arg number;
  Argument* items;
};

struct Product {
  const char* name;
  bool sum, batch;
  void *cpu, *cuda;
};
typedef int (*MatrixProduct)(void* out, void* a, void* b);
typedef int (*ProductAndSum)(void* out, void* c, void* a, void* b, double beta, double alpha);

Product products[] = {{"mm", false, false, nullptr, nullptr},
                      {"bmm", false, true, nullptr, nullptr},
                      {"addmm", true, false, nullptr, nullptr},
                      {"baddbmm", true, true, nullptr, nullptr}};

struct Step {
  enum Kind { LAUNCH, VIEW, PRODUCT, ATTENTION, PYTHON, CONSTANT } kind;
  PyObject *callable, *names;  // called by Python in place of the step, with the names of its last arguments
  Argument* items;
  int n_items, n_outs, n_frees;
  int *outs, *frees;  // slots; -1 for an unused output
  bool several;       // the callable returns a tuple
  const Product* product;
  double numbers[3];
  // Of a view: its root, and the root's expected geometry; sizes, then strides.
  int root, root_ndim, ndim;
  int64_t *root_dims, *dims, offset;
};

struct Sequence {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow, *weakrefs;
  Step* steps;
  Argument* results;
  int* unused;  // inputs that no step reads
  int n_inputs, n_slots, n_steps, n_results, n_unused;
  bool boxed;
  unsigned long long runs;
};

vectorcallfunc call_sequence;

template <class T>
T* zeroed(Py_ssize_t n) {
  T* made = (T*)calloc(size_t(n) + 1, sizeof(T));
  if (!made) PyErr_NoMemory();
  return made;
}

// -- From Python ------------------------------------------------------------------------------------------------------
void free_items(Argument* items, int n) {
  for (int i = 0; items && i < n; i++) {
    Py_XDECREF(items[i].object);
    if (items[i].n >= 0) free_items(items[i].items, items[i].n);
  }
  free(items);
}

int visit_items(const Argument* items, int n, visitproc visit, void* arg) {
  for (int i = 0; items && i < n; i++) {
    Py_VISIT(items[i].object);
    int code = items[i].n < 0 ? 0 : visit_items(items[i].items, items[i].n, visit, arg);
    if (code) return code;
  }
  return 0;
}

bool is_slot(long slot, const Sequence* q) {
  if (slot >= 0 && slot < q->n_slots) return true;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a sequence has no such slot");
  return false;
}

Argument* read_item_list(PyObject* given, const Sequence* q, int& n);

// (slot,), (None, constant), (False, a list's items) or (True, a tuple's items).
bool read_item(PyObject* o, const Sequence* q, Argument& item) {
  item.slot = item.n = -1;
  if (!PyTuple_Check(o) || !PyTuple_GET_SIZE(o) || PyTuple_GET_SIZE(o) > 2) {
    PyErr_SetString(PyExc_TypeError, "an argument of a sequence's step is (slot,), (None, constant) or (is tuple, items)");
    return false;
  }
  PyObject* first = PyTuple_GET_ITEM(o, 0);
  if (PyTuple_GET_SIZE(o) == 1) return is_slot(item.slot = int(PyLong_AsLong(first)), q);
  PyObject* second = PyTuple_GET_ITEM(o, 1);
  if (first == Py_None) {
    uint64_t devices = 0;
    item.object = Py_NewRef(second);
    item.number.kind = -1;
    if (!is_tensor(second) && !read_arg(second, false, item.number, devices)) item.number.kind = -1;
    return true;
  }
  item.tuple = first == Py_True;
  int n = 0;
  item.items = read_item_list(second, q, n);
  item.n = n;
  return item.items;
}

Argument* read_item_list(PyObject* given, const Sequence* q, int& n) {
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "the arguments of a sequence's step are a tuple");
    return nullptr;
  }
  n = int(PyTuple_GET_SIZE(given));
  Argument* items = zeroed<Argument>(n);
  for (int i = 0; items && i < n; i++) items[i].n = -1;
  for (int i = 0; items && i < n; i++) {
    if (read_item(PyTuple_GET_ITEM(given, i), q, items[i])) continue;
    free_items(items, n);
    return nullptr;
  }
  return items;
}

int* read_slots(PyObject* given, const Sequence* q, int& n, bool maybe_none) {
  n = PyTuple_Check(given) ? int(PyTuple_GET_SIZE(given)) : 0;
  int* slots = zeroed<int>(n);
  for (int i = 0; slots && i < n; i++) {
    long slot = PyLong_AsLong(PyTuple_GET_ITEM(given, i));
    slots[i] = int(slot);
    if ((maybe_none && slot == -1 && !PyErr_Occurred()) || is_slot(slot, q)) continue;
    free(slots);
    return nullptr;
  }
  return slots;
}

int64_t* read_dims(PyObject* given, int& n) {
  n = PyTuple_Check(given) ? int(PyTuple_GET_SIZE(given)) : 0;
  int64_t* dims = zeroed<int64_t>(n);
  for (int i = 0; dims && i < n; i++) dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
  n /= 2;
  return dims;
}

// Reads the data that depends on the kind of step. False with a Python error.
bool read_special(PyObject* special, const Sequence* q, Step& s) {
  PyObject *root_dims, *dims;
  long long offset;
  switch (s.kind) {
    case Step::VIEW:
      if (!PyArg_ParseTuple(special, "iOOL", &s.root, &root_dims, &dims, &offset) || !is_slot(s.root, q)) return false;
      s.offset = offset;
      s.root_dims = read_dims(root_dims, s.root_ndim);
      s.dims = read_dims(dims, s.ndim);
      return s.root_dims && s.dims && !PyErr_Occurred() && s.n_outs == 1 && s.outs[0] >= 0;
    case Step::PRODUCT: {
      const char* name;
      if (!PyArg_ParseTuple(special, "sdd", &name, &s.numbers[0], &s.numbers[1])) return false;
      for (Product& p : products) s.product = strcmp(p.name, name) ? s.product : &p;
      return s.product && s.n_items >= 2 + s.product->sum && s.n_outs == 1 && s.outs[0] >= 0;
    }
    case Step::ATTENTION:
      return PyArg_ParseTuple(special, "ddd", &s.numbers[0], &s.numbers[1], &s.numbers[2]) && s.n_outs == 2 && s.n_items >= 3;
    case Step::CONSTANT: return s.n_items == 1 && s.items[0].object && s.n_outs == 1;
    default: return true;
  }
}

// Whether a launch's arguments can be read here: slots and numbers.
bool is_launch(const Step& s) {
  bool ok = Py_TYPE(s.callable) == &HandleType && !s.names;
  for (int i = 0; ok && i < s.n_items; i++) {
    ok = s.items[i].n < 0 && (s.items[i].slot >= 0 || s.items[i].number.kind >= 0);
  }
  return ok;
}

bool has_tensors(const Step& s, int first) {
  for (int i = 0; i < first; i++) {
    if (s.items[i].n >= 0 || s.items[i].slot < 0) return false;
  }
  return true;
}

// (kind, callable, arguments, names, results, several, freed, special)
bool read_step(PyObject* given, const Sequence* q, Step& s) {
  int kind, several;
  PyObject *callable, *arguments, *names, *outs, *frees, *special;
  if (!PyArg_ParseTuple(given, "iOOOOpOO", &kind, &callable, &arguments, &names, &outs, &several, &frees, &special)) {
    return false;
  }
  s.kind = Step::Kind(kind);
  s.several = several;
  s.callable = Py_NewRef(callable);
  s.names = names == Py_None ? nullptr : Py_NewRef(names);
  s.items = read_item_list(arguments, q, s.n_items);
  s.outs = s.items ? read_slots(outs, q, s.n_outs, true) : nullptr;
  s.frees = s.outs ? read_slots(frees, q, s.n_frees, false) : nullptr;
  bool ok = s.frees && kind >= 0 && kind <= Step::CONSTANT && read_special(special, q, s);
  if (ok && s.kind == Step::LAUNCH && !is_launch(s)) s.kind = Step::PYTHON;
  if (ok && s.kind == Step::PRODUCT && !has_tensors(s, 2 + s.product->sum)) s.kind = Step::PYTHON;
  if (ok && s.kind == Step::ATTENTION && !has_tensors(s, 3)) s.kind = Step::PYTHON;
  if (ok && !s.several && s.kind == Step::PYTHON && s.n_outs > 1) ok = false;
  if (!ok && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a step of a sequence is not what its kind needs");
  return ok;
}

void free_step(Step& s) {
  Py_XDECREF(s.callable);
  Py_XDECREF(s.names);
  free_items(s.items, s.n_items);
  free(s.outs);
  free(s.frees);
  free(s.root_dims);
  free(s.dims);
}

int sequence_traverse(PyObject* self, visitproc visit, void* arg) {
  Sequence* q = (Sequence*)self;
  Py_VISIT(q->slow);
  for (int i = 0; q->steps && i < q->n_steps; i++) {
    Py_VISIT(q->steps[i].callable);
    int code = visit_items(q->steps[i].items, q->steps[i].n_items, visit, arg);
    if (code) return code;
  }
  return visit_items(q->results, q->n_results, visit, arg);
}

// A cycle through a sequence always passes `slow` or a step's callable; calls may still come while it is cleared.
int sequence_clear(PyObject* self) {
  Sequence* q = (Sequence*)self;
  PyObject* slow = q->slow;
  q->slow = Py_NewRef(Py_None);
  Py_XDECREF(slow);
  for (int i = 0; q->steps && i < q->n_steps; i++) {
    PyObject* callable = q->steps[i].callable;
    q->steps[i].kind = Step::PYTHON;
    q->steps[i].callable = Py_NewRef(Py_None);
    Py_XDECREF(callable);
  }
  return 0;
}

void sequence_dealloc(PyObject* self) {
  Sequence* q = (Sequence*)self;
  PyObject_GC_UnTrack(self);
  if (q->weakrefs) PyObject_ClearWeakRefs(self);
  Py_CLEAR(q->slow);
  for (int i = 0; q->steps && i < q->n_steps; i++) free_step(q->steps[i]);
  free_items(q->results, q->n_results);
  free(q->steps);
  free(q->unused);
  Py_TYPE(self)->tp_free(self);
}

PyObject* sequence_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *slow, *steps, *results, *unused;
  int boxed, inputs, slots;
  if (!PyArg_ParseTuple(arguments, "OpiiO!OO:Sequence", &slow, &boxed, &inputs, &slots, &PyTuple_Type, &steps, &results,
                        &unused)) {
    return nullptr;
  }
  if (inputs < 0 || slots < inputs || !torch.dlpack) {
    PyErr_SetString(PyExc_ValueError, "a sequence has a slot for each input, and the launcher is set up");
    return nullptr;
  }
  Sequence* q = (Sequence*)type->tp_alloc(type, 0);
  if (!q) return nullptr;
  q->vectorcall = call_sequence;
  q->slow = Py_NewRef(slow);
  q->boxed = boxed;
  q->n_inputs = inputs, q->n_slots = slots;
  q->steps = zeroed<Step>(PyTuple_GET_SIZE(steps));
  bool ok = q->steps && (q->results = read_item_list(results, q, q->n_results)) &&
            (q->unused = read_slots(unused, q, q->n_unused, false));
  for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(steps); i++) {
    q->n_steps++;
    ok = read_step(PyTuple_GET_ITEM(steps, i), q, q->steps[i]);
  }
  if (ok) return (PyObject*)q;
  Py_DECREF(q);
  return nullptr;
}

}  // namespace
