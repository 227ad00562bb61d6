"""The native launcher's way to a GPU, on the CPU: a driver made for the test runs "kernels" on memory of the host."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shlex
import shutil
import subprocess

import pytest
import torch

from fuser.cuda.batch import SETS
from fuser.ir.sizes import ADD, FLOORDIV, LT, PUSH, SLOT
from fuser.kernel_spec import Bind, GpuLaunch, InputPattern, Step
from fuser.runtime import launcher
from tests.unit import runtime_support as support

DRIVER = r"""
#include <stdint.h>
#include <string.h>
typedef int64_t N;
extern "C" {
N launches, copies, capturing, fails, sets, n_places, places[1000];
typedef void (*Kernel)(unsigned units, void** params);
struct Config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned n; };  // as cuda.h has it
int launch(const Config* c, Kernel k, void** params, void**) {
  launches++;
  if (fails || c->block[0] != 128 || c->grid[1] != 1 || c->attributes || c->n) return 1;
  k(c->grid[0], params);
  return 0;
}
int current_device(int* d) { *d = -1; return 0; }
int retain(void**, int) { return 999; }
int release(int) { return 999; }
int push(void*) { return 999; }
int pop(void**) { return 999; }
int is_capturing(void*, int* status) { *status = (int)capturing; return 0; }
int copy_to_device(void* to, const void* from, size_t n, void*) { copies++; memcpy(to, from, n); return 0; }

static void part(float* x, float* o, double a, int n, unsigned unit) {
  for (int i = unit * 100; i < n && i < int(unit + 1) * 100; i++) o[i] = float(x[i] * a + 1);
}
void scale(unsigned units, void** p) {
  for (unsigned u = 0; u < units; u++) part(*(float**)p[1], *(float**)p[3], *(double*)p[2], *(int*)p[0], u);
}
int set_words(int* to, unsigned value, size_t n, void*) {
  sets++;
  for (size_t i = 0; i < n; i++) to[i] = int(value);
  return 0;
}
// Writes down where its counters are, and leaves them zero; -1 for any that was not.
void count(unsigned units, void** p) {
  int *own = *(int**)p[1], ok = 1;
  for (unsigned u = 0; u < units; u++) ok &= ++own[u] == 1;
  for (unsigned u = 0; u < units; u++) own[u] = 0;
  places[n_places++ % 1000] = ok ? N(own) : -1;
}
void count_each(unsigned units, void** p) {
  N* table = *(N**)p[0];
  for (int j = 0; j < 128 && table[j] < units; j++) {
    N end = j < 127 && table[j + 1] < units ? table[j + 1] : units;
    void* own[] = {table + 128 + 2 * j, table + 128 + 2 * j + 1};
    count(unsigned(end - table[j]), own);
  }
}
void scale_each(unsigned units, void** p) {
  N* table = *(N**)p[0];
  for (unsigned u = 0; u < units; u++) {
    int set = -1;
    for (int j = 0; j < 128; j++) set += table[j] <= N(u);
    N* own = table + 128 + 4 * set;
    double a;
    memcpy(&a, own + 2, 8);
    part((float*)own[1], (float*)own[3], a, int(own[0]), u - unsigned(table[set]));
  }
}
}
"""
FUNCTIONS = ("launch", "current_device", "retain", "release", "push", "pop", "is_capturing", "copy_to_device",
             "set_words")
N = (SLOT, 0)


class Library:
    """What `fuser.cuda.driver.Library` is to the launcher."""

    def __init__(self, lib, steps=1, batch=True, name="scale"):
        def address(name):
            return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value

        self.entries = (address(name),) * steps
        self.functions = tuple(address(name) for name in FUNCTIONS)
        self.form = (address(f"{name}_each"), 128, 0, 1) * steps if batch else ()
        self.asked = 0

    def batch(self):
        self.asked += 1
        return self.form

    def failure(self, step, code, args):
        return f"step {step} failed with {code} for {len(args)} arguments"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.cpp", folder / "driver.so"
    source.write_text(DRIVER)
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "clang++"]
    subprocess.run([*compiler, "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def counters(driver):
    names = ("launches", "copies", "capturing", "fails", "sets", "n_places")
    values = {n: ctypes.c_int64.in_dll(driver, n) for n in names}
    for v in values.values():
        v.value = 0
    yield values
    values["capturing"].value = values["fails"].value = 0


def scale(*guards, steps=1):
    """x * a + 1, in programs of 100 elements, `steps` times: the second one reads what the first one wrote."""
    def step(x, out):
        params = (("int32", N), ("pointer", x), ("float64", 0), ("pointer", out), ("null", 0))
        units = (*N, PUSH, 99, ADD, PUSH, 100, FLOORDIV)
        return Step("scale", units, N, support.ZERO, GpuLaunch(128, 0, params))

    inputs = [support.vector(Bind(0)), InputPattern("float", slot=0)]
    buffers = [support.output(N, is_output=i == steps - 1) for i in range(steps)]
    results = (("buffer", steps - 1),)
    return support.program(
        inputs, 1, buffers, [step(i, i + 1) for i in range(steps)], results, floats=1, guards=guards
    )


def make(library, *programs):
    assert launcher.wait(60), launcher.reason()
    handle = launcher.native().Handle(lambda args, status: "slow")
    for p in programs:
        handle.add_kernel(p, library)
    return handle


def calls(sizes):
    torch.manual_seed(0)
    return [v for i, n in enumerate(sizes) for v in (torch.randint(-9, 9, (n,)).float(), 0.5 * i)]


def check(out, args, steps=1):
    for got, x, a in zip(out, args[::2], args[1::2], strict=True):
        for _ in range(steps):
            x = x * a + 1
        torch.testing.assert_close(got, x)


SIZES = [5, 100, 0, 1, 101, 1000, 0, 7]


def test_one_call(driver, counters):
    handle = make(Library(driver), scale())
    args = calls([250])
    check([handle(*args)], args)
    assert (counters["launches"].value, counters["copies"].value, handle.hits) == (1, 0, 1)


def test_launches_are_events_of_a_profiler(driver, counters):
    handle = make(Library(driver, 2), scale(steps=2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        handle(*calls([250]))
        handle.each(2, True, *calls(SIZES))  # together: one launch for each step
    assert [e.name for e in found.events() if e.name == "scale"] == ["scale"] * 4
    assert handle.seen == (((7,), True),)
    handle.forget()
    assert handle.seen == (None,)


@pytest.mark.parametrize("steps", [1, 3])
def test_equal_calls_are_one_launch_for_each_step(driver, counters, steps):
    library = Library(driver, steps)
    handle = make(library, scale(steps=steps))
    args = calls(SIZES)
    for turn in (1, 2):
        check(handle.each(2, True, *args), args, steps)
        assert (counters["launches"].value, counters["copies"].value) == (turn * steps, turn)
    assert (handle.hits, handle.misses, library.asked) == (2 * len(SIZES), 0, 1)
    assert handle.each(2, False, *args) is None


def test_many_calls_are_some_launches(driver, counters):
    handle = make(Library(driver), scale())
    args = calls([3, 250] * 150)
    check(handle.each(2, True, *args), args)
    assert counters["launches"].value == counters["copies"].value == -(-300 // SETS)


def test_calls_of_several_kernels_are_sorted(driver, counters):
    library = Library(driver)
    short, long = (*N, PUSH, 50, LT), (PUSH, 49, *N, LT)
    handle = make(library, scale(short), scale(long))
    args = calls([3, 250, 4, 260, 5, 270])
    check(handle.each(2, True, *args), args)
    assert (counters["launches"].value, handle.kernel_hits) == (2, (3, 3))


def test_what_no_kernel_takes_goes_alone(driver, counters):
    handle = make(Library(driver), scale())
    args = calls([3, 4, 5])
    args[2] = args[2].double()
    out = handle.each(2, True, *args)
    assert out[1] == "slow" and (handle.hits, handle.misses, counters["launches"].value) == (2, 1, 1)
    check([out[0], out[2]], args[:2] + args[4:])


@pytest.mark.parametrize("why", ["capturing", "no form", "one call"])
def test_where_calls_are_launched_one_by_one(driver, counters, why):
    handle = make(Library(driver, batch=why != "no form"), scale())
    counters["capturing"].value = int(why == "capturing")
    args = calls([250] if why == "one call" else SIZES[:5])
    check(handle.each(2, True, *args), args)
    launched = sum(x.numel() > 0 for x in args[::2])
    assert (counters["launches"].value, counters["copies"].value) == (launched, 0)


def test_a_batch_that_fails_names_the_step(driver, counters):
    handle = make(Library(driver), scale())
    counters["fails"].value = 1
    with pytest.raises(RuntimeError, match="step 0 failed with 1 for 2 arguments"):
        handle.each(2, True, *calls(SIZES))


def test_results_of_a_batch_are_given_back(driver, counters):
    handle = make(Library(driver), scale())
    x = torch.ones(1000)
    for _ in range(3):
        out = handle.each(2, True, x, 2.0, x, 3.0)
        assert [t._is_view() for t in out] == [False, False] and out[0].data_ptr() != out[1].data_ptr()
    check(out, [x, 2.0, x, 3.0])


def test_an_input_written_in_place_is_the_result(driver, counters):
    step = dataclasses.replace(scale().steps[0])
    params = (("int32", N), ("pointer", 0), ("float64", 0), ("pointer", 0), ("null", 0))
    step = dataclasses.replace(step, gpu=GpuLaunch(128, 0, params))
    inputs = [support.vector(Bind(0)), InputPattern("float", slot=0)]
    handle = make(Library(driver), support.program(inputs, 1, [], [step], [("input", 0)], floats=1))
    args = calls(SIZES)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    out = handle.each(2, True, *args)
    assert all(a is b for a, b in zip(out, args[::2]))
    check(out, before)


def counting(units):
    """A kernel of a counter for each element of its input."""
    counted = dataclasses.replace(support.output(N, is_output=False), dtype=torch.int32, counters=True)
    params = (("pointer", 0), ("pointer", 1), ("null", 0))
    step = Step("count", units, N, support.ZERO, GpuLaunch(128, 0, params))
    return support.program([support.vector(Bind(0))], 1, [counted], [step], [("input", 0)])


def places(driver, counters):
    n = counters["n_places"].value
    counters["n_places"].value = 0
    return list((ctypes.c_int64 * 1000).in_dll(driver, "places"))[:n]


def test_counters_are_zero_and_one_stream_has_its_own(driver, counters):
    handle = make(Library(driver, name="count"), counting(N))
    for n in (5, 100, 1):
        handle(torch.zeros(n))
    first, *others = places(driver, counters)
    assert first != -1 and others == [first, first] and counters["sets"].value <= 1
    handle(torch.zeros(20000))  # more than there are
    before = counters["sets"].value
    counters["capturing"].value = 1
    handle(torch.zeros(5))
    (large, recorded) = places(driver, counters)
    assert -1 not in (large, recorded) and first not in (large, recorded) and counters["sets"].value == before + 1


def test_counters_of_a_batch_are_apart(driver, counters):
    handle = make(Library(driver, name="count"), counting(N))
    sizes = [1 + 7 * i % 50 for i in range(SETS)]
    handle.each(1, False, *(torch.zeros(n) for n in sizes))
    found = places(driver, counters)
    assert counters["launches"].value == 1 and len(found) == SETS and -1 not in found
    assert all(a + 4 * n <= b for a, n, b in zip(found, sizes, found[1:])) and all(a % 16 == 0 for a in found)
    handle.each(1, False, *(torch.zeros(300) for _ in range(SETS)))  # more than there are: some have their own
    found = sorted(places(driver, counters))
    assert len(found) == SETS and found[0] != -1 and all(a + 1200 <= b for a, b in zip(found, found[1:]))
