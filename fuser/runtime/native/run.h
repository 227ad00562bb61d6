// One run of a kernel on the CPU: outputs and temporaries are allocated, steps run in one or in all threads.
#pragma once

#include "warm.h"

namespace {

// -- Outputs ----------------------------------------------------------------------------------------------------------
PyObject* int_tuple(const int64_t* v, int64_t n) {
  PyObject* t = PyTuple_New(n);
  for (int64_t i = 0; t && i < n; i++) {
    PyObject* item = PyLong_FromLongLong(v[i]);
    if (!item) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, i, item);
  }
  return t;
}

// `device` is the number of a CUDA device, or negative for the CPU, here and below.
PyObject* allocate_in_python(PyObject* function, const int64_t* sizes, const int64_t* strides, int64_t n,
                             PyObject* dtype, int32_t device) {
  PyObject *a = int_tuple(sizes, n), *b = int_tuple(strides, n), *d = nullptr, *out = nullptr;
  if (device >= 0) d = PyLong_FromLong(device);
  if (a && b) out = PyObject_CallFunctionObjArgs(function, a, b, dtype, d, nullptr);
  Py_XDECREF(a);
  Py_XDECREF(b);
  Py_XDECREF(d);
  return out;
}

void drop_outputs(const Frame& f, int64_t n_buffers) {
  for (int64_t i = 0; i < n_buffers; i++) {
    uintptr_t made = f.outputs[i];
    if (made & 1) Py_DECREF((PyObject*)(made - 1));
    else if (made) torch.delete_tensor((void*)made);
  }
}

constexpr size_t kAsked = 4 * kHuge;      // bytes advised at a time
constexpr int64_t kSlowHuge = 1000000;  // ns; to zero a huge page takes 0.2, all faults of small ones in its place 0.5

// Advises huge pages, and touches the first of every four at once to measure them. A virtual machine that returns free
// huge pages to its host waits for the host when it needs one again, ten times as long as for zeroing it; there small
// pages, which it keeps, are faster. After a page that took longer than `slow` ns, the rest is not advised. Memory at
// `data` is uninitialised: a byte of each touched page is written. Returns the number of bytes advised.
size_t advise_huge(char* data, size_t bytes, int64_t slow) {
  size_t asked = 0;
#ifdef MADV_HUGEPAGE
  uintptr_t begin = ((uintptr_t)data + kHuge - 1) & ~(uintptr_t)(kHuge - 1);
  uintptr_t end = ((uintptr_t)data + bytes) & ~(uintptr_t)(kHuge - 1);
  while (begin < end) {
    size_t n = end - begin < kAsked ? end - begin : kAsked;
    int64_t start = now_ns();
    madvise((void*)begin, kHuge, MADV_HUGEPAGE);
    *(volatile char*)begin = 0;
    asked += kHuge;
    if (now_ns() - start > slow) break;
    if (n > kHuge) madvise((void*)(begin + kHuge), n - kHuge, MADV_HUGEPAGE);
    asked += n - kHuge;
    begin += n;
  }
#endif
  return asked;
}

// A handle of torch's shim for new memory on a CUDA device; null, without an error, on failure.
void* empty_on_gpu(int64_t n, const int64_t* sizes, const int64_t* strides, int32_t scalar, int32_t device) {
  void** handle = (void**)operator new(sizeof(void*), std::nothrow);
  if (!handle) return nullptr;
  try {
    MaybeDevice where = {1, int8_t(device), true};  // torch's number of CUDA
    IntArrayRef size = {sizes, size_t(n)}, stride = {strides, size_t(n)};
    return new (handle) NewTensor(torch.empty_strided_cuda(size, stride, int8_t(scalar), where));
  } catch (...) {
    operator delete(handle);
    return nullptr;
  }
}

// The shim's handle of a new tensor; false, without a Python error, on failure.
bool make_empty(int64_t n, const int64_t* sizes, const int64_t* strides, int32_t scalar, int32_t device, void** made) {
  if (device >= 0 && torch.empty_strided_cuda) *made = empty_on_gpu(n, sizes, strides, scalar, device);
  if (*made) return true;
  int32_t type = device >= 0, index = device >= 0 ? device : 0;  // torch's numbers: 0 is the CPU, 1 is CUDA
  return !torch.empty_strided(n, sizes, strides, scalar, type, index, made);
}

// A new tensor for output buffer `i`: its handle and data pointer. False with a Python error set.
bool allocate_output(const Kernel* k, const Frame& f, int64_t i, int64_t n_inputs, int32_t scalar, int64_t itemsize,
                     const int64_t* sizes, const int64_t* strides, int64_t n, int32_t device) {
  void *made = nullptr, *data = nullptr;
  size_t bytes = itemsize;
  for (int64_t d = 0; d < n; d++) bytes *= size_t(sizes[d]);
  bool large = device < 0 && bytes >= kWarm;
  if (large && torch.wrap) made = take_warm(thread_state, scalar, itemsize, sizes, strides, n);
  if (made) {
    f.outputs[i] = (uintptr_t)made;
    torch.data_ptr(made, &data);
    f.pointers[n_inputs + i] = (char*)data;
    return true;
  }
  if (!large && torch.wrap && scalar >= 0 && make_empty(n, sizes, strides, scalar, device, &made)) {
    torch.data_ptr(made, &data);
    f.outputs[i] = (uintptr_t)made;
  } else {  // through Python, which also raises the right exception for a failure above
    PyObject* function = large ? torch.py_warm : torch.py_empty_strided;
    PyObject* o = allocate_in_python(function, sizes, strides, n, PyTuple_GET_ITEM(k->dtypes, i), device);
    DLTensor t;
    if (!o) return false;
    f.outputs[i] = (uintptr_t)o | 1;
    if (torch.dlpack->parse(o, &t)) return false;
    data = t.data + t.byte_offset;
  }
  f.pointers[n_inputs + i] = (char*)data;
  if (bytes >= kAdvise && device < 0) advise_huge((char*)data, bytes, kSlowHuge);
  return true;
}

// -- Steps ------------------------------------------------------------------------------------------------------------
constexpr int64_t kParallelWork = 32768;  // element operations that are worth one more thread
constexpr int64_t kReleaseWork = 32768;   // and those that are worth releasing the GIL

struct Launch {
  const Kernel* k;
  const Frame* f;
  char* scratch;
  size_t scratch_size;
  int32_t status;
  bool watched;
  Event event;  // of the calling thread's current step
};

int64_t thread_count(int64_t units, int64_t work) {
  if (work < 2 * kParallelWork || units < 2 || !torch.gomp_parallel || torch.omp_in_parallel()) return 1;
  int64_t n = torch.num_threads(), most = work / kParallelWork;
  n = n < most ? n : most;
  return n < units ? n : units;
}

// Thread `i` of `n` runs its part of step `s`.
void run_part(Launch* l, int64_t s, int64_t i, int64_t n) {
  const Frame* f = l->f;
  int64_t units = f->steps[3 * s], part = units / n, rest = units % n;
  int64_t begin = i * part + (i < rest ? i : rest), end = begin + part + (i < rest);
  int32_t status = 0;
  if (begin >= end || __atomic_load_n(&l->status, __ATOMIC_RELAXED)) return;
  l->k->entries[s](f->pointers, f->slots, f->floats, begin, end, l->scratch + i * l->scratch_size, &status);
  if (status) __atomic_store_n(&l->status, status, __ATOMIC_RELAXED);
}

// Opens a parallel region with as many threads as torch's own. A region with fewer threads ends the others (libgomp
// keeps no idle threads beyond the last team), and the next library call starts them again, at 10 to 20 microseconds
// each.
void open_region(void (*body)(void*), void* data) { torch.gomp_parallel(body, data, unsigned(torch.num_threads()), 0); }

// All steps in one parallel region: a barrier between two steps costs half of leaving and entering a region.
void parallel_body(void* p) {
  Launch* l = (Launch*)p;
  int64_t team = torch.omp_num_threads(), i = torch.omp_thread_num();
  for (int64_t s = 0; s < l->k->n_steps; s++) {
    if (s) torch.gomp_barrier();  // by every thread, whatever the status: it may change while others still wait
    if (l->watched && !i) l->event.begin(name_of(l->k->names, s));
    int64_t n = l->f->steps[3 * s + 2];
    if (n > team) n = team;
    if (i < n) run_part(l, s, i, n);
  }
}

int32_t run_steps(const Kernel* k, const Frame& f, int64_t threads, char* scratch, size_t scratch_size, bool watched) {
  Launch l = {k, &f, scratch, scratch_size, 0, watched, {}};
  if (threads > 1) {
    open_region(parallel_body, &l);
  } else {
    for (int64_t s = 0; s < k->n_steps; s++) {
      if (watched) l.event.begin(name_of(k->names, s));
      run_part(&l, s, 0, 1);
    }
  }
  return l.status;
}

// -- One run ----------------------------------------------------------------------------------------------------------
inline size_t round64(size_t n) { return (n + 63) & ~size_t(63); }

PyObject* wrap_output(uintptr_t made) {
  if (made & 1) return (PyObject*)(made - 1);
  PyObject* o = nullptr;
  try {
    o = torch.wrap(*(void* const*)made);
  } catch (...) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch could not make a Python object of an output");
  }
  torch.delete_tensor((void*)made);
  return o;
}

// One result: an output buffer, an argument itself, or an earlier result again.
PyObject* take_result(const int64_t*& p, const Frame& f, PyObject* const* args, PyObject* earlier) {
  int64_t source = *p++, i = *p++;
  if (source == FROM_BUFFER) {
    uintptr_t made = f.outputs[i];
    f.outputs[i] = 0;
    return wrap_output(made);
  }
  PyObject* o = source == FROM_INPUT ? args[i] : PyTuple_GET_ITEM(earlier, i);
  Py_INCREF(o);
  return o;
}

PyObject* results(const int64_t* p, const Frame& f, PyObject* const* args) {
  int64_t single = *p++, n = *p++;
  if (single) return take_result(p, f, args, nullptr);
  PyObject* out = PyTuple_New(n);
  for (int64_t i = 0; out && i < n; i++) {
    PyObject* o = take_result(p, f, args, out);
    if (!o) Py_CLEAR(out);
    else PyTuple_SET_ITEM(out, i, o);
  }
  return out;
}

// The requirements of one call's steps beside its outputs, in bytes; `scratch` is for each thread.
struct Needs {
  size_t temporary, scratch;
  int64_t work, threads;
};

// Allocates outputs and sizes the steps. `p`, the program after the guards, moves to the results. False with a Python
// error set and the outputs dropped.
inline bool prepare(const Kernel* k, const int64_t*& p, const Frame& f, Needs& need) {
  int64_t n_buffers = *p++, inputs = k->n_pointers - n_buffers, *dims = f.dims;
  need = {0, 0, 0, 1};
  if (n_buffers) memset(f.outputs, 0, sizeof(uintptr_t) * n_buffers);
  for (int64_t i = 0; i < n_buffers; i++) {
    int64_t output = p[0], scalar = p[1], itemsize = p[2], n = p[3];
    p += 4;
    for (int64_t d = 0; d < (output ? 2 * n : n); d++) dims[d] = value(p, f.slots, f.stack);
    if (output) {
      if (!allocate_output(k, f, i, inputs, int32_t(scalar), itemsize, dims, dims + n, n, -1)) {
        drop_outputs(f, n_buffers);
        return false;
      }
      continue;
    }
    size_t bytes = itemsize;
    for (int64_t d = 0; d < n; d++) bytes *= size_t(dims[d]);
    f.pointers[inputs + i] = (char*)need.temporary;  // an offset until the memory is known
    need.temporary += round64(bytes);
  }
  p++;
  for (int64_t s = 0; s < k->n_steps; s++) {
    int64_t* step = f.steps + 3 * s;
    step[0] = value(p, f.slots, f.stack);
    step[1] = value(p, f.slots, f.stack);
    step[2] = thread_count(step[0], step[1]);
    size_t bytes = size_t(value(p, f.slots, f.stack));
    p++;  // no GPU
    need.scratch = bytes > need.scratch ? bytes : need.scratch;
    need.work += step[1];
    need.threads = step[2] > need.threads ? step[2] : need.threads;
  }
  need.scratch = need.scratch ? round64(need.scratch) + 64 : 0;
  return true;
}

// Memory for temporaries and scratch, held until `release`: this thread's arena, a tensor, or a block of the pool.
struct Memory {
  PyObject* tensor = nullptr;
  Block* block = nullptr;
  void release() {
    Py_CLEAR(tensor);
    if (block) pool_give(block);
    block = nullptr;
  }
};

// Its address; null on failure, where a Python error may be set.
inline char* take_memory(size_t bytes, ThreadState& ts, Memory& held) {
  if (bytes < kPoolMin) return arena(ts, bytes);
  PyObject* made = PyObject_CallFunction(torch.py_scratch, "n", Py_ssize_t(bytes));
  DLTensor t;
  if (!made) return nullptr;
  if (made != Py_None) {
    held.tensor = made;
    return torch.dlpack->parse(made, &t) ? nullptr : t.data + t.byte_offset;
  }
  Py_DECREF(made);
  pool_follow_settings();
  held.block = pool_take(bytes);
  return held.block ? held.block->data : nullptr;
}

inline void place_temporaries(const Kernel* k, const Frame& f, char* base) {
  int64_t inputs = k->n_pointers - k->n_buffers;
  for (int64_t i = 0; i < k->n_buffers; i++) {
    if (!f.outputs[i]) f.pointers[inputs + i] += (uintptr_t)base;
  }
}

// Allocates and runs. `p`, the program after the guards, moves to the results, which the caller takes before it drops
// the outputs. False, with the outputs dropped, and with `*status` set or a Python error.
bool execute(const Kernel* k, const int64_t*& p, const Frame& f, ThreadState& ts, int32_t* status) {
  Range range(k->names);  // before memory is taken: it may run Python, and so other kernels
  Needs need;
  if (!prepare(k, p, f, need)) return false;
  size_t bytes = need.temporary + need.scratch * size_t(need.threads);
  Memory held;
  char* base = bytes ? take_memory(bytes, ts, held) : nullptr;
  if (bytes && !base) {
    held.release();
    drop_outputs(f, k->n_buffers);
    if (!PyErr_Occurred()) PyErr_NoMemory();
    return false;
  }
  if (need.temporary) place_temporaries(k, f, base);
  bool watched = is_watched(ts, need.work >= kReleaseWork);
  if (watched) remember(k, f);
  if (need.work >= kReleaseWork) {
    PyThreadState* state = PyEval_SaveThread();
    *status = run_steps(k, f, need.threads, base + need.temporary, need.scratch, watched);
    PyEval_RestoreThread(state);
  } else {
    *status = run_steps(k, f, need.threads, base + need.temporary, need.scratch, watched);
  }
  held.release();
  if (*status) drop_outputs(f, k->n_buffers);
  return !*status;
}

// Allocates, runs and wraps. `p` is the program after the guards. Null with `*status` set, or with a Python error.
PyObject* run(const Kernel* k, const int64_t* p, const Frame& f, PyObject* const* args, ThreadState& ts,
              int32_t* status) {
  if (!execute(k, p, f, ts, status)) return nullptr;
  PyObject* out = results(p, f, args);
  drop_outputs(f, k->n_buffers);
  return out;
}

}  // namespace
