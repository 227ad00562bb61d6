"""Makes random operators functional: their numbers become a function of a seed, which a kernel can compute.

One call of `randint` at the start of the graph draws a seed for each random operator from torch's default generator. So
`torch.manual_seed` determines all numbers, every call differs, and recomputation in a backward or a checkpointed region
gives the same numbers: seeds are values like any other. The numbers differ from eager's. With `config.random = "eager"`
the graph keeps ATen's operators and their numbers.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fuser import compiler, config, targets
from fuser.lazy_dataclasses import dataclass
from fuser.passes.calls import own_operator
from fuser.passes.classify import Kind, classify
from fuser.passes.hints import is_contiguous

settings: Any = config  # its attributes are made from a table
aten = torch.ops.aten
DRAWS = "draws"  # in a module's meta: a `Draw` for each of its random operators, in order


@dataclass(frozen=True)
class Draw:
    """A random operator of a graph. `seed`: its number among the seeds of its device; None if ATen draws."""

    target: Any
    numbers: tuple[Any, ...]  # its arguments, with None for those that are nodes
    device: torch.device
    seed: int | None = None


class _Writer:
    """Creates calls before a random operator, with their values."""

    def __init__(self, site: fx.Node, seed: fx.Node) -> None:
        self.site, self.seed = site, seed
        self.device = _drawn(site).device
        self.meta = {k: v for k, v in site.meta.items() if k not in ("val", "tensor_meta")}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.site.graph.inserting_before(self.site), _mode_of(_drawn(self.site)):
            return _call(self.site.graph, self.meta, target, *args, **kwargs)

    def uniform(self, like: fx.Node) -> fx.Node:
        """float32 in [0, 1) with the sizes of `like`."""
        return self.call(own_operator("uniform_like"), self.seed, 0, like)

    def normal(self, like: fx.Node) -> fx.Node:
        """Standard normal float32 with the sizes of `like`."""
        return self.call(own_operator("normal_like"), self.seed, 0, like)

    def full(self, size: Any, value: float, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A tensor of one number. If only its sizes are used, no kernel computes it."""
        return self.call(aten.full.default, size, value, dtype=dtype, device=self.device)

    def scaled(self, value: fx.Node, by: Any, plus: Any) -> fx.Node:
        value = value if by == 1.0 else self.call(aten.mul.Tensor, value, by)
        return value if plus == 0.0 else self.call(aten.add.Tensor, value, plus)

    def chosen(self, like: fx.Node, p: Any) -> fx.Node:
        """Ones with probability `p`, else zeros, in the dtype of `like`."""
        compare = aten.lt.Tensor if isinstance(p, fx.Node) and _is_tensor(p) else aten.lt.Scalar
        return self.either(self.call(compare, self.uniform(like), p), 1.0, like.meta["val"].dtype)

    def either(self, condition: fx.Node, value: float, dtype: torch.dtype) -> fx.Node:
        """`value` where the condition holds, else 0."""
        return self.call(aten.where.self, condition, self.full([], value, dtype), self.full([], 0.0, dtype))


def _call(graph: fx.Graph, meta: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = {**meta, "val": target(*values[0], **values[1])}
    return node


def _mode_of(value: torch.Tensor) -> Any:
    """The fake mode of `value`, in which new tensors have no memory; a neutral context for a real tensor."""
    return getattr(value, "fake_mode", None) or torch.no_grad()


def _drawn(node: fx.Node) -> torch.Tensor:
    """The tensor that a random operator fills, or the first of its results."""
    value = node.meta["val"]
    found: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dropout(w: _Writer, x: fx.Node, p: Any, train: Any = True) -> Sequence[fx.Node]:
    kept, dtype = w.call(aten.ge.Scalar, w.uniform(x), p), x.meta["val"].dtype
    factor = w.either(kept, 0.0 if p == 1 else 1.0 / (1.0 - p), torch.promote_types(dtype, torch.float32))
    value = w.call(aten.mul.Tensor, x, factor)
    return (value if dtype.itemsize >= 4 else w.call(aten._to_copy.default, value, dtype=dtype)), kept


_DEVICES = ("cpu", "cuda")
# For each operator: the function that rewrites it, given its arguments without dtypes and devices.
_REWRITES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: lambda w, x, p=0.5: w.chosen(x, p),
    aten.bernoulli.default: lambda w, p: w.chosen(p, w.call(own_operator("probabilities"), p)),
    aten.rand.default: lambda w, size: w.uniform(w.full(size, 0.0)),
    aten.rand_like.default: lambda w, x: w.uniform(x),
    aten.randn.default: lambda w, size: w.normal(w.full(size, 0.0)),
    aten.randn_like.default: lambda w, x: w.normal(x),
    aten.uniform.default: lambda w, x, low=0.0, high=1.0: w.scaled(w.uniform(x), high - low, low),
    aten.normal_functional.default: lambda w, x, mean=0.0, std=1.0: w.scaled(w.normal(x), std, mean),
}
# Whether eager takes an operator's numbers, which it checks when it draws. A deviation is checked when it is traced.
_TAKES: dict[Any, Callable[..., bool]] = {
    aten.native_dropout.default: lambda x, p, train=True: 0 <= p <= 1,
    aten.bernoulli.p: lambda x, p=0.5: 0 <= p <= 1,
    aten.uniform.default: lambda x, low=0.0, high=1.0: 0 <= high - low <= torch.finfo(torch.float32).max,
}
_FROM_FLOAT32 = frozenset(_REWRITES) - {aten.native_dropout.default, aten.bernoulli.p, aten.bernoulli.default}


def _can_rewrite(node: fx.Node) -> bool:
    """Whether an operator draws from the default generator, and its result can be computed from float32 numbers."""
    if node.target not in _REWRITES or node.kwargs.get("generator") is not None:
        return False
    first = _drawn(node)
    if first.device.type not in _DEVICES or first.layout is not torch.strided:
        return False
    if compiler.why_not(first.device.type) is not None:
        return False  # without kernels, the operators that use a seed are slow
    if node.target in _FROM_FLOAT32 and first.dtype is not torch.float32:
        return False
    if node.target is not aten.native_dropout.default and not is_contiguous(first):
        return False  # strides that a kernel's numbers would not have
    if any(isinstance(a, fx.Node) and not _is_tensor(a) for a in node.args):
        return False  # a probability that is a symbol
    if node.target in _TAKES and not _TAKES[node.target](*node.args):
        return False  # ATen's operator raises
    if node.target in _FROM_FLOAT32 and targets.is_host(first.device) and not _is_read_by_others(node):
        return "recompute" in node.meta  # unfused, ATen's operator takes less time than a kernel on few threads
    if node.target is aten.native_dropout.default:
        return node.args[-1] is not False and all(u.target is operator.getitem for u in node.users)
    return True


def _is_read_by_others(node: fx.Node) -> bool:
    """Whether some fusible operator reads the numbers that `node` draws."""
    kinds = {user: classify(user).kind for user in node.users}
    return any(k is Kind.COMPUTE or k is Kind.FREE and _is_read_by_others(user) for user, k in kinds.items())


def functional_random(module: fx.GraphModule) -> int:
    """Random operators become functions of seeds, which one call draws from torch's generator."""
    sites = [n for n in module.graph.nodes if _can_rewrite(n)] if settings.random == "philox" else []
    module.meta[DRAWS] = draws_of(module.graph, sites)
    if not sites:
        return 0
    seeds = _draw_seeds(module.graph, sites)
    for site in sites:
        args = [a for a in site.args if not isinstance(a, torch.dtype)]
        made = _REWRITES[site.target](_Writer(site, seeds[site]), *args)
        if isinstance(made, tuple):
            for user in list(site.users):
                user.replace_all_uses_with(made[user.args[1]])
                module.graph.erase_node(user)
        else:
            site.replace_all_uses_with(made)
        module.graph.erase_node(site)
    return len(sites)


def node_draws(node: fx.Node) -> bool:
    """Whether a node calls an operator that draws random numbers; attention without dropout draws none."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and draws_numbers(target, node.args, node.kwargs)


def draws_numbers(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an ATen operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in target.tags and target.namespace != "rngprims":
        return False
    names = [a.name for a in target._schema.arguments]
    at = names.index("dropout_p") if "dropout_p" in names else len(args)
    share = args[at] if at < len(args) else kwargs.get("dropout_p", 0.0 if "dropout_p" in names else None)
    return not (isinstance(share, float) and share == 0)


def draws_of(graph: fx.Graph, sites: Sequence[fx.Node] = ()) -> tuple[Draw, ...]:
    """All random operators of a graph; the seeds of `sites` are numbered for each device."""
    numbers: Counter[torch.device] = Counter()
    found = []
    for node in filter(node_draws, graph.nodes):
        device, seed = _drawn(node).device, None
        if node in sites:
            seed = numbers[device]
            numbers[device] += 1
        constants = tuple(None if isinstance(a, fx.Node) else a for a in node.args)
        found.append(Draw(node.target, constants, device, seed))
    return tuple(found)


def seeds_again(draws: Sequence[Draw]) -> dict[torch.device, tuple[torch.Tensor, ...]]:
    """The seeds that a graph drew, drawn again from generators in the state that they had then."""
    counts = Counter(d.device for d in draws if d.seed is not None)
    return {d: torch.randint(*_SEEDS, [n], dtype=torch.int64, device=d).unbind(0) for d, n in counts.items()}


def drawn_again(draw: Draw, seed: torch.Tensor, target: Any, args: Sequence[Any], like: torch.Tensor) -> Any:
    """The result of a call of `target` in eager, where the graph of `draw` drew from `seed`.

    `like`: a tensor like the result. Eager draws a dropout's mask by `bernoulli`; a trace of it may use `rand`.
    """
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    traced = packet_name(draw.target)
    masks = packet_name(target) != traced
    eager = [given(a) for a in args if not isinstance(a, torch.dtype)]
    if masks:
        eager = [list(like.shape)] if traced == "rand" else [eager[0], *draw.numbers[1:]]
    site = graph.call_function(draw.target, tuple(eager))
    site.meta["val"] = like
    made = _REWRITES[draw.target](_Writer(site, given(seed)), *eager)
    values = [m.meta["val"] for m in (made if isinstance(made, tuple) else (made,))]
    if masks:
        return (values[0] < args[0] if traced == "rand" else values[1]).to(like.dtype)
    return tuple(values) if isinstance(made, tuple) else values[0]


def packet_name(target: Any) -> str:
    """An operator's name; in-place and functional variants share one name."""
    return str(target._schema.name).split("::")[1].removesuffix("_functional").rstrip("_")


_SEEDS = -(1 << 63), (1 << 63) - 1


def _draw_seeds(graph: fx.Graph, sites: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """A 64-bit seed for each site, as a 0-dim tensor on its device, drawn at the start of the graph."""
    begin = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    found = {}
    for device in dict.fromkeys(_drawn(s).device for s in sites):
        here = [s for s in sites if _drawn(s).device == device]
        options = {"dtype": torch.int64, "device": device, "pin_memory": False}
        with graph.inserting_before(begin), _mode_of(_drawn(here[0])):
            drawn = _call(graph, {}, aten.randint.low, *_SEEDS, [len(here)], **options)
            parts = _call(graph, {}, aten.unbind.int, drawn)
            found.update({s: _call(graph, {}, operator.getitem, parts, i) for i, s in enumerate(here)})
    return found
