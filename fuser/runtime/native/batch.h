// `handle.each`: independent calls, run together.
#pragma once

#include "call.h"

namespace {

// -- Several calls at once --------------------------------------------------------------------------------------------
// `handle.each` runs independent calls, such as one optimiser step for hundreds of parameters. One parallel region
// runs all of their first steps, then all of their second ones, and so on. A thread runs a part of the work of all
// calls together, so that small calls go to different threads and large ones are shared.
constexpr Py_ssize_t kMembers = 128;                   // calls in a region: more would not stay in the cache
constexpr size_t kMembersTemporary = size_t(1) << 20;  // bytes of temporaries from which a region takes no more calls
constexpr int64_t kMembersWork = int64_t(1) << 16;    // element operations that are worth one more thread in a region
constexpr int32_t kDone = 0, kUntried = -1, kLater = -2;  // a call's state; else the status of its kernel

struct Member {
  Kernel* k;
  Frame f;
  const int64_t* rest;  // the program from the results on
  Py_ssize_t call;
  size_t temporary;  // offset of this call's temporaries
  int32_t status;
};

struct Batch {
  Member* members;
  Py_ssize_t n;
  size_t temporary, scratch;
  int64_t steps, work, threads;
  char* memory;
  int32_t device;  // of a GPU's batch
  int64_t counters;  // counters of the stream that it uses
  bool watched;
  Event event;  // of the calling thread's current step
};

inline int64_t step_work(const Member& m, int64_t s) {
  if (s >= m.k->n_steps) return 0;
  int64_t work = m.f.steps[3 * s + 1];
  return work > 1 ? work : 1;
}

// Thread `i` of `n` runs its part of the work of all members' step `s`. A unit belongs to the part in which it ends.
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

// The step of several calls is one event, with the name of the first call's step.
const char* batch_name(const Batch* b, int64_t s) {
  for (Py_ssize_t j = 0; j < b->n; j++) {
    if (s < b->members[j].k->n_steps) return name_of(b->members[j].k->names, s);
  }
  return nullptr;
}

void batch_body(void* p) {
  Batch* b = (Batch*)p;
  int64_t team = torch.omp_num_threads(), i = torch.omp_thread_num(), n = b->threads < team ? b->threads : team;
  for (int64_t s = 0; s < b->steps; s++) {
    if (s) torch.gomp_barrier();
    if (b->watched && !i) b->event.begin(batch_name(b, s));
    if (i < n) batch_part(b, s, i, n);
  }
}

// Runs the members; false with a Python error if memory is lacking.
bool run_batch(Batch& b, ThreadState& ts) {
  Range range(b.members[0].k->names);
  int64_t threads = thread_count(b.work / kMembersWork, b.work);
  b.threads = threads;
  size_t bytes = b.temporary + b.scratch * size_t(threads);
  Memory held;
  b.memory = bytes ? take_memory(bytes, ts, held) : nullptr;
  if (bytes && !b.memory) {
    held.release();
    if (!PyErr_Occurred()) PyErr_NoMemory();
    return false;
  }
  for (Py_ssize_t j = 0; j < b.n; j++) place_temporaries(b.members[j].k, b.members[j].f, b.memory + b.members[j].temporary);
  b.watched = is_watched(ts, true);
  for (Py_ssize_t j = 0; b.watched && j < b.n; j++) remember(b.members[j].k, b.members[j].f);
  PyThreadState* state = b.work >= kReleaseWork ? PyEval_SaveThread() : nullptr;
  if (threads > 1) {
    open_region(batch_body, &b);
  } else {
    for (int64_t s = 0; s < b.steps; s++) {
      if (b.watched) b.event.begin(batch_name(&b, s));
      batch_part(&b, s, 0, 1);
    }
  }
  b.event.end();
  if (state) PyEval_RestoreThread(state);
  held.release();
  return true;
}

// All calls of one `each`. `objects` are their arguments, `arity` for each call.
struct Calls {
  Handle* h;
  PyObject* const* objects;
  Py_ssize_t arity, n;
  PyObject* out;  // null: results are not kept
  int64_t frame_words, *words;
  Arg* args;
  int32_t* states;
  Batch batch;

  PyObject* const* of(Py_ssize_t c) const { return objects + c * arity; }
};

void drop_batch(Batch& b) {
  for (Py_ssize_t j = 0; j < b.n; j++) {
    drop_outputs(b.members[j].f, b.members[j].k->n_buffers);
    end_call(b.members[j].k);
  }
  b.n = b.steps = b.work = 0;
  b.temporary = b.scratch = 0;
  b.counters = 0;
}

// -- Several calls at once on a GPU: one launch for each step, whose programs find their arguments in a table ---------
constexpr int64_t kTableWords = 7000;  // the driver copies up to 64 KiB before the call of a copy returns
constexpr size_t kGpuTemporary = size_t(64) << 20;
struct BatchForm {
  int64_t entry, threads, shared, extra;
};

// Whether `k` has a form for many argument sets; it is compiled at the first request.
bool has_batch_form(Kernel* k) {
  if (k->batch || k->no_batch) return k->batch;
  k->no_batch = true;  // unless all succeeds
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

// Whether launches on the current stream of `device` may be batched: it is not being captured.
bool may_batch(int32_t device) {
  void* stream = nullptr;
  int status = 0;
  bool free = !current_stream(device, &stream) && !cuda.is_capturing(stream, &status) && !status;
  PyErr_Clear();
  return free;
}

// The words of the tables of all steps for `n` argument sets like that of `m`.
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

// Fills the tables, step by step: for each set the number of its first program, then each set's arguments. Writes the
// numbers of programs and the tables' offsets to `plan`. False if there are too many programs.
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
  bool watched = is_watched(thread_state, true);
  for (Py_ssize_t j = 0; watched && j < b.n; j++) remember(k, b.members[j].f);
  Range range(k->names);
  Event event;
  int code = 0;
  for (s = 0; s < k->n_steps && !code; s++) {
    int64_t *table = device_table + plan[s][1], nothing = 0;
    void* pointers[16] = {&table};
    for (int i = 1; i < 16; i++) pointers[i] = &nothing;
    if (watched) event.begin(name_of(k->names, s));
    code = launch_kernel((StepEntry)forms[s].entry, plan[s][0], forms[s].threads, forms[s].shared, stream, pointers);
  }
  return code;
}

// One copy, and one launch for each step, for all members. False with a Python error. Their `rest` moves to the
// results.
bool run_gpu_batch(Calls& a) {
  Batch& b = a.batch;
  const Kernel* k = b.members[0].k;
  int64_t words = table_words(b.members[0], b.n), one = 1, s = 0;
  int64_t* table = (int64_t*)malloc(8 * size_t(words) + 16 * size_t(k->n_steps));
  void *made = nullptr, *data = nullptr, *stream = nullptr;
  if (!table || !make_empty(1, &words, &one, kInt64, b.device, &made) || torch.data_ptr(made, &data)) {
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
  torch.delete_tensor(made);  // torch's allocator does not reuse it before this stream has reached this point
  if (code) fail_launch(k, s ? s - 1 : 0, code, a.of(b.members[0].call));
  return !code;
}

bool flush_batch(Calls& a, ThreadState& ts);

// Adds call `c`, with its kernel `m.k` and the rest `p` of its program, to a batch for that kernel on that device, if
// possible; calls that do not fit the batch are left to a later round. False with a Python error.
bool collect_on_gpu(Calls& a, Py_ssize_t c, Member& m, const int64_t* p, int32_t device, ThreadState& ts) {
  Batch& b = a.batch;
  if (b.n && (b.members[0].k != m.k || b.device != device)) {
    a.states[c] = kLater;
    return true;
  }
  if (!b.n && (a.n < 2 || !torch.wrap || !torch.empty_strided || !has_batch_form(m.k) || !may_batch(device))) return true;
  if (!allocate_on_gpu(m.k, p, m.f, device, b.counters)) return false;
  m.rest = p;
  m.call = c;
  b.device = device;
  b.members[b.n++] = m;
  return (b.n < kMembers && table_words(m, b.n + 1) <= kTableWords) || flush_batch(a, ts);
}

// Runs the collected calls and keeps their results; empties the batch. False with a Python error.
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

// Adds call `c` to the batch if a kernel accepts it. False with a Python error.
bool collect(Calls& a, Py_ssize_t c, ThreadState& ts) {
  Batch& b = a.batch;
  int32_t device = -1;
  Member m = {};
  const int64_t* p = nullptr;
  if (!read_args(a.of(c), a.arity, a.args, device)) return true;
  if (a.h->words > a.frame_words) return true;  // a kernel was added; checked after code that may run Python
  m.k = find_kernel(a.h, a.args, a.arity, a.words + b.n * a.frame_words, m.f, p);
  if (!m.k) return true;
  if (m.k->library) return collect_on_gpu(a, c, m, p, device, ts);
  if (b.n && b.members[0].k->library && !flush_batch(a, ts)) return false;
  if (!begin_call(m.k)) return true;
  Needs need;
  if (!prepare(m.k, p, m.f, need)) {
    end_call(m.k);
    return false;
  }
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

// Runs the calls in batches, then those that no kernel accepted one by one. False with a Python error.
bool run_calls(Calls& a, ThreadState& ts) {
  bool ok = true;
  for (Py_ssize_t c = 0; c < a.n; c++) a.states[c] = kUntried;
  if (a.h->n_kernels && context_is_plain(ts)) {
    for (Py_ssize_t c = 0; ok && c < a.n; c++) ok = collect(a, c, ts);
    if (ok) ok = flush_batch(a, ts);
    for (bool again = true; ok && again;) {  // calls of the GPU's other kernels, one kernel per round
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
  int64_t frame_words = h->words;  // read once: later code may run Python, and another thread may add kernels
  size_t words = size_t(frame_words) * size_t(most);
  char* memory = (char*)malloc(sizeof(Member) * most + sizeof(Arg) * arity + 8 * words + 4 * calls + 1);
  PyObject* out = keep ? PyTuple_New(calls) : nullptr;
  bool ok = memory && (out || !keep);
  if (!memory) PyErr_NoMemory();
  if (ok) {
    Calls a = {h, objects + 2, arity, calls, out, frame_words, nullptr, nullptr, nullptr, {}};
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

}  // namespace
