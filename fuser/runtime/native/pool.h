// Memory of temporaries: blocks that stay warm between calls, shared by all threads, bounded in size and time.
#pragma once

#include "given.h"

namespace {

constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kPoolMin = size_t(256) << 10;  // smaller sizes come from a thread's own arena
constexpr size_t kAdvise = size_t(4) << 20;     // larger fresh outputs are advised to use huge pages
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

// Four classes per octave, so that slightly different sizes share blocks.
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

// The smallest idle block that is large enough; else a new one in place of the largest idle one: temporaries are
// needed one kernel at a time, so that one block of the largest size serves all.
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

// Unlinks every idle block that is idle since before `before`, and the oldest while more than `limit` bytes are idle.
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

// Runs only while there are idle blocks, and ends by itself when there are none.
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

// Reads the limits of `config` again. Under the GIL, before the pool is used.
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

}  // namespace
