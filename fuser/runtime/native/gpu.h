// One run of a kernel on a GPU: outputs from torch's allocator, each step a launch on the current stream.
#pragma once

#include "run.h"

namespace {

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
  LaunchConfig config = {{unsigned(units), 1, 1}, {unsigned(threads), 1, 1}, unsigned(shared), stream, nullptr, 0};
  return cuda.launch(&config, (void*)entry, pointers, nullptr);
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

}  // namespace
