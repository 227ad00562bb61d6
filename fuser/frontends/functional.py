"""Compilation of one functional ATen graph to a callable: passes, grouping, registration, the outer program.

All of AOTAutograd's graphs (for inference, forward or backward) are compiled here and nowhere else.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fuser import config, interface
from fuser.errors import FuserError, Unsupported
from fuser.frontends import guarantees
from fuser.frontends.bodies import Body, all_of, compile_bodies
from fuser.frontends.noting import flows, group_records, log_graph, unfused_ops
from fuser.frontends.program import Program
from fuser.frontends.records import CompiledGraph, remember
from fuser.lazy_dataclasses import dataclass
from fuser.passes import sources
from fuser.passes.classify import BUILTIN, MARK, base_of
from fuser.passes.dying_inputs import write_dying
from fuser.passes.extract import GroupPlan, Plan, extract
from fuser.passes.grouping import Grouping, group_nodes
from fuser.passes.registry import run_stage
from fuser.passes.reinplacing import reinplace
from fuser.passes.rounding import round_decided
from fuser.passes.runner import PassRecord
from fuser.runtime import torch_abi
from fuser.startup import without_collection

if TYPE_CHECKING:
    from fuser.cuda.graphs import Recorded
    from fuser.frontends.matmuls import Raced

_log = logging.getLogger(__name__)
Function = Callable[..., Any]
_OF_VIEWS = ("merge_views", "split_to_slices")  # passes that remove no ATen operator


@dataclass(frozen=True)
class Compiled:
    """A compiled graph. `program` is None if the graph runs unchanged on ATen; `reason` then says why."""

    module: fx.GraphModule
    plan: Plan
    grouping: Grouping
    keys: tuple[int, ...]
    handles: dict[int, Function]
    passes: tuple[PassRecord, ...]
    program: Program | None
    reason: str
    seconds: float
    raced: tuple[Raced, ...] = ()
    bodies: tuple[Body, ...] = ()  # of operators on graphs

    @property
    def boxed(self) -> Function:
        """A function of a list of inputs, which it empties, to a tuple; of the inputs if the graph runs on ATen."""
        if self.program is None:
            return self.module.forward
        return _past_first_check(self.program.boxed, not _has_custom_ops(self.module))

    @property
    def written(self) -> frozenset[int]:
        """The numbers of the inputs that the graph writes to."""
        return written_inputs(self.module.graph)

    def recorded(self, name: str, forward: Recorded | None = None) -> Function:
        """`boxed` under CUDA graphs; `forward` is the recorded forward if this is a backward."""
        from fuser.cuda.graphs import Recorded  # for CUDA graphs alone

        if self.program is None:
            return self.boxed
        return Recorded(self.boxed, name=name, written=self.written, boxed=True, lender=forward)

    @property
    def alone(self) -> Function | None:
        """The fusion handle itself, if it takes the graph's inputs and gives its outputs unchanged; else None."""
        if self.program is None or len(self.plan.groups) != 1 or self.plan.outside or self.raced:
            return None
        (group,) = self.plan.groups
        placeholders = tuple(n for n in self.module.graph.nodes if n.op == "placeholder")
        (results,) = self.module.graph.output_node().args
        if group.inputs != placeholders or group.outputs != tuple(results):  # type: ignore[arg-type]
            return None
        (handle,) = self.handles.values()
        return handle

    def gains_nothing(self, options: dict[str, Any]) -> bool:
        """Whether Dynamo's own graph does the same as the program: only ATen operators, which no pass improved."""
        if self.program is None or self.plan.groups or options.get("freeze", config.freeze):
            return False
        targets = {n.target for n in self.plan.outside if n.op == "call_function"} - {operator.getitem}
        plain = all(isinstance(t, torch._ops.OpOverload) and t.namespace == "aten" for t in targets)
        return plain and all(record.name in _OF_VIEWS for record in self.passes if record.changed)

    def remember(
        self, route: str, reason: str, options: dict[str, Any], stage: str = "inference",
        by_eager: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        """Add this graph to the history for reports, after its bodies; the route of a graph on ATen is "eager"."""
        for body in all_of(self.bodies):
            body.compiled.tell(route, reason, options, stage, Counter(), f"{body.name} of {body.operator}")
        self.tell(route, reason, options, stage, Counter() if by_eager is None else by_eager)

    def tell(
        self, route: str, reason: str, options: dict[str, Any], stage: str, by_eager: Counter[str], body: str = ""
    ) -> None:
        """Add this graph alone; `body` names a graph that an operator runs."""
        if self.program is None:
            _log.warning("a graph runs unfused: %s", self.reason)
            record = CompiledGraph("eager", self.reason, options=options, stage=stage, body=body)
        else:
            record = CompiledGraph(
                route=route,
                reason=reason,
                groups=group_records(self.plan, self.keys, self.grouping),
                unfused=unfused_ops(self.plan, self.grouping),
                passes=self.passes,
                source=self.program.source,
                seconds=self.seconds,
                options=options,
                stage=stage,
                by_eager=by_eager,
                flows=flows(self.plan, self.grouping),
                body=body,
            )
        remember(record)
        log_graph(record)
        guarantees.check(record, self.plan.groups)


@without_collection()  # a backward is compiled in its first call, after Dynamo
def compile_functional(
    module: fx.GraphModule, stages: Sequence[str] = ("post_grad",), earlier: Sequence[PassRecord] = (),
    in_place: bool = True,
) -> Compiled:  # fmt: skip
    """Compile a functional ATen graph whose nodes have fake values; the module itself is rewritten.

    `stages` are those whose passes have not run yet, `earlier` the records of passes that have. `in_place`: kernels
    may write the inputs that the graph writes, because no two inputs overlap.
    """
    start = time.perf_counter()
    passes = (*earlier, *(record for stage in stages for record in run_stage(stage, module)))
    sources.complete(module.graph)
    grouping = group_nodes(module.graph)
    round_decided(module.graph, grouping.kinds)
    plan, writing = extract(module.graph, grouping), frozenset[int]()
    if in_place:
        plan, writing = reinplace(plan, grouping)
        plan, dying = write_dying(plan, grouping)
        writing |= dying
    made = [interface.register_handle(g.graph, in_place=i in writing) for i, g in enumerate(plan.groups)]
    keys = tuple(k for k, _ in made)
    handles = {k: interface.fusion_handle(k) for k in keys}
    _prepare(keys, plan.groups)
    functions: list[tuple[str, Function]] = [("fusion", handles[k]) for k in keys]
    raced: dict[int, Raced] = {}
    if config.max_autotune:
        from fuser.frontends import matmuls  # it imports the generator for GPUs, which most processes never need

        plan, pairs = matmuls.join(plan, writing)
        raced = {i: matmuls.Raced(pair, handles[keys[i]]) for i, pair in pairs.items()}
        functions = [("matmul", raced[i]) if i in raced else known for i, known in enumerate(functions)]
    bodies, calls = compile_bodies(module, _compile_body)
    program, reason = None, ""
    try:
        program = Program(module, plan, functions, calls)
        program.boxed  # noqa: B018  written and compiled now
    except Unsupported as error:
        program, reason = None, error.reason
    seconds = time.perf_counter() - start
    found = tuple(raced.values())
    return Compiled(module, plan, grouping, keys, handles, passes, program, reason, seconds, found, bodies)


def _compile_body(body: fx.GraphModule, in_place: bool) -> Compiled:
    return compile_functional(body, ("joint_graph", "post_grad"), in_place=in_place)


def written_inputs(graph: fx.Graph) -> frozenset[int]:
    """The numbers of the placeholders that some call writes, directly or through a view."""
    number = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: set[int] = set()
    for node in graph.nodes:
        if MARK in node.meta and base_of(node.args[0]) in number:
            found.add(number[base_of(node.args[0])])
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        for at, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
                for one in value if isinstance(value, (tuple, list)) else [value]:
                    found.update([number[base_of(one)]] if base_of(one) in number else [])
    return frozenset(found)


def _has_custom_ops(module: fx.GraphModule) -> bool:
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    targets = {n.target for graph in graphs for n in graph.nodes if n.op == "call_function"}
    return any(isinstance(t, torch._ops.OpOverload) and t.namespace not in BUILTIN for t in targets)


def _past_first_check(function: Function, leaves: bool) -> Function:
    """A boxed function. If `leaves`, its first call disables AOTAutograd's check for misdeclared custom operators.

    The check is a mode, and under any mode ATen has to run. The result is a Python function: AOTAutograd looks for an
    attribute, which wrappers around a native function do not have.
    """
    seen = not leaves

    def call(inputs: list[Any]) -> Any:
        nonlocal seen
        if seen:
            return function(inputs)
        seen = True
        if not torch_abi.is_inspected():
            return function(inputs)
        with _disable_current_modes():
            return function(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _prepare(keys: Sequence[int], groups: Sequence[GroupPlan]) -> None:
    """Compile the kernels of all groups for the arguments seen while tracing, in parallel; equal calls only once."""
    asked = set()
    for key, group in zip(keys, groups, strict=True):
        examples = [n.meta.get("val") for n in group.inputs]
        call = key, _sizes_of(examples)
        if call in asked:
            continue
        if call[1] is not None:
            asked.add(call)
        try:
            interface.prepare(key, examples)
        except FuserError as error:
            _log.debug("fusion %d is not compiled ahead: %s", key, error)


def _sizes_of(examples: Sequence[Any]) -> tuple[Any, ...] | None:
    """A key of calls with these arguments if they are tensors without symbolic sizes; else None."""
    if not all(isinstance(t, torch.Tensor) for t in examples):
        return None
    found = tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in examples)
    return found if all(type(n) is int for shape, stride, *_ in found for n in (*shape, *stride)) else None
