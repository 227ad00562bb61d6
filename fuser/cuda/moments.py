"""Variances of long rows in one pass over memory.

`sum((x - m)²)`, where `m` depends on a sum along the same row, needs a second pass. Here the first pass keeps three
numbers for each thread: the number of elements seen, their mean, and the sum of their squared distances from that
mean. A block of elements is in registers, so it is used twice there. Blocks, threads and chunks are combined as in
Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979). Once `m`
is known, `sum((x - m)²) = squares + count · (mean - m)²`, for any `m`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fuser.cuda.text import Lines
from fuser.ir.loop_body import Row
from fuser.ir.sizes import symbols
from fuser.lazy_dataclasses import dataclass
from fuser.ops import REDUCTIONS
from fuser.scheduler.kernel_plan import KernelPlan, Reduce
from fuser.scheduler.moments import squared_difference
from fuser.scheduler.together import reduces_in_one_pass

NAMES = ("count", "mean", "squares")


@dataclass(frozen=True)
class Moments:
    """`total` sums the square of `distance`, which is row `value` minus row `centre` or the reverse. `sum` sums
    `value` in the phase before."""

    sum: Reduce
    total: Reduce
    value: int
    centre: int
    distance: int

    @property
    def number(self) -> int:
        """The number of the reduction."""
        return self.total.number


def alone_behind(plan: KernelPlan) -> Iterator[tuple[int, list[Reduce]]]:
    """Each phase whose next phase stores nothing along the reduced axes, with the next phase's reductions."""
    reduced = {a.sym for a in plan.reduced_axes}
    for before in range(plan.n_phases - 1):
        totals = [r for r in plan.reductions if r.phase == before + 1]
        stores = [s for s in plan.stores if s.phase == before + 1]
        if totals and not any((plan.varies[s.row] | symbols(s.address)) & reduced for s in stores):
            yield before, totals


def moments_by_phase(plan: KernelPlan) -> dict[int, tuple[Moments, ...]]:
    """By phase, the sums of squared distances of the next phase that this phase can compute."""
    out: dict[int, tuple[Moments, ...]] = {}
    for before, totals in alone_behind(plan) if plan.ordered is None else ():
        found = tuple(m for m in (_squared_distances(plan, t) for t in totals) if m is not None)
        if before - 1 not in out and len({m.sum.number for m in found}) == len(totals):
            out[before] = found
    return out


def _squared_distances(plan: KernelPlan, total: Reduce) -> Moments | None:
    """The moments of `total`, if it sums squared distances of values that the phase before sums; else None."""
    reduced = {a.sym for a in plan.reduced_axes}
    pair = squared_difference(plan.rows, total.kind, total.row)
    if pair is None:
        return None
    distance = plan.rows[total.row].args[0]
    for value, centre in (pair, pair[::-1]):
        sums = (r for r in plan.reductions if r.row == value and r.phase == total.phase - 1)
        summed = next((r for r in sums if REDUCTIONS[r.kind].adds), None)
        if summed is not None and plan.varies[value] >= reduced and not plan.varies[centre] & reduced:
            return Moments(summed, total, value, centre, distance)
    return None


def reads_once(plan: KernelPlan) -> bool:
    """Whether one pass over memory computes all reductions of a plan and no other pass is needed."""
    if reduces_in_one_pass(plan):
        return True
    found = moments_by_phase(plan)
    if list(found) != [0] or any(r.phase for r in plan.reductions if r not in [m.total for m in found[0]]):
        return False
    return not any(p.stores for p in plan.passes[1:])


# -- text for rows: `rounds` × `threads` × `lanes` neighbouring elements ----------------------------------------------
def start(out: Lines, m: Moments, threads: int) -> None:
    """Declare moments of no elements."""
    for name in (f"acc{m.sum.number}", *(f"{n}{m.number}" for n in NAMES)):
        out.add(f"{name} = tl.full([{threads}], 0.0, tl.float32)")


def accumulate(out: Lines, m: Moments, values: str, mask: str, left: str, shape: tuple[int, int, int]) -> None:
    """Add a block of `values`, zero outside `mask`; the first `left` are inside."""
    k, dims = m.number, ", ".join(map(str, shape))
    rounds, threads, lanes = shape
    # A thread's count is computed from offsets: counting mask elements would happen in another layout.
    out.add(f"left{k} = {left} - tl.arange(0, {threads}) * {lanes}")
    each = (f"tl.minimum(tl.maximum(left{k} - {n * threads * lanes}, 0), {lanes})" for n in range(rounds))
    out.add(f"own{k} = ({' + '.join(each)}).to(tl.float32)")
    out.add(f"lane{k} = tl.reshape({values}, [{dims}])")
    out.add(f"part{k} = tl.sum(tl.sum(lane{k}, 2), 0)")
    out.add(f"acc{m.sum.number} = acc{m.sum.number} + part{k}")
    out.add(f"middle{k} = part{k} / tl.maximum(own{k}, 1.0)")
    out.add(f"away{k} = tl.where(tl.reshape({mask}, [{dims}]), lane{k} - middle{k}[None, :, None], 0.0)")
    out.add(f"both{k} = count{k} + own{k}")
    out.add(f"share{k} = own{k} / tl.maximum(both{k}, 1.0)")
    out.add(f"gap{k} = middle{k} - mean{k}")
    out.add(f"joint{k} = gap{k} * gap{k} * count{k} * share{k}")
    out.add(f"squares{k} = squares{k} + tl.sum(tl.sum(away{k} * away{k}, 2), 0) + joint{k}")
    out.add(f"mean{k} = mean{k} + gap{k} * share{k}")
    out.add(f"count{k} = both{k}")


# -- text for columns: each element of a tile has moments of its own, by Welford's method (1962) ----------------------
def start_tile(out: Lines, m: Moments, shape: str) -> None:
    """Declare moments of no elements, as tiles of `shape`."""
    for name in NAMES[1:]:
        out.add(f"{name}{m.number} = tl.full({shape}, 0.0, tl.float32)")


def accumulate_tile(out: Lines, m: Moments, values: str, mask: str, turn: str) -> None:
    """Add a tile of `values`, valid under `mask`; each of its elements has seen `turn` values before."""
    k = m.number
    out.add(f"once{k} = 1.0 / ({turn} + 1.0)")
    out.add(f"value{k} = {values}")
    out.add(f"gap{k} = tl.where({mask}, value{k} - mean{k}, 0.0)")
    out.add(f"mean{k} = mean{k} + gap{k} * once{k}")
    out.add(f"squares{k} = squares{k} + gap{k} * (value{k} - mean{k})")


def count_tile(out: Lines, m: Moments, first: str, end: str, step: str) -> None:
    """Compute how many values each element of a tile has seen, of those from `first` to `end`, `step` apart."""
    out.add(f"count{m.number} = tl.maximum(({end} - {first} + {step} - 1) // {step}, 0).to(tl.float32)")


# -- results: along the dim `axis`; `back` is the index text that keeps it --------------------------------------------
def about(m: Moments, centre: str, axis: int = 0, back: str = "") -> str:
    """The sum of squared distances from `centre`, over all threads or elements."""
    k = m.number
    return f"tl.sum(squares{k} + count{k} * (mean{k} - {centre}) * (mean{k} - {centre}), {axis}){back}"


def join(out: Lines, m: Moments, axis: int = 0, back: str = "") -> None:
    """Combine the moments of threads or elements into those of a chunk, in the same variables."""
    k = m.number
    zeros = f" + tl.zeros_like(mean{k})" if axis else ""
    out.add(f"all{k} = tl.sum(count{k}{zeros}, {axis}){back}")
    out.add(f"middle{k} = tl.sum(count{k} * mean{k}, {axis}){back} / tl.maximum(all{k}, 1.0)")
    out.add(f"squares{k} = {about(m, f'middle{k}', axis, back)}")
    out.add(f"mean{k} = middle{k}")
    out.add(f"count{k} = all{k}")


def combine_rows(m: Moments, plan: KernelPlan, rows: list[Row], numbers: tuple[int, int, int], centre: int) -> int:
    """Add rows for a chunk's squared distances from row `centre`; `numbers` are the rows of its three moments. Returns
    the row of the sum."""
    count, mean, squares = numbers
    times, minus = plan.rows[m.total.row], plan.rows[m.distance]

    def add(row: Row, *args: int) -> int:
        rows.append(dataclasses.replace(row, args=args))
        return len(rows) - 1

    distance = add(minus, mean, centre)
    moved = add(times, add(times, distance, distance), count)
    return add(Row(REDUCTIONS[m.total.kind].pointwise, (), torch.float32), moved, squares)
