"""The rows of a score modification: which loads of a plan stand for scores and indices, and which rows are results.

The lowering sees an input `score` with dims for batch, head, query and key, from which it computes the modified score
and the masked one; with an input `gradient`, also the gradient of the score. Inputs for the four indices are added.
All have the sizes of the scores, so that every row is in one kernel; `fuser.cuda.attention` computes the scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from fuser.cuda.text import Guard
from fuser.errors import Unsupported
from fuser.ir.loop_body import Row, indirect_rows
from fuser.ir.sizes import Expr, Sym, coefficient, expr, indirect, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered
from fuser.lowering.inputs import TensorInput
from fuser.scheduler.kernel_plan import Axis, KernelPlan
from fuser.scheduler.schedule import Schedule

ROLES = "bhqk"


@dataclass(frozen=True)
class ScoreRows:
    """The plan of a score's rows: which rows are loads of stand-in inputs, and which are results.

    `scaled`: the number if `mod` is only the score times a number. `guards`: relations that the plan depends on.
    """

    plan: KernelPlan
    axes: dict[str, Axis]  # by role
    given: dict[int, str]  # the stand-in's name for each load
    mod: int
    masked: int
    gradient: int
    masked_gradient: int
    scaled: float | None
    guards: tuple[Guard, ...]

    @property
    def reads_matrix(self) -> bool:
        """Whether rows load a tensor with an element for each pair of query and key, such as a bias."""
        q, k = (self.axes[role].sym for role in "qk")
        loads = (r.address for n, r in enumerate(self.plan.rows) if r.op == "load" and n not in self.given)
        return any(coefficient(at, k) == expr(1) and q in symbols(at) for at in loads)


def read_rows(lowered: Lowered, schedule: Schedule, stand_ins: dict[str, int], results: Sequence[str]) -> ScoreRows:
    """The rows of a schedule. `stand_ins` are the numbers of the inputs for scores, indices and gradients.

    `results` names the numbers whose sum is the output, which keeps their rows in one kernel. Unsupported if the rows
    need more than one elementwise kernel.
    """
    if len(schedule.plans) != 1 or schedule.plans[0].reductions or schedule.plans[0].ordered is not None:
        raise Unsupported("a score modification takes several kernels")
    plan = schedule.plans[0]
    names = {f"in{number}": role for role, number in stand_ins.items()}
    given = {i: names[r.buffer] for i, r in enumerate(plan.rows) if r.op == "load" and r.buffer in names}
    record = lowered.inputs[stand_ins["score"]]
    assert isinstance(record, TensorInput)
    score = next((i for i, name in given.items() if name == "score"), None)
    if score is None:
        raise Unsupported("the modified score does not depend on the score")
    address = plan.rows[score].address
    axes: dict[str, Axis] = {}
    for axis in plan.axes:
        step = coefficient(address, axis.sym)
        at = [role for role, stride in zip(ROLES, record.stride) if step == lowered.ctx.canon(stride)]
        if len(at) != 1:
            raise Unsupported("a score modification has other loops than batch, head, query and key")
        axes[at[0]] = axis
    if set(axes) != set(ROLES):
        raise Unsupported("a score modification has other loops than batch, head, query and key")
    q, k = lowered.inputs[:2]
    assert isinstance(q, TensorInput) and isinstance(k, TensorInput)
    sizes = dict(zip(ROLES, map(lowered.ctx.canon, (*q.size[:3], k.size[2]))))
    plan, guards = _without_checks(plan, axes, given, sizes, lowered.ctx.hint)
    plan = _along_own_axes(plan, axes, given)
    rows = dict(zip(results, _summands(plan, lowered, len(results))))
    mod_row, gradient = rows["mod"], rows.get("gradient", -1)
    scaled = _scale(plan.rows, mod_row, given)
    if gradient >= 0 and score in behind(plan.rows, gradient):
        scaled = None
    masked = behind(plan.rows, rows.get("masked", mod_row))
    if any(mod_row in plan.rows[n].args and not plan.rows[n].traits.chooses for n in masked):
        scaled = None  # something is added to the scaled score
    return ScoreRows(
        plan, axes, given, mod_row, rows.get("masked", mod_row), gradient, rows.get("masked_gradient", gradient),
        scaled, guards,
    )  # fmt: skip


def behind(rows: Sequence[Row], *roots: int) -> list[int]:
    """The rows that `roots` depend on, in order."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            pending += [*rows[n].args, *indirect_rows(rows[n])]
    return sorted(seen)


def _without_checks(
    plan: KernelPlan, axes: dict[str, Axis], given: dict[int, str], sizes: dict[str, Expr], hint: Callable[[Expr], int]
) -> tuple[KernelPlan, tuple[Guard, ...]]:
    """The plan without bounds checks where a score's index selects from a captured tensor that is large enough.

    Addresses of neighbours are then contiguous, and are loaded at once. The guards check that the tensor is large
    enough.
    """
    known: dict[Sym, Expr] = {}
    guards: dict[Guard, None] = {}
    for n, row in enumerate(plan.rows):
        if row.op != "indirect":
            continue
        source = row.args[0]
        while plan.rows[source].op == "to_dtype" and not plan.rows[source].dtype.is_floating_point:
            source = plan.rows[source].args[0]
        role, bound = given.get(source, ""), row.attr[0]
        if role in axes and hint(sizes[role]) <= hint(bound):
            guards["le", sizes[role], bound] = None
            known[indirect(n)] = expr(axes[role].sym)
    if not known:
        return plan, ()
    rows = []
    for row in plan.rows:
        if row.op == "load":
            buffer, addresses = row.attr
            row = dataclasses.replace(row, attr=(buffer, tuple(substitute(e, known) for e in addresses)))
        rows.append(row)
    return dataclasses.replace(plan, rows=tuple(rows)), tuple(guards)


def _along_own_axes(plan: KernelPlan, axes: dict[str, Axis], given: dict[int, str]) -> KernelPlan:
    """The plan in which an index varies along its own axis alone, and so do rows computed from it."""
    syms = {a.sym for a in plan.axes}
    varies: list[frozenset[Sym]] = []
    for n, row in enumerate(plan.rows):
        along: set[Sym] = set()
        if given.get(n) in axes:
            along = {axes[given[n]].sym}
        else:
            exprs = row.indices if row.op == "load" else (row.attr,) if row.op == "index" else ()
            for e in exprs:
                along |= syms & set(symbols(e))
        for m in (*row.args, *indirect_rows(row)):
            along |= varies[m]
        varies.append(frozenset(along))
    return dataclasses.replace(plan, varies=tuple(varies))


def _summands(plan: KernelPlan, lowered: Lowered, count: int) -> list[int]:
    """The rows of the `count` numbers whose sum is the only output, in the order of addition."""
    kind, name = lowered.outputs[0]
    stored = [s.row for s in plan.stores if kind == "buffer" and s.buffer == name]
    if len(stored) != 1 or len(lowered.outputs) != 1:
        raise Unsupported("a result of a score modification is not computed")
    found: list[int] = []
    n = stored[0]
    for _ in range(count - 1):
        if plan.rows[n].traits.sign != "+":
            raise Unsupported("a result of a score modification is known before")
        n, last = plan.rows[n].args
        found.append(last)
    return [n, *reversed(found)]


def _scale(rows: Sequence[Row], n: int, given: dict[int, str]) -> float | None:
    """The number by which row `n` multiplies the score; None if it does anything else."""
    if given.get(n) == "score":
        return 1.0
    if rows[n].traits.sign != "*":
        return None
    constants = [rows[a] for a in rows[n].args if rows[a].op == "const"]
    scores = [a for a in rows[n].args if given.get(a) == "score"]
    if len(constants) != 1 or len(scores) != 1:
        return None
    factor = float(constants[0].attr)
    return factor if factor > 0 and math.isfinite(factor) else None
