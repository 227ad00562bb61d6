"""Reductions along short rows beside eager: `python -m benchmarks.short_rows [THREADS]`.

Softmax, norms, losses and gradients of 1 MB, in float32 and bfloat16. Kernels stay whatever their time. As in a program
with many lengths, a kernel takes all lengths that its guards allow. Results are checked against eager and float64.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from benchmarks.checks import judge, tensors, to_float64
from benchmarks.runner import Budget, Call, geomean, interleave
from fuser import config

aten = torch.ops.aten
LENGTHS = (17, 32, 33, 48, 100, 128, 300, 512, 1000, 4096)
BYTES = 1 << 20
BUDGET = Budget(0.5, 2e-3, 9, 21)


# Of rows, weights for their elements, and the mean and inverse deviation of each row.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda x, w, m, r: F.softmax(x, -1),
    "log_softmax": lambda x, w, m, r: F.log_softmax(x, -1),
    "softmax's gradient": lambda x, w, m, r: aten._softmax_backward_data(x, x, -1, x.dtype),
    "logsumexp": lambda x, w, m, r: x.logsumexp(-1),
    "cross entropy": lambda x, w, m, r: F.cross_entropy(x, (x[:, 0] > 0).long(), reduction="none"),
    "layer norm": lambda x, w, m, r: F.layer_norm(x, (x.shape[-1],), w, w),
    "rms norm": lambda x, w, m, r: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
    "layer norm's gradient": lambda x, w, m, r: aten.native_layer_norm_backward(
        x, x, (x.shape[-1],), m, r, w, w, [True, False, False]
    )[0],
}


def main() -> int:
    """Print a row for each case, then the geometric mean and the worst. Returns how many cases are wrong."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    speeds, wrong = [], 0
    print("| function | dtype | elements | eager | fuser | times eager's speed |\n|---|---|---:|---:|---:|---:|")
    for name, function in FUNCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for n in LENGTHS:
                torch.manual_seed(0)
                x, w = torch.randn(BYTES // dtype.itemsize // n, n).to(dtype), torch.rand(n).to(dtype)
                with config.override(slowest=0.0), torch.no_grad():
                    args = (x, w, *torch.native_layer_norm(x, (n,), None, None, 1e-5)[1:])
                    handle = fuser.fusion_handle(fuser.register_fusion(make_fx(function)(*args)))
                    results = (tensors(f(*given)) for f, given in (
                        (handle, args), (function, args), (function, to_float64(args))
                    ))  # fmt: skip
                    verdict = judge(*results)
                    calls = {"eager": Call(function, args), "fuser": Call(handle, args)}
                    measured = interleave(calls, BUDGET, clock=time.thread_time if threads == 1 else time.perf_counter)
                eager, own = (measured[name].median for name in ("eager", "fuser"))
                speeds.append(eager / own)
                wrong += verdict.problem is not None
                times = f"{eager * 1e6:.0f} µs | {own * 1e6:.0f} µs | {eager / own:.2f}"
                print(f"| {name} | {str(dtype)[6:]} | {n} | {times} |", verdict.problem or "", flush=True)
    print(f"{len(speeds)} cases: {geomean(speeds):.2f} times eager's speed, at least {min(speeds):.2f}; {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
