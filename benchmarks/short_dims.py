"""Ways to index, join and reduce a dim of a few elements, beside eager: `python -m benchmarks.short_dims [options]`.

Each way runs with each size of the dim and each place of it, with some dtypes and operators behind. Kernels stay
whatever their time. Results are checked against eager and float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from benchmarks.checks import judge, tensors, to_float64
from benchmarks.runner import Budget, Call, copy_call, geomean, interleave
from fuser import config

ROWS, COLUMNS = 1024, 1024
SIZES = (2, 3, 4, 5, 6, 8)
PLACES = ("last", "middle", "first")
BUDGET = Budget(0.04, 5e-4, 5, 9)
WORST = 30


class Given(NamedTuple):
    """The tensors of a case: `x` has the dim, `w` and `v` it alone (in three dims), `y` all others, `m` another of its
    size beside it; `other` is like `x` and has the dim elsewhere in memory."""

    x: Tensor
    w: Tensor
    v: Tensor
    y: Tensor
    m: Tensor
    other: Tensor


Way = Callable[[Given, int, int], Any]


def _turned(x: Tensor, d: int) -> Tensor:
    a, b = x.chunk(2, d)
    return torch.cat((-b, a), d)


def _rotated(x: Tensor, d: int, n: int) -> Tensor:
    a, b = x.select(d, 0), x.select(d, 1)
    return torch.stack([a * 0.6 - b * 0.8, a * 0.8 + b * 0.6, *(x.select(d, k) for k in range(2, n))], d)


def _complex(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


# By name, of the tensors, the dim and its size.
WAYS: dict[str, Way] = {
    "two of them": lambda t, d, n: t.x.select(d, 0) * 2 - t.x.select(d, n - 1),
    "all, weighted": lambda t, d, n: sum(p * (k + 0.5) for k, p in enumerate(t.x.unbind(d))),
    "one of them": lambda t, d, n: t.x.select(d, 1) * t.y,
    "split": lambda t, d, n: t.x.narrow(d, 0, (n + 1) // 2) * t.x.narrow(d, n // 2, (n + 1) // 2),
    "halves turned": lambda t, d, n: t.x * t.w + _turned(t.x, d) * t.v,
    "stacked": lambda t, d, n: torch.stack([p * (k + 2) for k, p in enumerate(t.x.unbind(d))], d),
    "rotated": lambda t, d, n: _rotated(t.x, d, n),
    "stacked from one": lambda t, d, n: torch.stack([t.y * (k + 2) for k in range(n)], d),
    "joined": lambda t, d, n: torch.cat((t.x.narrow(d, 0, 1) * 2, t.x.narrow(d, 1, n - 1)), d),
    "interleaved": lambda t, d, n: torch.stack([t.x * 2, t.x + 1], d + 1).flatten(d, d + 1),
    "sum": lambda t, d, n: t.x.sum(d),
    "amax": lambda t, d, n: t.x.amax(d),
    "less the mean": lambda t, d, n: t.x - t.x.mean(d, keepdim=True),
    "norm": lambda t, d, n: torch.linalg.vector_norm(t.x, dim=d),
    "normalised": lambda t, d, n: t.x / (torch.linalg.vector_norm(t.x, dim=d, keepdim=True) + 1e-3),
    "variance": lambda t, d, n: t.x.var(d),
    "softmax": lambda t, d, n: t.x.softmax(d),
    "logsumexp": lambda t, d, n: t.x.logsumexp(d),
    "argmax": lambda t, d, n: t.x.argmax(d),
    "max and place": lambda t, d, n: t.x.max(d),
    "cumsum": lambda t, d, n: t.x.cumsum(d),
    "product": lambda t, d, n: t.x.prod(d),
    "any": lambda t, d, n: (t.x > 0).any(d),
    "distance": lambda t, d, n: (t.x - t.other).square().sum(d).sqrt(),
    "flip": lambda t, d, n: t.x.flip(d) * 2,
    "roll": lambda t, d, n: t.x.roll(1, d) * 2,
    "differences": lambda t, d, n: t.x.narrow(d, 1, n - 1) - t.x.narrow(d, 0, n - 1),
    "weights": lambda t, d, n: t.x * t.w + t.v,
    "weighted sum": lambda t, d, n: (t.x * t.w).sum(d),
    "less the first": lambda t, d, n: t.x - t.x.narrow(d, 0, 1),
    "spread": lambda t, d, n: t.y.unsqueeze(d) * t.w + t.v,
    "sines spread": lambda t, d, n: torch.sin(t.y.unsqueeze(d) * t.w),
    "masked by one": lambda t, d, n: torch.where(t.x.narrow(d, 0, 1) > 0, t.x, 0.5),
    "masked by another": lambda t, d, n: t.x.masked_fill((t.y > 0).unsqueeze(d), 0.5),
    "brought first": lambda t, d, n: (t.x.movedim(d, 0) * 2).contiguous(),
    "brought last": lambda t, d, n: (t.x.movedim(d, -1) * 2).contiguous(),
    "brought first, weights": lambda t, d, n: ((t.x * t.w + t.v).movedim(d, 0)).contiguous(),
    "brought last, weights": lambda t, d, n: ((t.x * t.w + t.v).movedim(d, -1)).contiguous(),
    "another order": lambda t, d, n: (t.x + t.other).relu(),
    "matrix by vector": lambda t, d, n: (t.m * t.x.unsqueeze(d)).sum(d + 1),
    "matrix by parts": lambda t, d, n: sum(t.m.select(d + 1, k) * t.x.narrow(d, k, 1) for k in range(n)),
    "all pairs": lambda t, d, n: t.x.unsqueeze(d) - t.x.unsqueeze(d + 1),
    "einsum": lambda t, d, n: torch.einsum(("ijab,jab->iab", "aijb,ajb->aib", "abij,abj->abi")[d], t.m, t.x),
    "cross": lambda t, d, n: torch.linalg.cross(t.x, t.other.contiguous(), dim=d),
    "complex": lambda t, d, n: _complex(t.x, t.other.contiguous()),
}
ONLY: dict[str, Callable[[int, int], bool]] = {
    "cross": lambda d, n: n == 3,
    "complex": lambda d, n: n == 2 and d == 2,
    "halves turned": lambda d, n: n % 2 == 0,
}
MATRICES = ("matrix by vector", "matrix by parts", "einsum")
FLOATS = (
    "less the mean", "norm", "normalised", "variance", "softmax", "logsumexp", "distance", "sines spread", "einsum",
    "cross", "complex", "masked by one", "masked by another",
)  # fmt: skip
DISCRETE = ("argmax", "max and place", "any")
WHOLE = ("einsum", "cross", "complex")  # which passes of torch.compile take apart


# By name, of a result and a dim of it that is long.
BEHIND: dict[str, Callable[[Tensor, int], Tensor]] = {
    "": lambda r, d: r,
    "cheap": lambda r, d: (r * 0.5 + 1).clamp(max=4),
    "exp": lambda r, d: torch.exp(r * 0.1),
    "sum": lambda r, d: r.sum(d),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program and the tensors it takes."""

    way: str
    size: int
    place: str
    behind: str = ""
    dtype: torch.dtype = torch.float32
    gradient: bool = False

    def __str__(self) -> str:
        words = (self.way, self.place, str(self.size), self.behind, str(self.dtype)[6:], "gradient" * self.gradient)
        return " / ".join(w for w in words if w)

    @property
    def dim(self) -> int:
        """The short dim, of three."""
        return {"last": 2, "middle": 1, "first": 0}[self.place]

    def given(self) -> Given:
        """Tensors of about a million elements."""
        d, n = self.dim, self.size
        columns = COLUMNS // n
        shape = [ROWS, columns]
        square, outside = [*shape[:d], n, n, *shape[d:]], [n, *shape] if d else [*shape, n]
        shape.insert(d, n)
        alone = [n if k == d else 1 for k in range(3)]
        other = _drawn(outside, self.dtype).movedim(*((0, d) if d else (2, 0)))
        x, w, v = (_drawn(s, self.dtype) for s in (shape, alone, alone))
        matrices = _drawn(square, self.dtype) if self.way in MATRICES else x
        return Given(x, w, v, _drawn([ROWS, columns], self.dtype), matrices, other)

    def __call__(self, *tensors: Tensor) -> Any:
        made = WAYS[self.way](Given(*tensors), self.dim, self.size)
        first = made[0] if isinstance(made, tuple) else made
        long = 1 if self.place == "first" and first.dim() > 2 else 0
        if self.behind:
            return BEHIND[self.behind](first, long)
        return tuple(made) if isinstance(made, tuple) else made


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(*shape).to(dtype)
    return torch.randint(0, 100, tuple(shape), dtype=dtype)


def cases() -> Iterator[Case]:
    """All of them."""
    for way in WAYS:
        for place in PLACES:
            for n in SIZES:
                case = Case(way, n, place)
                if way in ONLY and not ONLY[way](case.dim, n):
                    continue
                yield case
                behind = {2: ("cheap",), 3: ("exp", "sum")}.get(n, ())
                yield from (dataclasses.replace(case, behind=b) for b in behind)
                if n in (2, 3):
                    yield dataclasses.replace(case, dtype=torch.bfloat16)
                if n == 3 and place == "last" and way not in FLOATS:
                    yield dataclasses.replace(case, dtype=torch.uint8)
                    yield dataclasses.replace(case, dtype=torch.int64)
                if n == 4 and place == "last" and way not in DISCRETE:
                    yield dataclasses.replace(case, gradient=True)




@functools.lru_cache(2)
def _given(place: str, size: int, dtype: torch.dtype, matrices: bool) -> tuple[Given, Any]:
    given = Case("einsum" if matrices else "sum", size, place, dtype=dtype).given()
    return given, Given(*to_float64(tuple(given)))


def _step(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a program for all its tensors."""

    def step(*given: Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in given]
        out = forward(*inputs)
        found = torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)
        return tuple(g for g in found if g is not None)

    return step


def _compiled(case: Case, given: Given, backend: str) -> Callable[..., Any]:
    """The case's program as a handle; by `torch.compile` where its passes or gradients are asked for."""
    if backend == "fuser" and not case.gradient and case.way not in WHOLE:
        return fuser.fusion_handle(fuser.register_fusion(make_fx(case)(*given)))
    torch._dynamo.reset()
    forward = torch.compile(lambda *tensors: case(*tensors), backend=backend, dynamic=False)
    return _step(forward) if case.gradient else forward


def _moved(program: Callable[..., Any], given: Given) -> int:
    """Bytes that the program has to read and write."""
    traced = make_fx(program)(*given)
    used = [t for node, t in zip(traced.graph.find_nodes(op="placeholder"), given, strict=True) if node.users]
    return sum(t.numel() * t.element_size() for t in (*used, *tensors(program(*given))))


def measure(case: Case, threads: Sequence[int], inductor: bool, untimed: bool) -> dict[str, Any]:
    """Times and what is wrong. `untimed`: only compile and check."""
    torch.manual_seed(0)
    given, wide = _given(case.place, case.size, case.dtype, case.way in MATRICES)
    program: Callable[..., Any] = _step(case) if case.gradient else case
    record: dict[str, Any] = {"case": str(case), **dataclasses.asdict(case), "dtype": str(case.dtype)[6:]}
    with config.override(slowest=0.0), torch.set_grad_enabled(case.gradient):
        own = _compiled(case, given, "fuser")
        verdict = judge(tensors(own(*given)), tensors(program(*given)), tensors(program(*wide)))
        record["problem"] = verdict.problem
        if untimed:
            return record
        calls = {"eager": Call(program, given), "fuser": Call(own, given)}
        if not case.gradient:
            calls["copy"] = copy_call(_moved(program, given), "cpu")
        if inductor:
            calls["inductor"] = Call(_compiled(case, given, "inductor"), given)
        for t in threads:
            torch.set_num_threads(t)
            measured = interleave(calls, BUDGET, clock=time.thread_time if t == 1 else time.perf_counter)
            record[f"threads{t}"] = {name: found.median for name, found in measured.items()}
    return record


def _print_worst(timed: Sequence[dict[str, Any]], key: str, rival: str) -> None:
    over = {r["case"]: r[key][rival] / r[key]["fuser"] for r in timed if rival in r[key]}
    times = {r["case"]: ", ".join(f"{name} {v * 1e6:.0f}" for name, v in r[key].items()) for r in timed}
    if over:
        print(f"the slowest beside {rival}; geometric mean {geomean(list(over.values())):.2f}")
    for name in sorted(over, key=lambda name: over[name])[:WORST]:
        print(f"{over[name]:.2f}  {name}: {times[name]} µs")


def summary(records: Sequence[dict[str, Any]], threads: Sequence[int]) -> None:
    """Print geometric means and the worst."""
    for key in (f"threads{t}" for t in threads):
        timed = [r for r in records if key in r]
        speed = {r["case"]: r[key]["eager"] / r[key]["fuser"] for r in timed}
        if not timed:
            continue
        below = [sum(v < least for v in speed.values()) for least in (1, 0.8)]
        print(f"\n{key}, {len(timed)} cases: {geomean(list(speed.values())):.2f} times eager's speed;", end=" ")
        print(f"{below[0]} below 1, {below[1]} below 0.8")
        for column in ("place", "size", "behind", "dtype", "gradient", "way"):
            groups = defaultdict(list)
            for r in timed:
                groups[r[column]].append(speed[r["case"]])
            means = (f"{name or '-'} {geomean(found):.2f} ({min(found):.2f})" for name, found in groups.items())
            print(f"by {column}:", "; ".join(means))
        for rival in ("eager", "copy", "inductor"):
            _print_worst(timed, key, rival)


def main() -> int:
    """Print what is wrong, means and the worst. Returns how many cases are wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.short_dims")
    parser.add_argument("--only", default="", help="cases whose name matches")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th case from the k-th")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--sample", type=int, default=0, help="so many cases, drawn")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--untimed", action="store_true", help="compile and check alone")
    parser.add_argument("--json", help="add what was measured to this file")
    parser.add_argument("--cases", help="a file with names of cases")
    parser.add_argument("--summary", action="store_true", help="of the file alone")
    own = parser.parse_args()
    threads = [int(t) for t in own.threads.split(",")]
    if own.summary:
        with open(own.json) as file:
            summary(list({r["case"]: r for r in map(json.loads, file)}.values()), threads)
        return 0
    k, n = map(int, own.part.split("/"))
    chosen = [c for c in cases() if re.search(own.only, str(c))]
    if own.cases:
        with open(own.cases) as file:
            names = {line.strip() for line in file}
        chosen = [c for c in chosen if str(c) in names]
    if own.sample and own.sample < len(chosen):
        chosen = random.Random(0).sample(chosen, own.sample)
    chosen = chosen[k::n]
    chosen.sort(key=lambda c: (c.place, c.size, str(c.dtype), c.way in MATRICES))
    records = []
    for case in chosen:
        try:
            record = measure(case, threads, own.inductor, own.untimed)
        except Exception as error:
            record = {"case": str(case), "problem": f"{type(error).__name__}: {error}"[:300]}
        records.append(record)
        if record["problem"]:
            print(f"WRONG {record['case']}: {record['problem']}", flush=True)
        if own.json:
            with open(own.json, "a") as file:
                file.write(json.dumps(record) + "\n")
    summary(records, threads)
    return sum(r["problem"] is not None for r in records)


if __name__ == "__main__":
    sys.exit(main() > 0)
