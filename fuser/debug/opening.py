"""A fusion's IR for inspection: as an FX module that runs, and all stages of its compilation as one object."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fuser.debug.reference import print_lowered
from fuser.debug.relowering import entry_of, lowered_of
from fuser.errors import FuserError, GraphError
from fuser.ir.fx import Builder, body_to_fx
from fuser.ir.sizes import STRIDE, Sym
from fuser.kernel_cache import KernelSpec
from fuser.kernel_store import KernelEntry
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import NumberInput
from fuser.scheduler.printer import print_plan


def to_fx(key: int, class_number: int = 0) -> fx.GraphModule:
    """The IR of a fusion as a module, without any fusion.

    A fusion has an IR for each class of arguments that it was called with. The module runs for every size of the class.

    Args:
        key: what `register_fusion` returned.
        class_number: the number of the class, from 0, in the order of arrival.

    Returns:
        A module with the fusion's arguments, bound ones first, and the same results on the CPU.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        GraphError: the fusion has no such class, or its IR writes into an input.
        Unsupported: the class was not lowered; the message says why.
    """
    spec, entry = entry_of(key, class_number)
    lowered, _ = lowered_of(spec, entry.example)
    return lowered_to_fx(lowered, spec.graph.single)


def lowered_to_fx(lowered: Lowered, single: bool) -> fx.GraphModule:
    """The IR of a lowered graph as a module; `single`: it returns one tensor instead of a tuple."""
    if lowered.ctx.writes:
        raise GraphError("the group writes into its inputs, and a module of FX has no memory of its caller's")
    graph = fx.Graph()
    env: dict[Sym, Any] = {}
    floats: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    arguments = [graph.placeholder(f"in{n}") for n in range(len(lowered.inputs))]
    for n, (record, argument) in enumerate(zip(lowered.inputs, arguments)):
        if isinstance(record, NumberInput):
            if record.kind == "float":
                floats[record.name] = argument
            else:
                env[Sym(record.name, STRIDE)] = argument
            continue
        buffers[f"in{n}"] = argument
        for method, exprs in (("size", record.size), ("stride", record.stride)):
            for d, e in enumerate(exprs):
                own = e.as_symbol()
                if own is not None and own not in env:
                    env[own] = graph.call_method(method, (argument, d))
    builder = Builder(graph, env, floats, buffers, lowered.ctx.canon)
    for b in lowered.ctx.buffers:
        builder.buffer(b)
    for name, shape in lowered.ctx.result_sizes.items():
        buffers[name] = graph.call_method("view", (buffers[name], [builder.size(e) for e in shape]))
    results = [arguments[where] if kind == "input" else buffers[where] for kind, where in lowered.outputs]
    graph.output(results[0] if single else tuple(results))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(torch.nn.Module(), graph)


def loop_to_fx(key: int, buffer: str, number: int = 0, class_number: int = 0) -> fx.GraphModule:
    """The body of one loop of a fusion's IR as a module; see `fuser.ir.fx.body_to_fx`.

    Args:
        key: what `register_fusion` returned.
        buffer: a buffer's name in the printed IR, such as "buf0"; `trace(key).ir` is that text.
        number: the number of the loop among those of the buffer, from 0.
        class_number: the number of the class of arguments, from 0, in the order of arrival.

    Returns:
        A module of the loop variables `i0 …`, then of sizes, numbers and buffers by their names. Its result is the
        value of the body there.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        GraphError: the fusion has no such class, buffer or loop.
        Unsupported: the class was not lowered; the message says why.
    """
    spec, entry = entry_of(key, class_number)
    lowered, _ = lowered_of(spec, entry.example)
    for b in lowered.ctx.buffers:
        if b.name == buffer and number in range(len(b.loops)):
            return body_to_fx(b.loops[number].body, len(b.loops[number].domain))
    names = ", ".join(f"{b.name} ({len(b.loops)})" for b in lowered.ctx.buffers)
    raise GraphError(f"fusion {key} has no loop {number} of {buffer!r}: expected a buffer with its loops, of {names}")


@dataclass(frozen=True)
class Trace:
    """The stages of one class of a fusion: canonical graph, lowered IR, kernel plans, and each kernel's source."""

    key: int
    canonical: str
    ir: str
    plans: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # the kernel's name and its source

    def __str__(self) -> str:
        parts = [(f"fusion {self.key}: canonical graph", self.canonical), ("IR: buffers and loops", self.ir)]
        parts += [(f"plan of kernel {n}", plan) for n, plan in enumerate(self.plans)]
        parts += [(f"source of {name}", text) for name, text in self.sources]
        return "\n".join(f"== {title} ==\n{text.rstrip()}\n" for title, text in parts)


def trace(key: int, class_number: int = 0) -> Trace:
    """All stages from a fusion's graph to its kernels, for one class of arguments.

    Args:
        key: what `register_fusion` returned.
        class_number: the number of the class, from 0, in the order of arrival.

    Returns:
        A `Trace`, which prints as text. A class that was not lowered has the reason in place of its IR.

    Raises:
        UnknownKeyError: the key is not registered in this process.
        GraphError: the fusion has no such class.
    """
    return trace_of(key, *entry_of(key, class_number))


def trace_of(key: int, spec: KernelSpec, entry: KernelEntry) -> Trace:
    """The trace of a specification and one of its classes, which may have left the registry."""
    sources = tuple((k.name, k.source) for k in entry.kernels)
    try:
        lowered, schedule = lowered_of(spec, entry.example)
    except FuserError as e:
        return Trace(key, spec.graph.text, f"not lowered: {e}\n", (), sources)
    plans = tuple(print_plan(p) for p in schedule.plans)
    return Trace(key, spec.graph.text, print_lowered(lowered), plans, sources)


__all__ = ["Trace", "loop_to_fx", "lowered_to_fx", "to_fx", "trace", "trace_of"]
