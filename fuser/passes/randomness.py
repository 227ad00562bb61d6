"""Random operators made functional: what they draw becomes a function of a seed, which a kernel can compute.

One call of `randint` at the head of the graph draws a seed for each random operator from torch's default generator. So
`torch.manual_seed` decides all, every call differs, and whatever is computed again, in a backward or in a checkpoint's
region, is the same: seeds are values like any other. The numbers are not those that eager draws; with
`config.random = "eager"` the graph keeps ATen's operators and their numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config

settings: Any = config  # its attributes are made from a table
aten = torch.ops.aten


class _Writer:
    """Writes calls before a random operator, with the values that they have."""

    def __init__(self, site: fx.Node, seed: fx.Node) -> None:
        self.site, self.seed = site, seed
        self.meta = {k: v for k, v in site.meta.items() if k not in ("val", "tensor_meta")}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.site.graph.inserting_before(self.site):
            return _call(self.site.graph, self.meta, target, *args, **kwargs)

    def uniform(self, like: fx.Node, stream: int = 0) -> fx.Node:
        """float32 in [0, 1) in the sizes of `like`."""
        return self.call(torch.ops.fuser.uniform_like.default, self.seed, stream, like)

    def normal(self, like: fx.Node) -> fx.Node:
        """Standard normal float32, by Box and Muller."""
        radius = self.call(aten.sub.Tensor, self.call(aten.full.default, [], 1.0), self.uniform(like, 0))  # in (0, 1]
        radius = self.call(aten.sqrt.default, self.call(aten.mul.Tensor, self.call(aten.log.default, radius), -2.0))
        angle = self.call(aten.mul.Tensor, self.uniform(like, 1), 2 * math.pi)
        return self.call(aten.mul.Tensor, radius, self.call(aten.cos.default, angle))

    def sized(self, size: Any) -> fx.Node:
        """Something of these sizes; a kernel never makes it."""
        return self.call(aten.full.default, size, 0.0, dtype=torch.float32, device=torch.device("cpu"))

    def scaled(self, value: fx.Node, by: Any, plus: Any) -> fx.Node:
        value = value if by == 1.0 else self.call(aten.mul.Tensor, value, by)
        return value if plus == 0.0 else self.call(aten.add.Tensor, value, plus)

    def chosen(self, like: fx.Node, p: Any) -> fx.Node:
        """Ones with probability `p`, else zeros, in the dtype of `like`."""
        compare = aten.lt.Tensor if isinstance(p, fx.Node) and _is_tensor(p) else aten.lt.Scalar
        return self.either(self.call(compare, self.uniform(like), p), 1.0, like.meta["val"].dtype)

    def either(self, condition: fx.Node, value: float, dtype: torch.dtype) -> fx.Node:
        """`value` where the condition holds, else 0."""
        a, b = (self.call(aten.full.default, [], v, dtype=dtype, device=torch.device("cpu")) for v in (value, 0.0))
        return self.call(aten.where.self, condition, a, b)


def _call(graph: fx.Graph, meta: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = {**meta, "val": target(*values[0], **values[1])}
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dropout(w: _Writer, x: fx.Node, p: Any, train: Any = True) -> Sequence[fx.Node]:
    kept, dtype = w.call(aten.ge.Scalar, w.uniform(x), p), x.meta["val"].dtype
    factor = w.either(kept, 0.0 if p == 1 else 1.0 / (1.0 - p), torch.promote_types(dtype, torch.float32))
    value = w.call(aten.mul.Tensor, x, factor)
    return (value if dtype.itemsize >= 4 else w.call(aten._to_copy.default, value, dtype=dtype)), kept


# For each operator: what writes it anew, from its arguments without names of dtypes and devices.
_REWRITES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: lambda w, x, p=0.5: w.chosen(x, p),
    aten.bernoulli.default: lambda w, p: w.chosen(p, p),
    aten.rand.default: lambda w, size: w.uniform(w.sized(size)),
    aten.rand_like.default: lambda w, x: w.uniform(x),
    aten.randn.default: lambda w, size: w.normal(w.sized(size)),
    aten.randn_like.default: lambda w, x: w.normal(x),
    aten.uniform.default: lambda w, x, low=0.0, high=1.0: w.scaled(w.uniform(x), high - low, low),
    aten.normal_functional.default: lambda w, x, mean=0.0, std=1.0: w.scaled(w.normal(x), std, mean),
}
_FROM_FLOAT32 = frozenset(_REWRITES) - {aten.native_dropout.default, aten.bernoulli.p, aten.bernoulli.default}


def _can_rewrite(node: fx.Node) -> bool:
    """Whether an operator draws on the CPU, from the default generator, what can be had from float32 numbers."""
    if node.target not in _REWRITES or node.kwargs.get("generator") is not None:
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    if not isinstance(first, torch.Tensor) or first.device.type != "cpu" or first.layout is not torch.strided:
        return False
    if node.target in _FROM_FLOAT32 and (first.dtype is not torch.float32 or not first.is_contiguous()):
        return False
    if any(isinstance(a, fx.Node) and not _is_tensor(a) for a in node.args):
        return False  # a probability that is a symbol
    if node.target is aten.native_dropout.default:
        return node.args[-1] is not False and all(u.target is operator.getitem for u in node.users)
    return True


def functional_random(module: fx.GraphModule) -> int:
    """Random operators become functions of seeds that one call draws from torch's generator."""
    sites = [n for n in module.graph.nodes if _can_rewrite(n)] if settings.random == "philox" else []
    if not sites:
        return 0
    for site, seed in zip(sites, _draw_seeds(module.graph, sites), strict=True):
        args = [a for a in site.args if not isinstance(a, torch.dtype)]
        made = _REWRITES[site.target](_Writer(site, seed), *args)
        if isinstance(made, tuple):
            for user in list(site.users):
                user.replace_all_uses_with(made[user.args[1]])
                module.graph.erase_node(user)
        else:
            site.replace_all_uses_with(made)
        module.graph.erase_node(site)
    return len(sites)


def _draw_seeds(graph: fx.Graph, sites: Sequence[fx.Node]) -> list[fx.Node]:
    """A 64-bit seed for each site, as tensors without dims, drawn where the graph begins."""
    begin = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    value = sites[0].meta["val"]
    mode = getattr(value[0] if isinstance(value, (tuple, list)) else value, "fake_mode", None)
    options = {"dtype": torch.int64, "device": torch.device("cpu"), "pin_memory": False}
    with graph.inserting_before(begin), mode or torch.no_grad():
        drawn = _call(graph, {}, aten.randint.low, -(1 << 63), (1 << 63) - 1, [len(sites)], **options)
        parts = _call(graph, {}, aten.unbind.int, drawn)
        return [_call(graph, {}, operator.getitem, parts, i) for i in range(len(sites))]
