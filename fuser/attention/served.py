"""The replacement of `flex_attention` and its gradient in a graph: fused kernels, or else torch's own function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

from fuser import targets
from fuser.attention.blocks import blocks_of
from fuser.attention.by_rows import ByRows
from fuser.attention.scores import Mods
from fuser.errors import CompileError, NotNow, Unsupported
from fuser.reasons import because

Buffers = Sequence[Any]


class _Served:
    """One call in a graph. `reason`: why torch's own function runs from now on, or None."""

    # The reason why a node is in no group: see `reasons.reason_of_call`.
    fuser_reason = because("library", "it has kernels of its own, with its score modification and its mask in them")

    def __init__(self, mods: Mods, options: dict[str, Any]) -> None:
        self.mods, self.options = mods, options
        self.reason: str | None = None

    def fused(self, run: Callable[[], Any], *heads: torch.Tensor) -> Any:
        """The result of `run`; None if there are no kernels for tensors like `heads`."""
        if self.reason is not None or not takes(*heads):
            return None
        try:
            return run()
        except (Unsupported, CompileError) as error:
            if not isinstance(error, NotNow):
                self.reason = str(error)
            return None


class Forward(_Served):
    """`(q, k, v, block mask, buffers of mod, buffers of mask)` → (result, log2 of sums, maxima), as torch's operator.

    `sums` says whether a node reads the second; the third is None.
    """

    __name__ = "flex_attention"

    def __init__(self, mods: Mods, options: dict[str, Any], sums: bool) -> None:
        super().__init__(mods, options)
        self._by_rows = ByRows(mods, sums)
        self._sums = sums

    @functools.cached_property
    def _kernels(self) -> Any:
        from fuser.attention.kernels import Kernels  # it imports the generator for GPUs

        return Kernels(self.mods, self._sums)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Any], of_mod: Buffers,
        of_mask: Buffers,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        def run() -> Any:
            by = self._by_rows if targets.is_host(q.device) else self._kernels.forward
            return by(q, k, v, blocks_of(blocks), (*of_mod, *of_mask))

        found = self.fused(run, q, k, v)
        if found is not None:
            return *found, None
        mods = self.mods
        eager: tuple[torch.Tensor | None, ...] = flex_attention(
            q, k, v, mods.mod, (*blocks, mods.mask), mods.scale, self.options, tuple(of_mod), tuple(of_mask)
        )
        return eager


class Backward(_Served):
    """The gradients of queries, keys and values, and a tuple of None for the buffers, as torch's operator."""

    __name__ = "flex_attention_backward"

    @functools.cached_property
    def _kernels(self) -> Any:
        from fuser.attention.kernels import Kernels

        return Kernels(self.mods, sums=False)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor,
        grad: torch.Tensor | None, grad_sums: torch.Tensor | None, blocks: Sequence[Any], of_mod: Buffers,
        of_mask: Buffers,
    ) -> tuple[Any, ...]:  # fmt: skip
        def run() -> Any:
            return self._kernels.backward(
                (q, k, v), out, sums, grad, grad_sums, blocks_of(blocks), (*of_mod, *of_mask)
            )

        found = self.fused(run, q, k, v)
        if found is not None:
            return *found, (None,) * len(of_mod)
        mods, joint = self.mods, self.mods.joint
        assert joint is not None, "a gradient without its graph"
        eager: tuple[Any, ...] = flex_attention_backward(
            q, k, v, out, sums, grad, grad_sums, mods.mod, joint, (*blocks, mods.mask), mods.scale, self.options,
            tuple(of_mod), tuple(of_mask),
        )  # fmt: skip
        return eager


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether kernels accept tensors like these."""
    target = targets.known(q.device.type)
    return (
        target is not None
        and all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.dim() == 4 for t in (q, k, v))
        and q.dtype in target.scores
        and q.dtype == k.dtype == v.dtype
        and q.numel() > 0
        and k.numel() > 0
        and q.shape[1] % k.shape[1] == 0
        and k.shape[0] in (1, q.shape[0])
    )
