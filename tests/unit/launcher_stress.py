"""Random calls of shared handles from many threads, while others add kernels, refuse calls and change settings.

`python tests/unit/launcher_stress.py FOLDER LAUNCHER CALLS THREADS SEED`: FOLDER has copies of `runtime_support`'s
library, LAUNCHER is the native launcher's file. Every result is compared with the one that torch gives. Prints what was
done, as JSON. Run under a sanitizer by `test_runtime_sanitizers.py`.
"""

from __future__ import annotations

import gc
import json
import pathlib
import random
import sys
import threading
import time

import torch

from fuser import config
from fuser.ir.sizes import LE, PUSH, SLOT
from fuser.runtime import native_build, torch_abi
from fuser.runtime.encode import encode
from tests.unit import runtime_support as support

SIZES = (1, 2, 3, 5, 8, 17, 64, 100, 257)
LARGE = (40_000, 70_000, 100_000)  # the interpreter is let go meanwhile; temporaries come from the pool
LIBRARY_LIMIT = 3  # of those that FOLDER has, so that they are loaded and unloaded all the time


def mul_add(x, y, z):
    return x * y + z


def scalars(x, a, n, flag):
    return x * a + n + 1000 * flag


def gather(x, index):
    return x[index] if index.numel() and index.max() < len(x) else torch.full((len(index),), -1.0)


def flip(x):
    return (x * x).flip(0)


def vectors(n):
    return [(torch.randn(s), torch.randn(s), torch.randn(s)) for s in n]


# A function, the programs of kernels that compute it, and arguments, some of which no kernel takes.
def kinds():
    def up_to(n):
        return support.mul_add(guards=[(SLOT, 0, PUSH, n, LE)])

    odd = [(torch.randn(4, 3), torch.randn(4, 3), 2.0), (torch.randn(6, dtype=torch.float64), 2, 1.5)]
    rows = [(torch.randn(3, 5),), (torch.randn(7, 4).t(),), (torch.randn(64, 2)[::2],), (torch.randn(300, 130),)]
    double = [(torch.randn(s, dtype=torch.float64), 0.5, 3, bool(s % 2)) for s in SIZES]
    places = [(torch.randn(s), torch.randint(0, s + (s == 17), (9,))) for s in SIZES] + [
        (torch.randn(3), torch.tensor([0, 7]))
    ]
    one = [(a[0],) for a in vectors(SIZES + LARGE)]
    return [
        (mul_add, [support.mul_add(), *map(up_to, (4, 50, 1000))], [*vectors(SIZES * 2 + LARGE), *odd]),
        (lambda x: x + 1, [support.add_one()], [*rows, (torch.randn(2, 2, dtype=torch.float64),)]),
        (lambda x: 2 * x * x, [support.temporaries()], one),
        (flip, [support.flipped_squares()], one),
        (scalars, [support.scalars()], double),
        (gather, [support.gather(), support.gather(2)], places),
    ]


class Stress:
    """The shared handles and what is done to them."""

    def __init__(self, folder: str, launcher: str) -> None:
        self.native = native_build.load(pathlib.Path(launcher))
        described = torch_abi.describe() | {"encode": encode, "is_whole": lambda path: True}
        self.native.setup(described | {"settings": config._values})
        self.libraries = sorted(map(str, pathlib.Path(folder).glob("kernels*.so")))
        self.kinds = [(f, programs, args, [f(*a) for a in args]) for f, programs, args in kinds()]
        self.handles = [(kind, self.handle(kind)) for kind in self.kinds for _ in range(3)]
        self.lock = threading.Lock()
        self.done = dict.fromkeys(("calls", "batches", "others", "hits", "misses"), 0)

    def handle(self, kind):
        function = kind[0]
        made = self.native.Handle(lambda args, status, named=None: function(*args, **(named or {})))
        for program in kind[1]:
            made.add_kernel(program, self.libraries[len(kind[2]) % len(self.libraries)])
        return made

    def count(self, handle) -> None:
        with self.lock:
            self.done["hits"] += handle.hits
            self.done["misses"] += handle.misses

    def run(self, calls: int, seed: int) -> None:
        """`calls` calls and, now and then, something else, all at random."""
        draw = random.Random(seed)
        done = dict.fromkeys(self.done, 0)
        others = [self.add] * 3 + [self.refuse, self.pardon, self.read, self.replace, self.pool, self.switch]
        while done["calls"] < calls:
            at = int(draw.random() * len(self.handles))
            kind, handle = self.handles[at]
            chance = draw.random()
            if chance < 0.97:
                self.call(kind, handle, draw, done)
            elif chance < 0.985:
                self.each(kind, handle, draw, done)
            elif chance < 0.99:
                names = kind[0].__code__.co_varnames
                n = draw.randrange(len(kind[2]))
                self.check(kind, n, handle(**dict(zip(names, kind[2][n]))))
                done["calls"] += 1
            else:
                draw.choice(others)(at, kind, handle, draw)
                done["others"] += 1
        with self.lock:
            for name, number in done.items():
                self.done[name] += number

    @staticmethod
    def check(kind, n, got) -> None:
        if not got.equal(kind[3][n]):
            shapes = [getattr(a, "shape", a) for a in kind[2][n]]
            raise AssertionError(f"{kind[0]} of {shapes}: {got}, not {kind[3][n]}")

    def call(self, kind, handle, draw, done) -> None:
        n = int(draw.random() ** 2 * len(kind[2]))  # small ones mostly
        self.check(kind, n, handle(*kind[2][n]))
        done["calls"] += 1

    def each(self, kind, handle, draw, done) -> None:
        which = [draw.randrange(min(9, len(kind[2]))) for _ in range(draw.choice((1, 2, 3, 40)))]
        keep = draw.random() < 0.8
        got = handle.each(len(kind[2][0]), keep, *[a for n in which for a in kind[2][n]])
        for n, one in zip(which, got or ()):
            self.check(kind, n, one)
        done["calls"] += len(which)
        done["batches"] += 1

    def add(self, at, kind, handle, draw) -> None:
        if handle.kernel_count < 12:
            magnitudes = draw.choice((~0, ~0, 0b1111)) & (1 << 64) - 1
            number = handle.add_kernel(draw.choice(kind[1]), draw.choice(self.libraries), magnitudes)
            if draw.random() < 0.5:
                handle.widen(number, 1 << draw.randrange(20))

    def refuse(self, at, kind, handle, draw) -> None:
        args = draw.choice(kind[2])
        which = args if draw.random() < 0.9 else len(args)
        handle.refuse(kind[0], f"reason {draw.randrange(3)}", which, draw.random() < 0.3)

    def pardon(self, at, kind, handle, draw) -> None:
        handle.pardon(f"reason {draw.randrange(3)}")

    def read(self, at, kind, handle, draw) -> None:
        assert handle.hits >= 0 and handle.misses >= 0 and sum(handle.kernel_hits) >= 0
        assert all(calls >= 0 for _, calls in handle.refused)
        assert self.native.loaded_libraries() >= 0

    def replace(self, at, kind, handle, draw) -> None:
        """The handle may go while other threads are in it."""
        self.handles[at] = kind, self.handle(kind)
        self.count(handle)
        if draw.random() < 0.05:
            gc.collect()

    def pool(self, at, kind, handle, draw) -> None:
        limit, idle = draw.choice((0, 1 << 20, 1 << 28, 1 << 28)), draw.choice((0.0, 0.001, 5.0, 5.0))
        config.set(pool_limit_bytes=limit, pool_idle_seconds=idle)
        self.native.pool_trim()
        assert self.native.pool_stats()["used_blocks"] >= 0
        blocks = [self.native.pool_tensor((70_000,), (1,), 2 | 32 << 8 | 1 << 16, 280_000) for _ in range(3)]
        blocks[1].fill_(1)

    def switch(self, at, kind, handle, draw) -> None:
        on = draw.random() < 0.8
        self.native.set_enabled(1, on)
        self.native.switch(1, draw.choice((-1, 0, 1)))
        if not on:
            time.sleep(0)
        self.native.set_enabled(1, True)
        self.native.switch(1, 0)


def main(folder: str, launcher: str, calls: str, threads: str, seed: str) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(2e-4)
    config.set(library_limit=LIBRARY_LIMIT)
    torch.manual_seed(int(seed))
    stress, failed = Stress(folder, launcher), []

    def work(n: int) -> None:
        try:
            stress.run(int(calls) // int(threads), 1000 * int(seed) + n)
        except BaseException as e:
            failed.append(e)

    began = time.monotonic()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    for _, handle in stress.handles:
        stress.count(handle)
    print(json.dumps(stress.done | {"seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
