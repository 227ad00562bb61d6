// Operators of TorchScript that run a handle: tensors go from the interpreter's stack to a kernel and back without
// Python objects. torch's stable interface has one C function for each operator and no user data, so all operators
// share one function, and an operator's last argument is a constant of its graph: its number from `scripted`.
#pragma once

#include "handle_type.h"

namespace {

struct Scripted {
  Handle* handle;     // null once nothing holds the operator
  PyObject* text;     // holds `kinds`
  const char* kinds;  // one letter for each argument: tensor, int, float, bool
  Py_ssize_t arguments, results;
};

struct {
  Scripted* at;
  Py_ssize_t count;
} scripted;

bool shim_is_whole() { return torch.sizes && torch.wrap && torch.keys_offset >= 0 && torch.impl_requires_grad; }

// Reads a tensor into DLPack's form from a handle of torch's shim. False if its dtype is unknown here, or it is
// neither on the CPU nor, with `any`, on a CUDA device.
bool read_handle(void* handle, DLTensor& t, bool any = false) {
  int32_t device = -1, index = 0, dtype = -1;
  int64_t dims = 0;
  void* data = nullptr;
  if (torch.device_type(handle, &device) || (device && !(any && device == 1))) return false;
  if (device && torch.device_index(handle, &index)) return false;
  if (torch.dtype(handle, &dtype) || dtype < 0 || dtype > 63) return false;
  uint32_t word = torch.dtype_words[dtype];
  if (!word || torch.dim(handle, &dims) || torch.sizes(handle, &t.shape) || torch.strides(handle, &t.strides)) return false;
  if (torch.data_ptr(handle, &data)) return false;
  t.data = (char*)data, t.byte_offset = 0;
  t.device_type = device ? kCUDA : kCPU, t.device_id = index;
  t.ndim = int32_t(dims), t.dtype = word;
  return true;
}

// reads_alike(tensor): whether the shim and DLPack agree about a tensor.
PyObject* module_reads_alike(PyObject*, PyObject* o) {
  DLTensor want, got;
  void* more = nullptr;
  if (!shim_is_whole() || !is_tensor(o) || torch.dlpack->parse(o, &want)) {
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  bool same = !torch.another(handle_in(o), &more) && *(void**)more == *(void**)handle_in(o) && read_handle(more, got);
  same = same && got.dtype == want.dtype && got.ndim == want.ndim && got.device_type == want.device_type;
  same = same && got.data == want.data + want.byte_offset;
  for (int d = 0; same && d < want.ndim; d++) {
    same = got.shape[d] == want.shape[d] && got.strides[d] == want.strides[d];
  }
  if (more) torch.delete_tensor(more);
  return PyBool_FromLong(same);
}

// -- One call ---------------------------------------------------------------------------------------------------------
// Reads the stack's arguments as `read_args` reads Python's. False if Python has to make the call.
bool read_stack(const Scripted& s, const uint64_t* stack, Arg* args) {
  bool grad = torch.grad_enabled();
  for (Py_ssize_t i = 0; i < s.arguments; i++) {
    Arg& a = args[i];
    switch (s.kinds[i]) {
      case 't': {
        void* handle = (void*)stack[i];
        a.kind = TENSOR;
        if (!impl_is_plain(*(const char* const*)handle, grad) || !read_handle(handle, a.tensor)) return false;
        break;
      }
      case 'f':
        a.kind = FLOAT;
        memcpy(&a.real, stack + i, sizeof a.real);
        break;
      default:
        a.kind = s.kinds[i] == 'b' ? BOOL : INT;
        a.integer = a.kind == BOOL ? *(const bool*)(stack + i) : int64_t(stack[i]);
    }
  }
  return !(disabled_devices & uint64_t(1) << kCPU);
}

// A kernel's results as handles of the shim. False with a Python error set.
bool give_results(const int64_t* p, const Frame& f, const uint64_t* stack, void** out, Py_ssize_t wanted) {
  int64_t single = *p++, n = single ? (p++, 1) : *p++;
  bool ok = n == wanted;
  for (int64_t i = 0; ok && i < n; i++) {
    int64_t source = *p++, at = *p++;
    if (source == FROM_BUFFER && !(f.outputs[at] & 1)) {
      out[i] = (void*)f.outputs[at];
      f.outputs[at] = 0;
      continue;
    }
    void* same = source == FROM_BUFFER  ? handle_in((PyObject*)(f.outputs[at] - 1))
                 : source == FROM_INPUT ? (void*)stack[at]
                                        : out[at];
    ok = !torch.another(same, &out[i]);
  }
  if (!ok) PyErr_SetString(PyExc_RuntimeError, "a kernel's results could not be given to TorchScript");
  return ok;
}

// Runs a kernel that accepts the call. 1: done; 0: Python has to make the call; -1: a Python error is set.
int run_scripted(const Scripted& s, const uint64_t* stack, void** out) {
  Handle* h = s.handle;
  ThreadState& ts = thread_state;
  Room<Arg, 12> args;
  Room<int64_t, 192> words;
  if (!h->n_kernels || !context_is_plain(ts)) return 0;
  if (!args.take(size_t(s.arguments)) || !words.take(size_t(h->words))) return 0;
  if (!read_stack(s, stack, args.at)) return 0;
  Frame f;
  const int64_t* rest;
  int32_t status = 0;
  Kernel* k = find_kernel(h, args.at, s.arguments, words.at, f, rest);
  if (!k || k->library || !begin_call(k)) return 0;
  bool done = execute(k, rest, f, ts, &status);
  end_call(k);
  if (!done) return status ? 0 : -1;
  done = give_results(rest, f, stack, out, s.results);
  drop_outputs(f, k->n_buffers);
  if (!done) return -1;
  k->hits++;
  h->hits++;
  return 1;
}

// An argument as a Python object; null with a Python error set.
PyObject* object_of(char kind, const uint64_t* word) {
  double real;
  switch (kind) {
    case 't':
      try {
        return torch.wrap(*(void* const*)*word);
      } catch (...) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch could not make a Python object of an argument");
        return nullptr;
      }
    case 'f':
      memcpy(&real, word, sizeof real);
      return PyFloat_FromDouble(real);
    case 'b':
      return PyBool_FromLong(*(const bool*)word);
    default:
      return PyLong_FromLongLong(int64_t(*word));
  }
}

bool take_object(PyObject* o, void** out) {
  if (PyObject_TypeCheck(o, (PyTypeObject*)torch.tensor) && !torch.another(handle_in(o), out)) return true;
  PyErr_Format(PyExc_TypeError, "a fused group of a script gave a %s: expected a tensor", Py_TYPE(o)->tp_name);
  return false;
}

// Makes the call as a Python call of the handle. False with a Python error set.
bool run_in_python(const Scripted& s, const uint64_t* stack, void** out) {
  Room<PyObject*, 12> objects;
  if (!objects.take(size_t(s.arguments) + 1)) return PyErr_NoMemory();
  Py_ssize_t n = 0;
  bool ok = true;
  for (; ok && n < s.arguments; n += ok) ok = (objects.at[n] = object_of(s.kinds[n], stack + n)) != nullptr;
  PyObject* result = ok ? handle_call((PyObject*)s.handle, objects.at, size_t(n), nullptr) : nullptr;
  while (n--) Py_DECREF(objects.at[n]);
  if (!result) return false;
  if (s.results == 1) {
    ok = take_object(result, out);
  } else {
    ok = PyTuple_Check(result) && PyTuple_GET_SIZE(result) == s.results;
    if (!ok) PyErr_SetString(PyExc_TypeError, "a fused group of a script gave a wrong number of results");
    for (Py_ssize_t i = 0; ok && i < s.results; i++) ok = take_object(PyTuple_GET_ITEM(result, i), out + i);
  }
  Py_DECREF(result);
  return ok;
}

// The current error as text; a RuntimeError's without its name, which TorchScript adds.
void take_error(char* text, size_t size) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* words = value ? PyObject_Str(value) : nullptr;
  const char* said = words ? PyUnicode_AsUTF8(words) : nullptr;
  const char* name = type == PyExc_RuntimeError || !type ? "" : ((PyTypeObject*)type)->tp_name;
  snprintf(text, size, "%s%s%s", name, *name ? ": " : "", said ? said : "a fused group of a script failed");
  Py_XDECREF(words);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  PyErr_Clear();
}

// torch calls it for every operator made here: arguments are words or owned handles; results replace them.
void call_scripted(uint64_t* stack, uint64_t n_arguments, uint64_t n_results) {
  char error[2048] = "";
  PyGILState_STATE gil = PyGILState_Ensure();
  uint64_t number = n_arguments ? stack[n_arguments - 1] : 0;
  {
    Scripted s = number < uint64_t(scripted.count) ? scripted.at[number] : Scripted{};
    Room<void*, 12> out;
    if (!s.handle || uint64_t(s.arguments) + 1 != n_arguments || uint64_t(s.results) != n_results) {
      snprintf(error, sizeof error, "a fused group is gone with the script that it was made for");
    } else if (!out.take(size_t(s.results))) {
      snprintf(error, sizeof error, "out of memory");
    } else {
      memset(out.at, 0, sizeof(void*) * size_t(s.results));
      Py_INCREF(s.handle);
      Py_INCREF(s.text);
      int done = run_scripted(s, stack, out.at);
      if (done == 0) done = run_in_python(s, stack, out.at) ? 1 : -1;
      if (done < 0) {
        take_error(error, sizeof error);
        for (Py_ssize_t i = 0; i < s.results; i++) {
          if (out.at[i]) torch.delete_tensor(out.at[i]);
        }
      }
      for (Py_ssize_t i = 0; i < s.arguments; i++) {
        if (s.kinds[i] == 't') torch.delete_tensor((void*)stack[i]);
      }
      if (!*error) memcpy(stack, out.at, sizeof(void*) * size_t(s.results));
      Py_DECREF(s.text);
      Py_DECREF(s.handle);
    }
  }
  PyGILState_Release(gil);
  if (*error) torch.fail("call_scripted", "fuser", 0, error);
}

// -- Creation of operators from Python --------------------------------------------------------------------------------
PyObject* module_scripted(PyObject*, PyObject* arguments) {
  PyObject *handle, *text;
  Py_ssize_t results;
  if (!PyArg_ParseTuple(arguments, "OUn:scripted", &handle, &text, &results)) return nullptr;
  const char* kinds = PyUnicode_AsUTF8(text);
  if (!kinds) return nullptr;
  if (!shim_is_whole() || Py_TYPE(handle) != &HandleType || kinds[strspn(kinds, "tifb")]) Py_RETURN_NONE;
  Scripted* list = (Scripted*)realloc(scripted.at, sizeof(Scripted) * size_t(scripted.count + 1));
  if (!list) return PyErr_NoMemory();
  scripted.at = list;
  Py_INCREF(handle);
  Py_INCREF(text);
  list[scripted.count] = {(Handle*)handle, text, kinds, Py_ssize_t(strlen(kinds)), results};
  return Py_BuildValue("nK", scripted.count++, (unsigned long long)(uintptr_t)call_scripted);
}

PyObject* module_unscripted(PyObject*, PyObject* number) {
  Py_ssize_t n = PyLong_AsSsize_t(number);
  if (PyErr_Occurred()) return nullptr;
  if (n >= 0 && n < scripted.count) {
    Scripted was = scripted.at[n];
    scripted.at[n] = {};
    Py_XDECREF(was.text);
    Py_XDECREF(was.handle);
  }
  Py_RETURN_NONE;
}

// -- Calls of fused scripts from Python -------------------------------------------------------------------------------
// How to call a handle in place of a script: the script's arguments by kind, and the handle's by position.
struct Direct {
  PyObject_HEAD
  Handle* handle;
  PyObject* text;     // holds `kinds`
  const char* kinds;  // as of `Scripted`
  Py_ssize_t arguments, taken;
  Py_ssize_t order[8];
};

void direct_dealloc(PyObject* self) {
  Py_XDECREF(((Direct*)self)->handle);
  Py_XDECREF(((Direct*)self)->text);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject DirectType = {PyVarObject_HEAD_INIT(nullptr, 0)};

constexpr Py_ssize_t MOST_GIVEN = 16;  // most arguments of a call that needs no Python, including the script

// The `__call__` of a class of fused scripts: a script with a Direct as its `quick` runs that handle. If `quick` is a
// function of TorchScript, `plain(quick, ...)` runs. `other(script, ...)` handles all other calls, such as those with
// keywords.
struct ScriptCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *plain, *other;
};

bool is_kind(char kind, PyObject* o) {
  if (kind == 't') return is_tensor(o);
  return Py_TYPE(o) == (kind == 'i' ? &PyLong_Type : kind == 'f' ? &PyFloat_Type : &PyBool_Type);
}

// Null, without an error, if the script has to be called.
PyObject* call_direct(Direct* d, PyObject* const* args, Py_ssize_t n) {
  if (n != d->arguments) return nullptr;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!is_kind(d->kinds[i], args[i])) return nullptr;
  }
  PyObject* taken[8];
  for (Py_ssize_t i = 0; i < d->taken; i++) taken[i] = args[d->order[i]];
  Py_INCREF(d);
  PyObject* out = handle_call((PyObject*)d->handle, taken, size_t(d->taken), nullptr);
  Py_DECREF(d);
  if (!out && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();  // the script reports the error itself
  return out;
}

PyObject* script_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  ScriptCall* c = (ScriptCall*)self;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject* quick = nullptr;
  if (n && !(names && PyTuple_GET_SIZE(names)) && context_is_plain(thread_state)) {
    PyObject** dict = _PyObject_GetDictPtr(args[0]);
    quick = dict && *dict ? PyDict_GetItemWithError(*dict, torch.quick_name) : nullptr;
  }
  if (quick && Py_TYPE(quick) == &DirectType) {
    PyObject* out = call_direct((Direct*)quick, args + 1, n - 1);
    if (out || PyErr_Occurred()) return out;
  } else if (quick && n <= MOST_GIVEN) {
    PyObject* given[MOST_GIVEN];
    given[0] = quick;
    for (Py_ssize_t i = 1; i < n; i++) given[i] = args[i];
    Py_INCREF(quick);
    PyObject* out = PyObject_Vectorcall(c->plain, given, size_t(n), nullptr);
    Py_DECREF(quick);
    return out;
  }
  if (PyErr_Occurred()) return nullptr;
  return PyObject_Vectorcall(c->other, args, nargsf, names);
}

void script_call_dealloc(PyObject* self) {
  Py_XDECREF(((ScriptCall*)self)->plain);
  Py_XDECREF(((ScriptCall*)self)->other);
  Py_TYPE(self)->tp_free(self);
}

PyObject* script_call_get(PyObject* self, PyObject* instance, PyObject*) {
  if (instance && instance != Py_None) return PyMethod_New(self, instance);
  Py_INCREF(self);
  return self;
}

PyTypeObject ScriptCallType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_script_types() {
  DirectType.tp_name = "fuser.runtime._launcher.Direct";
  DirectType.tp_basicsize = sizeof(Direct);
  DirectType.tp_flags = Py_TPFLAGS_DEFAULT;
  DirectType.tp_doc = "How to call a handle in place of a script; made by `direct`.";
  DirectType.tp_dealloc = direct_dealloc;
  ScriptCallType.tp_name = "fuser.runtime._launcher.ScriptCall";
  ScriptCallType.tp_basicsize = sizeof(ScriptCall);
  ScriptCallType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_VECTORCALL;
  ScriptCallType.tp_doc = "What a class of fused scripts has for __call__; made by `script_call`.";
  ScriptCallType.tp_dealloc = script_call_dealloc;
  ScriptCallType.tp_descr_get = script_call_get;
  ScriptCallType.tp_call = PyVectorcall_Call;
  ScriptCallType.tp_vectorcall_offset = offsetof(ScriptCall, vectorcall);
  return PyType_Ready(&DirectType) == 0 && PyType_Ready(&ScriptCallType) == 0;
}

PyObject* module_direct(PyObject*, PyObject* arguments) {
  PyObject *handle, *text, *order;
  if (!PyArg_ParseTuple(arguments, "OUO!:direct", &handle, &text, &PyTuple_Type, &order)) return nullptr;
  const char* kinds = PyUnicode_AsUTF8(text);
  if (!kinds) return nullptr;
  Py_ssize_t n = PyTuple_GET_SIZE(order);
  if (Py_TYPE(handle) != &HandleType || kinds[strspn(kinds, "tifb")] || n > 8) Py_RETURN_NONE;
  Direct* d = PyObject_New(Direct, &DirectType);
  if (!d) return nullptr;
  Py_INCREF(handle);
  Py_INCREF(text);
  d->handle = (Handle*)handle, d->text = text, d->kinds = kinds;
  d->arguments = Py_ssize_t(strlen(kinds)), d->taken = n;
  for (Py_ssize_t i = 0; i < n; i++) {
    d->order[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(order, i));
    if (d->order[i] >= 0 && d->order[i] < d->arguments) continue;
    Py_DECREF(d);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "direct: a position is out of range");
    return nullptr;
  }
  return (PyObject*)d;
}

PyObject* module_script_call(PyObject*, PyObject* arguments) {
  PyObject *plain, *other;
  if (!PyArg_ParseTuple(arguments, "OO:script_call", &plain, &other)) return nullptr;
  ScriptCall* c = PyObject_New(ScriptCall, &ScriptCallType);
  if (!c) return nullptr;
  Py_INCREF(plain);
  Py_INCREF(other);
  c->vectorcall = script_call, c->plain = plain, c->other = other;
  return (PyObject*)c;
}

}  // namespace
