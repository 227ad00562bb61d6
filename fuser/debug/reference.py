"""A fusion's IR, run by torch, checked and printed: what lies between eager and a kernel.

`interpret_lowered` runs the buffers as the lowering made them, `interpret_schedule` the kernel plans as the scheduler
made them; both take a call's arguments and give its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.ir.interpreter import run_buffers
from fuser.ir.printer import exprs_text, print_buffers
from fuser.ir.sizes import STRIDE, Sym
from fuser.lowering.graph import Lowered, NumberInput, TensorInput
from fuser.scheduler.interpreter import run_plans
from fuser.scheduler.printer import print_plan
from fuser.scheduler.schedule import Schedule
from fuser.scheduler.verifier import verify_lowered


def interpret_lowered(lowered: Lowered, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of a lowered graph for `args`, which must be of the class it was lowered for."""
    ctx = lowered.ctx
    env, floats, inputs = bind(lowered, args)
    made = run_buffers(ctx.buffers, inputs, env, floats, ctx.canon)
    return _results(lowered, made, args)


def interpret_schedule(lowered: Lowered, schedule: Schedule, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of a lowered graph's kernel plans for `args`."""
    env, floats, inputs = bind(lowered, args)
    made = run_plans(schedule.plans, schedule.buffers, inputs, env, floats, lowered.ctx.canon)
    return _results(lowered, made, args)


def _results(lowered: Lowered, made: dict[str, torch.Tensor], args: Sequence[Any]) -> list[torch.Tensor]:
    return [args[where] if kind == "input" else made[where] for kind, where in lowered.outputs]


def bind(
    lowered: Lowered, args: Sequence[Any]
) -> tuple[dict[Sym, int], dict[str, float], dict[str, torch.Tensor]]:  # fmt: skip
    """The values of symbols and scalars, and the input buffers, in a call with `args`."""
    env: dict[Sym, int] = {}
    floats: dict[str, float] = {}
    tensors: dict[str, torch.Tensor] = {}
    for number, (record, a) in enumerate(zip(lowered.inputs, args)):
        if isinstance(record, NumberInput):
            if record.kind == "float":
                floats[record.name] = float(a)
            else:
                env[Sym(record.name, STRIDE)] = int(a)
            continue
        tensors[f"in{number}"] = a
        for e, n in zip((*record.size, *record.stride), (*a.shape, *a.stride())):
            own = e.as_symbol()
            if own is not None:
                env.setdefault(own, n)
    return env, floats, tensors


def print_lowered(lowered: Lowered, schedule: Schedule | None = None) -> str:
    """Inputs, buffers and results of a lowered graph, and its kernel plans if given, as text."""
    lines = []
    for n, record in enumerate(lowered.inputs):
        if isinstance(record, TensorInput):
            name = str(record.dtype).removeprefix("torch.")
            lines.append(f"in{n}: {name}{exprs_text(record.size)} strides {exprs_text(record.stride)}")
        else:
            lines.append(f"{record.name}: {record.kind}")
    ctx = lowered.ctx
    lines += [f"known: {s} = {e}" for s, e in sorted(ctx.facts.items())]
    lines += [f"guard: {a} {relation} {b}" for relation, a, b in ctx.guards]
    text = "\n".join(lines) + "\n" + print_buffers(ctx.buffers)
    results = ", ".join(f"in{where}" if kind == "input" else where for kind, where in lowered.outputs)
    text += f"return {results}\n"
    if schedule is not None:
        text += "".join("\n" + print_plan(p) for p in schedule.plans)
    return text


__all__ = ["bind", "interpret_lowered", "interpret_schedule", "print_lowered", "verify_lowered"]
