// Libraries of CPU kernels: loaded once for all kernels of a path, unloaded with the last kernel or to make room.
#pragma once

#include "events.h"

namespace {

// All fields are accessed under the GIL. A library is unloaded only while `running` is 0: each call counts itself
// there from finding its kernel until the end of its last step. The kernel itself stays, since it belongs to the
// handle that is being called.
struct Library {
  Library* next;
  void* handle;          // dlopen's; null while it is unloaded
  int64_t users;         // kernels that have an entry in it
  int64_t running;       // calls that are in it, or about to be
  uint64_t used, loads;  // time of the last call; number of loads and unloads: a kernel's entries belong to one of them
  char path[1];
} *all_libraries;

int64_t loaded_libraries;
uint64_t library_calls;  // the clock of `used`

void unload_library(Library* l) {
  if (!l->handle) return;
  dlclose(l->handle);
  l->handle = nullptr;
  l->loads++;
  loaded_libraries--;
}

// Unloads the least recently called libraries while there are more than `limit`, except those of running calls.
void make_room(int64_t limit) {
  while (loaded_libraries > limit) {
    Library* oldest = nullptr;
    for (Library* l = all_libraries; l; l = l->next) {
      if (l->handle && !l->running && (!oldest || l->used < oldest->used)) oldest = l;
    }
    if (!oldest) return;
    unload_library(oldest);
  }
}

int64_t library_limit() {
  PyObject* limit = torch.settings ? PyDict_GetItemWithError(torch.settings, torch.library_limit_name) : nullptr;
  long long n = limit ? PyLong_AsLongLong(limit) : INT64_MAX;
  if (!PyErr_Occurred()) return n;
  PyErr_Clear();
  return INT64_MAX;
}

// Whether the library is loaded now; if not, `dlerror` says why.
bool load_library(Library* l) {
  l->used = ++library_calls;
  if (l->handle) return true;
  make_room(library_limit() - 1);
  l->handle = dlopen(l->path, RTLD_NOW | RTLD_LOCAL);
  if (!l->handle) return false;
  l->loads++;
  loaded_libraries++;
  return true;
}

// The record of the library at `path`, with one more user; null if memory is lacking.
Library* take_library(const char* path) {
  for (Library* l = all_libraries; l; l = l->next) {
    if (strcmp(l->path, path)) continue;
    l->users++;
    return l;
  }
  size_t length = strlen(path);
  Library* l = (Library*)calloc(1, sizeof(Library) + length);
  if (!l) return nullptr;
  memcpy(l->path, path, length);
  l->users = 1;
  l->next = all_libraries;
  return all_libraries = l;
}

void leave_library(Library* l) {
  if (!l || --l->users) return;
  unload_library(l);
  Library** at = &all_libraries;
  while (*at != l) at = &(*at)->next;
  *at = l->next;
  free(l);
}

}  // namespace
