// `Handle` as a Python type: adds kernels and refusals, reads counters, frees memory.
#pragma once

#include "batch.h"

namespace {

// Gives a kernel a turn for those `magnitudes` for which it has none; false if memory is lacking. The latest turn is
// widened if it is the kernel's and nothing was refused since.
bool add_turn(Handle* h, Kernel* k, uint64_t magnitudes) {
  for (Py_ssize_t i = 0; i < h->n_turns; i++) {
    if (h->turns[i].kernel == k) magnitudes &= ~h->turns[i].magnitudes;
  }
  if (!magnitudes) return true;
  Turn* newest = h->n_turns ? &h->turns[h->n_turns - 1] : nullptr;
  if (newest && newest->kernel == k && !(h->refuses && h->new_refusal >= h->n_turns)) {
    newest->magnitudes |= magnitudes;
    return true;
  }
  Turn* list = (Turn*)realloc(h->turns, sizeof(Turn) * size_t(h->n_turns + 1));
  if (!list) return false;
  list[h->n_turns++] = {k, magnitudes};
  h->turns = list;
  return true;
}

bool add_kernel(Handle* h, Kernel* k, uint64_t magnitudes) {
  Kernel** list = (Kernel**)realloc(h->kernels, sizeof(Kernel*) * (h->n_kernels + 1));
  if (!list) return false;
  h->kernels = list;
  if (!add_turn(h, k, magnitudes)) return false;
  list[h->n_kernels++] = k;
  if (k->words > h->words) h->words = k->words;
  return true;
}

void free_kernel(Kernel* k) {
  Py_XDECREF(k->dtypes);
  Py_XDECREF(k->library);
  Py_XDECREF(k->names);
  leave_library(k->code);
  free(k->entries);
  free(k->batch);
  free(k->seen);
  free(k);
}

// A GPU kernel's library: `entries`, one for each step, and `functions`, in the order of the fields of `cuda`.
bool take_entries(Kernel* k, PyObject* library) {
  PyObject* entries = PyObject_GetAttrString(library, "entries");
  PyObject* functions = entries ? PyObject_GetAttrString(library, "functions") : nullptr;
  void* found[9] = {};
  bool ok = functions && PyTuple_Check(entries) && PyTuple_Check(functions) && PyTuple_GET_SIZE(functions) == 9 &&
            PyTuple_GET_SIZE(entries) == k->n_steps && torch.dlpack->current_stream;
  for (int i = 0; ok && i < 9; i++) ok = (found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i))) != nullptr;
  for (int64_t i = 0; ok && i < k->n_steps; i++) {
    k->entries[i] = (StepEntry)PyLong_AsVoidPtr(PyTuple_GET_ITEM(entries, i));
    ok = k->entries[i] != nullptr;
  }
  if (ok) {
    memcpy(&cuda, found, sizeof found);
    Py_INCREF(library);
    k->library = library;
  } else if (!PyErr_Occurred()) {
    PyErr_SetString(PyExc_OSError, "a GPU kernel's library lacks entries or the driver's functions");
  }
  Py_XDECREF(entries);
  Py_XDECREF(functions);
  return ok;
}

bool find_entries(Kernel* k, PyObject* names, PyObject* library) {
  if (!PyUnicode_Check(library) && !PyBytes_Check(library) && PyObject_HasAttrString(library, "entries")) {
    Py_INCREF(names);
    k->names = names;
    return take_entries(k, library);
  }
  PyObject* path;
  if (!PyUnicode_FSConverter(library, &path)) return false;
  Py_INCREF(names);
  k->names = names;
  k->code = take_library(PyBytes_AS_STRING(path));
  if (!k->code) PyErr_NoMemory();
  bool ok = k->code && load_entries(k, true);
  Py_DECREF(path);
  return ok;
}

PyObject* handle_add_kernel(PyObject* self, PyObject* arguments) {
  PyObject *program, *library;
  unsigned long long magnitudes = ~0ull;
  Py_ssize_t number = -1;
  if (!PyArg_ParseTuple(arguments, "OO|K:add_kernel", &program, &library, &magnitudes)) return nullptr;
  PyObject* encoded = PyObject_CallOneArg(torch.encode, program);
  const char* stream;
  Py_ssize_t length;
  PyObject *names, *dtypes;
  Kernel *k = nullptr, head = {};
  bool ok = encoded && PyArg_ParseTuple(encoded, "(LLLLLLL)y#O!O!", &head.n_inputs, &head.n_slots, &head.n_floats,
                                        &head.n_pointers, &head.n_buffers, &head.n_dims, &head.depth, &stream, &length,
                                        &PyTuple_Type, &names, &PyTuple_Type, &dtypes);
  if (ok) {
    k = (Kernel*)calloc(1, sizeof(Kernel) + size_t(length));
    head.n_steps = PyTuple_GET_SIZE(names);
    head.words = head.n_slots + head.n_floats + head.n_pointers + head.n_buffers + 3 * head.n_steps + head.n_dims +
                 head.depth;
    if (k) {
      *k = head;
      memcpy(k->stream, stream, size_t(length));
      Py_INCREF(dtypes);
      k->dtypes = dtypes;
      k->entries = (StepEntry*)calloc(size_t(head.n_steps) + 1, sizeof(StepEntry));
    }
    ok = k && k->entries && find_entries(k, names, library) && add_kernel((Handle*)self, k, magnitudes);
    if (ok) number = ((Handle*)self)->n_kernels - 1;
    if (!ok && !PyErr_Occurred()) PyErr_NoMemory();
  }
  Py_XDECREF(encoded);
  if (!ok) {
    if (k) free_kernel(k);
    return nullptr;
  }
  return PyLong_FromSsize_t(number);
}

PyObject* handle_widen(PyObject* self, PyObject* arguments) {
  Handle* h = (Handle*)self;
  Py_ssize_t number;
  unsigned long long magnitudes;
  if (!PyArg_ParseTuple(arguments, "nK:widen", &number, &magnitudes)) return nullptr;
  if (number < 0 || number >= h->n_kernels) {
    PyErr_Format(PyExc_IndexError, "the handle has %zd kernels: there is none with the number %zd", h->n_kernels, number);
    return nullptr;
  }
  if (!add_turn(h, h->kernels[number], magnitudes)) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

void free_refusal(Refusal* r) {
  if (!r) return;
  Py_DECREF(r->function);
  Py_DECREF(r->reason);
  free(r);
}

bool add_refusal(Handle* h, Refusal* r) {
  Refusal** list = (Refusal**)realloc(h->refusals, sizeof(Refusal*) * (h->n_refusals + 1));
  if (!list) return false;
  list[h->n_refusals] = r;
  h->refusals = list;
  h->last_refusal = h->n_refusals++;
  return true;
}

// Recomputes the data about refused forms after one was added or removed.
void order_refusals(Handle* h) {
  h->refuses = false;
  h->latest_words = 0;
  for (Py_ssize_t i = 0; i < h->n_refusals; i++) {
    const Refusal* r = h->refusals[i];
    if (!r->words) continue;
    if (!h->refuses || r->turn < h->first_refusal) h->first_refusal = r->turn;
    if (!h->refuses || r->turn > h->new_refusal) h->new_refusal = r->turn;
    h->refuses = true;
  }
}

// The form of a call with these arguments; false if kernels would not be tried for it, or it is already refused.
bool read_form(Handle* h, PyObject* example, int64_t* form, size_t& words) {
  Py_ssize_t n = PyTuple_GET_SIZE(example);
  Arg* args = (Arg*)malloc(sizeof(Arg) * size_t(n + 1));
  int32_t device = -1;
  words = args && read_args(((PyTupleObject*)example)->ob_item, n, args, device) ? form_of(args, n, form) : 0;
  free(args);
  bool known = false;
  for (Py_ssize_t i = 0; i < h->n_refusals; i++) known |= has_form(h->refusals[i], form, words);
  return words && !known;
}

PyObject* handle_refuse(PyObject* self, PyObject* arguments) {
  Handle* h = (Handle*)self;
  PyObject *function, *reason, *which;
  int first = 0;
  if (!PyArg_ParseTuple(arguments, "OOO|p:refuse", &function, &reason, &which, &first)) return nullptr;
  bool all = !PyTuple_Check(which);
  Py_ssize_t arity = all ? PyNumber_AsSsize_t(which, PyExc_OverflowError) : 0;
  if (PyErr_Occurred()) return nullptr;
  int64_t form[kForm];
  size_t words = 0;
  if (all ? h->all != nullptr : !read_form(h, which, form, words)) Py_RETURN_FALSE;
  Refusal* r = (Refusal*)calloc(1, sizeof(Refusal) + words * sizeof(int64_t));
  if (!r) return PyErr_NoMemory();
  Py_INCREF(function);
  Py_INCREF(reason);
  r->function = function;
  r->reason = reason;
  r->words = words;
  r->turn = first ? 0 : h->n_turns;
  memcpy(r->form, form, words * sizeof(int64_t));
  if (all) {
    h->all = r;
    h->arity = arity;
  } else if (!add_refusal(h, r)) {
    free_refusal(r);
    return PyErr_NoMemory();
  }
  order_refusals(h);
  Py_RETURN_TRUE;
}

// The records stay with their counts, since a call may be using one; a record of no words has no form.
PyObject* handle_pardon(PyObject* self, PyObject* reason) {
  Handle* h = (Handle*)self;
  for (Py_ssize_t i = 0; i < h->n_refusals; i++) {
    int same = PyObject_RichCompareBool(h->refusals[i]->reason, reason, Py_EQ);
    if (same < 0) return nullptr;
    if (same) h->refusals[i]->words = 0;
  }
  order_refusals(h);
  int same = h->all ? PyObject_RichCompareBool(h->all->reason, reason, Py_EQ) : 0;
  if (same < 0) return nullptr;
  if (same) {
    Refusal* all = h->all;
    if (!add_refusal(h, all)) return PyErr_NoMemory();
    h->all = nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* handle_new(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  PyObject* slow;
  static const char* names[] = {"slow", nullptr};
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O:Handle", (char**)names, &slow)) return nullptr;
  if (!torch.dlpack) {
    PyErr_SetString(PyExc_RuntimeError, "the native launcher is not set up: use fuser.runtime.launcher.make_handle");
    return nullptr;
  }
  Handle* h = (Handle*)type->tp_alloc(type, 0);
  if (!h) return nullptr;
  Py_INCREF(slow);
  h->slow = slow;
  h->vectorcall = handle_call;
  return (PyObject*)h;
}

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
  Handle* h = (Handle*)self;
  Py_VISIT(h->slow);
  for (Py_ssize_t i = 0; i < h->n_refusals; i++) Py_VISIT(h->refusals[i]->function);
  if (h->all) Py_VISIT(h->all->function);
  return 0;
}

void free_refusals(Handle* h) {
  Refusal **list = h->refusals, *all = h->all;
  Py_ssize_t n = h->n_refusals;
  h->refusals = nullptr;
  h->all = nullptr;
  h->n_refusals = 0;
  for (Py_ssize_t i = 0; i < n; i++) free_refusal(list[i]);
  free_refusal(all);
  free(list);
}

int handle_clear(PyObject* self) {
  Handle* h = (Handle*)self;
  PyObject* slow = h->slow;
  Py_INCREF(Py_None);  // a call while the cycle is being cleared finds an object to call
  h->slow = Py_None;
  Py_XDECREF(slow);
  free_refusals(h);
  return 0;
}

void handle_dealloc(PyObject* self) {
  Handle* h = (Handle*)self;
  PyObject_GC_UnTrack(self);
  if (h->weakrefs) PyObject_ClearWeakRefs(self);
  Py_CLEAR(h->slow);
  free_refusals(h);
  for (Py_ssize_t i = 0; i < h->n_kernels; i++) free_kernel(h->kernels[i]);
  free(h->kernels);
  free(h->turns);
  free(h->latest);
  Py_TYPE(self)->tp_free(self);
}

PyObject* handle_kernel_hits(PyObject* self, void*) {
  Handle* h = (Handle*)self;
  Py_ssize_t count = h->n_kernels;  // more may be added while a new tuple lets the garbage collector run
  PyObject* out = PyTuple_New(count);
  for (Py_ssize_t i = 0; out && i < count; i++) {
    PyObject* n = PyLong_FromUnsignedLongLong(h->kernels[i]->hits);
    if (!n) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, n);
  }
  return out;
}

PyObject* handle_refused(PyObject* self, void*) {
  Handle* h = (Handle*)self;
  Py_ssize_t n = h->n_refusals + (h->all ? 1 : 0);
  PyObject* out = PyTuple_New(n);
  for (Py_ssize_t i = 0; out && i < n; i++) {
    Refusal* r = i < h->n_refusals ? h->refusals[i] : h->all;
    PyObject* pair = Py_BuildValue("(OK)", r->reason, (unsigned long long)r->calls);
    if (!pair) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, pair);
  }
  return out;
}

// For each kernel: the slots of the last observed call, and whether earlier ones had others; or None.
PyObject* handle_seen(PyObject* self, void*) {
  Handle* h = (Handle*)self;
  Py_ssize_t count = h->n_kernels;
  PyObject* out = PyTuple_New(count);
  for (Py_ssize_t i = 0; out && i < count; i++) {
    const Kernel* k = h->kernels[i];
    PyObject* slots = k->seen ? int_tuple(k->seen, k->n_slots) : nullptr;
    PyObject* pair = k->seen ? Py_BuildValue("(NO)", slots, k->varied ? Py_True : Py_False) : Py_NewRef(Py_None);
    if (!pair) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, pair);
  }
  return out;
}

PyObject* handle_forget(PyObject* self, PyObject*) {
  Handle* h = (Handle*)self;
  for (Py_ssize_t i = 0; i < h->n_kernels; i++) {
    free(h->kernels[i]->seen);
    h->kernels[i]->seen = nullptr;
    h->kernels[i]->varied = false;
  }
  Py_RETURN_NONE;
}

// A module that holds a handle can be copied: copies share the handle.
PyObject* handle_copy(PyObject* self, PyObject*) {
  Py_INCREF(self);
  return self;
}

PyObject* handle_name(PyObject*, void*) { return PyUnicode_FromString("fusion"); }

PyObject* handle_module(PyObject*, void*) { return PyUnicode_FromString("fuser"); }

PyMethodDef handle_methods[] = {
    {"__copy__", handle_copy, METH_NOARGS, "the handle itself"},
    {"__deepcopy__", handle_copy, METH_O, "the handle itself"},
    {"add_kernel", handle_add_kernel, METH_VARARGS,
     "add_kernel(program, library, magnitudes=-1): later calls that match `program` run the entries of a library, which "
     "is a path, or for a GPU an object with `entries` and `functions`. Only calls whose largest tensor has a number of "
     "elements of b binary digits where bit b of `magnitudes` is set. The kernel's number."},
    {"widen", handle_widen, METH_VARARGS, "widen(number, magnitudes): that kernel also takes calls of these magnitudes."},
    {"refuse", handle_refuse, METH_VARARGS,
     "refuse(function, reason, which, first=False): calls that no kernel takes go to function(*args), those with "
     "tensors of the dtypes, sizes and strides of `which`, a tuple of arguments, or all of `which` arguments; with "
     "`first` those of the tuple's form also where a kernel takes them. False if not so."},
    {"pardon", handle_pardon, METH_O, "pardon(reason): calls that were refused for it are so no longer."},
    {"forget", handle_forget, METH_NOARGS, "forget(): `seen` begins anew."},
    {"each", (PyCFunction)(void (*)())handle_each, METH_FASTCALL,
     "each(arity, keep, *args): a call for every `arity` arguments, none of which reads what another writes; their "
     "results as a tuple if `keep`, else None."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef handle_members[] = {
    {"slow", T_OBJECT, offsetof(Handle, slow), READONLY, "what answers calls that no kernel takes"},
    {"hits", T_ULONGLONG, offsetof(Handle, hits), READONLY, "calls that a kernel answered"},
    {"misses", T_ULONGLONG, offsetof(Handle, misses), READONLY, "calls that no kernel answered"},
    {"kernel_count", T_PYSSIZET, offsetof(Handle, n_kernels), READONLY, "kernels added so far"},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef handle_getset[] = {
    {"kernel_hits", handle_kernel_hits, nullptr, "calls that each kernel answered, in the order they were added",
     nullptr},
    {"seen", handle_seen, nullptr,
     "for each kernel the slots of the last call that a profiler watched, and whether others differed; or None", nullptr},
    {"__module__", handle_module, nullptr, "where a graph of torch.fx says that it is from", nullptr},
    {"__name__", handle_name, nullptr, "its name in a graph of torch.fx", nullptr},
    {"refused", handle_refused, nullptr, "what was refused: the reason, and the calls since", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject HandleType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_handle_type() {
  HandleType.tp_name = "fuser.runtime._launcher.Handle";
  HandleType.tp_basicsize = sizeof(Handle);
  HandleType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  HandleType.tp_doc = "Handle(slow): runs the kernel that takes the call's arguments, or slow(args, status).";
  HandleType.tp_new = handle_new;
  HandleType.tp_dealloc = handle_dealloc;
  HandleType.tp_traverse = handle_traverse;
  HandleType.tp_clear = handle_clear;
  HandleType.tp_call = PyVectorcall_Call;
  HandleType.tp_vectorcall_offset = offsetof(Handle, vectorcall);
  HandleType.tp_weaklistoffset = offsetof(Handle, weakrefs);
  HandleType.tp_methods = handle_methods;
  HandleType.tp_members = handle_members;
  HandleType.tp_getset = handle_getset;
  return PyType_Ready(&HandleType) == 0;
}

}  // namespace
