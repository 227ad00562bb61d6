"""`python -m benchmarks.problems FOLDER`: problems in KernelBench's form beside eager and TorchInductor.

A problem is a Python file with a class `Model` and two functions: `get_init_inputs` gives its arguments, `get_inputs`
those of a call. The files are somebody else's: bring a checkout of KernelBench, and run only files that you trust.
Each is checked against eager; what differs is said beside TorchInductor's distance, since a net in training mode may
make a rounding as large as its result. With `--gradients` a call is a forward and a backward pass, and the gradients of
parameters and inputs are compared, too. With `--workers`, processes compile side by side and are timed one by one.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import fcntl
import functools
import math
import multiprocessing
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.checks import tensors
from fuser.lazy_dataclasses import dataclass

Call = Callable[[], Any]
NEAR = 1e-3  # of the largest element of a result


@dataclass
class Outcome:
    """By contestant: milliseconds of a call, seconds of the first one, the distance from eager; why it gave nothing.

    memory: MiB of a GPU's memory that its calls took at most, beside what was there before them.
    """

    steady: dict[str, float]
    first: dict[str, float]
    far: dict[str, float]
    failed: dict[str, str]
    memory: dict[str, float]


@dataclass(frozen=True)
class Options:
    """What is asked of all problems. `lock` is a file that a process holds while it measures."""

    device: str
    smaller: int
    backends: tuple[str, ...]
    gradients: bool = False
    lock: str = ""


class _Smaller(ast.NodeTransformer):
    """Sizes from 48 on that a file assigns at its top level, divided."""

    def __init__(self, by: int) -> None:
        self.by = by

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        large = type(node.value) is int and node.value >= 48
        return ast.copy_location(ast.Constant(max(int(node.value) // self.by, 16)), node) if large else node  # type: ignore[arg-type]


def load(path: pathlib.Path, device: str, by: int) -> tuple[torch.nn.Module, list[Any]]:
    """The model of a file and the arguments of a call, on a device; with `by`, of sizes divided."""
    tree = ast.parse(path.read_text())
    if by > 1:
        tree.body = [_Smaller(by).visit(n) if isinstance(n, ast.Assign) else n for n in tree.body]
    space: dict[str, Any] = {"__name__": path.stem}
    exec(compile(tree, str(path), "exec"), space)
    torch.manual_seed(0)
    with torch.device(device):
        model = space["Model"](*space["get_init_inputs"]()).to(device)
        args = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), space["get_inputs"]())
    return model, list(args)


def with_gradients(args: list[Any]) -> list[Any]:
    """The arguments of a call, of which those in floats need gradients."""
    return [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def milliseconds(call: Call, device: str, times: int = 9) -> float:
    """The median of a few calls."""
    found = []
    for _ in range(times):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return sorted(found)[times // 2]


def distance(got: Any, want: Any) -> float:
    """The largest difference of two results, relative to the largest element of each tensor; inf for another form."""
    most = 0.0
    for a, b in zip(tensors(got), tensors(want), strict=True):
        if a.shape != b.shape or a.dtype is not b.dtype:
            return math.inf
        if a.numel():
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a.double() - b.double()).abs()).max().item()
            scale = torch.where(b.isfinite(), b, 0).double().abs().max().item()
            most = max(most, gap / max(scale, 1e-30) if math.isfinite(gap) else math.inf)
    return most


def run(path: pathlib.Path, options: Options) -> Outcome:
    """One problem by eager and by each backend, in the mode that the file leaves its model in."""
    model, args = load(path, options.device, options.smaller)
    if options.gradients:
        args = with_gradients(args)
    wanted = [t for t in (*args, *model.parameters()) if isinstance(t, torch.Tensor) and t.requires_grad]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    found = Outcome({}, {}, {}, {}, {})
    want: Any = None
    for name in ("eager", *options.backends):
        torch._dynamo.reset()
        function = model if name == "eager" else torch.compile(model, backend=name, dynamic=False)
        model.load_state_dict(state)  # training changes the statistics of norms
        call = functools.partial(_call, function, args, wanted if options.gradients else None)
        torch.manual_seed(1)
        start = time.perf_counter()
        try:
            got = call()
        except Exception as error:
            if name == "eager":
                raise  # the file's own fault
            found.failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        found.first[name] = time.perf_counter() - start
        want = got if name == "eager" else want
        found.far[name] = distance(got, want)
        del got
        with _alone(options.lock):
            if options.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            found.steady[name] = milliseconds(call, options.device)
            if options.device != "cpu":
                found.memory[name] = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
    return found


def _call(function: Callable[..., Any], args: list[Any], wanted: list[torch.Tensor] | None) -> Any:
    """The results of a call; with `wanted`, the gradients of a weighted sum of the results for these, too."""
    if wanted is None:
        with torch.no_grad():
            return function(*args)
    got = function(*args)
    outs = [t for t in tensors(got) if t.requires_grad]
    grads = torch.autograd.grad(outs, wanted, [_slope(t) for t in outs], allow_unused=True)
    return [t.detach() for t in tensors(got)], [g for g in grads if g is not None]


def _slope(t: torch.Tensor) -> torch.Tensor:
    """The weights of a result's elements; all equal, the gradients of norms and softmaxes would be 0."""
    return torch.linspace(-1, 2, t.shape[-1], device=t.device).to(t).expand(t.shape) if t.dim() else torch.ones_like(t)


@contextlib.contextmanager
def _alone(lock: str) -> Iterator[None]:
    """Where a lock is given, no other process measures."""
    if not lock:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _outcome(path: pathlib.Path, options: Options) -> Outcome | str:
    try:
        return run(path, options)
    except Exception as error:  # a file from outside may fail in any way: it says why, the others go on
        return f"{type(error).__name__}: {str(error)[:120]}"
    finally:
        if options.device != "cpu":
            torch.cuda.empty_cache()


def _outcomes(
    files: list[pathlib.Path], options: Options, workers: int
) -> Iterator[tuple[pathlib.Path, Outcome | str]]:  # fmt: skip
    if workers < 2:
        yield from ((path, _outcome(path, options)) for path in files)
        return
    processes = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, processes) as pool:
        asked = {pool.submit(_outcome, path, options): path for path in files}
        for done in concurrent.futures.as_completed(asked):
            error = done.exception()
            yield asked[done], done.result() if error is None else f"{type(error).__name__}: {error}"


def paths(folder: pathlib.Path, only: str = "") -> Iterator[pathlib.Path]:
    """The files of problems in a folder, of which the path matches a regular expression."""
    for path in sorted(folder.rglob("*.py")):
        if re.search(only, str(path.relative_to(folder))) and "get_init_inputs" in path.read_text():
            yield path


def _cells(found: Outcome) -> Iterator[str]:
    """What is printed of each contestant."""
    for n, ms in found.steady.items():
        memory = f" {found.memory[n]:6.0f} MiB" if n in found.memory else ""
        yield f"{n} {ms:9.3f} ms {found.first[n]:6.2f} s {found.far[n]:.1e}{memory}"
    yield from (f"{n} {why}" for n, why in found.failed.items())


def main() -> int:
    """Print a row for each problem, then geometric means; 1 if a result is far from eager's and the rival's is not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.problems", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="a regular expression that a file's path matches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smaller", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--backends", default="fuser,inductor")
    parser.add_argument("--gradients", action="store_true", help="forward and backward passes")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile side by side")
    given = parser.parse_args()
    backends = tuple(given.backends.split(","))
    ratios: dict[str, list[float]] = {}
    wrong = 0
    with tempfile.NamedTemporaryFile() as lock:
        held = lock.name if given.workers > 1 else ""
        options = Options(given.device, given.smaller, backends, given.gradients, held)
        for path, found in _outcomes(list(paths(given.folder, given.only)), options, given.workers):
            if isinstance(found, str):
                print(f"{path.stem:48} {found}", flush=True)
                continue
            limit = max([NEAR, *(2 * found.far[b] for b in backends[1:] if b in found.far)])
            off = not found.far.get(backends[0], math.inf) <= limit
            wrong += off
            print(f"{path.stem:48}", *_cells(found), "NOT EAGER'S RESULT" if off else "", sep="  ", flush=True)
            for name in found.steady.keys() - {backends[0]} if backends[0] in found.steady else ():
                ratios.setdefault(name, []).append(found.steady[name] / found.steady[backends[0]])
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{len(values)} problems: {mean:.2f} x the speed of {name}, at least {min(values):.2f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
