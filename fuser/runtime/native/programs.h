// State that a thread keeps between calls, and the evaluation of sizes: polynomials as programs of int64 words.
#pragma once

#include "pool.h"

namespace {

// -- State of a thread ------------------------------------------------------------------------------------------------
struct ThreadState {
  const uint64_t* dispatch_keys;  // torch's own thread-local pair: included, excluded
  char* arena;                    // small temporaries and scratch; one launch uses it at a time
  size_t arena_size;
  const Observers* observers;  // torch's list for this thread (see events.h)
  unsigned unasked;
  bool process_watched;
  int enabled;  // config.override(enabled=...) in this thread: 1 or -1; else 0
  int64_t output_limit = -1;  // config.override(output_limit_bytes=...) in this thread; -1: none
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
enum Item { CONST, LOAD, CODE, BIND };         // how a number is given, or that it is stored
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

// The value of the item at `p`; `p` moves past it.
inline int64_t value(const int64_t*& p, const int64_t* slots, int64_t* stack) {
  int64_t tag = *p++, v = *p++;
  if (tag == CONST) return v;
  if (tag == LOAD) return slots[v];
  const int64_t* ops = p;
  p += v;
  return run_ops(ops, p, slots, stack);
}

}  // namespace
