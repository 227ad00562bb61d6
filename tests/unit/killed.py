"""Processes that compile into one cache and are killed, round after round: `killed.py FOLDER PROCESSES ROUNDS SEED`.

Each round forks processes that make and use the same new kernels, trim the cache and clear parts of it, and kills them
one by one within a second and a half. Then a process that nobody kills uses the same kernels. Printed are, as JSON,
what was broken and left behind, and how many processes were killed at their work.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time
import warnings
from typing import Any

import torch
from torch import fx

import fuser
from fuser import cache, config, pipeline
from fuser.cpu import fused_kernel
from fuser.runtime import eviction, launcher

X = torch.arange(12.0).reshape(4, 3) / 7


OPS = (torch.sin, torch.exp, torch.relu, torch.tanh, torch.sigmoid, torch.cos, torch.abs)


def group(number: int) -> Any:
    """A group for each number: seven operators, in an order of its own."""
    ops = [OPS[number // len(OPS) ** n % len(OPS)] for n in range(7)]

    def function(x: torch.Tensor) -> torch.Tensor:
        for op in ops:
            x = op(x) * 0.5
        return torch.softmax(x, -1)

    return function


def work(number: int, turn: int = 0) -> list[str]:
    """Make and use the groups of a round, those of the first turn in all processes; what was wrong."""
    wrong = []
    for function in (group((number * 1000 + turn * 3 + n) * 7919) for n in range(3)):
        handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(function)))
        for _ in range(2):
            if not torch.allclose(handle(X), function(X), atol=1e-6):
                wrong.append(f"round {number}: a result is wrong")
        if handle.hits != 2:
            wrong.append(f"round {number}: {handle.hits} of 2 calls ran the kernel")
    return wrong


def child(number: int, at: int) -> None:
    """One process of a round, until it is killed."""
    eviction._YOUNG_SECONDS = 5.0
    for turn in range(333):  # new kernels, until it is killed
        work(number, turn)
        if at % 8 == 0:
            eviction.trim(config.cache_dir, 1 << 18)
        if at % 16 == 1:
            cache.clear(("plan",), unused=10.0)
        if at % 16 == 2:
            cache.export(os.path.join(os.path.dirname(config.cache_dir), "bundle"))


def killed(number: int, processes: int, chance: random.Random) -> None:
    """A round: start, and kill one by one."""
    alive = []
    for at in range(processes):
        pid = os.fork()
        if pid == 0:
            try:
                warnings.simplefilter("ignore")
                child(number, at)
            finally:
                os._exit(3)
        alive.append(pid)
    ends = sorted((time.monotonic() + chance.uniform(0.0, 1.5), pid) for pid in alive)
    for end, pid in ends:
        time.sleep(max(end - time.monotonic(), 0.0))
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            problems.append(f"round {number}: a process ended by itself with status {status}")


def next_start(number: int) -> list[str]:
    """What is wrong in a process that starts after a round."""
    end, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = work(number)
            except BaseException as e:
                found = [f"round {number}: raised {e!r}"]
        found += [f"round {number}: said {w.message}" for w in said]
        os.write(start, json.dumps(found).encode())
        os._exit(0)
    os.close(start)
    with os.fdopen(end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    found = json.loads(text) if text else [f"round {number}: the next process crashed"]
    found += [f"round {number}: {p.name}: {p.why}" for p in cache.verify() if "is missing" not in p.why]
    temporary = pathlib.Path(os.environ["TMPDIR"])
    left = (*pathlib.Path(config.cache_dir).rglob(".*"), *temporary.iterdir())
    return found + [f"round {number}: left behind {p}" for p in left]


problems: list[str] = []
if __name__ == "__main__":
    folder, processes, rounds, seed = sys.argv[1], *map(int, sys.argv[2:5])
    launcher.wait(60)
    _ = fused_kernel, pipeline  # imported here, so that every process of a round compiles at once
    torch.set_num_threads(1)
    chance = random.Random(seed)
    for number in range(rounds):
        killed(number, processes, chance)
        problems += next_start(number)
    print(json.dumps({"problems": problems, "killed": rounds * processes}))
