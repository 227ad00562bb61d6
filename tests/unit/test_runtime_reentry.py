"""Kernels that are added while a call, or a read of a handle, lets Python run: nothing is written out of bounds."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from fuser.runtime import launcher
from tests.unit import runtime_support as support
from tests.unit import sanitized

ROOT = pathlib.Path(__file__).parents[2]

# Each case runs in a fork, so that one that writes over memory does not hide the others. Memory that Python gives has
# guard words around it there (PYTHONMALLOC=debug); a kernel added meanwhile needs so much that the stack and malloc's
# memory do not hold it.
_SCRIPT = """
import dataclasses, gc, os, pathlib, sys
import torch
from fuser import config
from fuser.runtime import native_build, torch_abi
from fuser.runtime.encode import encode
from tests.unit import runtime_support as support

library, *other = sys.argv[1:]
native = native_build.load(pathlib.Path(other[0])) if other else native_build.installed()
native = native or native_build.cached(config.cache_dir)
hooks = {}
small = support.mul_add()
huge = dataclasses.replace(small, n_slots=1 << 24)


def fire(what):
    hook = hooks.pop(what, None)
    if hook is not None:
        hook()


def setup(**changes):
    native.setup(torch_abi.describe() | {"encode": encode} | changes)


def plain_context():
    fire("context")
    return True


def plain_tensor(t):
    fire("tensor")
    return True


def collecting(phase, info):
    if phase == "start":
        fire("collection")


gc.callbacks.append(collecting)
gc.disable()
x = torch.ones(7)


def handle(kernels=1):
    made = native.Handle(lambda args, status: "slow")
    for _ in range(kernels):
        made.add_kernel(small, library)
    return made


def call(h):
    for got in (h(x, x, x), h(x, x, x)):
        assert got.tolist() == [2.0] * 7, got


def each(h, n=3):
    for got in h.each(3, True, *[x] * (3 * n)):
        assert got.tolist() == [2.0] * 7, got


def with_collection(kernels, read):
    # The garbage collector runs Python where an object is made: at the first, the second, ... from here on.
    setup()
    for collection in range(8):
        h, left = handle(kernels), [collection]

        def add():
            left[0] -= 1
            if left[0] >= 0:
                hooks["collection"] = add
            else:
                [h.add_kernel(huge, library) for _ in range(60)]

        hooks["collection"] = add
        gc.enable()
        gc.set_threshold(1, 0, 0)
        read(h)
        gc.disable()
        hooks.clear()


def context_adds(run):
    setup(c10_library=None, plain_context=plain_context)
    h = handle()
    hooks["context"] = lambda: h.add_kernel(huge, library)
    run(h)
    assert not hooks and h.kernel_count == 2


def tensor_adds(run):
    setup(keys_offset=-1, impl_offset=-1, plain_tensor=plain_tensor)
    h = handle()
    hooks["tensor"] = lambda: h.add_kernel(huge, library)
    run(h)
    assert not hooks and h.kernel_count == 2


def tensor_resizes():
    # Sizes of more than five dimensions have memory of their own, which is freed while the next argument is looked at.
    a = torch.ones(1, 1, 1, 1, 1, 1, 7)

    def resize(t):
        if t is not a:
            a.resize_(7)
        return True

    setup(keys_offset=-1, impl_offset=-1, plain_tensor=resize)
    assert handle()(a, x, x).tolist() == [2.0] * 7


CASES = {
    "context, call": lambda: context_adds(call),
    "context, each": lambda: context_adds(each),
    "tensor, call": lambda: tensor_adds(call),
    "tensor, each": lambda: tensor_adds(each),
    "sizes of a tensor": tensor_resizes,
    "collection, each": lambda: with_collection(1, lambda h: each(h, 40)),
    "collection, hits": lambda: with_collection(24, lambda h: h.kernel_hits),
}
for name, case in CASES.items():
    child = os.fork()
    if child == 0:
        case()
        gc.collect()
        os._exit(0)
    print(name, os.waitpid(child, 0)[1])
"""


def run(tmp_path: pathlib.Path, *launchers: str, **variables: str) -> str:
    """Every case ends well; what the process said on its error output."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-c", _SCRIPT, support.compile_library(tmp_path), *launchers]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    ended = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and len(ended) == 7, done.stderr
    assert set(ended.values()) == {"0"}, f"{ended}\n{done.stderr[-3000:]}"
    return done.stderr


def test_kernels_added_while_python_runs(tmp_path):
    assert launcher.wait(60), launcher.reason()
    run(tmp_path, PYTHONMALLOC="debug")


@pytest.mark.skipif(not os.environ.get("FUSER_TEST_ALL"), reason="FUSER_TEST_ALL is not set")
@pytest.mark.parametrize("sanitizer", sanitized.SANITIZERS)
def test_the_same_under_sanitizers(tmp_path, sanitizer):
    if (why := sanitized.why_not(sanitizer)) is not None:
        pytest.skip(why)
    said = run(tmp_path, sanitized.built(sanitizer, tmp_path), **sanitized.environment(sanitizer))
    assert not any(word in said for word in sanitized.REPORTS), said
