// The native launcher: from a Python call to a kernel's steps without running Python, and the buffer pool's memory.
//
// One file, the C standard and CPython's C API only, so that it builds in half a second on a user's machine. What it
// needs of torch comes at run time: the DLPack exchange table (tensor -> pointer, sizes, strides), the C shim of
// libtorch_cpu (new tensors) and a few addresses that `torch_abi.py` has looked up and checked; each has a slower
// stand-in through Python. A kernel's `LaunchProgram` arrives as one array of int64, written by `encode.py`, which is
// walked from front to back on every call: match the arguments, test the guards, size the buffers, run the steps.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

namespace {

// -- DLPack 1.x, as its specification lays it out ---------------------------------------------------------------------
struct DLTensor {
  char* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint32_t dtype;  // code, bits, lanes: compared as one word
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLManaged {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DLManaged*);
  uint64_t flags;
  DLTensor tensor;
};

struct DLExchange {
  uint32_t major, minor;
  DLExchange* previous;
  void* allocate;
  void* to_managed;
  int (*from_managed)(DLManaged*, void** out);
  int (*parse)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr int32_t kCPU = 1, kCUDA = 2;
constexpr int32_t kInt64 = 4;  // torch's number of the dtype
constexpr int kLayout = 2;  // of the words that encode.py writes: LAYOUT there; both change together

// -- What `setup` was given -------------------------------------------------------------------------------------------
typedef void (*StepEntry)(char* const*, const int64_t*, const double*, int64_t, int64_t, char*, int32_t*);
typedef PyObject* (*WrapTensor)(void* const& tensor);  // at::TensorBase const&: a reference to one pointer

struct {
  PyTypeObject *tensor, *parameter;
  DLExchange* dlpack;
  // Where a tensor object keeps its TensorImpl, and that its dispatch keys; -1: ask `plain_tensor`.
  int64_t impl_offset, keys_offset;
  uint64_t plain_keys[8];
  int n_plain_keys;
  bool (*impl_requires_grad)(const char* impl);  // null: Tensor.requires_grad's own getter
  getter requires_grad;
  void* requires_grad_closure;
  // The thread's dispatch keys, as differences from the default; no library: ask `plain_context`.
  void* c10_library;
  uint64_t harmless_included, harmful_excluded;
  bool (*grad_enabled)();
  bool (*function_mode)();
  int (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
  int (*delete_tensor)(void*);
  int (*data_ptr)(void*, void**);
  WrapTensor wrap;
  int (*num_threads)();
  void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
  void (*gomp_barrier)();
  int (*omp_thread_num)();
  int (*omp_num_threads)();
  int (*omp_in_parallel)();
  PyObject *py_empty_strided, *py_warm, *plain_tensor, *plain_context, *encode, *forward_ad, *level_name;
  PyObject *settings, *limit_name, *idle_name;  // config's values by name; null: the pool's own limits
} torch;

// NVIDIA's driver, as far as a launch needs it; found by the first GPU kernel's library.
struct {
  int (*launch)(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                unsigned shared, void* stream, void** params, void** extra);
  int (*current_device)(int* device);
  int (*retain)(void** context, int device);
  int (*release)(int device);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*is_capturing)(void* stream, int* status);
  int (*copy_to_device)(void* to, const void* from, size_t bytes, void* stream);
} cuda;

uint64_t disabled_devices;  // bit d: DLPack device type d is off

// -- The pool: warm blocks of memory, least recently used first out ---------------------------------------------------
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kPoolMin = size_t(256) << 10;  // below this a thread's own arena does
constexpr size_t kAdvise = size_t(4) << 20;     // fresh outputs from here on are asked onto huge pages
constexpr size_t kWarm = size_t(4) << 20;       // and come from storages that are kept warm (warm.py)

struct Block {
  char* data;
  size_t size;
  int64_t idle_since;
  Block *newer, *older;
};

struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;
  Block *newest, *oldest;
  size_t limit = size_t(256) << 20;
  int64_t idle_ns = 5000000000;
  size_t idle_bytes, idle_blocks, used_bytes, used_blocks, peak_bytes;
  uint64_t hits, misses, returned;
  bool trimmer;
} pool;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Four classes to an octave, so that sizes which differ a little do not each need a block of their own.
size_t size_class(size_t n) {
  size_t step = size_t(1) << (63 - __builtin_clzll(n | 1));
  step = step > 16384 ? step / 4 : 4096;
  return (n + step - 1) / step * step;
}

char* map_block(size_t size) {
  size_t extra = size >= kHuge ? kHuge : 0;
  char* raw = (char*)mmap(nullptr, size + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == (char*)MAP_FAILED) return nullptr;
  if (!extra) return raw;
  char* data = (char*)(((uintptr_t)raw + kHuge - 1) & ~(uintptr_t)(kHuge - 1));
  if (data > raw) munmap(raw, data - raw);
  if (raw + extra > data) munmap(data + size, raw + extra - data);
#ifdef MADV_HUGEPAGE
  madvise(data, size, MADV_HUGEPAGE);
#endif
  return data;
}

void free_block(Block* b) {
  munmap(b->data, b->size);
  free(b);
}

void pool_unlink(Block* b) {  // under the lock
  (b->newer ? b->newer->older : pool.newest) = b->older;
  (b->older ? b->older->newer : pool.oldest) = b->newer;
  pool.idle_bytes -= b->size;
  pool.idle_blocks--;
}

// The smallest idle block that is large enough; else a new one, in the place of the largest idle one: temporaries come
// one kernel at a time, so that one block of the largest size serves them all.
Block* pool_take(size_t bytes) {
  size_t size = size_class(bytes < 4096 ? 4096 : bytes);
  Block *found = nullptr, *largest = nullptr;
  pthread_mutex_lock(&pool.lock);
  for (Block* b = pool.newest; b; b = b->older) {
    if (b->size >= size && (!found || b->size < found->size)) found = b;
    if (!largest || b->size > largest->size) largest = b;
  }
  if (found || largest) pool_unlink(found ? found : largest);
  if (found) {
    size = found->size;
    pool.hits++;
  } else {
    pool.misses++;
    if (largest) pool.returned++;
  }
  pool.used_bytes += size;
  pool.used_blocks++;
  if (pool.used_bytes + pool.idle_bytes > pool.peak_bytes) pool.peak_bytes = pool.used_bytes + pool.idle_bytes;
  pthread_mutex_unlock(&pool.lock);
  if (found) return found;
  if (largest) free_block(largest);
  Block* b = (Block*)calloc(1, sizeof(Block));
  if (b) {
    b->size = size;
    b->data = map_block(size);
    if (b->data) return b;
    free(b);
  }
  pthread_mutex_lock(&pool.lock);
  pool.used_bytes -= size;
  pool.used_blocks--;
  pthread_mutex_unlock(&pool.lock);
  return nullptr;
}

// Unlinks every idle block that is older than `before`, and the oldest while more than `limit` bytes are idle.
Block* pool_collect(int64_t before, size_t limit) {  // under the lock
  Block* out = nullptr;
  while (pool.oldest && (pool.idle_bytes > limit || pool.oldest->idle_since < before)) {
    Block* b = pool.oldest;
    pool_unlink(b);
    pool.returned++;
    b->older = out;
    out = b;
  }
  return out;
}

size_t free_chain(Block* b) {
  size_t bytes = 0;
  while (b) {
    Block* next = b->older;
    bytes += b->size;
    free_block(b);
    b = next;
  }
  return bytes;
}

// Runs only while blocks are idle, and ends by itself when none is left.
void* trimmer_main(void*) {
  pthread_mutex_lock(&pool.lock);
  while (pool.oldest) {
    Block* chain = pool_collect(now_ns() - pool.idle_ns, pool.limit);
    if (chain) {
      pthread_mutex_unlock(&pool.lock);
      free_chain(chain);
      pthread_mutex_lock(&pool.lock);
      continue;
    }
    if (!pool.oldest) break;
    int64_t until = pool.oldest->idle_since + pool.idle_ns + 1000000;
    timespec t = {time_t(until / 1000000000), long(until % 1000000000)};
    pthread_cond_timedwait(&pool.wake, &pool.lock, &t);
  }
  pool.trimmer = false;
  pthread_mutex_unlock(&pool.lock);
  return nullptr;
}

void start_trimmer() {  // under the lock
  pthread_attr_t attr;
  pthread_attr_init(&attr);
  pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attr, 64 << 10);
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // signals stay with the program's own threads
  pthread_t thread;
  pool.trimmer = pthread_create(&thread, &attr, trimmer_main, nullptr) == 0;
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_attr_destroy(&attr);
}

void pool_give(Block* b) {
  pthread_mutex_lock(&pool.lock);
  pool.used_bytes -= b->size;
  pool.used_blocks--;
  pool.idle_bytes += b->size;
  pool.idle_blocks++;
  b->idle_since = now_ns();
  b->newer = nullptr;
  b->older = pool.newest;
  (pool.newest ? pool.newest->newer : pool.oldest) = b;
  pool.newest = b;
  Block* chain = pool_collect(INT64_MIN, pool.limit);
  if (pool.oldest && !pool.trimmer) start_trimmer();
  pthread_mutex_unlock(&pool.lock);
  free_chain(chain);
}

void pool_init_lock() {
  pthread_mutex_init(&pool.lock, nullptr);
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&pool.wake, &attr);
  pthread_condattr_destroy(&attr);
}

// A forked child has the blocks but not the thread.
void before_fork() { pthread_mutex_lock(&pool.lock); }
void after_fork_parent() { pthread_mutex_unlock(&pool.lock); }
void after_fork_child() {
  pool_init_lock();
  pool.trimmer = false;
}

// Takes over `config`'s limits where they have changed. Under the GIL, before the pool is used.
void pool_follow_settings() {
  PyObject* limit = torch.settings ? PyDict_GetItemWithError(torch.settings, torch.limit_name) : nullptr;
  PyObject* idle = torch.settings ? PyDict_GetItemWithError(torch.settings, torch.idle_name) : nullptr;
  if (!limit || !idle) return;
  long long bytes = PyLong_AsLongLong(limit);
  int64_t ns = int64_t(PyFloat_AsDouble(idle) * 1e9);
  if (PyErr_Occurred()) PyErr_Clear();
  else if (size_t(bytes) != pool.limit || ns != pool.idle_ns) {
    pthread_mutex_lock(&pool.lock);
    pool.limit = bytes < 0 ? 0 : size_t(bytes);
    pool.idle_ns = ns;
    Block* chain = pool_collect(INT64_MIN, pool.limit);
    pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    free_chain(chain);
  }
}

// -- What a thread keeps ----------------------------------------------------------------------------------------------
struct ThreadState {
  const uint64_t* dispatch_keys;  // torch's own thread-local pair: included, excluded
  char* arena;                    // small temporaries and scratch; one launch at a time uses it
  size_t arena_size;
  ~ThreadState() { free(arena); }
};
thread_local ThreadState thread_state;

char* arena(ThreadState& ts, size_t bytes) {
  if (ts.arena_size < bytes) {
    free(ts.arena);
    size_t size = size_class(bytes < 8192 ? 8192 : bytes);
    ts.arena = (char*)aligned_alloc(4096, size);
    ts.arena_size = ts.arena ? size : 0;
  }
  return ts.arena;
}

// -- Programs: see sizes.program --------------------------------------------------------------------------------------
enum Op { PUSH, SLOT, ADD, MUL, FLOORDIV, MOD, MIN, MAX, EQ, NE, LT, LE };
enum Item { CONST, LOAD, CODE, BIND };         // how one number is found, or that it is stored
enum Source { FROM_BUFFER, FROM_INPUT, FROM_RESULT };

inline int64_t wrap_add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
inline int64_t wrap_mul(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return int64_t(0 - uint64_t(a));
  int64_t q = a / b;
  return q - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

int64_t run_ops(const int64_t* op, const int64_t* end, const int64_t* slots, int64_t* top) {
  while (op < end) {
    int64_t kind = *op++;
    if (kind <= SLOT) {
      *top++ = kind == PUSH ? *op : slots[*op];
      op++;
      continue;
    }
    int64_t b = *--top, a = top[-1], r;
    switch (kind) {
      case ADD: r = wrap_add(a, b); break;
      case MUL: r = wrap_mul(a, b); break;
      case FLOORDIV: r = floor_div(a, b); break;
      case MOD: r = floor_mod(a, b); break;
      case MIN: r = a < b ? a : b; break;
      case MAX: r = a > b ? a : b; break;
      case EQ: r = a == b; break;
      case NE: r = a != b; break;
      case LT: r = a < b; break;
      default: r = a <= b; break;
    }
    top[-1] = r;
  }
  return top[-1];
}

// The number that the item at `p` stands for; `p` moves past it.
inline int64_t value(const int64_t*& p, const int64_t* slots, int64_t* stack) {
  int64_t tag = *p++, v = *p++;
  if (tag == CONST) return v;
  if (tag == LOAD) return slots[v];
  const int64_t* ops = p;
  p += v;
  return run_ops(ops, p, slots, stack);
}

// -- Kernels and handles ----------------------------------------------------------------------------------------------
struct Kernel {
  int64_t n_inputs, n_slots, n_floats, n_buffers, n_steps, n_pointers, n_dims, depth, words;
  uint64_t hits;
  StepEntry* entries;  // of a GPU kernel: the driver's handles
  PyObject* dtypes;    // of the buffers, for the stand-in that allocates through Python
  PyObject* library;   // of a GPU kernel: what its handles come from, and what explains failures
  int64_t* batch;      // of a GPU kernel, for each step: its form for many argument sets (see BatchForm); null: not asked
  bool no_batch;       // there is none
  int64_t stream[1];
};

// Calls that are left to ATen: of one form (dtypes, sizes and strides of the tensors, kinds of the numbers), or all.
struct Refusal {
  PyObject *function, *reason;
  uint64_t calls;
  size_t words;
  int64_t form[1];
};

struct Handle {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *slow, *weakrefs;
  Kernel** kernels;
  Py_ssize_t n_kernels, last;
  Refusal **refusals, *all;  // `all`: every call of `arity` arguments that no kernel takes
  Py_ssize_t n_refusals, last_refusal, arity;
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

bool truth(PyObject* answer) {  // steals; an error counts as no
  if (!answer) {
    PyErr_Clear();
    return false;
  }
  bool yes = answer == Py_True;
  Py_DECREF(answer);
  return yes;
}

// Whether no mode, transform, autocast or forward derivative is at work in this thread.
bool context_is_plain(ThreadState& ts) {
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

bool tensor_is_plain(PyObject* o, bool grad) {
  if (torch.keys_offset < 0) {
    return !(grad && requires_grad(o)) && truth(PyObject_CallOneArg(torch.plain_tensor, o));
  }
  const char* impl = *(const char* const*)((const char*)o + torch.impl_offset);
  if (grad && (torch.impl_requires_grad ? torch.impl_requires_grad(impl) : requires_grad(o))) return false;
  uint64_t keys = *(const uint64_t*)(impl + torch.keys_offset);
  for (int i = 0; i < torch.n_plain_keys; i++) {
    if (torch.plain_keys[i] == keys) return true;
  }
  return false;
}

bool read_arg(PyObject* o, bool grad, Arg& a, uint64_t& devices) {
  PyTypeObject* type = Py_TYPE(o);
  if (type == torch.tensor || type == torch.parameter) {
    if (!tensor_is_plain(o, grad)) return false;
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
  int n = t.ndim;
  p += 3;
  bool empty = false;
  for (int d = 0; d < 2 * n; d++) {
    int64_t found = d < n ? t.shape[d] : t.strides[d - n];
    empty |= d < n && found == 0;
    if (*p == BIND) {
      f.slots[p[1]] = found;
      p += 2;
    } else if (value(p, f.slots, f.stack) != found && (d < n || !(empty || t.shape[d - n] <= 1))) {
      return false;
    }
  }
  return true;
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

void advise_huge(char* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  uintptr_t begin = ((uintptr_t)data + kHuge - 1) & ~(uintptr_t)(kHuge - 1);
  uintptr_t end = ((uintptr_t)data + bytes) & ~(uintptr_t)(kHuge - 1);
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

// A new tensor for output buffer `i`: its handle and data pointer. False with a Python error set.
bool allocate_output(const Kernel* k, const Frame& f, int64_t i, int64_t n_inputs, int32_t scalar, int64_t itemsize,
                     const int64_t* sizes, const int64_t* strides, int64_t n, int32_t device) {
  void *made = nullptr, *data = nullptr;
  size_t bytes = itemsize;
  for (int64_t d = 0; d < n; d++) bytes *= size_t(sizes[d]);
  bool large = device < 0 && bytes >= kWarm;
  int32_t type = device >= 0, index = device >= 0 ? device : 0;  // torch's numbers: 0 is the CPU, 1 is CUDA
  if (!large && torch.wrap && scalar >= 0 && !torch.empty_strided(n, sizes, strides, scalar, type, index, &made)) {
    torch.data_ptr(made, &data);
    f.outputs[i] = (uintptr_t)made;
  } else {  // through Python, which also has the right exception for what went wrong above
    PyObject* function = large ? torch.py_warm : torch.py_empty_strided;
    PyObject* o = allocate_in_python(function, sizes, strides, n, PyTuple_GET_ITEM(k->dtypes, i), device);
    DLTensor t;
    if (!o) return false;
    f.outputs[i] = (uintptr_t)o | 1;
    if (torch.dlpack->parse(o, &t)) return false;
    data = t.data + t.byte_offset;
  }
  f.pointers[n_inputs + i] = (char*)data;
  if (bytes >= kAdvise && device < 0) advise_huge((char*)data, bytes);
  return true;
}

// -- Steps ------------------------------------------------------------------------------------------------------------
constexpr int64_t kParallelWork = 32768;  // element operations that are worth one more thread
constexpr int64_t kReleaseWork = 32768;   // and those that are worth letting other Python threads run

struct Launch {
  const Kernel* k;
  const Frame* f;
  char* scratch;
  size_t scratch_size;
  int32_t status;
};

int64_t thread_count(int64_t units, int64_t work) {
  if (work < 2 * kParallelWork || units < 2 || !torch.gomp_parallel || torch.omp_in_parallel()) return 1;
  int64_t n = torch.num_threads(), most = work / kParallelWork;
  n = n < most ? n : most;
  return n < units ? n : units;
}

// Thread `i`'s part of step `s`, split over `n` threads.
void run_part(Launch* l, int64_t s, int64_t i, int64_t n) {
  const Frame* f = l->f;
  int64_t units = f->steps[3 * s], part = units / n, rest = units % n;
  int64_t begin = i * part + (i < rest ? i : rest), end = begin + part + (i < rest);
  int32_t status = 0;
  if (begin >= end || __atomic_load_n(&l->status, __ATOMIC_RELAXED)) return;
  l->k->entries[s](f->pointers, f->slots, f->floats, begin, end, l->scratch + i * l->scratch_size, &status);
  if (status) __atomic_store_n(&l->status, status, __ATOMIC_RELAXED);
}

// All steps in one parallel region: a barrier between two steps costs half of leaving and entering a region.
void parallel_body(void* p) {
  Launch* l = (Launch*)p;
  int64_t team = torch.omp_num_threads(), i = torch.omp_thread_num();
  for (int64_t s = 0; s < l->k->n_steps; s++) {
    if (s) torch.gomp_barrier();  // by every thread, whatever the status: it may change while others are still waiting
    int64_t n = l->f->steps[3 * s + 2];
    if (n > team) n = team;
    if (i < n) run_part(l, s, i, n);
  }
}

int32_t run_steps(const Kernel* k, const Frame& f, int64_t threads, char* scratch, size_t scratch_size) {
  Launch l = {k, &f, scratch, scratch_size, 0};
  if (threads > 1) {
    torch.gomp_parallel(parallel_body, &l, unsigned(threads), 0);
  } else {
    for (int64_t s = 0; s < k->n_steps; s++) run_part(&l, s, 0, 1);
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

// One result: an output buffer, the very object of an argument, or an earlier result once more.
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

// What the steps of one call need beside its outputs. Bytes; `scratch` is each thread's.
struct Needs {
  size_t temporary, scratch;
  int64_t work, threads;
};

// Allocates outputs and sizes the steps. `p`, the stream after the guards, moves to the results. False with a Python
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

// Memory for temporaries and scratch: a block of the pool, to be given back, or this thread's arena. Null: there is none.
inline char* take_memory(size_t bytes, ThreadState& ts, Block*& block) {
  block = nullptr;
  if (bytes < kPoolMin) return arena(ts, bytes);
  pool_follow_settings();
  block = pool_take(bytes);
  return block ? block->data : nullptr;
}

inline void place_temporaries(const Kernel* k, const Frame& f, char* base) {
  int64_t inputs = k->n_pointers - k->n_buffers;
  for (int64_t i = 0; i < k->n_buffers; i++) {
    if (!f.outputs[i]) f.pointers[inputs + i] += (uintptr_t)base;
  }
}

// Allocates, runs and wraps. `p` is the stream after the guards. Null with `*status` set, or with a Python error.
PyObject* run(const Kernel* k, const int64_t* p, const Frame& f, PyObject* const* args, ThreadState& ts,
              int32_t* status) {
  Needs need;
  if (!prepare(k, p, f, need)) return nullptr;
  size_t bytes = need.temporary + need.scratch * size_t(need.threads);
  Block* block = nullptr;
  char* base = bytes ? take_memory(bytes, ts, block) : nullptr;
  if (bytes && !base) {
    drop_outputs(f, k->n_buffers);
    return PyErr_NoMemory();
  }
  if (need.temporary) place_temporaries(k, f, base);
  if (need.work >= kReleaseWork) {
    PyThreadState* state = PyEval_SaveThread();
    *status = run_steps(k, f, need.threads, base + need.temporary, need.scratch);
    PyEval_RestoreThread(state);
  } else {
    *status = run_steps(k, f, need.threads, base + need.temporary, need.scratch);
  }
  if (block) pool_give(block);
  PyObject* out = *status ? nullptr : results(p, f, args);
  drop_outputs(f, k->n_buffers);
  return out;
}

// -- One run on a GPU -------------------------------------------------------------------------------------------------
enum Param { POINTER, NUMBER4, NUMBER8, REAL, NOTHING };

// Makes `device`'s context current for a while, where it is not.
struct OnDevice {
  int device, code = 0;
  bool pushed = false;
  explicit OnDevice(int wanted) : device(wanted) {
    int current = -1;
    void* context;
    if (!cuda.current_device(&current) && current == wanted) return;
    code = cuda.retain(&context, wanted);
    if (!code) code = cuda.push(context);
    pushed = !code;
  }
  ~OnDevice() {
    void* context;
    if (!pushed) return;
    cuda.pop(&context);
    cuda.release(device);
  }
};

// A step's words, which begin at `p` and which `p` moves past.
struct GpuStep {
  int64_t units, threads, shared, n;
  const int64_t* params;

  GpuStep(const int64_t*& p, const Frame& f) {
    units = value(p, f.slots, f.stack);
    value(p, f.slots, f.stack);
    value(p, f.slots, f.stack);
    threads = p[1], shared = p[2], n = p[3];
    p += 4;
    params = p;
  }
};

// The next argument of a step as the word that a kernel reads; `p` moves past it.
inline int64_t argument(const int64_t*& p, const Frame& f) {
  int64_t word = 0;
  switch (*p++) {
    case POINTER: word = (int64_t)f.pointers[*p++]; break;
    case REAL: memcpy(&word, &f.floats[*p++], sizeof(double)); break;
    case NOTHING: break;
    default: word = value(p, f.slots, f.stack);
  }
  return word;
}

int launch_kernel(StepEntry entry, int64_t units, int64_t threads, int64_t shared, void* stream, void** pointers) {
  if (units > 0x7fffffff) return 1;  // CUDA_ERROR_INVALID_VALUE
  if (units <= 0) return 0;
  return cuda.launch((void*)entry, unsigned(units), 1, 1, unsigned(threads), 1, 1, unsigned(shared), stream, pointers,
                     nullptr);
}

// The launch of step `s`, whose words begin at `p`; the driver's error code. `p` moves past them.
int launch_step(const Kernel* k, int64_t s, const int64_t*& p, const Frame& f, void* stream) {
  int64_t few_values[64], *values = few_values;
  void *few_pointers[64], **pointers = few_pointers, *more = nullptr;
  GpuStep step(p, f);
  if (step.n > 64) {
    more = malloc(size_t(step.n) * 16);
    if (!more) return 2;  // CUDA_ERROR_OUT_OF_MEMORY
    values = (int64_t*)more;
    pointers = (void**)(values + step.n);
  }
  for (int64_t i = 0; i < step.n; i++) {
    pointers[i] = &values[i];
    values[i] = argument(p, f);
  }
  int code = launch_kernel(k->entries[s], step.units, step.threads, step.shared, stream, pointers);
  free(more);
  return code;
}

PyObject* fail_launch(const Kernel* k, int64_t s, int code, PyObject* const* args) {
  PyObject* list = PyTuple_New(k->n_inputs);
  for (int64_t i = 0; list && i < k->n_inputs; i++) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(list, i, args[i]);
  }
  PyObject* said = list ? PyObject_CallMethod(k->library, "failure", "LiO", (long long)s, code, list) : nullptr;
  if (said) PyErr_SetObject(PyExc_RuntimeError, said);
  Py_XDECREF(said);
  Py_XDECREF(list);
  return nullptr;
}

// Outputs and temporaries from torch's allocator. `p`, the stream after the guards, moves to the steps. False with a
// Python error set and what was made dropped.
bool allocate_on_gpu(const Kernel* k, const int64_t*& p, const Frame& f, int32_t device) {
  int64_t n_buffers = *p++, inputs = k->n_pointers - n_buffers, *dims = f.dims;
  if (n_buffers) memset(f.outputs, 0, sizeof(uintptr_t) * n_buffers);
  for (int64_t i = 0; i < n_buffers; i++) {
    int64_t output = p[0], scalar = p[1], itemsize = p[2], n = p[3], count = 1, one = 1;
    p += 4;
    for (int64_t d = 0; d < (output ? 2 * n : n); d++) dims[d] = value(p, f.slots, f.stack);
    for (int64_t d = 0; d < n; d++) count *= dims[d];
    bool made = output ? allocate_output(k, f, i, inputs, int32_t(scalar), itemsize, dims, dims + n, n, device)
                       : allocate_output(k, f, i, inputs, int32_t(scalar), itemsize, &count, &one, 1, device);
    if (!made) {
      drop_outputs(f, n_buffers);
      return false;
    }
  }
  p++;
  return true;
}

int current_stream(int32_t device, void** stream) {
  *stream = nullptr;
  return device < 0 ? 0 : torch.dlpack->current_stream(kCUDA, device, stream);
}

// Launches on the current stream and wraps. Null with a Python error.
PyObject* run_on_gpu(const Kernel* k, const int64_t* p, const Frame& f, PyObject* const* args, int32_t device) {
  if (!allocate_on_gpu(k, p, f, device)) return nullptr;
  void* stream = nullptr;
  int code = current_stream(device, &stream);
  int64_t s = 0;
  if (!code) {
    OnDevice on(device);
    code = on.code;
    for (; s < k->n_steps && !code; s++) code = launch_step(k, s, p, f, stream);
  }
  PyObject* out = code ? fail_launch(k, s ? s - 1 : 0, code, args) : results(p, f, args);
  drop_outputs(f, k->n_buffers);
  return out;
}

// -- The handle, as Python sees it ------------------------------------------------------------------------------------
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

// `device` becomes the number of the tensors' CUDA device, if they are on one.
bool read_args(PyObject* const* objects, Py_ssize_t n, Arg* args, int32_t& device) {
  bool grad = torch.grad_enabled();
  uint64_t devices = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!read_arg(objects[i], grad, args[i], devices)) return false;
    if (args[i].kind != TENSOR || args[i].tensor.device_type != kCUDA) continue;
    if (device >= 0 && device != args[i].tensor.device_id) return false;
    device = args[i].tensor.device_id;
  }
  return !((devices ? devices : uint64_t(1) << kCPU) & disabled_devices);
}

// The most recently used kernel first, then the others in the order they were added.
Kernel* find_kernel(Handle* h, const Arg* args, Py_ssize_t n, int64_t* words, Frame& f, const int64_t*& rest) {
  Py_ssize_t last = h->last;
  for (Py_ssize_t i = -1; i < h->n_kernels; i++) {
    if (i == last) continue;
    Kernel* k = h->kernels[i < 0 ? last : i];
    f = frame_of(k, words);
    rest = match(k, args, n, f);
    if (!rest) continue;
    if (i >= 0) h->last = i;
    return k;
  }
  return nullptr;
}

// -- What ATen runs, without asking Python again ----------------------------------------------------------------------
constexpr size_t kForm = 160;  // words of the longest form that is remembered

// The form of a call; 0 if it is too long.
size_t form_of(const Arg* args, Py_ssize_t n, int64_t* form) {
  size_t w = 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    const DLTensor& t = args[i].tensor;
    size_t dims = args[i].kind == TENSOR ? size_t(t.ndim) : 0;
    if (w + 2 + 2 * dims > kForm) return 0;
    form[w++] = args[i].kind;
    if (args[i].kind != TENSOR) continue;
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

// What was refused in this form, the most recently used first; else what is refused in all; else null.
Refusal* find_refusal(Handle* h, const Arg* args, Py_ssize_t n) {
  int64_t form[kForm];
  size_t words = h->n_refusals ? form_of(args, n, form) : 0;
  for (Py_ssize_t i = -1; words && i < h->n_refusals; i++) {
    Py_ssize_t at = i < 0 ? h->last_refusal : i;
    if (!has_form(h->refusals[at], form, words)) continue;
    h->last_refusal = at;
    return h->refusals[at];
  }
  return h->all && n == h->arity ? h->all : nullptr;
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
  return type == torch.tensor || type == torch.parameter || type == &PyLong_Type || type == &PyFloat_Type ||
         type == &PyBool_Type;
}

bool are_usual(PyObject* const* objects, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; i++) {
    if (!is_usual(objects[i])) return false;
  }
  return true;
}

PyObject* handle_call(PyObject* self, PyObject* const* objects, size_t nargsf, PyObject* names) {
  Handle* h = (Handle*)self;
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  if (names && PyTuple_GET_SIZE(names)) {
    PyErr_SetString(PyExc_TypeError, "a fusion handle takes its inputs as positional arguments: no keywords");
    return nullptr;
  }
  if (!h->n_kernels && h->all && n == h->arity && are_usual(objects, n)) return call_refused(h, h->all, objects, n);
  if (!h->n_kernels && !h->n_refusals) return call_slow(h, objects, n, 0);
  constexpr Py_ssize_t kArgs = 12;
  constexpr int64_t kWords = 192;
  Arg few_args[kArgs], *args = few_args;
  int64_t few_words[kWords], *words = few_words;
  void* more = nullptr;
  if (n > kArgs || h->words > kWords) {
    more = malloc(sizeof(Arg) * n + sizeof(int64_t) * h->words);
    if (!more) return PyErr_NoMemory();
    args = (Arg*)more;
    words = (int64_t*)(args + n);
  }
  ThreadState& ts = thread_state;
  PyObject* out = nullptr;
  int32_t status = 0;
  Kernel* k = nullptr;
  Refusal* refusal = nullptr;
  int32_t device = -1;
  if (context_is_plain(ts) && read_args(objects, n, args, device)) {
    Frame f;
    const int64_t* rest;
    k = h->n_kernels ? find_kernel(h, args, n, words, f, rest) : nullptr;
    if (k) out = k->library ? run_on_gpu(k, rest, f, objects, device) : run(k, rest, f, objects, ts, &status);
    else refusal = find_refusal(h, args, n);
  }
  free(more);
  if (refusal) return call_refused(h, refusal, objects, n);
  if (out) {
    k->hits++;
    h->hits++;
    return out;
  }
  if (k && !status) return nullptr;
  return call_slow(h, objects, n, status);
}

// -- Several calls at once --------------------------------------------------------------------------------------------
// `handle.each` runs calls that do not depend on each other: one optimiser step for hundreds of parameters. All of
// their first steps, then all of their second ones, and so on, in one parallel region; what a thread does is a part of
// the work of all calls together, so that small calls go to different threads and large ones are shared.
constexpr Py_ssize_t kMembers = 128;                   // calls to a region: more would not stay in the cache
constexpr size_t kMembersTemporary = size_t(1) << 20;  // bytes of temporaries after which a region takes no more
constexpr int64_t kMembersWork = int64_t(1) << 20;    // element operations that are worth one more thread to a region
constexpr int32_t kDone = 0, kUntried = -1, kLater = -2;  // a call's state; else the status that its kernel gave

struct Member {
  Kernel* k;
  Frame f;
  const int64_t* rest;  // of the stream: the results
  Py_ssize_t call;
  size_t temporary;  // where this call's temporaries begin
  int32_t status;
};

struct Batch {
  Member* members;
  Py_ssize_t n;
  size_t temporary, scratch;
  int64_t steps, work;
  char* memory;
  int32_t device;  // of a GPU's batch
};

inline int64_t step_work(const Member& m, int64_t s) {
  if (s >= m.k->n_steps) return 0;
  int64_t work = m.f.steps[3 * s + 1];
  return work > 1 ? work : 1;
}

// Thread `i` of `n`: its part of the work of all members' step `s`. A unit belongs to the thread in whose part it ends.
void batch_part(Batch* b, int64_t s, int64_t i, int64_t n) {
  int64_t total = 0, at = 0;
  for (Py_ssize_t j = 0; j < b->n; j++) total += step_work(b->members[j], s);
  int64_t share = total / n, rest = total % n;
  int64_t begin = i * share + (i < rest ? i : rest), end = begin + share + (i < rest);
  for (Py_ssize_t j = 0; j < b->n && at < end; j++) {
    Member& m = b->members[j];
    int64_t work = step_work(m, s), from = begin - at, to = end - at;
    at += work;
    if (!work || from >= work || __atomic_load_n(&m.status, __ATOMIC_RELAXED)) continue;
    int64_t units = m.f.steps[3 * s];
    int64_t first = from <= 0 ? 0 : int64_t(__int128(units) * from / work);
    int64_t last = to >= work ? units : int64_t(__int128(units) * to / work);
    int32_t status = 0;
    if (first >= last) continue;
    m.k->entries[s](m.f.pointers, m.f.slots, m.f.floats, first, last, b->memory + b->temporary + i * b->scratch,
                    &status);
    if (status) __atomic_store_n(&m.status, status, __ATOMIC_RELAXED);
  }
}

void batch_body(void* p) {
  Batch* b = (Batch*)p;
  int64_t team = torch.omp_num_threads(), i = torch.omp_thread_num();
  for (int64_t s = 0; s < b->steps; s++) {
    if (s) torch.gomp_barrier();
    batch_part(b, s, i, team);
  }
}

// Runs the members; false with a Python error if there is no memory.
bool run_batch(Batch& b, ThreadState& ts) {
  int64_t threads = thread_count(b.work / kMembersWork, b.work);
  size_t bytes = b.temporary + b.scratch * size_t(threads);
  Block* block = nullptr;
  b.memory = bytes ? take_memory(bytes, ts, block) : nullptr;
  if (bytes && !b.memory) {
    PyErr_NoMemory();
    return false;
  }
  for (Py_ssize_t j = 0; j < b.n; j++) place_temporaries(b.members[j].k, b.members[j].f, b.memory + b.members[j].temporary);
  PyThreadState* state = b.work >= kReleaseWork ? PyEval_SaveThread() : nullptr;
  if (threads > 1) {
    torch.gomp_parallel(batch_body, &b, unsigned(threads), 0);
  } else {
    for (int64_t s = 0; s < b.steps; s++) batch_part(&b, s, 0, 1);
  }
  if (state) PyEval_RestoreThread(state);
  if (block) pool_give(block);
  return true;
}

// All calls of one `each`. `objects` are their arguments, `arity` for each.
struct Calls {
  Handle* h;
  PyObject* const* objects;
  Py_ssize_t arity, n;
  PyObject* out;  // null: results are not wanted
  int64_t frame_words, *words;
  Arg* args;
  int32_t* states;
  Batch batch;

  PyObject* const* of(Py_ssize_t c) const { return objects + c * arity; }
};

void drop_batch(Batch& b) {
  for (Py_ssize_t j = 0; j < b.n; j++) drop_outputs(b.members[j].f, b.members[j].k->n_buffers);
  b.n = b.steps = b.work = 0;
  b.temporary = b.scratch = 0;
}

// -- Several calls at once on a GPU: one launch for each step, whose programs find their arguments in a table ----------
// (fuser/cuda/batch.py). Calls of one kernel are collected; those of others come in a later round.
constexpr int64_t kTableWords = 7000;  // the driver takes over up to 64 KiB before a copy's call returns
constexpr size_t kGpuTemporary = size_t(64) << 20;
struct BatchForm {
  int64_t entry, threads, shared, extra;
};

// Whether `k` has a form for many argument sets; it is compiled when this is first asked.
bool has_batch_form(Kernel* k) {
  if (k->batch || k->no_batch) return k->batch;
  k->no_batch = true;  // unless all goes well
  PyObject* found = PyObject_CallMethod(k->library, "batch", nullptr);
  if (found && PyTuple_Check(found) && k->n_steps && PyTuple_GET_SIZE(found) == 4 * k->n_steps) {
    int64_t* words = (int64_t*)malloc(sizeof(BatchForm) * size_t(k->n_steps));
    for (Py_ssize_t i = 0; words && i < PyTuple_GET_SIZE(found); i++) {
      words[i] = int64_t(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(found, i)));
    }
    k->batch = words;
    k->no_batch = !words;
  }
  Py_XDECREF(found);
  PyErr_Clear();
  return k->batch;
}

// Whether launches on the current stream of `device` may be made by a copy and few launches: nobody records them.
bool may_batch(int32_t device) {
  void* stream = nullptr;
  int status = 0;
  bool free = !current_stream(device, &stream) && !cuda.is_capturing(stream, &status) && !status;
  PyErr_Clear();
  return free;
}

// Words of the tables of all steps for `n` sets of the arguments of `m`.
int64_t table_words(const Member& m, int64_t n) {
  const int64_t* p = m.rest;
  int64_t words = 0;
  for (int64_t s = 0; s < m.k->n_steps; s++) {
    GpuStep step(p, m.f);
    for (int64_t i = 0; i < step.n; i++) words += n * (*p != NOTHING), argument(p, m.f);
    words += kMembers;
  }
  return words;
}

// Fills the tables, step after step: for each set the number of its first program, then each set's arguments. Leaves
// the numbers of programs, and where each table begins, in `plan`. False if there are too many programs.
bool fill_tables(const Batch& b, int64_t* table, int64_t (*plan)[2]) {
  const int64_t steps = b.members[0].k->n_steps;
  int64_t* to = table;
  for (int64_t s = 0; s < steps; s++) {
    int64_t *first = to, units = 0;
    plan[s][1] = to - table;
    to += kMembers;
    for (Py_ssize_t j = 0; j < kMembers; j++) first[j] = INT64_MAX;
    for (Py_ssize_t j = 0; j < b.n; j++) {
      Member& m = b.members[j];
      GpuStep step(m.rest, m.f);
      first[j] = units;
      units += step.units > 0 ? step.units : 0;
      for (int64_t i = 0; i < step.n; i++) {
        bool own = *m.rest != NOTHING;
        int64_t word = argument(m.rest, m.f);
        if (own) *to++ = word;
      }
    }
    plan[s][0] = units;
    if (units > 0x7fffffff) return false;
  }
  return true;
}

int launch_tables(const Batch& b, const int64_t (*plan)[2], int64_t* device_table, void* stream, int64_t& s) {
  const Kernel* k = b.members[0].k;
  const BatchForm* forms = (const BatchForm*)k->batch;
  int code = 0;
  for (s = 0; s < k->n_steps && !code; s++) {
    int64_t *table = device_table + plan[s][1], nothing = 0;
    void* pointers[16] = {&table};
    for (int i = 1; i < 16; i++) pointers[i] = &nothing;
    code = launch_kernel((StepEntry)forms[s].entry, plan[s][0], forms[s].threads, forms[s].shared, stream, pointers);
  }
  return code;
}

// One copy and one launch for each step, for all members. False with a Python error. Their `rest` moves to the results.
bool run_gpu_batch(Calls& a) {
  Batch& b = a.batch;
  const Kernel* k = b.members[0].k;
  int64_t words = table_words(b.members[0], b.n), one = 1, s = 0;
  int64_t* table = (int64_t*)malloc(8 * size_t(words) + 16 * size_t(k->n_steps));
  void *made = nullptr, *data = nullptr, *stream = nullptr;
  int32_t type = b.device >= 0, index = b.device >= 0 ? b.device : 0;
  if (!table || torch.empty_strided(1, &words, &one, kInt64, type, index, &made) || torch.data_ptr(made, &data)) {
    free(table);
    if (made) torch.delete_tensor(made);
    PyErr_NoMemory();
    return false;
  }
  int64_t(*plan)[2] = (int64_t(*)[2])(table + words);
  int code = fill_tables(b, table, plan) ? current_stream(b.device, &stream) : 1;
  if (!code) {
    OnDevice on(b.device);
    code = on.code ? on.code : cuda.copy_to_device(data, table, 8 * size_t(words), stream);
    if (!code) code = launch_tables(b, plan, (int64_t*)data, stream, s);
  }
  free(table);
  torch.delete_tensor(made);  // torch's allocator gives it to nobody before this stream has come so far
  if (code) fail_launch(k, s ? s - 1 : 0, code, a.of(b.members[0].call));
  return !code;
}

bool flush_batch(Calls& a, ThreadState& ts);

// Takes call `c`, for which `m.k` was found and whose stream goes on at `p`, into a batch for that kernel on that
// device, if one may be made; a later round takes what does not go with the batch. False with a Python error.
bool collect_on_gpu(Calls& a, Py_ssize_t c, Member& m, const int64_t* p, int32_t device, ThreadState& ts) {
  Batch& b = a.batch;
  if (b.n && (b.members[0].k != m.k || b.device != device)) {
    a.states[c] = kLater;
    return true;
  }
  if (!b.n && (a.n < 2 || !torch.wrap || !torch.empty_strided || !has_batch_form(m.k) || !may_batch(device))) return true;
  if (!allocate_on_gpu(m.k, p, m.f, device)) return false;
  m.rest = p;
  m.call = c;
  b.device = device;
  b.members[b.n++] = m;
  return (b.n < kMembers && table_words(m, b.n + 1) <= kTableWords) || flush_batch(a, ts);
}

// Runs what was collected and keeps the results; the batch is empty then. False with a Python error.
bool flush_batch(Calls& a, ThreadState& ts) {
  Batch& b = a.batch;
  bool ok = !b.n || (b.members[0].k->library ? run_gpu_batch(a) : run_batch(b, ts));
  for (Py_ssize_t j = 0; ok && j < b.n; j++) {
    Member& m = b.members[j];
    a.states[m.call] = m.status;
    if (m.status) continue;
    PyObject* result = a.out ? results(m.rest, m.f, a.of(m.call)) : nullptr;
    if (result) PyTuple_SET_ITEM(a.out, m.call, result);
    ok = result || !a.out;
    m.k->hits++;
    a.h->hits++;
  }
  drop_batch(b);
  return ok;
}

// Takes call `c` into the batch if a kernel takes it. False with a Python error.
bool collect(Calls& a, Py_ssize_t c, ThreadState& ts) {
  Batch& b = a.batch;
  int32_t device = -1;
  Member m = {};
  const int64_t* p = nullptr;
  if (a.h->words > a.frame_words || !read_args(a.of(c), a.arity, a.args, device)) return true;
  m.k = find_kernel(a.h, a.args, a.arity, a.words + b.n * a.frame_words, m.f, p);
  if (!m.k) return true;
  if (m.k->library) return collect_on_gpu(a, c, m, p, device, ts);
  if (b.n && b.members[0].k->library && !flush_batch(a, ts)) return false;
  Needs need;
  if (!prepare(m.k, p, m.f, need)) return false;
  m.rest = p;
  m.call = c;
  m.temporary = b.temporary;
  b.members[b.n++] = m;
  b.temporary += need.temporary;
  b.scratch = need.scratch > b.scratch ? need.scratch : b.scratch;
  b.steps = m.k->n_steps > b.steps ? m.k->n_steps : b.steps;
  b.work += need.work;
  return (b.n < kMembers && b.temporary < kMembersTemporary) || flush_batch(a, ts);
}

// The calls in batches, then one by one what no kernel took. False with a Python error.
bool run_calls(Calls& a, ThreadState& ts) {
  bool ok = true;
  for (Py_ssize_t c = 0; c < a.n; c++) a.states[c] = kUntried;
  if (a.h->n_kernels && context_is_plain(ts)) {
    for (Py_ssize_t c = 0; ok && c < a.n; c++) ok = collect(a, c, ts);
    if (ok) ok = flush_batch(a, ts);
    for (bool again = true; ok && again;) {  // the calls of a GPU's other kernels, one kernel a round
      again = false;
      for (Py_ssize_t c = 0; ok && c < a.n; c++) {
        if (a.states[c] != kLater) continue;
        a.states[c] = kUntried;
        again = true;
        ok = collect(a, c, ts);
      }
      if (ok) ok = flush_batch(a, ts);
    }
    if (!ok) drop_batch(a.batch);
  }
  for (Py_ssize_t c = 0; ok && c < a.n; c++) {
    if (a.states[c] == kDone) continue;
    PyObject* result = a.states[c] == kUntried ? handle_call((PyObject*)a.h, a.of(c), size_t(a.arity), nullptr)
                                               : call_slow(a.h, a.of(c), a.arity, a.states[c]);
    ok = result != nullptr;
    if (ok && a.out) PyTuple_SET_ITEM(a.out, c, result);
    else Py_XDECREF(result);
  }
  return ok;
}

PyObject* handle_each(PyObject* self, PyObject* const* objects, Py_ssize_t n) {
  Handle* h = (Handle*)self;
  Py_ssize_t arity = n >= 2 ? PyNumber_AsSsize_t(objects[0], PyExc_OverflowError) : 0;
  if (PyErr_Occurred()) return nullptr;
  if (arity < 1 || (n - 2) % arity) {
    PyErr_SetString(PyExc_TypeError, "each takes how many inputs a call has, whether to keep results, and the inputs");
    return nullptr;
  }
  Py_ssize_t calls = (n - 2) / arity, most = calls < kMembers ? calls : kMembers;
  bool keep = objects[1] == Py_True;
  size_t words = size_t(h->words) * size_t(most);
  char* memory = (char*)malloc(sizeof(Member) * most + sizeof(Arg) * arity + 8 * words + 4 * calls + 1);
  PyObject* out = keep ? PyTuple_New(calls) : nullptr;
  bool ok = memory && (out || !keep);
  if (!memory) PyErr_NoMemory();
  if (ok) {
    Calls a = {h, objects + 2, arity, calls, out, h->words, nullptr, nullptr, nullptr, {}};
    a.batch.members = (Member*)memory;
    a.args = (Arg*)(a.batch.members + most);
    a.words = (int64_t*)(a.args + arity);
    a.states = (int32_t*)(a.words + words);
    ok = run_calls(a, thread_state);
  }
  free(memory);
  if (!ok) Py_CLEAR(out);
  if (!ok || keep) return out;
  Py_RETURN_NONE;
}

bool add_kernel(Handle* h, Kernel* k) {
  Kernel** list = (Kernel**)realloc(h->kernels, sizeof(Kernel*) * (h->n_kernels + 1));
  if (!list) return false;
  list[h->n_kernels] = k;
  h->kernels = list;
  if (k->words > h->words) h->words = k->words;
  h->last = h->n_kernels++;
  return true;
}

void free_kernel(Kernel* k) {
  Py_XDECREF(k->dtypes);
  Py_XDECREF(k->library);
  free(k->entries);
  free(k->batch);
  free(k);
}

// The library stays loaded: other handles, or a launch in another thread, may be using it.
bool load_entries(Kernel* k, PyObject* names, const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    PyErr_Format(PyExc_OSError, "kernel library %s cannot be loaded: %s", path, dlerror());
    return false;
  }
  for (int64_t i = 0; i < k->n_steps; i++) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
    if (!name) return false;
    k->entries[i] = (StepEntry)dlsym(library, name);
    if (!k->entries[i]) {
      PyErr_Format(PyExc_OSError, "kernel library %s has no entry %s", path, name);
      return false;
    }
  }
  return true;
}

// A GPU kernel's library: `entries`, one for each step, and `functions`, in the order of the fields of `cuda`.
bool take_entries(Kernel* k, PyObject* library) {
  PyObject* entries = PyObject_GetAttrString(library, "entries");
  PyObject* functions = entries ? PyObject_GetAttrString(library, "functions") : nullptr;
  void* found[8] = {};
  bool ok = functions && PyTuple_Check(entries) && PyTuple_Check(functions) && PyTuple_GET_SIZE(functions) == 8 &&
            PyTuple_GET_SIZE(entries) == k->n_steps && torch.dlpack->current_stream;
  for (int i = 0; ok && i < 8; i++) ok = (found[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i))) != nullptr;
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
    return take_entries(k, library);
  }
  PyObject* path;
  if (!PyUnicode_FSConverter(library, &path)) return false;
  bool ok = load_entries(k, names, PyBytes_AS_STRING(path));
  Py_DECREF(path);
  return ok;
}

PyObject* handle_add_kernel(PyObject* self, PyObject* arguments) {
  PyObject *program, *library;
  if (!PyArg_ParseTuple(arguments, "OO:add_kernel", &program, &library)) return nullptr;
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
    ok = k && k->entries && find_entries(k, names, library) && add_kernel((Handle*)self, k);
    if (!ok && !PyErr_Occurred()) PyErr_NoMemory();
  }
  Py_XDECREF(encoded);
  if (!ok) {
    if (k) free_kernel(k);
    return nullptr;
  }
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

// The form of a call with these arguments; false if kernels would not be asked about it, or it is known already.
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
  if (!PyArg_ParseTuple(arguments, "OOO:refuse", &function, &reason, &which)) return nullptr;
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
  memcpy(r->form, form, words * sizeof(int64_t));
  if (all) {
    h->all = r;
    h->arity = arity;
  } else if (!add_refusal(h, r)) {
    free_refusal(r);
    return PyErr_NoMemory();
  }
  Py_RETURN_TRUE;
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
  Py_INCREF(Py_None);  // a call while the cycle is being taken apart finds something to call
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
  Py_TYPE(self)->tp_free(self);
}

PyObject* handle_kernel_hits(PyObject* self, void*) {
  Handle* h = (Handle*)self;
  PyObject* out = PyTuple_New(h->n_kernels);
  for (Py_ssize_t i = 0; out && i < h->n_kernels; i++) {
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

PyMethodDef handle_methods[] = {
    {"add_kernel", handle_add_kernel, METH_VARARGS,
     "add_kernel(program, library): later calls that match `program` run the entries of a library, which is a path, "
     "or for a GPU an object with `entries` and `functions`."},
    {"refuse", handle_refuse, METH_VARARGS,
     "refuse(function, reason, which): calls that no kernel takes go to function(*args), those with tensors of the "
     "dtypes, sizes and strides of `which`, a tuple of arguments, or all of `which` arguments. False if not so."},
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

// -- Module functions -------------------------------------------------------------------------------------------------
PyObject* module_set_enabled(PyObject*, PyObject* arguments) {
  int device, on;
  if (!PyArg_ParseTuple(arguments, "ip:set_enabled", &device, &on)) return nullptr;
  uint64_t bit = uint64_t(1) << (device & 63);
  disabled_devices = on ? disabled_devices & ~bit : disabled_devices | bit;
  Py_RETURN_NONE;
}

template <class T>
void address(PyObject* table, const char* name, T& out) {
  PyObject* v = PyDict_GetItemString(table, name);
  out = v && v != Py_None ? (T)PyLong_AsVoidPtr(v) : nullptr;
}

int64_t number(PyObject* table, const char* name, int64_t missing) {
  PyObject* v = PyDict_GetItemString(table, name);
  return v && v != Py_None ? int64_t(PyLong_AsUnsignedLongLongMask(v)) : missing;
}

PyObject* object(PyObject* table, const char* name) {
  PyObject* v = PyDict_GetItemString(table, name);
  Py_XINCREF(v);
  if (!v && !PyErr_Occurred()) PyErr_Format(PyExc_KeyError, "setup needs %s", name);
  return v;
}

bool setup_plain_keys(PyObject* table) {
  PyObject* keys = PyDict_GetItemString(table, "plain_keys");
  Py_ssize_t n = keys && PyTuple_Check(keys) ? PyTuple_GET_SIZE(keys) : 0;
  torch.n_plain_keys = 0;
  for (Py_ssize_t i = 0; i < n && i < 8; i++) {
    torch.plain_keys[torch.n_plain_keys++] = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(keys, i));
  }
  return !PyErr_Occurred();
}

// setup(table): what `torch_abi.py` found. Called once, before the first handle.
PyObject* module_setup(PyObject*, PyObject* table) {
  if (!PyDict_Check(table)) {
    PyErr_SetString(PyExc_TypeError, "setup takes the dict that fuser.runtime.torch_abi makes");
    return nullptr;
  }
  torch.tensor = (PyTypeObject*)object(table, "tensor");
  torch.parameter = (PyTypeObject*)object(table, "parameter");
  torch.py_empty_strided = object(table, "py_empty_strided");
  torch.py_warm = object(table, "py_warm");
  torch.plain_tensor = object(table, "plain_tensor");
  torch.plain_context = object(table, "plain_context");
  torch.encode = object(table, "encode");
  torch.forward_ad = object(table, "forward_ad");
  torch.level_name = object(table, "level_name");
  torch.settings = PyDict_GetItemString(table, "settings");
  Py_XINCREF(torch.settings);
  torch.limit_name = PyUnicode_InternFromString("pool_limit_bytes");
  torch.idle_name = PyUnicode_InternFromString("pool_idle_seconds");
  PyObject* capsule = object(table, "dlpack");
  PyObject* flag = object(table, "requires_grad");
  if (PyErr_Occurred()) return nullptr;
  if (Py_TYPE(flag) != &PyGetSetDescr_Type) {
    PyErr_SetString(PyExc_TypeError, "Tensor.requires_grad is no getset descriptor in this torch");
    return nullptr;
  }
  torch.requires_grad = ((PyGetSetDescrObject*)flag)->d_getset->get;
  torch.requires_grad_closure = ((PyGetSetDescrObject*)flag)->d_getset->closure;
  torch.impl_offset = number(table, "impl_offset", -1);
  torch.keys_offset = number(table, "keys_offset", -1);
  torch.harmless_included = uint64_t(number(table, "harmless_included", 0));
  torch.harmful_excluded = uint64_t(number(table, "harmful_excluded", 0));
  address(table, "c10_library", torch.c10_library);
  address(table, "impl_requires_grad", torch.impl_requires_grad);
  address(table, "grad_enabled", torch.grad_enabled);
  address(table, "function_mode", torch.function_mode);
  address(table, "empty_strided", torch.empty_strided);
  address(table, "delete_tensor", torch.delete_tensor);
  address(table, "data_ptr", torch.data_ptr);
  address(table, "wrap", torch.wrap);
  address(table, "num_threads", torch.num_threads);
  address(table, "gomp_parallel", torch.gomp_parallel);
  address(table, "gomp_barrier", torch.gomp_barrier);
  address(table, "omp_thread_num", torch.omp_thread_num);
  address(table, "omp_num_threads", torch.omp_num_threads);
  address(table, "omp_in_parallel", torch.omp_in_parallel);
  DLExchange* api = (DLExchange*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (!setup_plain_keys(table) || !api) return nullptr;
  while (api && api->major != 1) api = api->previous;
  if (!api || !api->parse || !api->from_managed || !torch.grad_enabled) {
    PyErr_SetString(PyExc_RuntimeError, "torch's DLPack table is not of version 1, or a needed address is missing");
    return nullptr;
  }
  torch.dlpack = api;
  Py_RETURN_NONE;
}

PyObject* module_pool_trim(PyObject*, PyObject*) {
  pthread_mutex_lock(&pool.lock);
  Block* chain = pool_collect(INT64_MAX, 0);
  pthread_cond_signal(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  return PyLong_FromSize_t(free_chain(chain));
}

PyObject* module_pool_stats(PyObject*, PyObject*) {
  pool_follow_settings();
  pthread_mutex_lock(&pool.lock);
  auto p = pool;
  pthread_mutex_unlock(&pool.lock);
  return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:O}", "idle_bytes", (Py_ssize_t)p.idle_bytes, "idle_blocks",
                       (Py_ssize_t)p.idle_blocks, "used_bytes", (Py_ssize_t)p.used_bytes, "used_blocks",
                       (Py_ssize_t)p.used_blocks, "peak_bytes", (Py_ssize_t)p.peak_bytes, "hits",
                       (unsigned long long)p.hits, "misses", (unsigned long long)p.misses, "returned",
                       (unsigned long long)p.returned, "trimmer", p.trimmer ? Py_True : Py_False);
}

struct PoolTensor {
  DLManaged managed;
  Block* block;
  int64_t dims[1];
};

void delete_pool_tensor(DLManaged* m) {  // from any thread, with or without the GIL
  PoolTensor* t = (PoolTensor*)m;
  pool_give(t->block);
  free(t);
}

// pool_tensor(sizes, strides, dtype word, bytes): a CPU tensor over a block, which goes back when the storage dies.
PyObject* module_pool_tensor(PyObject*, PyObject* arguments) {
  PyObject *sizes, *strides;
  unsigned long long dtype;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(arguments, "O!O!Kn:pool_tensor", &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &dtype,
                        &bytes))
    return nullptr;
  Py_ssize_t n = PyTuple_GET_SIZE(sizes);
  PoolTensor* t = n == PyTuple_GET_SIZE(strides) ? (PoolTensor*)calloc(1, sizeof(PoolTensor) + sizeof(int64_t) * 2 * n)
                                                 : nullptr;
  if (!t) {
    PyErr_SetString(PyExc_ValueError, "pool_tensor: as many strides as sizes are needed");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    t->dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
    t->dims[n + i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
  }
  pool_follow_settings();
  t->block = PyErr_Occurred() ? nullptr : pool_take(size_t(bytes));
  if (!t->block) {
    free(t);
    return PyErr_Occurred() ? nullptr : PyErr_NoMemory();
  }
  t->managed.major = 1;
  t->managed.deleter = delete_pool_tensor;
  t->managed.tensor = {t->block->data, kCPU, 0, int32_t(n), uint32_t(dtype), t->dims, t->dims + n, 0};
  void* out = nullptr;
  if (torch.dlpack->from_managed(&t->managed, &out)) {
    delete_pool_tensor(&t->managed);
    return nullptr;
  }
  return (PyObject*)out;
}

PyMethodDef module_methods[] = {
    {"setup", module_setup, METH_O, "setup(table): take what fuser.runtime.torch_abi found"},
    {"set_enabled", module_set_enabled, METH_VARARGS, "set_enabled(dlpack_device_type, on)"},
    {"pool_trim", module_pool_trim, METH_NOARGS, "pool_trim() -> bytes given back"},
    {"pool_stats", module_pool_stats, METH_NOARGS, "pool_stats() -> dict"},
    {"pool_tensor", module_pool_tensor, METH_VARARGS, "pool_tensor(sizes, strides, dtype_word, bytes) -> Tensor"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_launcher", "The native launcher of fuser.", -1,
                                 module_methods,        nullptr,     nullptr,                         nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__launcher() {
  if (!ready_handle_type()) return nullptr;
  PyObject* m = PyModule_Create(&module_definition);
  if (!m) return nullptr;
  PyModule_AddIntConstant(m, "LAYOUT", kLayout);
  pool_init_lock();
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
  Py_INCREF(&HandleType);
  if (PyModule_AddObject(m, "Handle", (PyObject*)&HandleType) < 0) {
    Py_DECREF(&HandleType);
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}
