// One run of a kernel on a GPU: outputs from torch's allocator, each step a launch on the current stream.
#pragma once

#include "run.h"

namespace {

enum Param { POINTER, NUMBER4, NUMBER8, REAL, NOTHING };

// Makes `device`'s context current in its scope, if it is not.
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

// A step's words, which start at `p`; `p` moves past them.
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
  LaunchConfig config = {{unsigned(units), 1, 1}, {unsigned(threads), 1, 1}, unsigned(shared), stream, nullptr, 0};
  return cuda.launch(&config, (void*)entry, pointers, nullptr);
}

// Launches step `s`, whose words start at `p`; returns the driver's error code. `p` moves past them.
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

int current_stream(int32_t device, void** stream) {
  *stream = nullptr;
  return device < 0 ? 0 : torch.dlpack->current_stream(kCUDA, device, stream);
}

// Zeros that kernels count in and leave zero. Each stream has its own, since its kernels run in order.
struct Counters {
  int32_t device;
  void *stream, *data;
  Counters* next;
} *all_counters;
constexpr int64_t kCounters = 16384;

Counters* counters_of(int32_t device, void* stream) {
  for (Counters* c = all_counters; c; c = c->next) {
    if (c->stream == stream && c->device == device) return c;
  }
  int64_t size = kCounters, one = 1;
  void* made = nullptr;
  Counters* c = (Counters*)malloc(sizeof(Counters));
  if (!c) return nullptr;
  *c = {device, stream, nullptr, nullptr};
  if (!make_empty(1, &size, &one, kInt32, device, &made) || torch.data_ptr(made, &c->data) ||
      cuda.set_words(c->data, 0, size_t(size), stream)) {
    if (made) torch.delete_tensor(made);
    free(c);
    return nullptr;
  }
  c->next = all_counters;  // read again: others may have been added while torch allocated
  return all_counters = c;  // and the tensor is kept
}

// Buffer `i`, of `count` counters. `taken` counters of its stream are in use by calls that will run beside this one. A
// captured graph may run beside anything: it has its own, which it zeroes each time. False with a Python error.
bool take_counters(const Kernel* k, const Frame& f, int64_t i, int64_t n_inputs, int64_t count, int32_t device,
                   int64_t& taken) {
  void* stream = nullptr;
  int64_t one = 1;
  int status = 0, code = 0;
  if (current_stream(device, &stream)) return false;
  OnDevice on(device);
  bool own = cuda.is_capturing(stream, &status) || status || taken + count > kCounters || !torch.wrap;
  Counters* c = own ? nullptr : counters_of(device, stream);
  if (c) {
    f.pointers[n_inputs + i] = (char*)c->data + 4 * taken;
    taken += (count + 3) & ~int64_t(3);  // 16 bytes divide each address
    return true;
  }
  if (!allocate_output(k, f, i, n_inputs, kInt32, 4, &count, &one, 1, device)) return false;
  code = count ? cuda.set_words(f.pointers[n_inputs + i], 0, size_t(count), stream) : 0;
  if (code) PyErr_Format(PyExc_RuntimeError, "counters of a kernel could not be set to zero: CUDA error %d", code);
  return !code;
}

// Allocates outputs and temporaries from torch's allocator. `p`, the program after the guards, moves to the steps.
// False with a Python error set and the buffers dropped. `taken`: counters in use (see `take_counters`).
bool allocate_on_gpu(const Kernel* k, const int64_t*& p, const Frame& f, int32_t device, int64_t& taken) {
  int64_t n_buffers = *p++, inputs = k->n_pointers - n_buffers, *dims = f.dims;
  if (n_buffers) memset(f.outputs, 0, sizeof(uintptr_t) * n_buffers);
  for (int64_t i = 0; i < n_buffers; i++) {
    int64_t output = p[0], scalar = p[1], itemsize = p[2], n = p[3], count = 1, one = 1;
    p += 4;
    for (int64_t d = 0; d < (output == 1 ? 2 * n : n); d++) dims[d] = value(p, f.slots, f.stack);
    for (int64_t d = 0; d < n; d++) count *= dims[d];
    bool made = output == 2 ? take_counters(k, f, i, inputs, count, device, taken)
                : output    ? allocate_output(k, f, i, inputs, int32_t(scalar), itemsize, dims, dims + n, n, device)
                            : allocate_output(k, f, i, inputs, int32_t(scalar), itemsize, &count, &one, 1, device);
    if (!made) {
      drop_outputs(f, n_buffers);
      return false;
    }
  }
  p++;
  return true;
}

// Allocates and launches on the current stream. `p`, the program after the guards, moves to the results, which the
// caller takes before it drops the outputs. False with the outputs dropped and a Python error, or with the driver's
// `code`. `s`: the number of steps launched.
bool execute_on_gpu(const Kernel* k, const int64_t*& p, const Frame& f, int32_t device, int64_t& s, int& code) {
  Range range(k->names);
  int64_t taken = 0;
  if (!allocate_on_gpu(k, p, f, device, taken)) return false;
  void* stream = nullptr;
  code = current_stream(device, &stream);
  if (!code) {
    OnDevice on(device);
    code = on.code;
    bool watched = is_watched(thread_state, true);
    if (watched) remember(k, f);
    for (Event event; s < k->n_steps && !code; s++) {
      if (watched) event.begin(name_of(k->names, s));
      code = launch_step(k, s, p, f, stream);
    }
  }
  if (code) drop_outputs(f, k->n_buffers);
  return !code;
}

// Launches on the current stream and wraps the results. Null with a Python error.
PyObject* run_on_gpu(const Kernel* k, const int64_t* p, const Frame& f, PyObject* const* args, int32_t device) {
  int64_t s = 0;
  int code = 0;
  bool done = execute_on_gpu(k, p, f, device, s, code);
  if (!done) return code ? fail_launch(k, s ? s - 1 : 0, code, args) : nullptr;
  PyObject* out = results(p, f, args);
  drop_outputs(f, k->n_buffers);
  return out;
}

}  // namespace
