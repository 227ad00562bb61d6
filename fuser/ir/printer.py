"""The IR as text: buffers with their loops, one row a line. `fuser.ir.parser` reads it back.

    buf0: float32[x0_0, x0_1] strides [x0_1, 1]   # %2 aten.add
      for i0 < x0_0, i1 < x0_1
        %0 = in0[i0, i1]
        %1 = in1[i1]
        %2 = add(%0, %1)
        store %2 at [i0, i1]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fuser.ir.loop_body import Row
from fuser.ir.nodes import Buffer, Loops, Reduction, Scan, Scatter
from fuser.ir.sizes import Expr


def print_buffers(buffers: Iterable[Buffer]) -> str:
    """All buffers, with the loops that fill them."""
    return "\n".join(line for b in buffers for line in _buffer_lines(b)) + "\n"


def dtype_text(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def exprs_text(exprs: Sequence[Expr]) -> str:
    """ "[a, b]"."""
    return f"[{', '.join(map(str, exprs))}]"


def _buffer_lines(b: Buffer) -> list[str]:
    origin = f"   # {b.origin}" if b.origin else ""
    order = f" order {list(b.order)}" if b.order is not None else ""
    lines = [f"{b.name}: {dtype_text(b.dtype)}{exprs_text(b.size)} strides {exprs_text(b.stride)}{order}{origin}"]
    for loops in b.loops:
        lines += ["  " + line for line in loops_lines(loops)]
    return lines


def loops_lines(loops: Loops) -> list[str]:
    """The lines of a loop nest, one row per line."""
    reduced = loops.n_reduced if isinstance(loops, Reduction) else 0
    kept = len(loops.domain) - reduced
    heads = [f"i{d} < {n}" for d, n in enumerate(loops.domain)]
    lines = [f"for {', '.join(heads[:kept]) or 'one point'}"]
    if isinstance(loops, Reduction):
        lines[0] += f", reducing {', '.join(heads[kept:]) or 'nothing'} by {loops.kind}"
    if isinstance(loops, Scan):
        lines[0] += f", scanning the last by {loops.kind}"
    if isinstance(loops, Scatter):
        lines[0] += f", in order, {loops.combine or 'replacing'}"
    lines += [f"  {row_text(n, row)}" for n, row in enumerate(loops.body.rows)]
    return [*lines, f"  store %{loops.body.result} at {exprs_text(loops.store_index)}"]


def row_text(n: int, row: Row) -> str:
    """One row: `%3 = add(%1, %2)`, with its dtype unless that is float32."""
    kind = "" if row.dtype is torch.float32 else f": {dtype_text(row.dtype)}"
    return f"%{n}{kind} = {_right_side(row)}"


def _right_side(row: Row) -> str:
    args = [f"%{a}" for a in row.args]
    if row.op == "load":
        name, index = row.attr
        return f"{name}{exprs_text(index)}" + (f" where {args[0]}" if args else "")
    if row.op == "const":
        return str(row.attr)
    if row.op in ("scalar", "index"):
        return f"{row.op} {row.attr}"
    if row.op == "indirect":
        size, checked = row.attr
        where = f" where {args[1]}" if len(args) > 1 else ""
        return f"index {args[0]} below {size}{where}{'' if checked else ', unchecked'}"
    if row.op in ("round_to", "to_dtype"):
        target = row.attr if row.op == "round_to" else row.dtype
        return f"{row.op}({args[0]}, {dtype_text(target)})"
    if row.op == "reduced":
        return f"result of reduction {row.attr}"
    return f"{row.op}({', '.join(args)})"


__all__ = ["dtype_text", "exprs_text", "loops_lines", "print_buffers", "row_text"]
