"""The forms in which the CPU can compute a convolution, and a contest between them for each class of convolutions.

The forms of a two-dimensional convolution, transposed or not, and of its gradients: images contiguous or in
channels-last, and for 1x1 convolutions products over the channels of all points (`LINEAR`). With a frozen weight the
channels-last form may use a packed weight, by oneDNN or by the package's own kernel (`OWN`). The own kernel includes
the epilogue; the other forms are then timed with a separate kernel for it. A contest runs on as few images as needed
for `_MOST_WORK` multiplications per thread. It runs on more if weights are larger than images, since oneDNN reorders
weights at each call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser import config, interface
from fuser.contests import race
from fuser.contests.deciding import Decisions, numbers
from fuser.contests.race import Contestant
from fuser.cpu import convolve
from fuser.cpu.epilogues import ACTIVATIONS, PER_CHANNEL, PER_ELEMENT, Epilogue, folded
from fuser.lazy_dataclasses import dataclass
from fuser.passes.providers import linear_op

aten = torch.ops.aten

USUAL, LAST, LINEAR, PACKED = "contiguous", "channels last", "linear", "channels last, packed"
OWN = "own kernel, packed"
LEAST_LINEAR = 1 << 22  # multiplications of a 1x1 convolution that becomes a product
_MOST_WORK = 1 << 26
_MOST_HEAVY = 4  # images of a contest, however large the work, if the weights are larger than the images
_COLD_BYTES, _MOST_COPIES = 1 << 25, 8  # of copies of a weight, used in turn: a program reads each weight once
_COPIED = 1 << 18  # elements of the copy that measures copying speed


@dataclass(frozen=True)
class Convolution:
    """A class of convolutions of x (n, c, h, w). `mask`: which gradients, for a convolution's gradients.

    out: (channels, height, width). epilogue: the steps that the package's kernel can include; None if it does not take
    the convolution. weight_last: the weight, and so the result of the contiguous form, is in channels-last memory.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    dtype: torch.dtype
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    mask: tuple[bool, ...] | None = None
    frozen: bool = False
    epilogue: Epilogue | None = None

    @property
    def work(self) -> int:
        """Number of multiplications."""
        points = self.x if self.transposed else self.out
        return self.x[0] * math.prod(points[-2:]) * math.prod(self.weight)

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a 1x1 convolution that is large enough to become a product, or the gradients of one."""
        alone = self.weight[2:] == (1, 1) and not any(self.padding) and self.groups == 1 and not self.transposed
        skips = self.mask is not None and max(self.stride) > 1  # the gradient of the image has gaps
        return alone and not skips and self.work >= LEAST_LINEAR and self.dtype is torch.float32

    def key(self) -> str:
        """The key that convolutions of one class share: everything but the number of images beyond a contest's."""
        values = [v for k, v in self.__dict__.items() if (k, v) != ("epilogue", None)]
        return repr((self._images(), self.x[1:], *values[1:]))

    def _images(self) -> int:
        """Number of images in the contest: several if reordering the weights, once a call, costs as much as they do."""
        image = math.prod(self.x[1:]) + math.prod(self.out)
        heavy = min(_MOST_HEAVY, math.prod(self.weight) // max(image, 1) + 1)
        return max(1, min(self.x[0], max(heavy, _MOST_WORK * torch.get_num_threads() * self.x[0] // max(self.work, 1))))

    def __str__(self) -> str:
        kind = "transposed convolution" if self.transposed else "convolution"
        kind = f"gradients of a {kind}" if self.mask is not None else kind
        sizes = "×".join(map(str, self.x)), "×".join(map(str, self.weight))
        step = f" by {'×'.join(map(str, self.stride))}" if max(self.stride) > 1 else ""
        groups = f" in {self.groups} groups" if self.groups > 1 else ""
        behind = f" with {', '.join(self.epilogue)}" if self.epilogue else ""
        return f"{kind} of {sizes[0]} with {sizes[1]}{step}{groups} {str(self.dtype)[6:]}{behind}"

    def settings(self) -> tuple[Any, ...]:
        """The operator's arguments after the bias, or after the bias's sizes."""
        lists = map(list, (self.stride, self.padding, self.dilation))
        return (*lists, self.transposed, list(self.output_padding), self.groups)


_convolutions = Decisions("convolution")


def seconds(c: Convolution) -> dict[str, float]:
    """Seconds of each form of a class; empty if the contest could not be held."""
    names = [USUAL, LAST]
    names += [LINEAR] if c.is_pointwise and linear_op() is not None else []
    names += [PACKED] if c.frozen and not c.transposed and c.mask is None and pack_op() is not None else []
    names += [OWN] if c.epilogue is not None else []
    choice = _convolutions.choice(c.key(), names, str(c), lambda: _contestants(c, names))
    scale = 1e-6 * c.x[0] / c._images()
    return {name: scale * t for name, t in choice.times}


def why_not_own(c: Convolution) -> str | None:
    """None if the package's kernel can compute such convolutions on this machine, else the reason."""
    if not c.frozen or c.mask is not None or c.transposed or c.groups != 1 or max(c.dilation) > 1:
        return "the kernel takes frozen weights, one group and no gaps between the places of its kernel"
    if linear_op() is None:
        return "libraries are switched off"
    return convolve.why_not(c.dtype, c.x[1])


def pack_op() -> Any:
    """oneDNN's reordering of a convolution's weight; None if this torch has none or oneDNN is switched off."""
    packet = getattr(torch.ops.mkldnn, "_reorder_convolution_weight", None) if linear_op() is not None else None
    return getattr(packet, "default", None)


def pack(c: Convolution) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that packs the weight of a convolution."""
    lists = list(c.padding), list(c.stride), list(c.dilation)
    return lambda w: pack_op()(w, *lists, c.groups, list(c.x))


def packed_convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> torch.Tensor:
    """`aten.convolution` with a packed weight, for arguments in its order."""
    stride, padding, dilation, _, _, groups = settings
    op = torch.ops.mkldnn._convolution_pointwise.default
    made: torch.Tensor = op(x, weight, bias, padding, stride, dilation, groups, "none", [], "")
    return made


def _contestants(c: Convolution, names: list[str]) -> dict[str, Contestant]:
    n = c._images()
    x = numbers(n * math.prod(c.x[1:]), c.dtype, 0).view(n, *c.x[1:])
    w = numbers(math.prod(c.weight), c.dtype, 1).view(c.weight)
    bias = numbers(c.out[0], c.dtype, 2) if c.bias else None
    last = x.contiguous(memory_format=torch.channels_last)
    if c.mask is not None:
        grad = numbers(n * math.prod(c.out), c.dtype, 3).view(n, *c.out)
        grads = grad.contiguous(memory_format=torch.channels_last)
        sizes = [c.out[0]] if c.bias else None
        behind = (w, sizes, *c.settings(), list(c.mask))
        forms: dict[str, Callable[[], Any]] = {
            USUAL: lambda: aten.convolution_backward.default(grad, x, *behind),
            LAST: lambda: aten.convolution_backward.default(grads, last, *behind),
            LINEAR: lambda: _linear_gradients(c, grads, last, w),
        }
        return {name: _nth_of(c.mask.index(True), forms[name]) for name in names}
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        USUAL: lambda w: aten.convolution.default(x, w, bias, *c.settings()),
        LAST: lambda w: aten.convolution.default(last, w, bias, *c.settings()),
        LINEAR: lambda w: _linear(c, last, w, bias),
        PACKED: lambda w: packed_convolution(last, w, bias, *c.settings()),
    }
    packs = {PACKED: pack(c), OWN: convolve.pack}
    if OWN in names:
        calls = _with_epilogue(c, calls, last, bias)
    copies = 1 if not c.frozen else max(1, min(_MOST_COPIES, _COLD_BYTES // (w.numel() * w.element_size())))
    weights = [w, *(w.clone() for _ in range(copies - 1))]
    return {name: _contestant(calls[name], packs.get(name), weights) for name in names}


def _contestant(
    call: Callable[[torch.Tensor], torch.Tensor], pack: Callable[[torch.Tensor], torch.Tensor] | None,
    weights: list[torch.Tensor],
) -> Contestant:  # fmt: skip
    """A contestant that uses copies of the weight in turn, packed if `pack` is given."""
    try:
        turns = itertools.cycle(weights if pack is None else list(map(pack, weights)))
    except RuntimeError as e:
        return race.failing(e)
    return Contestant(lambda: call(next(turns)))


def _with_epilogue(
    c: Convolution, calls: dict[str, Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor,
    bias: torch.Tensor | None,
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:  # fmt: skip
    """The calls, each followed by a kernel for the epilogue, and the kernel that includes it."""
    steps = c.epilogue or ()
    count, sums = sum(s in PER_CHANNEL for s in steps), steps.count(PER_ELEMENT)
    factors = numbers(count * c.out[0], torch.float32, 4).view(count, c.out[0]) if count else None
    if factors is not None and bias is not None:
        factors[0] = bias
    given = [numbers(x.shape[0] * math.prod(c.out), c.dtype, 5).view(-1, *c.out) for _ in range(sums)]
    orders = {form: [t.contiguous(memory_format=form) for t in given] for form in _ORDERS}
    behind = steps if bias is None else steps[1:]  # libraries add the bias themselves
    rows = factors if factors is None or bias is None else factors[1:]
    kernel = _kernel(behind, c.dtype) if behind else None

    def followed(name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        others = orders[_ORDERS[name == USUAL]]
        if kernel is None:
            return call
        operands = [*([] if rows is None else [r.view(-1, 1, 1) for r in rows.to(c.dtype)]), *others]
        like = x.new_zeros(x.shape[0], *c.out).contiguous(memory_format=_ORDERS[name == USUAL])
        with config.override(slowest=0.0, compile_mode="wait"):  # no trial, and at once
            kernel(like, *operands)
        return lambda w: kernel(call(w), *operands)

    def own(w: torch.Tensor) -> torch.Tensor:
        sizes = c.out[0], c.weight[2:], c.stride, c.padding
        return convolve.convolution(x, w, *sizes, steps, factors, *orders[torch.channels_last])

    return {**{name: followed(name, call) for name, call in calls.items()}, OWN: own}


_ORDERS = (torch.channels_last, torch.contiguous_format)


@functools.cache
def _kernel(steps: Epilogue, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A kernel for an epilogue alone, as a function of a tensor, per-channel numbers and other tensors."""
    graph = fx.Graph()
    out = graph.placeholder("x")
    vectors = [graph.placeholder(f"a{n}") for n, s in enumerate(steps) if s in PER_CHANNEL]
    others = [graph.placeholder(f"b{n}") for n, s in enumerate(steps) if s == PER_ELEMENT]

    def activated(step: str, x: fx.Node) -> fx.Node:
        target, arguments, named = ACTIVATIONS[step]
        return graph.call_function(target, (x, *arguments), named)

    times, plus = (lambda *a, op=op: graph.call_function(op, a) for op in (aten.mul.Tensor, aten.add.Tensor))
    graph.output(folded(steps, out, vectors, others, times, plus, activated))
    handle: Callable[..., torch.Tensor] = interface.fusion_handle(interface.register_fusion(graph))
    return handle


def _nth_of(n: int, call: Callable[[], Any]) -> Contestant:
    """A contestant compared by result `n`. oneDNN gives the weight's gradient with the bias's, whatever the mask."""
    return Contestant(call, lambda: call()[n])


def _linear(c: Convolution, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    points = x[:, :, :: c.stride[0], :: c.stride[1]].permute(0, 2, 3, 1)
    rows = points.reshape(-1, c.x[1])
    out = linear_op()(rows, w.view(c.out[0], c.x[1]), bias, "none", [], "")
    made: torch.Tensor = out.view(*points.shape[:3], c.out[0]).permute(0, 3, 1, 2)
    return made


def _linear_gradients(
    c: Convolution, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients that the mask asks for, of a 1x1 convolution without strides."""
    assert c.mask is not None
    points = grad.permute(0, 2, 3, 1)
    grads, rows = points.reshape(-1, c.out[0]), x.permute(0, 2, 3, 1).reshape(-1, c.x[1])
    image = torch.mm(grads, w.view(c.out[0], c.x[1])).view(*points.shape[:3], -1) if c.mask[0] else None
    return (
        image.permute(0, 3, 1, 2) if image is not None else None,
        torch.mm(grads.t(), rows).view(c.weight) if c.mask[1] else None,
        grads.sum(0) if c.mask[2] else None,
    )


_copies = Decisions("copy")


def seconds_a_byte() -> float:
    """Seconds per byte of a change of memory order, as measured by a copy to channels-last."""

    def enter() -> dict[str, Contestant]:
        x = numbers(_COPIED, torch.float32, 0).view(1, 64, 64, -1)
        return {LAST: Contestant(lambda: x.clone(memory_format=torch.channels_last))}

    times = dict(_copies.choice(_COPIED, [LAST], "copy to channels-last of 1 MiB", enter).times)
    return 1e-6 * times.get(LAST, 100.0) / (4 * _COPIED)


__all__ = [
    "LAST", "LINEAR", "OWN", "PACKED", "USUAL", "Convolution", "pack", "packed_convolution", "seconds",
    "seconds_a_byte", "why_not_own",
]  # fmt: skip
