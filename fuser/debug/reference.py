"""A fusion's IR interpreted on torch, checked and printed: a reference between eager and a kernel.

`interpret_lowered` runs the buffers of the lowering, `interpret_schedule` the kernel plans of the scheduler; both take
a call's arguments and return its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuser.ir.interpreter import run_buffers
from fuser.ir.printer import exprs_text, print_buffers
from fuser.ir.sizes import STRIDE, Sym, evaluate
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import NumberInput, TensorInput
from fuser.scheduler.interpreter import run_plans
from fuser.scheduler.printer import print_plan
from fuser.scheduler.schedule import Schedule
from fuser.scheduler.verifier import verify_lowered


def interpret_lowered(lowered: Lowered, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of a lowered graph for `args`, which have to be of its class of arguments."""
    ctx = lowered.ctx
    env, floats, inputs = bind(lowered, args)
    made = run_buffers(ctx.buffers, inputs, env, floats, ctx.canon)
    return _results(lowered, made, args, env)


def interpret_schedule(lowered: Lowered, schedule: Schedule, args: Sequence[Any]) -> list[torch.Tensor]:
    """The results of a lowered graph's kernel plans for `args`."""
    env, floats, inputs = bind(lowered, args)
    made = run_plans(schedule.plans, schedule.buffers, inputs, env, floats, lowered.ctx.canon)
    return _results(lowered, made, args, env)


def _results(
    lowered: Lowered, made: dict[str, torch.Tensor], args: Sequence[Any], env: dict[Sym, int]
) -> list[torch.Tensor]:  # fmt: skip
    ctx, out = lowered.ctx, []
    for kind, where in lowered.outputs:
        given = args[where] if kind == "input" else made[where]
        shape = ctx.result_sizes.get(where) if kind == "buffer" else None
        out.append(given if shape is None else given.view([evaluate(ctx.canon(e), env) for e in shape]))
    return out


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
    """Inputs, buffers and results of a lowered graph as text, and its kernel plans if given."""
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
    shapes = {name: f" as {exprs_text(size)}" for name, size in ctx.result_sizes.items()}
    named = (f"in{where}" if kind == "input" else f"{where}{shapes.get(where, '')}" for kind, where in lowered.outputs)
    results = ", ".join(named)
    text += f"return {results}\n"
    if schedule is not None:
        text += "".join("\n" + print_plan(p) for p in schedule.plans)
    return text


__all__ = ["bind", "interpret_lowered", "interpret_schedule", "print_lowered", "verify_lowered"]
