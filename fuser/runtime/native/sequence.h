// `Sequence`: a whole graph as one program of steps. A step launches a kernel, makes a view, calls a matrix product of
// ATen through torch's C shim, or calls a Python function; its arguments and results are slots. Tensors between two
// steps are handles of the shim: they become Python objects only if a Python function or the caller takes them.
#pragma once

#include "sequence_steps.h"

namespace {

// -- Steps ------------------------------------------------------------------------------------------------------------
// 1: done; 0: the step's Python function has to be called; -1: a Python error is set.
int run_view(const Step& s, Value* values) {
  Value& root = values[s.root];
  if (!read_value(root) || root.t.ndim != s.root_ndim) return 0;
  for (int d = 0; d < s.root_ndim; d++) {
    int64_t size = s.root_dims[d], stride = s.root_dims[s.root_ndim + d];
    if (root.t.shape[d] != size || (size != 1 && root.t.strides[d] != stride)) return 0;
  }
  Value& out = values[s.outs[0]];
  out.t = root.t;
  out.t.ndim = s.ndim;
  out.t.shape = s.dims, out.t.strides = s.dims + s.ndim;
  out.t.data += s.offset * int64_t((root.t.dtype >> 8 & 255) * (root.t.dtype >> 16) / 8);
  out.read = true;
  out.base = &root;
  out.offset = s.offset;
  return 1;
}

// A kernel's results as values. False with a Python error set.
bool take_results(const int64_t* p, const Frame& f, const Step& s, Value* values) {
  int64_t single = *p++, n = single ? (p++, 1) : *p++;
  if (n != s.n_outs || single == int64_t(s.several)) {
    PyErr_SetString(PyExc_RuntimeError, "a kernel of a sequence has another number of results");
    return false;
  }
  for (int64_t i = 0; i < n; i++) {
    int64_t source = *p++, at = *p++;
    Value made = {};
    if (source == FROM_BUFFER) {
      uintptr_t output = f.outputs[at];
      f.outputs[at] = 0;
      if (output & 1) made.take_object((PyObject*)(output - 1));
      else made.handle = (void*)output;
    } else {
      Value* same = source == FROM_INPUT ? &values[s.items[at].slot] : s.outs[at] >= 0 ? &values[s.outs[at]] : nullptr;
      if (!same || !handle_of(*same) || torch.another(same->handle, &made.handle)) {
        PyErr_SetString(PyExc_RuntimeError, "a result of a kernel of a sequence could not be taken");
        return false;
      }
    }
    if (s.outs[i] >= 0) values[s.outs[i]].replace(made);
    else made.drop();
  }
  return true;
}

// Reads the arguments of a launch. False if the handle has to be called through Python.
bool read_items(const Step& s, Value* values, Arg* args, int32_t& device) {
  uint64_t devices = 0;
  for (int i = 0; i < s.n_items; i++) {
    const Argument& item = s.items[i];
    if (item.slot < 0) {
      args[i] = item.number;
      continue;
    }
    Value& v = values[item.slot];
    if (v.object && !is_tensor(v.object)) {
      if (!read_arg(v.object, false, args[i], devices)) return false;
      continue;
    }
    if (!read_value(v)) return false;
    args[i].kind = TENSOR;
    args[i].tensor = v.t;
    devices |= uint64_t(1) << (v.t.device_type & 63);
    if (v.t.device_type != kCUDA) continue;
    if (device >= 0 && device != v.t.device_id) return false;
    device = v.t.device_id;
  }
  return !((devices ? devices : uint64_t(1) << kCPU) & disabled_devices);
}

PyObject* const* objects_of(const Step& s, Value* values, Room<PyObject*, 12>& room) {
  if (!room.take(size_t(s.n_items) + 1)) return nullptr;
  for (int i = 0; i < s.n_items; i++) {
    const Argument& item = s.items[i];
    room.at[i] = item.slot < 0 ? item.object : object_of(values[item.slot]);
    if (!room.at[i]) return nullptr;
  }
  return room.at;
}

int run_launch(const Step& s, Value* values, ThreadState& ts) {
  Handle* h = (Handle*)s.callable;
  Room<Arg, 12> args;
  Room<int64_t, 192> words;
  if (!h->n_kernels || !args.take(size_t(s.n_items))) return 0;
  int32_t device = -1, status = 0;
  if (!read_items(s, values, args.at, device) || !words.take(size_t(h->words))) return 0;
  Frame f;
  const int64_t* rest;
  Kernel* k = find_kernel(h, args.at, s.n_items, words.at, f, rest);
  if (!k || !begin_call(k)) return 0;
  bool done;
  if (k->library) {
    int64_t at = 0;
    int code = 0;
    done = execute_on_gpu(k, rest, f, device, at, code);
    if (code) {
      Room<PyObject*, 12> room;
      PyObject* const* objects = objects_of(s, values, room);
      if (objects) fail_launch(k, at ? at - 1 : 0, code, objects);
      else if (!PyErr_Occurred()) PyErr_NoMemory();
    }
  } else {
    done = execute(k, rest, f, ts, &status);
  }
  end_call(k);
  if (!done) return status ? 0 : -1;
  done = take_results(rest, f, s, values);
  drop_outputs(f, k->n_buffers);
  k->hits++;
  h->hits++;
  return done ? 1 : -1;
}

// A matrix product of ATen, into a new row-major tensor.
int run_product(Step& s, Value* values) {
  bool sum = s.product->sum, batch = s.product->batch;
  Value* v[3];
  for (int i = 0; i < 2 + sum; i++) {  // numbers may follow
    v[i] = &values[s.items[i].slot];
    if (!read_value(*v[i]) || !handle_of(*v[i])) return 0;
  }
  const DLTensor &a = v[sum]->t, &b = v[sum + 1]->t;
  int dims = batch ? 3 : 2;
  if (a.ndim != dims || b.ndim != dims || a.dtype != b.dtype || a.device_type != b.device_type) return 0;
  if (a.device_id != b.device_id || (sum && (v[0]->t.dtype != a.dtype || v[0]->t.device_type != a.device_type))) return 0;
  void* function = a.device_type == kCPU ? s.product->cpu : a.device_type == kCUDA ? s.product->cuda : nullptr;
  int32_t scalar = -1;
  if (!function || torch.dtype(v[sum]->handle, &scalar)) return 0;
  int64_t sizes[3] = {a.shape[0], a.shape[1], 0}, strides[3] = {0, 0, 0};
  sizes[dims - 1] = b.shape[dims - 1];
  strides[dims - 1] = 1;
  strides[dims - 2] = sizes[dims - 1] > 1 ? sizes[dims - 1] : 1;
  if (batch) strides[0] = strides[1] * (sizes[1] > 1 ? sizes[1] : 1);
  Value made = {};
  if (!make_empty(dims, sizes, strides, scalar, a.device_type == kCUDA ? a.device_id : -1, &made.handle)) return 0;
  int code;
  PyThreadState* state = PyEval_SaveThread();
  if (sum) code = ((ProductAndSum)function)(made.handle, v[0]->handle, v[1]->handle, v[2]->handle, s.numbers[0], s.numbers[1]);
  else code = ((MatrixProduct)function)(made.handle, v[0]->handle, v[1]->handle);
  PyEval_RestoreThread(state);
  if (!code) {
    values[s.outs[0]].replace(made);
    return 1;
  }
  made.drop();
  s.kind = Step::PYTHON;  // which says what is wrong, or what the shim cannot do; torch's exceptions take milliseconds
  return 0;
}

// Flash attention on the CPU: (query, key, value), dropout and causality; results and their logsumexp.
int run_attention(Step& s, Value* values) {
  Value* v[3];
  if (!torch.cpu_attention) return 0;
  for (int i = 0; i < 3; i++) {
    v[i] = &values[s.items[i].slot];
    if (!read_value(*v[i]) || v[i]->t.device_type != kCPU || !handle_of(*v[i])) return 0;
  }
  Value made[2] = {};
  double scale = s.numbers[2];
  PyThreadState* state = PyEval_SaveThread();
  int code = torch.cpu_attention(v[0]->handle, v[1]->handle, v[2]->handle, s.numbers[0], s.numbers[1] != 0, nullptr,
                                 scale == scale ? &scale : nullptr, &made[0].handle, &made[1].handle);
  PyEval_RestoreThread(state);
  for (int i = 0; i < 2; i++) {
    if (code || s.outs[i] < 0) made[i].drop();
    else values[s.outs[i]].replace(made[i]);
  }
  if (code) s.kind = Step::PYTHON;
  return !code;
}

// -- Python -----------------------------------------------------------------------------------------------------------
// A value for Python as a new reference; null with a Python error.
PyObject* item_object(const Argument& item, Value* values) {
  if (item.n < 0) return Py_NewRef(item.slot < 0 ? item.object : object_of(values[item.slot]));
  PyObject* out = item.tuple ? PyTuple_New(item.n) : PyList_New(item.n);
  for (int i = 0; out && i < item.n; i++) {
    PyObject* o = item_object(item.items[i], values);
    if (!o) Py_CLEAR(out);
    else if (item.tuple) PyTuple_SET_ITEM(out, i, o);
    else PyList_SET_ITEM(out, i, o);
  }
  return out;
}

bool keep_result(PyObject* o, int slot, Value* values) {  // steals
  Value made = {};
  if (slot < 0) {
    Py_DECREF(o);
    return true;
  }
  made.take_object(o);
  values[slot].replace(made);
  return true;
}

bool run_python(const Step& s, Value* values) {
  Room<PyObject*, 12> objects;
  if (!objects.take(size_t(s.n_items) + 1)) return PyErr_NoMemory();
  int n = 0;
  bool ok = true;
  for (; ok && n < s.n_items; n += ok) {
    const Argument& item = s.items[n];
    if (item.n < 0 && item.slot >= 0 && !object_of(values[item.slot])) ok = false;
    else ok = (objects.at[n] = item_object(item, values)) != nullptr;
  }
  Py_ssize_t named = s.names ? PyTuple_GET_SIZE(s.names) : 0;
  PyObject* out = ok ? PyObject_Vectorcall(s.callable, objects.at, size_t(n) - size_t(named), s.names) : nullptr;
  while (n--) Py_DECREF(objects.at[n]);
  if (!out) return false;
  for (int i = 0; i < s.n_items; i++) {
    if (s.items[i].n < 0 && s.items[i].slot >= 0) forget_reading(values[s.items[i].slot]);
  }
  if (!s.several) return keep_result(out, s.n_outs ? s.outs[0] : -1, values);
  PyObject* fast = PySequence_Fast(out, "a step of a sequence gave no tuple");
  Py_DECREF(out);
  if (!fast) return false;
  ok = PySequence_Fast_GET_SIZE(fast) == s.n_outs;
  if (!ok) PyErr_SetString(PyExc_RuntimeError, "a step of a sequence gave another number of results");
  for (int i = 0; ok && i < s.n_outs; i++) keep_result(Py_NewRef(PySequence_Fast_GET_ITEM(fast, i)), s.outs[i], values);
  Py_DECREF(fast);
  return ok;
}

bool run_step(Step& s, Value* values, ThreadState& ts) {
  int done = 0;
  switch (s.kind) {
    case Step::LAUNCH: done = run_launch(s, values, ts); break;
    case Step::VIEW: done = run_view(s, values); break;
    case Step::PRODUCT: done = run_product(s, values); break;
    case Step::ATTENTION: done = run_attention(s, values); break;
    case Step::CONSTANT: done = keep_result(Py_NewRef(s.items[0].object), s.outs[0], values); break;
    case Step::PYTHON: break;
  }
  if (done < 0 || (!done && !run_python(s, values))) return false;
  for (int i = 0; i < s.n_frees; i++) values[s.frees[i]].drop();
  return true;
}

// -- The program ------------------------------------------------------------------------------------------------------
// Whether native steps may run: operators are not observed or changed, and all tensors are ordinary ones.
bool may_run(PyObject* const* inputs, Py_ssize_t n, ThreadState& ts) {
  if (!context_is_plain(ts) || is_watched(ts, true) || ranges.push || torch.keys_offset < 0) return false;
  bool grad = torch.grad_enabled();
  for (Py_ssize_t i = 0; i < n; i++) {
    if (is_tensor(inputs[i]) ? !tensor_is_plain(inputs[i], grad) : !is_usual(inputs[i]) && inputs[i] != Py_None) return false;
  }
  return true;
}

PyObject* give_all(const Sequence* q, Value* values) {
  PyObject* out = PyTuple_New(q->n_results);
  for (int i = 0; out && i < q->n_results; i++) {
    const Argument& item = q->results[i];
    PyObject* o = item.slot >= 0 && !object_of(values[item.slot]) ? nullptr : item_object(item, values);
    if (!o) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, o);
  }
  return out;
}

// Runs the steps on `inputs`, whose references it takes over.
PyObject* run_sequence(Sequence* q, PyObject** inputs) {
  Room<Value, 48> values;
  if (!values.take(size_t(q->n_slots) + 1)) {
    for (int i = 0; i < q->n_inputs; i++) Py_DECREF(inputs[i]);
    return PyErr_NoMemory();
  }
  memset((void*)values.at, 0, sizeof(Value) * size_t(q->n_slots));
  for (int i = 0; i < q->n_inputs; i++) values.at[i].take_object(inputs[i]);
  for (int i = 0; i < q->n_unused; i++) values.at[q->unused[i]].drop();
  bool ok = true;
  ThreadState& ts = thread_state;
  for (int i = 0; ok && i < q->n_steps; i++) ok = run_step(q->steps[i], values.at, ts);
  PyObject* out = ok ? give_all(q, values.at) : nullptr;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  if (!out) PyErr_Fetch(&type, &value, &trace);  // dropping tensors may run Python
  for (int i = 0; i < q->n_slots; i++) values.at[i].drop();
  if (!out) PyErr_Restore(type, value, trace);
  return out;
}

PyObject* sequence_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  Sequence* q = (Sequence*)self;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  ThreadState& ts = thread_state;
  bool boxed = q->boxed && n == 1 && PyList_CheckExact(args[0]);
  PyObject* list = boxed ? args[0] : nullptr;
  PyObject* const* given = boxed ? ((PyListObject*)list)->ob_item : args;
  Py_ssize_t count = boxed ? PyList_GET_SIZE(list) : n;
  bool whole = !(names && PyTuple_GET_SIZE(names)) && (boxed || !q->boxed) && count == q->n_inputs;
  if (!whole || !may_run(given, count, ts)) return PyObject_Vectorcall(q->slow, args, nargsf, names);
  Room<PyObject*, 48> inputs;
  if (!inputs.take(size_t(count) + 1)) return PyErr_NoMemory();
  // `may_run` may have run Python, so the list is read again.
  given = boxed ? ((PyListObject*)list)->ob_item : args;
  if (boxed && PyList_GET_SIZE(list) != count) return PyObject_Vectorcall(q->slow, args, nargsf, names);
  for (Py_ssize_t i = 0; i < count; i++) inputs.at[i] = Py_NewRef(given[i]);
  Py_INCREF(self);
  PyObject* out = nullptr;
  if (boxed && PyList_SetSlice(list, 0, count, nullptr)) {
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(inputs.at[i]);
  } else {
    out = run_sequence(q, inputs.at);
    q->runs++;
  }
  Py_DECREF(self);
  return out;
}

PyMemberDef sequence_members[] = {
    {"slow", T_OBJECT, offsetof(Sequence, slow), READONLY, "what runs where native steps may not"},
    {"runs", T_ULONGLONG, offsetof(Sequence, runs), READONLY, "calls that ran as native steps"},
    {"step_count", T_INT, offsetof(Sequence, n_steps), READONLY, "steps"},
    {"_boxed_call", T_BOOL, offsetof(Sequence, boxed), READONLY, "whether it takes its inputs as one list, to be emptied"},
    {nullptr, 0, 0, 0, nullptr}};

PyObject* sequence_kinds(PyObject* self, void*) {
  Sequence* q = (Sequence*)self;
  static const char* names[] = {"launch", "view", "product", "attention", "python", "constant"};
  PyObject* out = PyTuple_New(q->n_steps);
  for (int i = 0; out && i < q->n_steps; i++) {
    PyObject* name = PyUnicode_FromString(names[q->steps[i].kind]);
    if (!name) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, name);
  }
  return out;
}

PyGetSetDef sequence_getset[] = {
    {"kinds", sequence_kinds, nullptr, "the kind of each step: launch, view, product, attention or python", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject SequenceType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready_sequence_type() {
  SequenceType.tp_name = "fuser.runtime._launcher.Sequence";
  SequenceType.tp_basicsize = sizeof(Sequence);
  SequenceType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  SequenceType.tp_doc =
      "Sequence(slow, boxed, inputs, slots, steps, results, unused): a graph's steps, run without Python between them.";
  SequenceType.tp_new = sequence_new;
  SequenceType.tp_dealloc = sequence_dealloc;
  SequenceType.tp_traverse = sequence_traverse;
  SequenceType.tp_clear = sequence_clear;
  SequenceType.tp_call = PyVectorcall_Call;
  SequenceType.tp_vectorcall_offset = offsetof(Sequence, vectorcall);
  SequenceType.tp_weaklistoffset = offsetof(Sequence, weakrefs);
  SequenceType.tp_members = sequence_members;
  SequenceType.tp_getset = sequence_getset;
  call_sequence = sequence_call;
  return PyType_Ready(&SequenceType) == 0;
}

}  // namespace
