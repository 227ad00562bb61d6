"""Runs kernel plans with torch: the reference between the scheduler and a code generator.

It walks `KernelPlan.passes` as the generators do: a row that no pass names has no value here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fuser.errors import VerifyError
from fuser.ir.interpreter import Evaluator, OutOfRange, broadcast, put_in_order, reduce, scanned
from fuser.ir.loop_body import compute_dtype
from fuser.ir.nodes import Buffer
from fuser.ir.sizes import Expr, Sym, evaluate
from fuser.ops import REDUCTIONS, SCANS
from fuser.scheduler.kernel_plan import KernelPlan, Pass, Reduce, Store
from fuser.scheduler.nodes import Ordered


class FlatMemory:
    """Buffers by name, read and written by element offset."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def flat(self, name: str) -> torch.Tensor:
        """The tensor's storage as 1-D, from its first element to its last."""
        t = self.tensors[name]
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
        return t.as_strided((span,), (1,))

    def load(self, name: str, index: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
        """The elements at the flat address `index`; 0 where `mask` is False."""
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
        """Raise OutOfRange if an address is outside the buffer."""
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
    walk = _Walk(plan, memory, Evaluator(env, floats, points, memory.load), domain)
    for p in plan.passes:
        walk.run(p)


class _Walk:
    """Runs the passes of a plan in order. Values of loop rows are dropped after each pass; rows outside keep theirs."""

    def __init__(self, plan: KernelPlan, memory: FlatMemory, evaluator: Evaluator, domain: list[int]) -> None:
        self.plan, self.memory, self.evaluator, self.domain = plan, memory, evaluator, domain
        self.dims = tuple(d for d, a in enumerate(plan.axes) if a.reduced)
        self.turns = 0 not in domain
        self.outside: dict[int, torch.Tensor] = {}

    def run(self, p: Pass) -> None:
        """Run one pass. If its loops have no iterations, their rows are not computed: there may be nothing to read."""
        values = dict(self.outside)
        if self.turns:
            self._compute(p.before, values)
            self.outside |= values
            self._compute(p.inner, values)
            if self.plan.ordered is not None:
                self._put_ordered(self.plan.ordered, p.stores, values)
                return
            self._store(p.stores, values, self.domain)
        for n in p.results:
            self.outside[n] = self._reduced(self.plan.reductions[self.plan.rows[n].attr], values, n)
        self._compute(p.outer, self.outside)
        kept = [1 if a.reduced else n for a, n in zip(self.plan.axes, self.domain)]
        self._store(p.after, self.outside, kept)

    def _compute(self, rows: Iterable[int], values: dict[int, torch.Tensor]) -> None:
        for n in rows:
            row = self.plan.rows[n]
            if n not in values:
                values[n] = values[row.args[0]] if row.op == "pair" else self.evaluator.row(row, values)

    def _store(self, stores: Iterable[Store], values: Mapping[int, torch.Tensor], shape: list[int]) -> None:
        for s in stores:
            address = self.evaluator.expr(s.address, values).expand(shape)
            target = self.memory.flat(s.buffer)
            self.memory.check(s.buffer, address, target)
            target[address] = values[s.row].expand(shape).to(target.dtype)

    def _reduced(self, r: Reduce, values: Mapping[int, torch.Tensor], result: int) -> torch.Tensor:
        row, dtype = self.plan.rows[r.row], self.plan.rows[result].dtype
        pair = row.op == "pair"
        if REDUCTIONS[r.kind].index and not pair:
            raise VerifyError(f"{r.kind} reduces {row.op}: expected a pair")
        if not self.turns:
            value = torch.empty(self.domain, dtype=self.plan.rows[row.args[0]].dtype if pair else row.dtype)
            return reduce(r.kind, value, None, self.dims, keepdim=True).to(dtype)
        index = values[row.args[1]].expand(self.domain) if pair else None
        return reduce(r.kind, values[r.row].expand(self.domain), index, self.dims, keepdim=True).to(dtype)

    def _put_ordered(self, ordered: Ordered, stores: Iterable[Store], values: Mapping[int, torch.Tensor]) -> None:
        kept = [n for n, a in zip(self.domain, self.plan.axes) if not a.reduced]
        for s in stores:
            address = self.evaluator.expr(s.address, values).expand(self.domain)
            value, target = values[s.row].expand(self.domain), self.memory.flat(s.buffer)
            self.memory.check(s.buffer, address, target)
            if ordered.kind == "scatter":
                put_in_order(target, [address], value, ordered.how)
                continue
            how = ordered.how
            if self.plan.rows[s.row].op != "pair":
                how = SCANS[how].value or how
            along = scanned(how, value.reshape(*kept, -1), len(kept))
            target[address] = along.reshape(self.domain).to(target.dtype)


__all__ = ["FlatMemory", "run_plans"]
