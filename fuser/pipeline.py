"""From a canonical graph and arguments to a device's source: lowering, scheduling, code generation.

It is imported only to compile a kernel: a process that finds its kernels on disk does not need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fuser import config, targets
from fuser.canonical import HOST_OF_PACKET, HOST_OPS, CanonicalGraph, CanonicalNode, Ref
from fuser.errors import FuserError, LoweringError, Unsupported, is_refusal
from fuser.lowering.decisive import rounded_nodes
from fuser.lowering.graph import COPIES_IF_NEEDED, lower_graph, may_share
from fuser.lowering.host import is_host
from fuser.lowering.registry import LOWERINGS, ORDERED, supports
from fuser.lowering.survey import Survey, alone, survey
from fuser.refusals import Refusals
from fuser.runtime.counting import COUNTS
from fuser.runtime.spans import span
from fuser.scheduler.schedule import schedule
from fuser.scheduler.verifier import verify_lowered

if TYPE_CHECKING:
    from fuser.compiler import FusionBackend, Source


def generate(graph: CanonicalGraph, args: Sequence[Any], backend: FusionBackend) -> Source:
    """The source of the kernel of `graph` for arguments like `args`, without compiler and device."""
    return _generate(with_numbers(graph, _numbers(args)), args, backend, graph.text)


def _generate(
    graph: CanonicalGraph, args: Sequence[Any], backend: FusionBackend, comment: str, device_type: str | None = None
) -> Source:
    COUNTS.add("lowerings")
    with _stage("lower", graph):
        lowered = lower_graph(graph, args, config.numerics, device_type)
    with _stage("schedule", graph):
        plan = schedule(lowered, config.max_body_rows)
    if config.check_ir:
        verify_lowered(lowered, plan)
    with _stage("codegen", graph):
        return backend.codegen(lowered, plan, graph.single, comment)


@contextlib.contextmanager
def _stage(name: str, graph: CanonicalGraph) -> Iterator[None]:
    """A span in which torch's default device does not affect our constants.

    An exception of a stage that is not one of the package's errors is a defect; its message names place and operators.
    """
    with span(name), torch._C.DisableTorchFunction():
        try:
            yield
        except Exception as e:
            if isinstance(e, FuserError) or is_refusal(e):
                raise
            at = traceback.extract_tb(e.__traceback__)[-1]
            where = f"{pathlib.PurePath(at.filename).name}:{at.lineno}, in {at.name}"
            ops = ", ".join(dict.fromkeys(node.op for node in graph.calls))
            what = f"{type(e).__name__}: {e}"
            raise LoweringError(f"please report this: {name} of {ops} raised {what} ({where})") from e


def _numbers(args: Sequence[Any]) -> frozenset[int]:
    return frozenset(i for i, a in enumerate(args) if not isinstance(a, torch.Tensor))


def find_refused(graph: CanonicalGraph, args: Sequence[Any], backend: FusionBackend | None) -> Refusals:
    """The calls of `graph` that no kernel can compute for arguments like `args`, and an example of each value.

    First those that cannot be lowered; if there are none, those for which no code can be generated.
    """
    COUNTS.add("lowerings")
    return refusals(graph, _surveyed(with_numbers(graph, _numbers(args)), args, backend))


def refusals(graph: CanonicalGraph, found: Survey) -> Refusals:
    """The facts about the nodes of `graph` that splitting needs: `found` for some arguments, and general ones."""
    refused = dict(found.refused)
    for node in graph.calls:
        if node.index not in refused and node.op != "getitem" and not is_host(node.op):
            reason = supports(node.op)
            refused.update({node.index: reason} if reason is not None else {})
    free = frozenset(node.index for node in graph.calls if _is_free(node))
    metas = [m if isinstance(m, (torch.Tensor, int, float)) else None for m in found.metas]
    return Refusals(refused, free, rounded_nodes(graph), metas)


_CREATION = frozenset("aten.full aten.zeros aten.ones aten.arange aten.scalar_tensor prims.iota".split())


def _is_free(node: CanonicalNode) -> bool:
    if node.op == "getitem" or is_host(node.op):
        return True
    if node.op in _CREATION:
        return not any(True for _ in node.refs())
    return node.op not in COPIES_IF_NEEDED and may_share(node.op)


def _surveyed(graph: CanonicalGraph, args: Sequence[Any], backend: FusionBackend | None) -> Survey:
    found = survey(graph, args, config.numerics)
    device_type = next((a.device.type for a in args if isinstance(a, torch.Tensor)), targets.HOST)
    if found.refused or backend is None:
        return found
    for node in graph.calls:
        by_itself = None if node.op == "getitem" or is_host(node.op) else alone(graph, node.index, found.metas)
        if by_itself is not None:
            try:
                _generate(*by_itself, backend, "", device_type)
            except Unsupported as e:
                found.refused[node.index] = e.reason
    return found


def with_numbers(graph: CanonicalGraph, inputs: frozenset[int]) -> CanonicalGraph:
    """`graph` for calls in which `inputs` are numbers: operators whose operands are all numbers become Python's."""
    numbers = set(inputs)
    nodes = list(graph.nodes)
    inverses: dict[int, Any] = {}  # reciprocals of numbers, by node
    for node in graph.calls:
        operands = [a.index in numbers if isinstance(a, Ref) else isinstance(a, (int, float)) for a in node.args]
        if is_host(node.op):
            numbers.add(node.index)
        elif not node.kwargs and operands and all(operands) and (call := _on_numbers(node, inverses)) is not None:
            nodes[node.index] = dataclasses.replace(node, op=call[0], args=call[1])
            numbers.add(node.index)
    if nodes == list(graph.nodes):
        return graph
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _on_numbers(node: CanonicalNode, inverses: dict[int, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """The Python operation that a call was written as, if its operands are numbers; None if there is none.

    `1 - p` and `c / p` are spelled with tensor operators in the graph, the second as a product with the reciprocal of
    p.
    """
    if node.op == "aten.rsub" and len(node.args) == 2:
        return "host.sub", node.args[::-1]
    if node.op == "aten.reciprocal":
        inverses[node.index] = node.args[0]
        return "host.truediv", (1, node.args[0])
    left = node.args[0]
    if node.op == "aten.mul" and isinstance(left, Ref) and left.index in inverses:
        return "host.truediv", (node.args[1], inverses[left.index])
    return (HOST_OF_PACKET[node.op], node.args) if node.op in HOST_OF_PACKET else None


def why_not_lowered(operators: Iterable[str]) -> str | None:
    """None if every one of these canonical operators can be lowered, else the reason for the first that cannot."""
    for op in operators:
        if op == "getitem" or op in HOST_OPS:
            continue
        reason = supports(op)
        if reason is not None and not is_host(op):
            return reason
    return None


def lowered_operators() -> frozenset[str]:
    """The canonical operators that kernels of some device can contain."""
    return frozenset(op for op in {*LOWERINGS, *HOST_OPS, "getitem"} if why_not_lowered([op]) is None)


def unordered_operators() -> frozenset[str]:
    """The operators that are not lowered for devices on which points run in order (`Target.ordered`)."""
    return frozenset(ORDERED)
