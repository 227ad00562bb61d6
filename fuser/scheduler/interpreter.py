"""Kernel plans, run by torch: the reference between the scheduler and a code generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fuser.errors import VerifyError
from fuser.ir.interpreter import Evaluator, OutOfRange, broadcast, put_in_order, reduce, scanned
from fuser.ir.loop_body import Row, compute_dtype, indirect_rows
from fuser.ir.nodes import Buffer
from fuser.ir.sizes import INDIRECT, Expr, Sym, evaluate, symbols
from fuser.ops import REDUCTIONS, SCANS
from fuser.scheduler.plan import KernelPlan, Reduce


class FlatMemory:
    """Buffers by name, read and written by element offset."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def flat(self, name: str) -> torch.Tensor:
        """All that the tensor's storage holds from its first element on."""
        t = self.tensors[name]
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        return t.as_strided((span,), (1,))

    def load(self, name: str, index: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
        """The elements at an address, 0 where `mask` does not hold."""
        source = self.flat(name)
        (address,) = index
        dtype = compute_dtype(source.dtype)
        if mask is None:
            self.check(name, address, source)
            return source[address].to(dtype)
        address, mask = broadcast(address, mask)
        self.check(name, address[mask], source)
        if source.numel() == 0:
            return torch.zeros(mask.shape, dtype=dtype)
        return torch.where(mask, source[torch.where(mask, address, 0)].to(dtype), torch.zeros((), dtype=dtype))

    def check(self, name: str, address: torch.Tensor, flat: torch.Tensor) -> None:
        """OutOfRange if an address is not in the buffer."""
        if bool(((address < 0) | (address >= flat.numel())).any()):
            raise OutOfRange(f"an address outside of {name}, which has {flat.numel()} elements")


def run_plans(
    plans: Sequence[KernelPlan], buffers: Sequence[Buffer], inputs: Mapping[str, torch.Tensor], env: Mapping[Sym, int],
    floats: Mapping[str, float], canon: Callable[[Expr], Expr] = lambda e: e,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The contents of `buffers` after all plans, by name. VerifyError for a plan that breaks its own rules."""
    memory = FlatMemory(inputs)
    for b in buffers:
        size = [evaluate(canon(n), env) for n in b.size]
        stride = [evaluate(canon(n), env) for n in b.stride]
        memory.tensors[b.name] = torch.empty_strided(size, stride, dtype=b.dtype)
    for plan in plans:
        _run_plan(plan, memory, env, floats, canon)
    return memory.tensors


def _run_plan(
    plan: KernelPlan, memory: FlatMemory, env: Mapping[Sym, int], floats: Mapping[str, float],
    canon: Callable[[Expr], Expr],
) -> None:  # fmt: skip
    domain = [evaluate(canon(a.size), env) for a in plan.axes]
    if any(n == 0 and (plan.ordered is not None or not a.reduced) for a, n in zip(plan.axes, domain)):
        return
    points = {}
    for d, (a, n) in enumerate(zip(plan.axes, domain)):
        points[a.sym] = torch.arange(n).reshape([n if k == d else 1 for k in range(len(domain))])
    evaluator = Evaluator(env, floats, points, memory.load)
    dims = tuple(d for d, a in enumerate(plan.axes) if a.reduced)
    served = _rows_outside(plan) if 0 in domain else None

    def special(n: int, row: Row, values: list[torch.Tensor]) -> torch.Tensor | None:
        if served is not None and n not in served and row.op in ("load", "indirect"):
            return torch.zeros((), dtype=row.dtype)  # for loops without a turn: there may be nothing to read
        if row.op == "pair":
            return values[row.args[0]]
        if row.op != "reduced":
            return None
        return _reduced(plan.reductions[row.attr], plan.rows, values, domain, dims, row.dtype)

    kept = [1 if a.reduced else n for a, n in zip(plan.axes, domain)]
    values = evaluator.rows(plan.rows, special)
    if plan.ordered is not None:
        _put_ordered(plan, memory, evaluator, values, domain)
        return
    for s in plan.stores:
        address = evaluator.expr(s.address, values)
        shape = kept if _is_narrow(values[s.row], dims) and _is_narrow(address, dims) else domain
        target = memory.flat(s.buffer)
        address = address.expand(shape)
        memory.check(s.buffer, address, target)
        target[address] = values[s.row].expand(shape).to(target.dtype)


def _rows_outside(plan: KernelPlan) -> set[int]:
    """The rows that the stores outside of the reduced axes need, but for what is reduced."""
    reduced = {a.sym for a in plan.axes if a.reduced}
    pending: list[int] = []
    for s in plan.stores:
        if not reduced & (plan.varies[s.row] | symbols(s.address)):
            pending += (s.row, *_indirects(s.address))
    found: set[int] = set()
    while pending:
        n = pending.pop()
        if n not in found:
            found.add(n)
            row = plan.rows[n]
            pending += (*row.args, *indirect_rows(row))
    return found


def _indirects(e: Expr) -> list[int]:
    return [int(s.name[1:]) for s in symbols(e) if s.kind == INDIRECT]


def _put_ordered(
    plan: KernelPlan, memory: FlatMemory, evaluator: Evaluator, values: Sequence[torch.Tensor], domain: list[int]
) -> None:
    assert plan.ordered is not None
    kept = [n for n, a in zip(domain, plan.axes) if not a.reduced]
    for s in plan.stores:
        address, value = evaluator.expr(s.address, values).expand(domain), values[s.row].expand(domain)
        target = memory.flat(s.buffer)
        memory.check(s.buffer, address, target)
        if plan.ordered.kind == "scatter":
            put_in_order(target, [address], value, plan.ordered.how)
            continue
        how = plan.ordered.how
        if plan.rows[s.row].op != "pair":
            how = SCANS[how].value or how
        along = scanned(how, value.reshape(*kept, -1), len(kept))
        target[address] = along.reshape(domain).to(target.dtype)


def _is_narrow(t: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Whether `t`, which broadcasts to the domain, does not vary along the reduced `dims`."""
    return t.dim() == 0 or all(t.shape[d] == 1 for d in dims)


def _reduced(
    r: Reduce, rows: Sequence[Row], values: Sequence[torch.Tensor], domain: Sequence[int], dims: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    row = rows[r.row]
    index = values[row.args[1]].expand(domain) if row.op == "pair" else None
    value = values[r.row].expand(domain)
    if REDUCTIONS[r.kind].index and index is None:
        raise VerifyError(f"{r.kind} reduces {row.op}: expected a pair")
    return reduce(r.kind, value, index, dims, keepdim=True).to(dtype)


__all__ = ["FlatMemory", "run_plans"]
