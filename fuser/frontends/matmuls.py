"""Matmuls with their epilogues in one kernel, under `max_autotune`: which are joined, and the race that each must win.

A matmul is joined with the fusion group that is its only reader. At the first call of each class of shapes, joint
kernels race ATen's matmul with the group's own kernel after it; the winner is kept on disk.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser import config, forks, interface, targets
from fuser.cuda import choices, fused_kernel, matmul
from fuser.errors import CompileError, Unsupported
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import lower_graph
from fuser.passes.classify import op_name
from fuser.passes.extract import GroupPlan, Plan
from fuser.reasons import because
from fuser.runtime import launcher, workers
from fuser.scheduler.schedule import schedule

aten = torch.ops.aten
_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_MOST_VARIANTS = 8  # kernels of one choice, for sizes with other divisors
_LEAST_WORK = 1 << 20  # multiplications
_log = logging.getLogger(__name__)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Pair:
    """A matmul and the group after it. The inputs of `plan` are the matmul's, then the group's others.

    `place` is the index of the matmul's result among the group's inputs.
    """

    target: Any
    n_operands: int
    place: int
    plan: GroupPlan


# -- which ---------------------------------------------------------------------------------------------------------
def join(plan: Plan, writing: frozenset[int]) -> tuple[Plan, dict[int, Pair]]:
    """The plan in which groups include a matmul, and each group's pair. Groups in `writing` write inputs."""
    pairs: dict[int, Pair] = {}
    readers: dict[fx.Node, list[Any]] = {}
    for i, g in enumerate(plan.groups):
        for node in g.inputs:
            readers.setdefault(node, []).append(i)
    for outer in plan.outside:
        for node in outer.all_input_nodes:
            readers.setdefault(node, []).append(outer)
    taken: set[fx.Node] = set()
    for node in reversed(plan.outside):
        found = readers.get(node, [])
        if not _is_matmul(node) or len(found) != 1 or not isinstance(found[0], int) or _is_returned(node):
            continue
        at = found[0]
        if at not in pairs and at not in writing:
            pairs[at] = _pair(node, plan.groups[at])
            taken.add(node)
    groups = tuple(pairs[i].plan if i in pairs else g for i, g in enumerate(plan.groups))
    outside = tuple(n for n in plan.outside if n not in taken)
    return dataclasses.replace(plan, groups=groups, outside=outside), pairs


def _is_matmul(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.target not in _MATMULS or node.kwargs or not isinstance(value, torch.Tensor):
        return False
    target = targets.known(value.device.type)
    return target is not None and value.dtype in target.templates and value.layout is torch.strided


def _is_returned(node: fx.Node) -> bool:
    return any(u.op == "output" for u in node.users)


def _pair(node: fx.Node, group: GroupPlan) -> Pair:
    operands = tuple(node.args[1:]) + tuple(node.args[:1]) if node.target is aten.addmm.default else tuple(node.args)
    others = tuple(n for n in group.inputs if n is not node)
    graph = combined(node.target, group.graph, group.inputs.index(node))
    plan = GroupPlan(graph, (*operands, *others), group.outputs, (op_name(node.target), *group.ops))  # type: ignore[arg-type]
    return Pair(node.target, len(operands), group.inputs.index(node), plan)


def outer_product(graph: fx.Graph, a: fx.Node, b: fx.Node, batched: bool) -> fx.Node:
    """The stand-in for `a @ b` until `fuser.cuda.matmul` writes the kernel: the same sizes, and both addresses."""
    d = int(batched)
    column = graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.select.int, (a, d + 1, 0)), d + 1))
    row = graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.select.int, (b, d, 0)), d))
    return graph.call_function(aten.mul.Tensor, (column, row))


def combined(target: Any, group: fx.Graph, place: int) -> fx.Graph:
    """The graph of a matmul and its epilogue; inputs are a, b, for addmm the bias, then the group's others."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    bias = graph.placeholder("bias") if target is aten.addmm.default else None
    env: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in group.nodes if n.op == "placeholder"]
    for i, node in enumerate(inputs):
        if i != place:
            env[node] = graph.placeholder(f"arg{i}")
    product = outer_product(graph, a, b, target is aten.bmm.default)
    if bias is not None:
        product = graph.call_function(aten.add.Tensor, (product, bias))
    env[inputs[place]] = product
    for node in group.nodes:
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
    return graph


# -- the race ------------------------------------------------------------------------------------------------------
class Raced:
    """A matmul with its epilogue, run by the fastest kernel for the class of its arguments: see `choices`."""

    def __init__(self, pair: Pair, group: Function) -> None:
        self.pair, self.group = pair, group
        key, _held = interface.register_handle(pair.plan.graph, functional=True)
        self.graph = interface.kernel_spec(key).graph
        self.precision = matmul.precision()
        self.choices: dict[Any, choices.Choice] = {}
        self._handles: dict[Any, Function] = {}
        self._settings = config.snapshot()
        self._lock = forks.lock()

    def plain(self, *args: Any) -> Any:
        """Run ATen's matmul and the group's kernel."""
        n = self.pair.n_operands
        operands = (args[2], args[0], args[1]) if n == 3 else args[:2]
        found = self.pair.target(*operands)
        rest = args[n:]
        return self.group(*rest[: self.pair.place], found, *rest[self.pair.place :])

    def __call__(self, *args: Any) -> Any:
        key = _class_of(args)
        handle = self._handles.get(key)
        if handle is None:
            if torch.cuda.is_current_stream_capturing():
                return self.plain(*args)
            with self._lock, config.override(**self._settings):
                handle = self._handles.get(key) or self._choose(key, args)
        return handle(*args)

    def _choose(self, key: Any, args: Sequence[Any]) -> Function:
        try:
            handle = self._decide(key, args)
        except (Unsupported, CompileError) as e:
            self.choices[key] = choices.Choice("aten", str(e).splitlines()[0], (), self._what(args))
            choices.remember(repr((id(self), key)), self.choices[key])
            handle = self.plain
        self._handles[key] = handle
        _log.info("%s", self.choices[key])
        return handle

    def _decide(self, key: Any, args: Sequence[Any]) -> Function:
        a, b = args[:2]
        if a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == 3 else 1) < _LEAST_WORK:
            raise Unsupported(because("alone", "the matmul is small"))
        first = matmul.candidates(a.shape[-2], a.dtype)
        self._source(first[0], args)  # raises Unsupported before anything is timed
        name = choices.name_of(self.graph.hash, key, self.precision)
        known = choices.find(name)
        tiles = {str(t): t for t in first}
        if known is None or known.winner not in ("aten", *tiles):
            known = self._race(tiles, args)
            choices.keep(name, known)
        self.choices[key] = known
        return self.plain if known.winner == "aten" else self._handle(tiles[known.winner], args)

    def _race(self, tiles: dict[str, matmul.MatmulTile], args: Sequence[Any]) -> choices.Choice:
        runs: dict[str, Callable[[], Any]] = {"aten": functools.partial(self.plain, *args)}
        failed = []

        def compiled(tile: matmul.MatmulTile) -> Function | str:
            try:
                with config.override(**self._settings), torch.cuda.device(args[0].device):
                    return functools.partial(self._handle(tile, args), *args)
            except (Unsupported, CompileError) as e:  # a tile that does not fit
                return str(e).splitlines()[0]

        for label, found in zip(tiles, workers.run_all(compiled, tiles.values())):
            if isinstance(found, str):
                failed.append((label, found))
            else:
                runs[label] = found
        return dataclasses.replace(choices.race(runs, "aten", failed), what=self._what(args))

    def _what(self, args: Sequence[Any]) -> str:
        """The operators and sizes as text."""
        a, b = args[:2]
        ops = [op.removeprefix("aten.") for op in self.pair.plan.ops]
        return f"{' '.join(ops[:6])} of {'×'.join(map(str, (*a.shape, b.shape[-1])))} {str(a.dtype)[6:]}"

    def _source(self, tile: matmul.MatmulTile, args: Sequence[Any]) -> fused_kernel.Source:
        lowered = lower_graph(self.graph, args, config.numerics)
        plan = schedule(lowered, config.max_body_rows)
        return matmul.generate(lowered, plan, self.graph.single, tile, self.precision, self.graph.text)

    def _handle(self, tile: matmul.MatmulTile, args: Sequence[Any]) -> Function:
        """A launcher's handle with the kernel for `args`; other arguments get another kernel, or ATen."""
        made: list[str] = []

        def slow(args: tuple[Any, ...], status: int) -> Any:
            ours = not status and not torch.cuda.is_current_stream_capturing() and len(made) < _MOST_VARIANTS
            if not ours or not _is_plain(args):
                return self.plain(*args)
            try:
                with config.override(**self._settings):
                    add(args)
            except (Unsupported, CompileError):
                made.extend([""] * _MOST_VARIANTS)
                return self.plain(*args)
            again: Any = handle(*args)
            return again

        def add(args: Sequence[Any]) -> None:
            source = self._source(tile, args)
            if source.name in made:  # it does not accept the arguments that it was made for
                raise CompileError(f"kernel {source.name} does not take its arguments")
            made.append(source.name)
            kernel = fused_kernel.compile_source(source)
            handle.add_kernel(kernel.program, kernel.library)

        handle: Any = launcher.make_handle(slow)
        add(args)
        found: Function = handle
        return found


def _is_plain(args: Sequence[Any]) -> bool:
    return all(type(a) in (torch.Tensor, torch.nn.Parameter, int, float, bool) for a in args)


def _class_of(args: Sequence[Any]) -> Any:
    """The class of arguments that share a choice: dtypes, sizes, contiguous dims, the class of the row count."""
    a, b = args[:2]
    rows = matmul.rows_class(a.shape[-2])
    others = tuple(
        (str(x.dtype), tuple(s == 1 for s in x.stride()), x.dim()) if isinstance(x, torch.Tensor) else type(x).__name__
        for x in args[2:]
    )
    batch = a.shape[0] if a.dim() == 3 else 1
    layout = (a.stride(-1) == 1, b.stride(-1) == 1)
    return (str(a.dtype), str(b.dtype), batch, rows, a.shape[-1], b.shape[-1], layout, others, a.device.index)
