"""`python -m benchmarks.problems FOLDER`: problems in KernelBench's form beside eager and TorchInductor.

A problem is a Python file with a class `Model` and two functions: `get_init_inputs` gives its arguments, `get_inputs`
those of a call. The files are somebody else's: bring a checkout of KernelBench, and run only files that you trust.
Each is checked against eager; what differs is said beside TorchInductor's distance, since a net in training mode may
make a rounding as large as its result.
"""

from __future__ import annotations

import argparse
import ast
import functools
import math
import pathlib
import re
import sys
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
    """By contestant: milliseconds of a call, seconds of the first one, the distance from eager; why it gave nothing."""

    steady: dict[str, float]
    first: dict[str, float]
    far: dict[str, float]
    failed: dict[str, str]


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


def run(path: pathlib.Path, device: str, by: int, backends: tuple[str, ...]) -> Outcome:
    """One problem by eager and by each backend, without gradients, in the mode that the file leaves its model in."""
    model, args = load(path, device, by)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    found = Outcome({}, {}, {}, {})
    want: Any = None
    for name in ("eager", *backends):
        torch._dynamo.reset()
        function = model if name == "eager" else torch.compile(model, backend=name, dynamic=False)
        model.load_state_dict(state)  # training changes the statistics of norms
        torch.manual_seed(1)
        start = time.perf_counter()
        try:
            got = function(*args)
        except Exception as error:
            if name == "eager":
                raise  # the file's own fault
            found.failed[name] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        found.first[name] = time.perf_counter() - start
        want = got if name == "eager" else want
        found.far[name] = distance(got, want)
        found.steady[name] = milliseconds(functools.partial(function, *args), device)
    return found


def _problems(folder: pathlib.Path, only: str) -> Iterator[pathlib.Path]:
    for path in sorted(folder.rglob("*.py")):
        if re.search(only, str(path.relative_to(folder))) and "get_init_inputs" in path.read_text():
            yield path


def main() -> int:
    """Print a row for each problem, then geometric means; 1 if a result is far from eager's and the rival's is not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.problems", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="", help="a regular expression that a file's path matches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smaller", type=int, default=1, help="divide sizes by this")
    parser.add_argument("--backends", default="fuser,inductor")
    options = parser.parse_args()
    backends = tuple(options.backends.split(","))
    ratios: dict[str, list[float]] = {}
    wrong = 0
    for path in _problems(options.folder, options.only):
        try:
            with torch.no_grad():
                found = run(path, options.device, options.smaller, backends)
        except Exception as error:  # a file from outside may fail in any way: it says why, the others go on
            print(f"{path.stem:48} {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        limit = max([NEAR, *(2 * found.far[b] for b in backends[1:] if b in found.far)])
        off = not found.far.get(backends[0], math.inf) <= limit
        wrong += off
        cells = [f"{n} {found.steady[n]:9.3f} ms {found.first[n]:6.2f} s {found.far[n]:.1e}" for n in found.steady]
        cells += [f"{n} {why}" for n, why in found.failed.items()]
        print(f"{path.stem:48}", *cells, "NOT EAGER'S RESULT" if off else "", sep="  ", flush=True)
        for name in found.steady.keys() - {backends[0]} if backends[0] in found.steady else ():
            ratios.setdefault(name, []).append(found.steady[name] / found.steady[backends[0]])
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"{len(values)} problems: {mean:.2f} x the speed of {name}, at least {min(values):.2f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
