"""The last pass: values in the form that a machine's compiler takes best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fuser.cpu.quotients import factors
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir import rewrite
from fuser.ir.sizes import LOOP, expr, symbol
from fuser.machines import Machine

# Largest constant stride between lanes that g++ is shown. g++ treats loads at a constant stride as one group of
# interleaved elements, and its compile time grows with the square of the stride.
MOST_INTERLEAVED = 16
# Most loads of less than a word that a function gathers by vectors. A vector gather of bytes is some 20 instructions
# for eight lanes, and 64 lanes are taken at once: many of them, as windows read, are faster as scalar loads.
MOST_GATHERED = 4


def legalise(kernel: ir.Kernel, machine: Machine) -> ir.Kernel:
    """`kernel` with forms of divisions by constants, large strides, gathers and float16 casts that g++ compiles
    well."""
    far: set[int] = set()
    gathers: set[ir.Gather] = set()

    def noted(v: ir.Gather) -> ir.Value:
        gathers.add(v)
        return v

    rules: dict[type, Callable[[Any], ir.Value]] = {ir.Offset: lambda v: _with_hidden_step(v, far), ir.Gather: noted}
    if machine.fma:
        rules[ir.Binary] = _quotient
    if kernel.sequential:
        rules |= dict.fromkeys((ir.Decode, ir.Encode), lambda v: dataclasses.replace(v, lone=True))
    made: ir.Kernel = rewrite.values(kernel, rules)
    if len(gathers) > MOST_GATHERED or (gathers and kernel.checked):
        made = rewrite.values(made, {ir.Gather: lambda v: v.buffer[v.place]})
    hidden = (ir.Let("i64", f"far{n}", ir.call("hidden", n)) for n in sorted(far))
    return dataclasses.replace(made, body=(*hidden, *made.body)) if far else made


def _with_hidden_step(v: ir.Offset, far: set[int]) -> ir.Offset:
    """`v` with a large constant stride between lanes hidden behind a variable; the stride is added to `far`."""
    sym = v.scope.lanes
    step = next((c for monomial, c in v.e.terms if monomial == (sym,)), 0)
    if sym is None or v.of != "place" or (abs(step) <= MOST_INTERLEAVED and abs(step) not in v.scope.apart):
        return v
    far.add(abs(step))
    name = symbol(f"far{abs(step)}", LOOP)
    return dataclasses.replace(v, e=v.e + expr(sym) * ((name if step > 0 else -name) - step))


def _quotient(v: ir.Binary) -> ir.Value:
    """A division by a constant as a product and an fma, where these round as the division does; else `v`."""
    if v.sign != "/" or not isinstance(v.b, ir.Number) or v.b.dtype is not torch.float32:
        return v
    found = factors(float(v.b.number))
    if found is None:
        return v
    high, low = (ir.Number(f, torch.float32) for f in found)
    return ir.Fma(v.a, high, v.a * low)


__all__ = ["legalise"]
