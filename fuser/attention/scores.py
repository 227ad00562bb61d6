"""A user's `score_mod` and `mask_mod` for one score, as a graph over all scores of a tile.

Both are traced for one score: graphs of numbers (0-dim tensors) that index captured tensors. Here every number becomes
a tensor of four dims, batch, head, query and key, with one element in dims that it does not depend on.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser.canonical.schemas import is_pointwise
from fuser.errors import Unsupported
from fuser.lazy_dataclasses import dataclass

aten = torch.ops.aten
DIMS = 4  # batch, head, query, key
# Functions that create a number: the number, or the index of its argument.
_MADE = {"new_ones": 1, "ones": 1, "new_zeros": 0, "zeros": 0}
_FILLED = {"full": 1, "new_full": 2, "scalar_tensor": 0}
# Functions that do not change a single number.
_SAME = frozenset(
    "alias alias_copy detach detach_copy lift_fresh lift_fresh_copy clone contiguous view reshape expand squeeze t"
    " resolve_conj resolve_neg".split()
)
# Elementwise functions without torch's tag for these, in some of its releases.
_ELEMENTWISE = frozenset(
    "where _to_copy convert_element_type full_like zeros_like ones_like floor_divide rsub isclose special_ndtr"
    " hardswish _prelu_kernel hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward"
    " leaky_relu_backward elu_backward mish_backward softplus_backward softshrink_backward"
    " log_sigmoid_forward log_sigmoid_backward".split()
)
_TRUE = ("new_ones", "ones", "ones_like", "full", "new_full", "full_like")


@dataclass(frozen=True)
class Mods:
    """The graphs of one attention: `mod(score, b, h, q, k, *buffers)` and `mask(b, h, q, k, *buffers)`.

    `joint(score, b, h, q, k, gradient, *buffers)` returns the gradient of the score first; None in the forward
    direction.
    """

    mod: fx.GraphModule
    mask: fx.GraphModule
    mod_buffers: int
    mask_buffers: int
    scale: float
    joint: fx.GraphModule | None = None

    @property
    def gradient(self) -> bool:
        """Whether the backward direction is wanted."""
        return self.joint is not None

    @property
    def masks(self) -> bool:
        """Whether the mask excludes anything: torch's default is a mask that is True everywhere."""
        out = self.mask.graph.output_node().args[0]
        out = out[0] if isinstance(out, (tuple, list)) else out
        if not isinstance(out, fx.Node) or _name(out.target) not in _TRUE:
            return True
        values = [a for a in out.args if isinstance(a, (bool, int))] if "full" in _name(out.target) else [True]
        return not (values and bool(values[-1]))


@dataclass(frozen=True)
class Added:
    """Scores to which a captured tensor is added in the blocks that a block mask lists as masked, and in no others.

    `dims`: which of batch, head, query and key the tensor has. `gradient`: whether the backward direction is wanted.
    """

    dims: tuple[int, ...]
    scale: float
    gradient: bool
    masks = True


@dataclass(frozen=True)
class _Part:
    """A captured tensor indexed along its first dims."""

    buffer: fx.Node
    index: tuple[Any, ...]
    dims: int  # remaining dims


class _Inliner:
    """Copies a graph for one score into a graph over all of them. Raises Unsupported for unknown operators."""

    def __init__(self, graph: fx.Graph, score: fx.Node) -> None:
        self.graph, self.score = graph, score

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def inline(self, module: fx.GraphModule, args: Sequence[Any]) -> Any:
        """The result of `module` for `args`: nodes of four dims, captured tensors, or numbers."""
        env: dict[fx.Node, Any] = {}
        given = iter(args)
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    value = next(given)
                    tensor = _tensor(node)
                    if isinstance(value, fx.Node) and tensor is not None and value.name.startswith("buffer"):
                        value = self._buffer(value, tensor.dim())
                    env[node] = value
                case "get_attr":
                    env[node] = self._constant(getattr(module, str(node.target), None))
                case "call_function":
                    env[node] = self._made(node, env)
                case "output":
                    return fx.map_arg(node.args[0], env.__getitem__)
                case _:
                    raise Unsupported(f"a score modification has {node.op} {node.target}")
        raise AssertionError("a graph without an output")

    def _buffer(self, node: fx.Node, dims: int) -> Any:
        return self.call(aten.view.default, node, [1] * DIMS) if dims == 0 else _Part(node, (), dims)

    def _constant(self, value: Any) -> fx.Node:
        if not isinstance(value, torch.Tensor) or value.dim():
            raise Unsupported("a score modification holds a constant that is no number")
        with _disable_current_modes():  # a constant is a real tensor in a graph of fake ones
            number = value.item()
        return self._number(number, value.dtype)

    def _number(self, value: Any, dtype: torch.dtype) -> fx.Node:
        """A number as a tensor of four dims on the device of the scores."""
        return self.call(aten.new_full.default, self.score, [1] * DIMS, value, dtype=dtype)

    def _made(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        name = _name(target)
        given: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = given
        if target is aten.index.Tensor:
            return self._indexed(args[0], args[1])
        if target is operator.getitem:
            return self.call(target, *args) if isinstance(args[0], fx.Node) else args[0][args[1]]
        result = _tensor(node)
        if result is None:  # sizes and their arithmetic, or several numbers
            if isinstance(node.meta.get("val"), (tuple, list)) and not _is_elementwise(target):
                raise Unsupported(f"a score modification calls {target}")
            return self.graph.call_function(target, args, kwargs)
        if name in _SAME and isinstance(args[0], _Part) and args[0].dims == result.dim():
            return args[0]
        if result.dim():
            raise Unsupported(f"a score modification makes a tensor of {result.dim()} dims by {target}")
        if any(isinstance(a, _Part) for a in (*args, *kwargs.values())):
            raise Unsupported(f"a score modification reads a captured tensor by {target}")
        if name in _SAME:
            return args[0]
        if name in _MADE or name in _FILLED:
            value = _MADE[name] if name in _MADE else args[_FILLED[name]]
            return self._number(value, result.dtype)
        if not _is_elementwise(target):
            raise Unsupported(f"a score modification calls {target}")
        return self.graph.call_function(target, args, kwargs)

    def _indexed(self, tensor: Any, index: Sequence[Any]) -> Any:
        if not isinstance(tensor, _Part) or any(not isinstance(i, fx.Node) for i in index):
            raise Unsupported("a score modification indexes something other than a captured tensor")
        left = tensor.dims - len(index)
        both = (*tensor.index, *index)
        return _Part(tensor.buffer, both, left) if left else self.call(aten.index.Tensor, tensor.buffer, list(both))


def _name(target: Any) -> str:
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else ""


def _tensor(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def _is_elementwise(target: Any) -> bool:
    return is_pointwise(target) or _name(target) in _ELEMENTWISE


@dataclass(frozen=True)
class Scores:
    """A graph over scores under construction, and the nodes of its results."""

    graph: fx.Graph
    index: tuple[fx.Node, ...]  # of batch, head, query and key
    mod: fx.Node
    masked: fx.Node
    gradient: fx.Node | None = None
    masked_gradient: fx.Node | None = None

    def add_up(self) -> None:
        """Let the graph return the sum of its results, from which kernels take the parts (`cuda.attention`)."""
        results = [n for n in (self.mod, self.masked, self.gradient, self.masked_gradient) if n is not None]
        total, *others = dict.fromkeys(results)
        for node in others:
            total = self.graph.call_function(aten.add.Tensor, (total, node))
        self.graph.output(total)


def of_keys_alone(scores: Scores, plain: Collection[Any]) -> list[fx.Node]:
    """The nodes that depend on no index but the key's, and on an operator outside `plain`.

    Nodes with more dependences read them, and they can be computed once for all rows.
    """
    key = scores.index[-1]
    inputs = set(scores.graph.find_nodes(op="placeholder"))
    buffers = {n for n in inputs if n.name.startswith("buffer")}
    alone: dict[fx.Node, bool] = {key: False}  # whether computing it costs something
    for node in scores.graph.nodes:
        given = node.all_input_nodes
        if node in inputs or node.op != "call_function" or not given:
            continue
        if all(a in alone or a in buffers for a in given) and any(a in alone for a in given):
            alone[node] = _name(node.target) not in plain or any(alone.get(a, False) for a in given)
    return [n for n, costs in alone.items() if costs and any(u not in alone for u in n.users)]


def write_scores(
    mods: Mods | Added, buffers: int, working: torch.dtype = torch.float32, others: Sequence[str] = ()
) -> Scores:  # fmt: skip
    """The graph of the scores of a tile; `buffers` is the number of tensors and numbers that mod and mask capture.

    Its inputs: those named `others`, which it does not read, the buffers, the product of query and key, the indices of
    batch, head, query and key, and with `mods.joint` the gradient of the modified score. It has no output yet. Scores
    are computed in the dtype `working`.
    """
    graph = fx.Graph()
    for name in others:
        graph.placeholder(name)
    held = [graph.placeholder(f"buffer{i}") for i in range(buffers)]
    score = graph.placeholder("score")
    index = [graph.placeholder(f"index_{name}") for name in "bhqk"]
    gradient = graph.placeholder("gradient") if mods.gradient else None
    if isinstance(mods, Added):
        return _added(mods, graph, score, index, gradient, held[0])
    of_mod, of_mask = held[: mods.mod_buffers], held[mods.mod_buffers :]
    inliner = _Inliner(graph, score)
    scaled = inliner.call(aten.mul.Tensor, score, mods.scale)
    mod = _single(inliner.inline(mods.mod, (scaled, *index, *of_mod)))
    if scaled not in behind(mod):
        raise Unsupported("the modified score does not depend on the score")
    mod = inliner.call(aten._to_copy.default, mod, dtype=working)
    masks, masked = mods.masks, mod
    if masks:
        mask = _single(inliner.inline(mods.mask, (*index, *of_mask)))
        masked = inliner.call(aten.where.ScalarOther, mask, mod, -float("inf"))
    if mods.joint is None:
        return Scores(graph, tuple(index), mod, masked)
    outputs = inliner.inline(mods.joint, (scaled, *index, gradient, *of_mod))
    through = _single(outputs)
    if gradient not in behind(through):
        raise Unsupported("the gradient of the score does not depend on that of the modified score")
    through = inliner.call(aten.mul.Tensor, inliner.call(aten._to_copy.default, through, dtype=working), mods.scale)
    kept = inliner.call(aten.where.ScalarOther, mask, through, 0.0) if masks else through
    return Scores(graph, tuple(index), mod, masked, through, kept)


def _added(
    mods: Added, graph: fx.Graph, score: fx.Node, index: Sequence[fx.Node], gradient: fx.Node | None, bias: fx.Node
) -> Scores:  # fmt: skip
    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    mod = call(aten.mul.Tensor, score, mods.scale)
    bias = call(aten.index.Tensor, bias, [index[d] for d in mods.dims])
    bias = graph.call_function(aten._to_copy.default, (bias,), {"dtype": torch.float32})
    masked = call(aten.add.Tensor, mod, bias)
    if gradient is None:
        return Scores(graph, tuple(index), mod, masked)
    through = call(aten.mul.Tensor, gradient, mods.scale)
    left = call(aten.gt.Scalar, bias, -float("inf"))
    return Scores(graph, tuple(index), mod, masked, through, call(aten.where.ScalarOther, left, through, 0.0))


def _single(output: Any) -> fx.Node:
    found = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(found, fx.Node):
        raise Unsupported("a score modification returns something other than one number")
    return found


def behind(node: fx.Node) -> set[fx.Node]:
    """All nodes that `node` depends on, and itself."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            pending += n.all_input_nodes
    return seen
