// torch and NVIDIA's driver as the launcher uses them: addresses and objects passed to `module_setup`.
#pragma once

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

#include <new>

namespace {

// -- DLPack 1.x, as in its specification ------------------------------------------------------------------------------
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
constexpr int32_t kInt32 = 3, kInt64 = 4;  // torch's numbers of the dtypes
constexpr int kLayout = 12;  // version of encode.py's words and of this module's functions: LAYOUT there; both change together

// -- Objects passed to `setup` ----------------------------------------------------------------------------------------
typedef void (*StepEntry)(char* const*, const int64_t*, const double*, int64_t, int64_t, char*, int32_t*);
typedef PyObject* (*WrapTensor)(void* const& tensor);  // at::TensorBase const&: a reference to one pointer

// at::detail::empty_strided_cuda in C++: c10::IntArrayRef, std::optional<c10::Device>, and at::TensorBase, which has a
// destructor and is returned through the caller's memory.
struct IntArrayRef {
  const int64_t* data;
  size_t size;
};
struct MaybeDevice {
  int8_t type, index;
  bool known;
};
struct NewTensor {
  void* impl;
  NewTensor(NewTensor&& other) : impl(other.impl) {}
  ~NewTensor() {}
};
typedef NewTensor (*EmptyStridedCuda)(IntArrayRef sizes, IntArrayRef strides, int8_t scalar, MaybeDevice device);

struct Observers {  // at::RecordFunctionTLS, which begins with a std::vector
  const void *begin, *end;
};

struct {
  PyTypeObject *tensor, *parameter;
  DLExchange* dlpack;
  // Offsets of the TensorImpl pointer in a tensor object, and of the dispatch keys in it; -1: call `plain_tensor`.
  int64_t impl_offset, keys_offset;
  uint64_t plain_keys[8];
  int n_plain_keys;
  bool (*impl_requires_grad)(const char* impl);  // null: Tensor.requires_grad's own getter
  getter requires_grad, version;
  void *requires_grad_closure, *version_closure;
  // The thread's dispatch keys, as differences from the default; without library: call `plain_context`.
  void* c10_library;
  uint64_t harmless_included, harmful_excluded;
  bool (*grad_enabled)();
  bool (*function_mode)();
  int (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
  EmptyStridedCuda empty_strided_cuda;  // 0.3 µs faster than the shim's, which uses the dispatcher; null: the shim's
  int (*delete_tensor)(void*);
  int (*data_ptr)(void*, void**);
  WrapTensor wrap;
  // The rest of the shim: a tensor's sizes and so on, for operators of TorchScript. All of them, or none.
  int (*sizes)(void*, int64_t**);
  int (*strides)(void*, int64_t**);
  int (*dim)(void*, int64_t*);
  int (*dtype)(void*, int32_t*);
  int (*device_type)(void*, int32_t*);
  int (*device_index)(void*, int32_t*);
  int (*storage_size)(void*, int64_t*);  // bytes
  int (*another)(void*, void**);  // one more handle of the same tensor
  int (*reinterpret)(void*, int64_t, const int64_t*, const int64_t*, int64_t more_offset, void**);
  // Flash attention: query, key, value, dropout, causal, mask, scale; results and logsumexp. Null: Python calls it.
  int (*cpu_attention)(void*, void*, void*, double, int32_t, void**, double*, void**, void**);
  void (*fail)(const char* function, const char* file, uint32_t line, const char* message);  // throws a c10::Error
  uint32_t dtype_words[64];       // DLPack's dtypes by torch's numbers; 0 if there is none
  int (*num_threads)();
  void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned);
  void (*gomp_barrier)();
  int (*omp_thread_num)();
  int (*omp_num_threads)();
  int (*omp_in_parallel)();
  // Observers of operators; all of them, or none. `thread_observers` gives this thread's list, a std::vector.
  const Observers* (*thread_observers)();
  bool (*process_observers)();
  int (*record_start)(const char* name, void* options, const void* inputs, uint64_t n_inputs, void** record);
  int (*record_end)(void* record);
  PyObject *py_empty_strided, *py_warm, *py_scratch, *plain_tensor, *plain_context, *encode, *py_is_whole, *forward_ad, *level_name;
  PyObject *settings, *limit_name, *idle_name, *library_limit_name, *quick_name;  // config's values by name; null: the pool's own limits
} torch;

// NVIDIA's driver, as far as launches need it; set by the first GPU kernel's library.
struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned n_attributes;
};

struct {
  // cuLaunchKernelEx, which is 0.1 µs faster than cuLaunchKernel.
  int (*launch)(const LaunchConfig* config, void* kernel, void** params, void** extra);
  int (*current_device)(int* device);
  int (*retain)(void** context, int device);
  int (*release)(int device);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*is_capturing)(void* stream, int* status);
  int (*copy_to_device)(void* to, const void* from, size_t bytes, void* stream);
  int (*set_words)(void* to, unsigned value, size_t words, void* stream);
} cuda;

uint64_t disabled_devices;  // bit d: DLPack device type d is off
bool switched_off;          // config.enabled is False, for threads without an override

}  // namespace
