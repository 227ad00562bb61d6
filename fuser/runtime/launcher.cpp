// The native launcher: from a Python call to a kernel's steps without running Python, and the buffer pool's memory.
//
// It is one translation unit on the C standard and CPython's C API only, so it builds in half a second on a user's
// machine. Its parts are in native/, each based on the ones before: given, pool, programs, events, libraries, match,
// warm, run, gpu, call, batch, handle_type, scripted, sequence. torch's functions are found at run time: the DLPack
// exchange table (tensor -> pointer, sizes, strides), the C shim of libtorch_cpu (new tensors) and a few addresses
// that `torch_abi.py` has looked up and checked; each has a slower replacement in Python. A kernel's `LaunchProgram`
// is one array of int64, written by `encode.py`, which is read from front to back on every call: match the arguments,
// test the guards, size the buffers, run the steps.
#include "native/sequence.h"

namespace {

PyObject* module_set_enabled(PyObject*, PyObject* arguments) {
  int device, on;
  if (!PyArg_ParseTuple(arguments, "ip:set_enabled", &device, &on)) return nullptr;
  uint64_t bit = uint64_t(1) << (device & 63);
  disabled_devices = on ? disabled_devices & ~bit : disabled_devices | bit;
  Py_RETURN_NONE;
}

PyObject* module_switch(PyObject*, PyObject* arguments) {
  int on, here;
  if (!PyArg_ParseTuple(arguments, "ii:switch", &on, &here)) return nullptr;
  switched_off = !on;
  thread_state.enabled = here;
  Py_RETURN_NONE;
}

// warm_limit(process, this_thread): `config.output_limit_bytes`; -1 if the thread has no override.
PyObject* module_warm_limit(PyObject*, PyObject* arguments) {
  long long process, here;
  if (!PyArg_ParseTuple(arguments, "LL:warm_limit", &process, &here)) return nullptr;
  warm.limit = process;
  thread_state.output_limit = here;
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

bool setup_dtype_words(PyObject* table) {
  PyObject* words = PyDict_GetItemString(table, "dtype_words");
  Py_ssize_t n = words && PyTuple_Check(words) ? PyTuple_GET_SIZE(words) : 0;
  for (Py_ssize_t i = 0; i < n && i < 64; i++) {
    torch.dtype_words[i] = uint32_t(PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(words, i)));
  }
  return !PyErr_Occurred();
}

// The storages that warm.py holds; if some of these objects are missing, Python allocates large results.
bool setup_warm(PyObject* table) {
  warm.count_offset = number(table, "storage_count_offset", -1);
  if (!torch.reinterpret || !torch.storage_size || torch.impl_offset < 0) warm.count_offset = -1;
  address(table, "warm_clock", warm.clock);
  warm.acquire = object(table, "warm_acquire");
  warm.release = object(table, "warm_release");
  warm.in_inference = object(table, "in_inference");
  warm.base_name = PyUnicode_InternFromString("base");
  warm.storage_name = PyUnicode_InternFromString("storage");
  warm.words_name = PyUnicode_InternFromString("words");
  warm.held = object(table, "warm_held");
  return warm.held && PyList_CheckExact(warm.held) && !PyErr_Occurred();
}

// setup(table): the table of `torch_abi.py`. Called once, before the first handle.
PyObject* module_setup(PyObject*, PyObject* table) {
  if (!PyDict_Check(table)) {
    PyErr_SetString(PyExc_TypeError, "setup takes the dict that fuser.runtime.torch_abi makes");
    return nullptr;
  }
  torch.tensor = (PyTypeObject*)object(table, "tensor");
  torch.parameter = (PyTypeObject*)object(table, "parameter");
  torch.py_empty_strided = object(table, "py_empty_strided");
  torch.py_warm = object(table, "py_warm");
  torch.py_scratch = object(table, "py_scratch");
  torch.plain_tensor = object(table, "plain_tensor");
  torch.plain_context = object(table, "plain_context");
  torch.encode = object(table, "encode");
  torch.py_is_whole = object(table, "is_whole");
  torch.forward_ad = object(table, "forward_ad");
  torch.level_name = object(table, "level_name");
  torch.settings = PyDict_GetItemString(table, "settings");
  Py_XINCREF(torch.settings);
  torch.limit_name = PyUnicode_InternFromString("pool_limit_bytes");
  torch.idle_name = PyUnicode_InternFromString("pool_idle_seconds");
  torch.quick_name = PyUnicode_InternFromString("quick");
  torch.library_limit_name = PyUnicode_InternFromString("library_limit");
  PyObject* capsule = object(table, "dlpack");
  PyObject *flag = object(table, "requires_grad"), *version = object(table, "version");
  if (PyErr_Occurred()) return nullptr;
  if (Py_TYPE(flag) != &PyGetSetDescr_Type || Py_TYPE(version) != &PyGetSetDescr_Type) {
    PyErr_SetString(PyExc_TypeError, "Tensor.requires_grad or Tensor._version is no getset descriptor in this torch");
    return nullptr;
  }
  torch.version = ((PyGetSetDescrObject*)version)->d_getset->get;
  torch.version_closure = ((PyGetSetDescrObject*)version)->d_getset->closure;
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
  address(table, "empty_strided_cuda", torch.empty_strided_cuda);
  address(table, "delete_tensor", torch.delete_tensor);
  address(table, "data_ptr", torch.data_ptr);
  address(table, "wrap", torch.wrap);
  address(table, "sizes", torch.sizes);
  address(table, "strides", torch.strides);
  address(table, "dim", torch.dim);
  address(table, "dtype", torch.dtype);
  address(table, "device_type", torch.device_type);
  address(table, "device_index", torch.device_index);
  address(table, "reinterpret", torch.reinterpret);
  address(table, "storage_size", torch.storage_size);
  address(table, "cpu_attention", torch.cpu_attention);
  address(table, "another", torch.another);
  for (Product& p : products) {
    char name[32];
    snprintf(name, sizeof name, "cpu_%s", p.name);
    address(table, name, p.cpu);
    snprintf(name, sizeof name, "cuda_%s", p.name);
    address(table, name, p.cuda);
  }
  address(table, "fail", torch.fail);
  address(table, "thread_observers", torch.thread_observers);
  address(table, "process_observers", torch.process_observers);
  address(table, "record_start", torch.record_start);
  address(table, "record_end", torch.record_end);
  address(table, "num_threads", torch.num_threads);
  address(table, "gomp_parallel", torch.gomp_parallel);
  address(table, "gomp_barrier", torch.gomp_barrier);
  address(table, "omp_thread_num", torch.omp_thread_num);
  address(table, "omp_num_threads", torch.omp_num_threads);
  address(table, "omp_in_parallel", torch.omp_in_parallel);
  DLExchange* api = (DLExchange*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  if (!setup_plain_keys(table) || !setup_dtype_words(table) || !setup_warm(table) || !api) return nullptr;
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

PyObject* module_advise_huge(PyObject*, PyObject* args) {
  unsigned long long address, bytes;
  long long slow;
  if (!PyArg_ParseTuple(args, "KKL", &address, &bytes, &slow)) return nullptr;
  return PyLong_FromSize_t(advise_huge((char*)address, bytes, slow));
}

// product(function, x, w, out): torch's `mkldnn_matmul` at an address. The others are TensorImpls that the caller
// holds; a reference to a tensor is a pointer to such a pointer.
PyObject* module_product(PyObject*, PyObject* args) {
  typedef void (*Product)(void* const* x, void* const* w, void* const* out, float beta, float alpha);
  unsigned long long function, x, w, out;
  if (!PyArg_ParseTuple(args, "KKKK:product", &function, &x, &w, &out)) return nullptr;
  void *left = (void*)x, *right = (void*)w, *result = (void*)out;
  bool done = true;
  PyThreadState* state = PyEval_SaveThread();
  try {
    ((Product)function)(&left, &right, &result, 0.0f, 1.0f);
  } catch (...) {
    done = false;
  }
  PyEval_RestoreThread(state);
  if (done) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, "oneDNN could not multiply two matrices");
  return nullptr;
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

// pool_tensor(sizes, strides, dtype word, bytes): a CPU tensor over a block, which is returned with the storage.
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

// seen(*args): for each tensor a weak reference and its version, for any other argument itself and None, as one flat
// tuple. An inference tensor has no version.
PyObject* module_seen(PyObject*, PyObject* const* objects, Py_ssize_t n) {
  PyObject* out = PyTuple_New(2 * n);
  for (Py_ssize_t i = 0; out && i < n; i++) {
    bool tensor = is_tensor(objects[i]);
    PyObject* kept = tensor ? PyWeakref_NewRef(objects[i], nullptr) : Py_NewRef(objects[i]);
    PyObject* version = tensor ? torch.version(objects[i], torch.version_closure) : nullptr;
    if (tensor && kept && !version) PyErr_Clear();
    if (kept) {
      PyTuple_SET_ITEM(out, 2 * i, kept);
      PyTuple_SET_ITEM(out, 2 * i + 1, version ? version : Py_NewRef(Py_None));
    } else {
      Py_XDECREF(version);
      Py_CLEAR(out);
    }
  }
  return out;
}

PyObject* module_loaded_libraries(PyObject*, PyObject*) { return PyLong_FromLongLong(loaded_libraries); }

PyObject* module_ranges(PyObject*, PyObject* arguments) {
  PyObject *push, *pop, *before_push = ranges.push, *before_pop = ranges.pop;
  if (!PyArg_ParseTuple(arguments, "OO:ranges", &push, &pop)) return nullptr;
  bool on = push != Py_None;
  Py_INCREF(push);
  Py_INCREF(pop);
  ranges.push = on ? push : nullptr, ranges.pop = on ? pop : nullptr;
  if (!on) Py_DECREF(push), Py_DECREF(pop);
  Py_XDECREF(before_push);
  Py_XDECREF(before_pop);
  Py_RETURN_NONE;
}

PyObject* module_has_sequences(PyObject*, PyObject*) { return PyBool_FromLong(shim_is_whole()); }

PyMethodDef module_methods[] = {
    {"setup", module_setup, METH_O, "setup(table): take what fuser.runtime.torch_abi found"},
    {"set_enabled", module_set_enabled, METH_VARARGS, "set_enabled(dlpack_device_type, on)"},
    {"switch", module_switch, METH_VARARGS, "switch(on, this_thread): 1, -1 or 0, which is as `on`"},
    {"warm_limit", module_warm_limit, METH_VARARGS, "warm_limit(bytes, this_thread): held for large results; -1 is as the process"},
    {"ranges", module_ranges, METH_VARARGS, "ranges(push, pop): open and close a range around each call; None, None: do not"},
    {"pool_trim", module_pool_trim, METH_NOARGS, "pool_trim() -> bytes given back"},
    {"pool_stats", module_pool_stats, METH_NOARGS, "pool_stats() -> dict"},
    {"advise_huge", module_advise_huge, METH_VARARGS, "advise_huge(address, bytes, slow_ns) -> bytes asked for"},
    {"product", module_product, METH_VARARGS, "product(function, x, w, out): a matrix product into `out`"},
    {"seen", (PyCFunction)(void (*)())module_seen, METH_FASTCALL,
     "seen(*args): a weak reference and the version of each tensor, itself and None of anything else, in one tuple"},
    {"loaded_libraries", module_loaded_libraries, METH_NOARGS, "loaded_libraries() -> libraries of kernels loaded now"},
    {"reads_alike", module_reads_alike, METH_O, "reads_alike(tensor): whether torch's shim says of it what DLPack does"},
    {"scripted", module_scripted, METH_VARARGS,
     "scripted(handle, kinds, results): a handle as an operator of TorchScript, with a letter of `tifb` for each argument:"
     " its number, which is that operator's last argument, and the address of what runs it; None if that cannot be."},
    {"direct", module_direct, METH_VARARGS,
     "direct(handle, kinds, order): how to call a handle in place of a script whose arguments are of these kinds; the "
     "handle takes those at the positions `order`. None if that cannot be."},
    {"script_call", module_script_call, METH_VARARGS,
     "script_call(plain, other): `__call__` of fused scripts, whose `quick` is from the function above, a function, or not there."},
    {"unscripted", module_unscripted, METH_O, "unscripted(number): that operator may be called no more"},
    {"has_sequences", module_has_sequences, METH_NOARGS, "has_sequences(): whether torch's shim has all that a Sequence needs"},
    {"pool_tensor", module_pool_tensor, METH_VARARGS, "pool_tensor(sizes, strides, dtype_word, bytes) -> Tensor"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_launcher", "The native launcher of fuser.", -1,
                                 module_methods,        nullptr,     nullptr,                         nullptr,
                                 nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__launcher() {
  if (!ready_handle_type() || !ready_script_types() || !ready_sequence_type()) return nullptr;
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
  Py_INCREF(&SequenceType);
  if (PyModule_AddObject(m, "Sequence", (PyObject*)&SequenceType) < 0) {
    Py_DECREF(&SequenceType);
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}
