"""The passes over the vector IR of a function, in the order of `PASSES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuser import config
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir import rewrite
from fuser.cpu.vir.legalise import legalise
from fuser.cpu.vir.verifier import verify_kernel
from fuser.machines import Machine


def through_passes(kernel: ir.Kernel, machine: Machine) -> ir.Kernel:
    """`kernel` after all passes; with `config.check_ir` it is verified before each."""
    for run in PASSES:
        if config.check_ir:
            verify_kernel(kernel)
        kernel = run(kernel, machine)
    return kernel


def stage_stores(kernel: ir.Kernel, machine: Machine) -> ir.Kernel:
    """`kernel` without `Staged` blocks: stores go to a tile or to memory, and a tile is copied out after its loop.

    The tile is in the first-level cache; the copy uses non-temporal stores. The variable `stream` says at run time
    whether a loop stages its results.
    """

    def expanded(s: ir.Statement) -> Sequence[ir.Statement]:
        if not isinstance(s, ir.Block) or not isinstance(s.head, ir.Staged):
            return (s,)
        head, stream = s.head, ir.Name("stream")
        before, after = [], []
        for r in head.results:
            tile, past, to = (ir.Name(f"{name}{r.tile}") for name in ("staged", "past", "to"))
            before += [
                ir.Scratch(r.kind, tile.name, (head.length,), machine.line_bytes),
                ir.Let(f"{r.kind}* const", past.name, r.memory, const=False),
                ir.Let(f"{r.kind}* __restrict", to.name, ir.Select(stream, tile, past), const=False),
            ]
            copy = ir.Stream(past, tile, head.count * r.bytes)
            after.append(ir.Block(ir.If(stream), (copy,)))
        # Accesses to a staged result, relative to the pointer `to`: its tile or memory.
        to_tile = {r.tile: ir.Name(f"to{r.tile}") for r in head.results}
        rules: rewrite.Rules = {
            ir.At: lambda v: to_tile[v.tile][head.place] if v.tile in to_tile else v,
            ir.Address: lambda v: to_tile[v.tile] if v.tile in to_tile else v,
        }
        return (*before, *(rewrite.values(b, rules) for b in s.body), *after)

    return rewrite.statements(kernel, expanded)


PASSES: tuple[Callable[[ir.Kernel, Machine], ir.Kernel], ...] = (stage_stores, legalise)

__all__ = ["PASSES", "stage_stores", "through_passes"]
