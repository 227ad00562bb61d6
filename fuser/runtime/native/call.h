// A call of a handle: the kernel that accepts it, else ATen if it is known to be refused, else Python.
#pragma once

#include "gpu.h"

namespace {

// -- The handle as seen by Python -------------------------------------------------------------------------------------
// A call with keywords, which `slow` puts in order.
PyObject* call_named(Handle* h, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  PyObject *tuple = PyTuple_New(n), *named = PyDict_New(), *code = PyLong_FromLong(0), *out = nullptr;
  bool made = tuple && named && code;
  for (Py_ssize_t i = 0; made && i < n; i++) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(tuple, i, args[i]);
  }
  for (Py_ssize_t i = 0; made && i < PyTuple_GET_SIZE(names); i++) {
    made = !PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[n + i]);
  }
  if (made) out = PyObject_CallFunctionObjArgs(h->slow, tuple, code, named, nullptr);
  Py_XDECREF(code);
  Py_XDECREF(named);
  Py_XDECREF(tuple);
  return out;
}

PyObject* call_slow(Handle* h, PyObject* const* args, Py_ssize_t n, int32_t status) {
  h->misses++;
  PyObject* tuple = PyTuple_New(n);
  if (!tuple) return nullptr;
  for (Py_ssize_t i = 0; i < n; i++) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(tuple, i, args[i]);
  }
  PyObject* code = PyLong_FromLong(status);
  PyObject* out = code ? PyObject_CallFunctionObjArgs(h->slow, tuple, code, nullptr) : nullptr;
  Py_XDECREF(code);
  Py_DECREF(tuple);
  return out;
}

// `device` becomes the number of the tensors' CUDA device, if they have one. May run Python, but not after the sizes
// of the first tensor were read: these pointers stay valid until Python runs again.
bool read_args(PyObject* const* objects, Py_ssize_t n, Arg* args, int32_t& device) {
  bool grad = torch.grad_enabled();
  for (Py_ssize_t i = 0; torch.keys_offset < 0 && i < n; i++) {
    if (is_tensor(objects[i]) && !tensor_is_plain(objects[i], grad)) return false;
  }
  uint64_t devices = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!read_arg(objects[i], grad, args[i], devices)) return false;
    if (args[i].kind != TENSOR || args[i].tensor.device_type != kCUDA) continue;
    if (device >= 0 && device != args[i].tensor.device_id) return false;
    device = args[i].tensor.device_id;
  }
  return !((devices ? devices : uint64_t(1) << kCPU) & disabled_devices);
}

// -- Calls that ATen runs without asking Python again -----------------------------------------------------------------
constexpr size_t kForm = 160;  // words of the longest form that is remembered

// The form of a call; 0 if it is too long. With `exact` it includes all that decides which kernels accept the call:
// also the integers' values and the alignment of memory.
size_t form_of(const Arg* args, Py_ssize_t n, int64_t* form, bool exact = false) {
  size_t w = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    const DLTensor& t = args[i].tensor;
    size_t dims = args[i].kind == TENSOR ? size_t(t.ndim) : 0;
    if (w + 2 + 2 * dims > kForm) return 0;
    form[w++] = args[i].kind;
    if (args[i].kind != TENSOR) {
      if (exact && args[i].kind != FLOAT) form[w++] = args[i].integer;
      continue;
    }
    bool aligned = exact && !(((uintptr_t)t.data + t.byte_offset) % 16);
    form[w - 1] |= int64_t(aligned) << 7;
    form[w - 1] |= int64_t(t.ndim) << 8 | int64_t(t.device_type) << 16 | int64_t(t.device_id) << 32;
    form[w++] = t.dtype;
    for (size_t d = 0; d < dims; d++) form[w++] = t.shape[d];
    for (size_t d = 0; d < dims; d++) form[w++] = t.strides[d];
  }
  return w;
}

bool has_form(const Refusal* r, const int64_t* form, size_t words) {
  return r->words == words && !memcmp(r->form, form, words * sizeof(int64_t));
}

// The refusal of this form, and moves it to the front; null if there is none.
Refusal* find_form(Handle* h, const Arg* args, Py_ssize_t n) {
  int64_t form[kForm];
  size_t words = h->n_refusals ? form_of(args, n, form) : 0;
  for (Py_ssize_t i = -1; words && i < h->n_refusals; i++) {
    Py_ssize_t at = i < 0 ? h->last_refusal : i;
    if (!has_form(h->refusals[at], form, words)) continue;
    h->last_refusal = at;
    return h->refusals[at];
  }
  return nullptr;
}

// The refusal of this form; else the one of all calls; else null.
Refusal* find_refusal(Handle* h, const Arg* args, Py_ssize_t n) {
  Refusal* found = find_form(h, args, n);
  return found ? found : h->all && n == h->arity ? h->all : nullptr;
}

// Whether this turn's kernel accepts the call.
inline bool take_turn(const Turn& turn, const Arg* args, Py_ssize_t n, int64_t* words, Frame& f, const int64_t*& rest) {
  f = frame_of(turn.kernel, words);
  rest = match(turn.kernel, args, n, f);
  return rest && takes_magnitude(turn, args, n);
}

// Remembers which turn accepted the latest call. Without memory for that, turns are tried in order again.
void remember_turn(Handle* h, Py_ssize_t turn, const int64_t* form, size_t words) {
  if (words && !h->latest) h->latest = (int64_t*)malloc(kForm * sizeof(int64_t));
  h->latest_words = h->latest ? words : 0;
  h->latest_turn = turn;
  if (h->latest_words) memcpy(h->latest, form, words * sizeof(int64_t));
}

// The kernel of the first turn that accepts the call; null if there is none, or if the call's form was refused before
// that turn was added. If this call equals the latest one in all that decides, its turn is used at once.
Kernel* find_kernel(Handle* h, const Arg* args, Py_ssize_t n, int64_t* words, Frame& f, const int64_t*& rest) {
  if (!h->n_turns) return nullptr;
  if (h->first_refusal > 0 || !h->refuses) {
    if (take_turn(h->turns[0], args, n, words, f, rest)) return h->turns[0].kernel;
  }
  int64_t form[kForm];
  size_t length = form_of(args, n, form, true);
  if (length && length == h->latest_words && !memcmp(h->latest, form, length * sizeof(int64_t))) {
    const Turn& turn = h->turns[h->latest_turn];
    if (take_turn(turn, args, n, words, f, rest)) return turn.kernel;
  }
  const Refusal* refusal = h->refuses && h->first_refusal < h->n_turns ? find_form(h, args, n) : nullptr;
  Py_ssize_t turns = refusal && refusal->turn < h->n_turns ? refusal->turn : h->n_turns;
  for (Py_ssize_t i = 0; i < turns; i++) {
    if (!take_turn(h->turns[i], args, n, words, f, rest)) continue;
    remember_turn(h, i, form, length);
    return h->turns[i].kernel;
  }
  return nullptr;
}

PyObject* call_refused(Handle* h, Refusal* r, PyObject* const* objects, Py_ssize_t n) {
  h->misses++;
  r->calls++;
  PyObject* function = r->function;
  Py_INCREF(function);
  PyObject* out = PyObject_Vectorcall(function, objects, size_t(n), nullptr);
  Py_DECREF(function);
  return out;
}

bool is_usual(PyObject* o) {
  PyTypeObject* type = Py_TYPE(o);
  return is_tensor(o) || type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type;
}

bool are_usual(PyObject* const* objects, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!is_usual(objects[i])) return false;
  }
  return true;
}

// Memory for a number of items known only at run time: a few are on the stack.
template <class T, size_t N>
struct Room {
  T few[N], *at = few;
  T* take(size_t n) { return at = n > N ? (T*)malloc(n * sizeof(T)) : few; }
  ~Room() {
    if (at != few) free(at);
  }
};

PyObject* handle_call(PyObject* self, PyObject* const* objects, size_t nargsf, PyObject* names);

// Excludes a kernel whose library is gone from later calls; these get another one, which is compiled then.
void retire(Handle* h, const Kernel* k) {
  for (Py_ssize_t i = 0; i < h->n_turns; i++) {
    if (h->turns[i].kernel == k) h->turns[i].magnitudes = 0;
  }
}

// Repeats a call after Python ran, while the kernel's library is held.
PyObject* call_again(Kernel* k, PyObject* self, PyObject* const* objects, size_t nargsf) {
  k->code->running++;
  PyObject* out = handle_call(self, objects, nargsf, nullptr);
  k->code->running--;
  return out;
}

PyObject* handle_call(PyObject* self, PyObject* const* objects, size_t nargsf, PyObject* names) {
  Handle* h = (Handle*)self;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  if (names && PyTuple_GET_SIZE(names)) {
    return call_named(h, objects, n, names);
  }
  if (!h->n_kernels && h->all && n == h->arity && are_usual(objects, n)) return call_refused(h, h->all, objects, n);
  if (!h->n_kernels && !h->n_refusals) return call_slow(h, objects, n, 0);
  Room<Arg, 12> args;
  Room<int64_t, 192> words;
  if (!args.take(size_t(n))) return PyErr_NoMemory();
  ThreadState& ts = thread_state;
  PyObject* out = nullptr;
  int32_t status = 0;
  Kernel* k = nullptr;
  Refusal* refusal = nullptr;
  int32_t device = -1;
  if (context_is_plain(ts) && read_args(objects, n, args.at, device)) {
    // Kernels may have been added while Python ran: the handle is read only from here on.
    if (!words.take(size_t(h->words))) return PyErr_NoMemory();
    Frame f;
    const int64_t* rest;
    k = find_kernel(h, args.at, n, words.at, f, rest);
    if (k && !begin_call(k)) {
      if (!reload(k)) retire(h, k);
      return call_again(k, self, objects, nargsf);
    }
    if (k) {
      out = k->library ? run_on_gpu(k, rest, f, objects, device) : run(k, rest, f, objects, ts, &status);
      end_call(k);
    } else {
      refusal = find_refusal(h, args.at, n);
    }
  }
  if (refusal) return call_refused(h, refusal, objects, n);
  if (out) {
    k->hits++;
    h->hits++;
    return out;
  }
  if (k && !status) return nullptr;
  return call_slow(h, objects, n, status);
}

}  // namespace
