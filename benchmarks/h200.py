"""Fused kernels on one GPU beside a copy of the same bytes: `python -m benchmarks.h200 [regular expression]`.

Inputs larger than the caches, rotated; times are medians over CUDA events around several launches.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import checks
from fuser import config, interface
from fuser.cuda import fused_kernel, tiles
from fuser.lowering.graph import lower_graph
from fuser.runtime import launcher
from fuser.scheduler.schedule import schedule

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Row:
    """A function and its inputs. What it must move at least are those, once, and its results."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    tables: Mapping[str, Any] = field(default_factory=dict)  # other values of `fuser.cuda.tiles`


def _n(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def swiglu(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return F.silu(g) * u


def adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def column_row(name: str, rows: int = 32768, **tables: Any) -> Row:
    return Row(f"column_sum {name}", lambda x: x.sum(0), lambda: (_n(rows, 4096, dtype=F32),), tables)


def every(value: Any) -> dict[int, Any]:
    """The same for all sizes of elements."""
    return dict.fromkeys((1, 2, 4, 8), value)


def places(n: int, *size: int) -> torch.Tensor:
    return torch.randint(n, size, device="cuda")


def embedding_gradient(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(g, i, 50000, -1, False)


ROWS = (
    Row("gelu_tanh bf16", lambda x, b: F.gelu(x + b, approximate="tanh") * x, lambda: (_n(16384, 8192), _n(8192))),
    Row("gelu_erf bf16", lambda x: F.gelu(x), lambda: (_n(16384, 8192),)),
    Row("gelu_erf f32", lambda x: F.gelu(x), lambda: (_n(16384, 4096, dtype=F32),)),
    Row("add_relu f32", lambda x, y: torch.relu(x * y + 1),
        lambda: (_n(16384, 4096, dtype=F32), _n(16384, 4096, dtype=F32))),
    Row("swiglu bf16", swiglu, lambda: (_n(16384, 8192), _n(16384, 8192))),
    Row("mixed", lambda x, y: x * y, lambda: (_n(16384, 4096), _n(16384, 4096, dtype=F32))),
    Row("transposed f32", lambda x, y: x + y.t(), lambda: (_n(8192, 8192, dtype=F32), _n(8192, 8192, dtype=F32))),
    Row("transposed bf16", lambda x, y: x + y.t(), lambda: (_n(8192, 8192), _n(8192, 8192))),
    Row("adam f32", adam, lambda: tuple(_n(1 << 26, dtype=F32).abs() for _ in range(4))),
    Row("softmax 1k bf16", lambda x: torch.softmax(x, -1), lambda: (_n(131072, 1024),)),
    Row("softmax 8k bf16", lambda x: torch.softmax(x, -1), lambda: (_n(16384, 8192),)),
    Row("softmax 16k bf16", lambda x: torch.softmax(x, -1), lambda: (_n(8192, 16384),)),
    Row("softmax 8k f32", lambda x: torch.softmax(x, -1), lambda: (_n(16384, 8192, dtype=F32),)),
    Row("softmax 131k bf16", lambda x: torch.softmax(x, -1), lambda: (_n(4096, 131072),)),
    Row("softmax mid f32", lambda x: torch.softmax(x, 1), lambda: (_n(256, 256, 1024, dtype=F32),)),
    Row("layer_norm bf16", lambda x, w, b: F.layer_norm(x, (8192,), w, b),
        lambda: (_n(16384, 8192), _n(8192), _n(8192))),
    Row("layer_norm 1k f32", lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        lambda: (_n(65536, 1024, dtype=F32), _n(1024, dtype=F32), _n(1024, dtype=F32))),
    Row("rms_norm bf16", rms_norm, lambda: (_n(16384, 4096), _n(4096))),
    Row("cross_entropy bf16", lambda x, t: F.cross_entropy(x, t),
        lambda: (_n(8192, 128256), torch.randint(128256, (8192,), device="cuda"))),
    Row("column_sum bf16", lambda x: x.sum(0), lambda: (_n(32768, 8192),)),
    column_row("f32"),
    column_row("f32, 1 stage", COLUMN_STAGES=0),
    column_row("f32, 4 stages", COLUMN_STAGES=4),
    column_row("64 MiB", 4096),
    Row("full_sum f32", lambda x: x.sum(), lambda: (_n(1 << 27, dtype=F32),)),
    Row("argmax f32", lambda x: x.argmax(-1), lambda: (_n(16384, 4096, dtype=F32),)),
    Row("mean_var f32", lambda x: (x.mean(-1), x.var(-1)), lambda: (_n(16384, 4096, dtype=F32),)),
    Row("rope bf16", rope, lambda: (_n(8, 32, 8192, 128), _n(8192, 128), _n(8192, 128))),
    Row("rope f32", rope, lambda: (_n(8, 16, 8192, 64, dtype=F32), _n(8192, 64, dtype=F32), _n(8192, 64, dtype=F32))),
    Row("cumsum f32", lambda x: x.cumsum(-1), lambda: (_n(16384, 4096, dtype=F32),)),
    Row("cumsum 1k bf16", lambda x: x.cumsum(-1), lambda: (_n(131072, 1024),)),
    Row("cumsum columns", lambda x: x.cumsum(0), lambda: (_n(16384, 4096, dtype=F32),)),
    Row("cumsum of one row", lambda x: x.cumsum(0), lambda: (_n(1 << 27, dtype=F32),)),
    Row("cumsum columns, 1 st", lambda x: x.cumsum(0), lambda: (_n(16384, 4096, dtype=F32),), {"SCAN_STAGES": 0}),
    Row("cumsum one row, 1 st", lambda x: x.cumsum(0), lambda: (_n(1 << 27, dtype=F32),), {"SCAN_STAGES": 0}),
    Row("cumsum one row, 2048", lambda x: x.cumsum(0), lambda: (_n(1 << 27, dtype=F32),), {"SCAN_PROGRAMS": 2112}),
    Row("cummax f32", lambda x: torch.cummax(x, -1)[1], lambda: (_n(16384, 4096, dtype=F32),)),
    Row("index_add f32", lambda x, i, y: x.index_add(0, i, y),
        lambda: (_n(50000, 1024, dtype=F32), places(50000, 65536), _n(65536, 1024, dtype=F32))),
    Row("scatter_add f32", lambda x, i, y: x.scatter_add(1, i, y),
        lambda: (_n(16384, 1024, dtype=F32), places(1024, 16384, 1024), _n(16384, 1024, dtype=F32))),
    Row("index_copy f32", lambda x, i, y: x.index_copy(0, i, y),
        lambda: (_n(65536, 1024, dtype=F32), torch.randperm(65536, device="cuda"), _n(65536, 1024, dtype=F32))),
    Row("embedding grad f32", embedding_gradient, lambda: (_n(65536, 1024, dtype=F32), places(50000, 65536))),
    Row("embedding grad bf16", embedding_gradient, lambda: (_n(65536, 1024), places(50000, 65536))),
)  # fmt: skip


def timed(fn: Callable[[], Any], n: int = 12) -> float:
    """Seconds of one call on the device, median of `n` after three; the second-level cache is flushed before each."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    out = []
    for _ in range(n + 3):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        end.synchronize()
        out.append(begin.elapsed_time(end) / 1000)
    return statistics.median(out[3:])


def copy_time(moved: int) -> float:
    """Seconds of a copy that moves as many bytes."""
    a = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return timed(lambda: b.copy_(a))


def kernel_of(row: Row, args: tuple[Any, ...]) -> Any:
    """A handle with one kernel made with the row's tables."""
    spec = interface.kernel_spec(interface.register_fusion(torch.fx.symbolic_trace(row.fn)))
    lowered = lower_graph(spec.graph, args, config.numerics)
    before = {name: getattr(tiles, name) for name in row.tables}
    try:
        for name, value in row.tables.items():
            setattr(tiles, name, value)
        source = fused_kernel.generate(lowered, schedule(lowered, config.max_body_rows), spec.graph.single)
        kernel = fused_kernel.compile_source(source)
    finally:
        for name, value in before.items():
            setattr(tiles, name, value)
    handle = launcher.make_handle(lambda args, status: None)
    handle.add_kernel(kernel.program, kernel.library)
    return handle


def measure(row: Row) -> dict[str, Any]:
    """One row: right or not, seconds, share of the copy rate."""
    torch.manual_seed(0)
    args = row.make()
    key = interface.register_fusion(torch.fx.symbolic_trace(row.fn))
    handle = interface.fusion_handle(key)
    spec = interface.kernel_spec(key)
    began = time.perf_counter()
    if row.tables:
        handle = kernel_of(row, args)
    handle(*args)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    out = checks.tensors(handle(*args))
    eager = checks.tensors(row.fn(*args))
    problem = checks.judge(out, eager).problem
    if not handle.hits:
        problem = f"no kernel: {spec.blocked} {[e.reason for e in spec.store.entries]} {spec.store.fallbacks}"
    moved = sum(t.nbytes for t in (*checks.tensors(args), *out))
    mine, theirs, copy = timed(lambda: handle(*args)), timed(lambda: row.fn(*args), 5), copy_time(moved)
    names = [f"{s.entry}:{s.gpu.threads}" for k in spec.store.kernels for s in k.program.steps]
    return {
        "row": row.name, "ms": 1e3 * mine, "eager_ms": 1e3 * theirs, "of_copy": copy / mine, "first_s": first,
        "TB_s": moved / mine / 1e12, "problem": problem, "kernels": names,
    }  # fmt: skip


def overhead() -> dict[str, float]:
    """Host microseconds of a call on 16 elements."""
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * y + 1)

    x, y = _n(16, dtype=F32), _n(16, dtype=F32)
    handle = interface.fusion_handle(interface.register_fusion(torch.fx.symbolic_trace(fn)))
    handle(x, y)
    found = {}
    empty, none = x[:0], torch.empty(0, device="cuda")
    handle(empty, none)
    calls = {
        "fuser": (handle, (x, y)), "eager": (fn, (x, y)), "fuser, no launch": (handle, (empty, none)),
        "torch.empty_like": (torch.empty_like, (x,)),
    }  # fmt: skip
    for name, (call, args) in calls.items():
        best = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(200):
                call(*args)
            best.append((time.perf_counter() - began) / 200)
        found[name] = 1e6 * min(best)
    return found


def main() -> None:
    """Measure what the command line asks for."""
    launcher.wait(60)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(torch.cuda.get_device_name(), torch.__version__, "native launcher:", launcher.is_native(), launcher.reason())
    records = []
    print(f"{'row':20} {'ms':>8} {'TB/s':>6} {'of copy':>8} {'eager ms':>9} {'first s':>8}")
    for row in ROWS:
        if not re.search(wanted, row.name):
            continue
        try:
            r = measure(row)
        except Exception as e:  # the other rows still run
            print(f"{row.name:20} {type(e).__name__}: {str(e)[:300]}", flush=True)
            continue
        records.append(r)
        print(f"{r['row']:20} {r['ms']:8.3f} {r['TB_s']:6.2f} {100 * r['of_copy']:7.0f}% {r['eager_ms']:9.3f} "
              f"{r['first_s']:8.2f} {' '.join(r['kernels'])} {r['problem'] or ''}", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    print("host microseconds, three ops on 16 elements:", overhead())
    if os.environ.get("OUT"):
        with open(f"{os.environ['OUT']}/h200.json", "w") as f:
            json.dump(records, f, indent=1)


if __name__ == "__main__":
    main()
