"""Convolutions on CUDA that are timed in both memory orders once on each device.

Which order is faster depends on the channels of a group: of a RegNet's 24, cuDNN reorders channels-last images, of a
ResNeXt's 4 to 32 the usual ones. It depends on the number of channels, too, if cuDNN copies images to add some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config

aten = torch.ops.aten
USUAL, LAST = "contiguous", "channels-last"


def are_faster_last(nodes: Sequence[fx.Node], spared: float = 0.0) -> bool:
    """Whether convolutions take less time in channels-last memory, all together. True for none.

    `spared`: microseconds that others gain in that memory. Where results must be the same in all processes, nothing is
    timed.
    """
    if not nodes:
        return True
    if config.is_deterministic():
        return False
    totals = {USUAL: 0.0, LAST: 0.0}
    for node in nodes:
        try:
            times = _times(node)
        except RuntimeError:  # cuDNN has no kernel for one of the orders
            times = None
        if times is None:
            return False
        for name, time in times:
            totals[name] += time
    return totals[LAST] < totals[USUAL] + spared


def _times(node: fx.Node) -> Sequence[tuple[str, float]] | None:
    """Microseconds in each order; None where nothing can be raced."""
    from fuser.cuda import choices

    backward = node.target is aten.convolution_backward.default
    args: Any = node.args[1:] if backward else node.args
    x, weight, bias, *behind = args
    sizes: Any = [tuple(n.meta["val"].shape) for n in (x, weight)]
    result = tuple(node.args[0].meta["val"].shape) if backward else None  # type: ignore[union-attr]
    device, dtype = x.meta["val"].device, x.meta["val"].dtype
    how = *sizes, dtype, bias is not None, behind, result
    subject = "gradients of a convolution" if backward else "convolution"
    what = f"{subject} of {'×'.join(map(str, sizes[0]))} in {behind[5]} groups {str(dtype)[6:]}"
    key = "order of a convolution", *map(str, how)
    found = choices.of_class(device, key, functools.partial(runs_of, *how), USUAL, what)
    return None if found is None else found.times


def runs_of(
    size: Sequence[int], weights: Sequence[int], dtype: torch.dtype, has_bias: bool, behind: Sequence[Any],
    result: Sequence[int] | None = None, device: str = "cuda",
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """The convolution on a device in both memory orders; its gradients for a result's size."""
    x, weight = (torch.randn(s, device=device, dtype=dtype) for s in (size, weights))
    behind = [list(b) if isinstance(b, Sequence) else b for b in behind]
    channels = weights[0] if not behind[3] else weights[1] * behind[5]
    bias = torch.randn(channels, device=device, dtype=dtype) if has_bias else None

    def run(form: torch.memory_format) -> Callable[[], Any]:
        image, filters = x.contiguous(memory_format=form), weight.contiguous(memory_format=form)
        if result is not None:
            grad = torch.randn(result, device=device, dtype=dtype).contiguous(memory_format=form)
            sizes = [channels] if has_bias else None
            return lambda: aten.convolution_backward.default(grad, image, filters, sizes, *behind)
        return lambda: aten.convolution.default(image, filters, bias, *behind)

    return {USUAL: run(torch.contiguous_format), LAST: run(torch.channels_last)}
