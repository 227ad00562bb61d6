"""Checks the rules of the IR: rows refer backwards and have the dtypes that their ops give; indices use only existing
symbols and as many dims as their buffer has; nothing is read before it is written; every buffer is filled.

`verify_buffers` raises VerifyError for the first broken rule; a lowering that breaks one is a defect of `fuser`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fuser.errors import VerifyError
from fuser.ir.loop_body import Row, compute_dtype, row_exprs
from fuser.ir.nodes import Buffer, Loops, Reduction, Scan
from fuser.ir.sizes import LOOP, Expr, Sym, symbols
from fuser.ops import OPS, REDUCTIONS, SCANS

_LOW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def verify_buffers(
    buffers: Sequence[Buffer], inputs: Mapping[str, tuple[torch.dtype, int]], known: Iterable[Sym],
    scalars: Iterable[str],
) -> None:  # fmt: skip
    """Check every loop of `buffers`. `inputs` gives (dtype, rank) by name; `known` are the symbols with values."""
    readable = dict(inputs)
    names, sizes = frozenset(scalars), frozenset(known)
    for buffer in buffers:
        _verify_shape(buffer, sizes)
        if buffer.name in readable:
            raise VerifyError(f"{buffer.name} is made twice")
        for n, loops in enumerate(buffer.loops):
            try:
                if n:  # a later loop may read what earlier loops stored
                    readable[buffer.name] = buffer.dtype, len(buffer.size)
                _verify_loops(buffer, loops, readable, sizes, names)
            except VerifyError as e:
                raise VerifyError(f"loop {n} of {buffer.name} ({buffer.origin}): {e}") from None
        readable[buffer.name] = buffer.dtype, len(buffer.size)


def _verify_shape(buffer: Buffer, known: frozenset[Sym]) -> None:
    if len(buffer.size) != len(buffer.stride):
        raise VerifyError(f"{buffer.name} has {len(buffer.size)} sizes and {len(buffer.stride)} strides")
    for e in (*buffer.size, *buffer.stride):
        _need(symbols(e) <= known, f"{buffer.name} has the size or stride {e}, which uses an unknown symbol")


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise VerifyError(message)


def _verify_loops(
    buffer: Buffer, loops: Loops, readable: Mapping[str, tuple[torch.dtype, int]], known: frozenset[Sym],
    scalars: frozenset[str],
) -> None:  # fmt: skip
    for size in loops.domain:
        _need(symbols(size) <= known, f"the domain has the size {size}, which uses an unknown symbol")
    own = {Sym(f"i{d}", LOOP) for d in range(len(loops.domain))}
    rows = loops.body.rows
    _need(0 <= loops.body.result < len(rows), f"the result is row {loops.body.result} of {len(rows)}")
    for n, row in enumerate(rows):
        try:
            verify_row(n, rows, known | own, scalars)
            if row.op == "load":
                _verify_load(row, readable)
        except VerifyError as error:
            raise VerifyError(f"row %{n} = {row.op}: {error}") from None
    kept = len(loops.domain)
    if isinstance(loops, Reduction):
        _verify_reduction(loops)
        kept -= loops.n_reduced
    _need(len(loops.store_index) == len(buffer.size), f"the store has {len(loops.store_index)} indices")
    stored = {Sym(f"i{d}", LOOP) for d in range(kept)}
    for e in loops.store_index:
        verify_symbols(e, len(rows), rows, known | stored)
    made = _result_dtype(loops)
    _need(made is compute_dtype(buffer.dtype), f"the result is {made}, the buffer is {buffer.dtype}")


def _result_dtype(loops: Loops) -> torch.dtype:
    dtype = loops.body.dtype
    if isinstance(loops, Scan):
        return _scan_dtype(loops)
    if not isinstance(loops, Reduction):
        return dtype
    made = REDUCTIONS[loops.kind].result_dtype(dtype)
    return made


def _scan_dtype(loops: Scan) -> torch.dtype:
    row = SCANS.get(loops.kind)
    _need(row is not None, f"{loops.kind!r} is no scan: expected a row of fuser.ops.SCANS")
    assert row is not None
    _need(row.index == (loops.body.rows[loops.body.result].op == "pair"), f"{loops.kind} scans no such value")
    return torch.int64 if row.index else loops.body.dtype


def _verify_reduction(loops: Reduction) -> None:
    row = REDUCTIONS.get(loops.kind)
    _need(row is not None, f"{loops.kind!r} is no reduction: expected a row of fuser.ops.REDUCTIONS")
    assert row is not None
    result = loops.body.rows[loops.body.result]
    _need(0 <= loops.n_reduced <= len(loops.domain), f"{loops.n_reduced} of {len(loops.domain)} loops are reduced")
    _need(row.index == (result.op == "pair"), f"{loops.kind} reduces {result.op}")
    product = result.op in OPS and OPS[result.op].sign == "*" and len(result.args) == 2
    _need(not row.contracts or product, f"{loops.kind} contracts {result.op}, which is no product of two operands")


def _verify_load(row: Row, readable: Mapping[str, tuple[torch.dtype, int]]) -> None:
    name, index = row.attr
    _need(name in readable, f"{name} is read before it is written")
    dtype, rank = readable[name]
    _need(len(index) == rank, f"{name} has {rank} dims, the load {len(index)} indices")
    _need(row.dtype is compute_dtype(dtype), f"{name} of {dtype} is loaded as {row.dtype}")


def verify_symbols(e: Expr, n: int, rows: Sequence[Row], known: frozenset[Sym] | set[Sym]) -> None:
    """Check that the symbols of `e`, used by row `n`, have values by then."""
    for s in symbols(e):
        at = s.row
        if at is not None:
            _need(at < n, f"{e} uses row {s}, which comes later")
            _need(rows[at].op == "indirect", f"{e} uses row {s}, which is no index but {rows[at].op}")
        else:
            _need(s in known, f"{e} uses {s}, which is neither a loop variable here nor a size of the graph")


def verify_row(n: int, rows: Sequence[Row], known: frozenset[Sym] | set[Sym], scalars: frozenset[str]) -> None:
    """Check row `n` of `rows`: its references, and that its dtype is the one that its op gives."""
    row = rows[n]
    for a in row.args:
        _need(0 <= a < n, f"refers to row {a}")
    for e in row_exprs(row):
        verify_symbols(e, n, rows, known)
    dtypes = [rows[a].dtype for a in row.args]
    _need(row.dtype not in _LOW, f"has dtype {row.dtype}, which is a storage dtype: values are float32")
    check = _CHECKS.get(row.op)
    if check is not None:
        check(row, dtypes, scalars)
    elif row.op in OPS:
        _verify_op(row, dtypes)
    else:
        raise VerifyError("no such op: expected a row of fuser.ops.OPS")


def _verify_op(row: Row, dtypes: list[torch.dtype]) -> None:
    spec = OPS[row.op]
    _need(len(dtypes) == spec.arity, f"takes {spec.arity} arguments, has {len(dtypes)}")
    signature = spec.signature or "t" * spec.arity
    own = {d for d, s in zip(dtypes, signature) if s == "t"}
    _need(len(own) == 1, f"has arguments of different dtypes: {', '.join(map(str, dtypes))}")
    (dtype,) = own
    _need(dtype in spec.dtypes, f"is not defined for {dtype}")
    _need(all(d is torch.bool for d, s in zip(dtypes, signature) if s == "b"), "has a condition that is no bool")
    _need(row.dtype is spec.result_dtype(dtype), f"gives {spec.result_dtype(dtype)}, not {row.dtype}")


def _mask(row: Row, dtypes: list[torch.dtype], at: int) -> None:
    _need(len(dtypes) <= at + 1, f"has {len(dtypes)} arguments")
    _need(len(dtypes) <= at or dtypes[at] is torch.bool, "has a mask that is no bool")


Check = Callable[[Row, list[torch.dtype], frozenset[str]], None]


def _check_const(row: Row, dtypes: list[torch.dtype], scalars: frozenset[str]) -> None:
    _need(not dtypes and isinstance(row.attr, str), "a constant is a text without arguments")
    if row.dtype is torch.bool:
        _need(row.attr in ("True", "False"), f"{row.attr} is no bool")
    elif row.dtype.is_floating_point:
        float(row.attr)
    else:
        _need(row.attr.lstrip("-").isdigit(), f"{row.attr} is no integer")


def _check_scalar(row: Row, dtypes: list[torch.dtype], scalars: frozenset[str]) -> None:
    _need(row.attr in scalars, f"{row.attr} is no scalar input")


def _check_int64(row: Row, dtypes: list[torch.dtype], scalars: frozenset[str]) -> None:
    _need(row.dtype is torch.int64, f"has dtype {row.dtype}: indices are int64")
    if row.op == "indirect":
        _need(len(dtypes) in (1, 2) and dtypes[0] is torch.int64, "takes an int64 index")
        _mask(row, dtypes, 1)
    if row.op == "pair":
        _need(len(dtypes) == 2 and dtypes[1] is torch.int64, "takes a value and an int64 index")


def _check_to_dtype(row: Row, dtypes: list[torch.dtype], scalars: frozenset[str]) -> None:
    _need(dtypes == [row.attr], f"converts from {row.attr}, but has {', '.join(map(str, dtypes))}")


def _check_round_to(row: Row, dtypes: list[torch.dtype], scalars: frozenset[str]) -> None:
    _need(dtypes == [torch.float32] and row.dtype is torch.float32, "rounds float32")
    _need(row.attr in _LOW, f"rounds to {row.attr}")


_CHECKS: dict[str, Check] = {
    "load": lambda row, dtypes, scalars: _mask(row, dtypes, 0),
    "const": _check_const,
    "scalar": _check_scalar,
    "index": _check_int64,
    "indirect": _check_int64,
    "pair": _check_int64,
    "to_dtype": _check_to_dtype,
    "round_to": _check_round_to,
    "reduced": lambda row, dtypes, scalars: None,  # in plans: the result of a reduction
}


__all__ = ["verify_buffers", "verify_row", "verify_symbols"]
