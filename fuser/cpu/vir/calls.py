"""Nodes of the vector IR that print as a call of a helper: the helper's name, then its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.cpu.vir import nodes as ir
from fuser.ops import CPP_TYPES, LOW, SCANS

WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}  # unsigned types of elements of so many bytes
SCANNED = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.int32: "i32"}  # by helpers of blocks
_ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.bool: "bool", **LOW}
Called = tuple[Any, ...]


def moved(size: int) -> str:
    """The C++ vector type of elements of `size` bytes that are moved as bits."""
    return f"fuser_bits{size}"


def _spelled(how: str, of: ir.Of) -> str:
    """The name of the helper `how` for vectors of dtype `of`, or of elements of `of` bytes."""
    return f"{moved(of)}_{how}" if isinstance(of, int) else f"fuser_lanes_{how}_{_ELEMENTS[of]}"


def _load(v: ir.Load) -> Called:
    if v.paired:
        return "fuser_lanes_load_pairs", v.address
    more = v.back if v.back is not None else v.mask
    how = "back" if v.back is not None else "load" if v.mask is None or isinstance(v.of, int) else "part"
    how = how if v.step == 1 else {"load": "each_second", "part": "part_of_second"}[how]
    return _spelled(how, v.of), v.address, *(() if more is None else (more,))


def _first(v: ir.First) -> Called:
    how = "fuser_first" if isinstance(v.of, int) else f"fuser_lanes_{'before' if v.flags else 'first'}"
    return how + ("_double" if v.of is torch.float64 else ""), v.count


def _store(s: ir.Store) -> Called:
    values = tuple(_bfloat16_bits(v, s) for v in s.values) if s.of is torch.bfloat16 else s.values
    if len(values) > 1:
        return "fuser_lanes_store_pairs", s.address, *values
    how = _spelled("put" if s.mask is not None and not isinstance(s.of, int) else "store", s.of)
    return how, s.address, *values, *((s.mask,) if s.mask is not None else ())


def _bfloat16_bits(v: ir.Value, s: ir.Store) -> ir.Value:
    """Float32 lanes as words whose upper 16 bits are the bfloat16 to store; NaN stays NaN."""
    if s.exact:
        return ir.Cast("lanes_u", v)
    if s.tame:
        return ir.call("fuser_lanes_nearest_bfloat16", v)
    return ir.Cast("lanes_u", ir.Round(torch.bfloat16, v, tame=False, vector=True))


def _transpose(s: ir.Transpose) -> Called:
    if s.rows is None:
        return f"apart_{WORDS[s.size]}", s.source, s.step, s.to, s.columns
    return f"transpose_{WORDS[s.size]}", s.source, s.step, s.to, s.rows, s.columns


def _widen(s: ir.Widen) -> Called:
    if s.low is None:
        return "fuser_piece_from_half", s.to, s.source, s.count
    return "fuser_piece_between", s.to, s.source, s.count, s.low, s.high


def _scan_block(s: ir.ScanBlock) -> Called:
    name = f"fuser_{'total' if s.total else 'scan'}_{SCANS[s.how].helper}_{SCANNED[s.element]}"
    none = ir.Number(0)
    args = [s.source, s.count, s.acc, s.to or ir.Cast(f"{CPP_TYPES[s.element]}*", none)]
    return name, *args, *((s.place, s.base, s.places or ir.Cast("i64*", none)) if s.place is not None else ())


VALUES: dict[type, Callable[[Any], Called]] = {
    ir.Call: lambda v: (v.function, *v.args),
    ir.Load: _load,
    ir.First: _first,
    ir.Half: lambda v: (f"fuser_lanes_{'odd' if v.odd else 'even'}", v.pairs),
    ir.Blend: lambda v: (_spelled("pick", v.of), v.mask, v.a, v.b),
    ir.Gather: lambda v: (f"fuser_gather_{v.kind}", v.buffer, v.place),
    ir.Fma: lambda v: ("FUSER_FMAF", v.a, v.b, v.c),
}
STATEMENTS: dict[type, Callable[[Any], Called]] = {
    ir.Do: lambda s: (s.call.function, *s.call.args),
    ir.Store: _store,
    ir.Transpose: _transpose,
    ir.Widen: _widen,
    ir.Narrow: lambda s: ("fuser_piece_to_half", s.to, s.source, s.count),
    ir.Draw: lambda s: ("fuser_philox_fill", s.to, s.seed, s.stream, s.place, s.count, ir.Number(s.word)),
    ir.ScanBlock: _scan_block,
    ir.Stream: lambda s: ("fuser_stream", s.to, s.source, s.count),
    ir.StreamEnd: lambda s: ("fuser_stream_end",),
}

__all__ = ["SCANNED", "STATEMENTS", "VALUES", "WORDS", "moved"]
