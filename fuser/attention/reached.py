"""ATen's attention on CUDA with a mask that is known to exclude some blocks of keys: these are skipped.

A kernel loops over the remaining blocks, and adds the mask where it is not known to be 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fuser.attention.blocks import Blocks
from fuser.attention.reach import BLOCK, Reach, Reaching
from fuser.attention.scores import Added
from fuser.errors import CompileError, NotNow, Unsupported
from fuser.reasons import because

aten: Any = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
FORWARD, BACKWARD = (CUDNN, EFFICIENT), (CUDNN_BACKWARD, EFFICIENT_BACKWARD)
SIDE = 128  # queries and keys of a block: the side of most tiles
_ROWS_OF_SUMS = 32  # the efficient kernel's logarithms are padded to a multiple of this many rows
_LN2 = math.log(2)


class Reached:
    """Takes the arguments of the operator `target` and returns its results; ATen runs it if no kernel can.

    `dims`: which of batch, head, query and key the mask varies along.
    """

    __name__ = "attention_of_some_keys"
    fuser_reason = because("library", "it has kernels of its own, which leave out keys that its mask rules out")

    def __init__(self, target: Any, reach: Reaching, dims: tuple[int, ...], scale: float) -> None:
        self.target, self.reach, self.dims = target, reach, dims
        self._added = Added(dims, scale, target in BACKWARD)
        self._made: dict[bool, Any] = {}
        self._listed: dict[Any, Blocks] = {}
        self.reason: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason is None:
            try:
                return self._run(*args)
            except (Unsupported, CompileError) as error:
                if not isinstance(error, NotNow):
                    self.reason = str(error)
        return self.target(*args, **kwargs)

    def _run(self, *args: Any) -> tuple[Any, ...]:
        if self.target is CUDNN_BACKWARD:
            grad, q, k, v, out, logs, bias = *args[:6], args[8]
            return self._gradients(grad, q, k, v, bias, out, logs.squeeze(-1))
        if self.target is EFFICIENT_BACKWARD:
            grad, q, k, v, bias, out, logs = args[:7]
            return *self._gradients(grad, q, k, v, bias, out, logs[..., : q.shape[2]]), None
        q, k, v, bias, logs_read = args[:5]
        out, sums = self._kernels(bool(logs_read)).forward(q, k, v, self._blocks(q, k), self._mask(bias))
        # Those of a query without a key are infinite, so that its weights are 0 in ATen's gradient, too.
        logs = None if sums is None else (sums * _LN2).masked_fill_(sums == -math.inf, math.inf)
        number = _zero(q.device)
        if self.target is CUDNN:
            logs = None if logs is None else logs.unsqueeze(-1)
            return out, logs, None, None, q.shape[2], k.shape[2], number, number, None
        rows = -q.shape[2] % _ROWS_OF_SUMS
        return out, None if logs is None else torch.nn.functional.pad(logs, (0, rows)), number, number

    def _gradients(self, grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, logs: Any) -> tuple[Any, ...]:
        kernels, sums = self._kernels(False), logs / _LN2
        return kernels.backward((q, k, v), out, sums, grad, None, self._blocks(q, k), self._mask(bias))  # type: ignore[no-any-return]

    def _kernels(self, sums: bool) -> Any:
        if sums not in self._made:
            from fuser.attention.kernels import Kernels  # it imports the generator for GPUs

            self._made[sums] = Kernels(self._added, sums)
        return self._made[sums]

    def _mask(self, bias: torch.Tensor) -> tuple[torch.Tensor]:
        """The mask without the dims in which it has one element."""
        first = 4 - bias.dim()
        return (bias[tuple(slice(None) if d in self.dims else 0 for d in range(first, 4))],)

    def _blocks(self, q: torch.Tensor, k: torch.Tensor) -> Blocks:
        key = q.shape[2], k.shape[2], q.device
        if key not in self._listed:  # a reach takes longer to hash than a kernel to launch
            found = self.reach.at(*key[:2])
            if found is None or found.checked:
                raise NotNow("no keys are known to be masked at these sizes")
            self._listed[key] = blocks_on(found, q.device)
        return self._listed[key]


@functools.lru_cache(maxsize=64)
def blocks_on(reach: Reach, device: torch.device) -> Blocks:
    """The block mask of the remaining blocks: those in which the mask is added, and those in which it is 0."""
    rows, columns = -(-reach.rows // SIDE), -(-reach.keys // SIDE)
    left = torch.zeros((rows, columns), dtype=torch.bool, device="cpu")
    plain = torch.ones((rows, columns), dtype=torch.bool, device="cpu")
    each = SIDE // BLOCK
    for n, ((low, high), (first, last)) in enumerate(zip(reach.ranges, reach.whole)):
        if low < high:
            left[n // each, low // SIDE : -(-high // SIDE)] = True
        inside = slice(-(-first // SIDE), last // SIDE)
        known = torch.zeros(columns, dtype=torch.bool, device="cpu")
        known[inside] = True
        plain[n // each] &= known
    whole = left & plain
    masked = left & ~whole
    lists = [*_listed(masked), *_listed(whole), *_listed(masked.T), *_listed(whole.T)]
    there = [t.to(device) for t in lists]
    return Blocks((there[0], there[1]), (there[2], there[3]), (there[4], there[5]), (there[6], there[7]), SIDE, SIDE)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of true blocks in each row, and their indices: int32, [1, 1, rows] and [1, 1, rows, columns]."""
    order = (~blocks).to(torch.uint8).argsort(dim=-1, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None].contiguous()


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    """A placeholder for a generator's state, which attention without dropout does not read."""
    return torch.zeros((), dtype=torch.int64, device=device)


__all__ = ["BACKWARD", "FORWARD", "Reached", "blocks_on"]
