"""Decides which loops run in one kernel.

Nodes are taken in order of execution. Kernels have an order too, and a node may join a kernel that comes no earlier
than any kernel it reads from. That never makes a cycle and needs no search. `score_fusion`, the bytes of memory traffic
saved, ranks these kernels; `can_fuse` accepts or gives a reason, and the reasons are kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TypeVar

from fuser.ir.loop_body import loads_in
from fuser.ir.sizes import ZERO, Expr, Sym, expr, substitute, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.context import LoweringContext
from fuser.ops import SCANS
from fuser.scheduler.align import Matching, digits_of
from fuser.scheduler.moments import spreads_from_sum
from fuser.scheduler.nodes import Node, scanned_rows
from fuser.scheduler.traversal import Kernel, Memory, few_long_rows, mixes, split_set, stores_across, turns

Key = TypeVar("Key")
MOST_CANDIDATES = 8  # kernels that a node, or another kernel, is tried in
SHARE_TO_MERGE = 8  # kernels merge if that saves at least 1/SHARE_TO_MERGE of the bytes that the later one reads


@dataclass(frozen=True)
class Verdict:
    """The answer of `can_fuse`: a matching to apply, or a reason."""

    matching: Matching | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.matching is not None


@dataclass
class Fusion:
    """The outcome of scheduling: kernels in launch order, and why nodes were kept apart."""

    kernels: list[Kernel]
    reasons: list[tuple[str, str, str]]  # (node, kernel's first node, reason)


def can_fuse(ctx: LoweringContext, kernel: Kernel, node: Node, most_rows: int, memory: Memory) -> Verdict:
    """Whether `node` can run in `kernel`'s loops, at its end."""
    if node.ordered is not None or kernel.nodes[0].ordered is not None:
        return _extreme_and_places(ctx, kernel, node)
    if node.contracts != kernel.nodes[0].contracts and (node.is_reduction or node.contracts):
        return Verdict(None, "a contraction's loops are shared by contractions and elementwise work on their results")
    if kernel.n_rows + node.size_of_code() > most_rows:
        return Verdict(None, f"the fused body would have more than {most_rows} rows")
    if len(kernel.reads | node.reads | set(kernel.produced)) > ctx.target.most_buffers:
        return Verdict(None, f"the kernel would touch more than {ctx.target.most_buffers} buffers")
    matching = Matching(kernel.axes.copy(), node.sizes())
    for row in node.rows:
        if row.op != "load" or row.buffer not in kernel.produced:
            continue
        producer = kernel.produced[row.buffer]
        if not producer.identity_store:
            return Verdict(None, f"{producer.buffer.name} is filled by several loops")
        if not _line_up(kernel, matching, producer, row.indices):
            return Verdict(None, f"reads {producer.buffer.name} at another index than it is written")
    return _check_axes(ctx, kernel, node, matching, memory)


def _extreme_and_places(ctx: LoweringContext, kernel: Kernel, node: Node) -> Verdict:
    """Accept a scan for extremes and the scan for their indices, if both scan the same values in the same loops."""
    first = kernel.nodes[0]
    kinds = [n.ordered.how for n in (first, node) if n.ordered is not None and n.ordered.kind == "scan"]
    same = len(kernel.nodes) == 1 and len(kinds) == 2 and SCANS[kinds[0]].value == kinds[1] != ""
    same |= len(kernel.nodes) == 1 and len(kinds) == 2 and SCANS[kinds[0]].place == kinds[1] != ""
    same &= ctx.target.scans_alone
    if not same or first.domain != node.domain or scanned_rows(first) != scanned_rows(node):
        return Verdict(None, "a scatter or a scan runs alone")
    matching = Matching(kernel.axes.copy(), node.sizes())
    matched = matching.match([v for v, _ in node.domain], matching.axes.order)
    return Verdict(matching if matched else None, "its loops have other sizes than the kernel's")


def _line_up(kernel: Kernel, matching: Matching, producer: Node, index: tuple[Expr, ...]) -> bool:
    """Match the reader's index with the producer's store index, dim by dim; False if some dim does not match."""
    own = kernel.maps[producer.name]
    for e, store in zip(index, producer.store_index):
        variables = digits_of(e, matching.sizes)
        axes = matching.axis_digits(substitute(store, own))
        if variables is None or axes is None or not matching.match([v for v, _ in variables], axes):
            return False
    return True


def _check_axes(ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory) -> Verdict:
    """Match the variables that no shared buffer matched with the free axes, then check the reduced axes."""
    parts = [p for v, _ in node.domain for p in matching.variable_digits(v) if p not in matching.variables]
    used = matching.used_axes()
    free = [a for a in matching.axes.order if a not in used]
    if parts:
        if not free:
            return Verdict(None, "runs over loops that the kernel does not have")
        if not matching.match(parts, free):
            return Verdict(None, "its loops have other sizes than the kernel's")
        free = []
    reduced = split_set(kernel.reduced, matching)
    if node.is_reduction:
        own = {matching.variables[p][0] for v, _ in node.reduced for p in matching.variable_digits(v)}
        if free:
            return Verdict(None, "reduces only part of the kernel's loops")
        if reduced and own != reduced:
            return Verdict(None, "reduces over other loops than the kernel")
    elif free and set(free) != reduced:
        return Verdict(None, "covers only part of the kernel's loops")
    elif not free and kernel.nodes[0].contracts:
        return Verdict(None, "runs over what a contraction adds up")
    waits = kernel.reduced and not free and node.reads & kernel.after
    if waits and few_long_rows(ctx, kernel, node, matching, memory):
        if not _reads_once(ctx, kernel, node):
            return Verdict(None, "few long rows: the reduction is split over threads")
    apart = _apart(ctx, kernel, node, matching, memory, not free) if ctx.target.square_tiles else None
    return Verdict(matching) if apart is None else Verdict(None, apart)


def _apart(
    ctx: LoweringContext, kernel: Kernel, node: Node, matching: Matching, memory: Memory, everywhere: bool
) -> str | None:  # fmt: skip
    """Why a node should have another kernel than a reduction, on a target with tiles of two dims; None if not.

    `everywhere`: the node runs over all axes of the kernel.
    """
    if kernel.reduced and everywhere and turns(ctx, kernel, node, matching, memory):
        return "is stored along another axis than the reduction reads"
    if not kernel.reduced and node.is_reduction and mixes(ctx, kernel, matching, memory):
        return "reduces what is read along two axes and stored"
    if not kernel.reduced and node.is_reduction and stores_across(ctx, kernel, node, matching, memory):
        return "reduces rows of what is stored along another axis"
    many = ctx.target.neighbours
    if kernel.reduced and not node.is_reduction and _reads_many(node, many):
        return "reads many neighbours of each element, beside a reduction"
    if node.is_reduction and any(_reads_many(n, many) for n in kernel.nodes if not n.is_reduction):
        return "reduces what is computed from many neighbours of each element"
    return None


def _reads_many(node: Node, many: int) -> bool:
    """Whether a node reads so many elements of one tensor for each of its own, as sums over windows do."""
    loads = Counter(r.buffer for r in loads_in(node.rows))
    return max(loads.values(), default=0) >= many > 0


def _reads_once(ctx: LoweringContext, kernel: Kernel, node: Node) -> bool:
    """Whether the kernel's single pass over its rows can also compute the variance that `node` adds up."""
    if not ctx.target.moments or any(n.is_reduction and n.reads & kernel.after for n in kernel.nodes):
        return False
    return spreads_from_sum(node, kernel.nodes, kernel.after)


def apply(kernel: Kernel, node: Node, matching: Matching) -> None:
    """Add `node` to `kernel` as `matching` found."""
    if matching.axis_splits:
        for mapping in kernel.maps.values():
            for v in mapping:
                mapping[v] = substitute(mapping[v], matching.axis_splits)
        kernel.reduced = split_set(kernel.reduced, matching)
    kernel.axes = matching.axes
    kernel.maps[node.name] = {v: matching.expression(v) for v, _ in node.domain}
    if node.is_reduction:
        kernel.reduced = {matching.variables[p][0] for v, _ in node.reduced for p in matching.variable_digits(v)}
    _register(kernel, node)


def _register(kernel: Kernel, node: Node) -> None:
    kernel.nodes.append(node)
    kernel.produced[node.buffer.name] = node
    if node.is_reduction or node.reads & kernel.after:
        kernel.after.add(node.buffer.name)
    kernel.reads |= node.reads
    kernel.n_rows += node.size_of_code()


def start_kernel(node: Node, order: int) -> Kernel:
    """A kernel with `node` alone."""
    kernel = Kernel(order)
    mapping: dict[Sym, Expr] = {}
    for v, size in node.domain:
        mapping[v] = expr(kernel.axes.add(size))
    kernel.maps[node.name] = mapping
    kernel.reduced = {mapping[v].as_symbol() or v for v, _ in node.reduced}
    _register(kernel, node)
    return kernel


def score_fusion(kernel: Kernel, node: Node, buffers: dict[str, tuple[int, int]]) -> int:
    """Bytes of memory traffic saved by running `node` in `kernel`: what it reads and the kernel makes or reads."""
    shared = (node.reads & kernel.reads) | (node.reads & set(kernel.produced))
    return sum(buffers.get(b, (0, 0))[0] for b in shared)


def score_merger(first: Kernel, second: Kernel, buffers: dict[str, tuple[int, int]]) -> int:
    """Bytes of memory traffic saved by running both kernels as one."""
    return sum(buffers.get(b, (0, 0))[0] for b in second.reads & (first.reads | set(first.produced)))


def fuse(
    ctx: LoweringContext, nodes: list[Node], sizes: dict[str, tuple[int, int]], most_rows: int, memory: Memory
) -> Fusion:
    """Assign every node to a kernel. `sizes` gives (bytes, elements) by buffer name in the example."""
    kernels: list[Kernel] = []
    home: dict[str, int] = defaultdict(lambda: -1)  # buffer -> order of the last kernel that fills it
    last_reader: dict[str, int] = {}
    same_loops: dict[tuple[Expr, ...], int] = {}  # domain -> order of the last kernel that started with it
    reasons: list[tuple[str, str, str]] = []
    left = _Left(nodes, memory.outputs)
    for node in nodes:
        earliest = max((home[b] for b in node.reads), default=-1)
        if node.ordered is not None:
            earliest = max(earliest, home[node.buffer.name])  # after the loops that filled the buffer before
        domain = tuple(size for _, size in node.domain)
        candidates = _candidates(kernels, node, earliest, [same_loops.get(domain, -1)], last_reader)
        candidates.sort(key=lambda k: (-score_fusion(k, node, sizes), k.order))
        chosen: Kernel | None = None
        for kernel in candidates:
            verdict = can_fuse(ctx, kernel, node, most_rows, memory)
            if verdict and _is_worth_it(kernel, node, verdict, left.has_room(kernel, node, most_rows)):
                assert verdict.matching is not None
                apply(kernel, node, verdict.matching)
                chosen = kernel
                break
            reasons.append((node.name, kernel.nodes[0].name, verdict.reason or "no memory access in common"))
        if chosen is None and not ctx.writes and node.ordered is None:
            chosen = _join_postponed(ctx, kernels, node, earliest, most_rows, memory)
            if chosen is not None:
                now = {k.order: n for n, k in enumerate(kernels)}
                for k in kernels:
                    k.order = now[k.order]
                _renumber(home, now)
                _renumber(last_reader, now)
                _renumber(same_loops, now)
                home.update({b: max(home[b], chosen.order) for b in chosen.produced})
        if chosen is None:
            chosen = start_kernel(node, len(kernels))
            kernels.append(chosen)
            same_loops[domain] = chosen.order
        left.take(node)
        home[node.buffer.name] = max(home[node.buffer.name], chosen.order)
        for b in node.reads:
            last_reader[b] = chosen.order
    if not ctx.writes:
        _merge(ctx, kernels, sizes, most_rows, memory)
    kernel_of = {node.name: kernel for kernel in kernels for node in kernel.nodes}
    apart = [r for r in reasons if kernel_of[r[0]] is not kernel_of[r[1]]]
    return Fusion(kernels, apart)


def _merge(
    ctx: LoweringContext, kernels: list[Kernel], sizes: dict[str, tuple[int, int]], most_rows: int, memory: Memory
) -> None:
    """Merge pairs of kernels where that saves at least 1/SHARE_TO_MERGE of the bytes that the later one reads.

    `fuse` adds a node to a kernel only for the node's own reads. The norms of two tensors start two kernels, and the
    product of the tensors, which comes later, can be in one of them only.
    """
    users: dict[str, list[Kernel]] = defaultdict(list)  # by buffer: the kernels that make or read it
    for kernel in [*kernels]:
        near = {k.order: k for b in kernel.reads for k in users[b][-MOST_CANDIDATES:]}
        ranked = sorted(near.values(), key=lambda k: (-score_merger(k, kernel, sizes), k.order))
        for other in ranked[:MOST_CANDIDATES]:
            if score_merger(other, kernel, sizes) * SHARE_TO_MERGE < _bytes_read(kernel, sizes):
                break
            merged = _merged(ctx, kernels, other, kernel, most_rows, memory)
            if merged is not None:
                for among in users.values():
                    if other in among:
                        among.remove(other)
                kernel = merged
                break
        for b in kernel.reads | set(kernel.produced):
            users[b].append(kernel)
    for order, kernel in enumerate(kernels):
        kernel.order = order


def _bytes_read(kernel: Kernel, sizes: dict[str, tuple[int, int]]) -> int:
    return sum(sizes.get(b, (0, 0))[0] for b in kernel.reads if b not in kernel.produced)


def _merged(
    ctx: LoweringContext, kernels: list[Kernel], first: Kernel, second: Kernel, most_rows: int, memory: Memory
) -> Kernel | None:
    """The kernel that replaces `first` and `second` in `kernels`, after all of its inputs; None if they stay two."""
    a, b = kernels.index(first), kernels.index(second)
    between = kernels[a + 1 : b]
    late = all(_may_change_places(first, k) for k in between)
    if not late and not all(_may_change_places(k, second) for k in between):
        return None
    out = first.copy()
    worth = False
    for node in second.nodes:
        verdict = can_fuse(ctx, out, node, most_rows, memory)
        if verdict.matching is None:
            return None
        worth = worth or _shares_an_access(first, node, verdict)
        apply(out, node, verdict.matching)
    if not worth:
        return None
    kernels[b if late else a] = out
    del kernels[a if late else b]
    return out


def _may_change_places(first: Kernel, second: Kernel) -> bool:
    """Whether the two kernels may swap. Some buffers are filled by one kernel and then changed by another."""
    return second.reads.isdisjoint(first.produced) and second.produced.keys().isdisjoint(first.produced)


def _renumber(orders: dict[Key, int], now: Mapping[int, int]) -> None:
    for key, order in orders.items():
        orders[key] = now.get(order, order)


def _join_postponed(
    ctx: LoweringContext, kernels: list[Kernel], node: Node, earliest: int, most_rows: int, memory: Memory
) -> Kernel | None:
    """The kernel that `node` joined after it moved behind kernel `earliest`, with its old `order`, or None.

    A norm that needs statistics of two tensors reads a result of the first kernel and one of the second. If no kernel
    in between reads results of the first, the first may run last.
    """
    for kernel in reversed(kernels[:max(earliest, 0)]):
        between = kernels[kernel.order + 1 : earliest + 1]
        if not node.reads & set(kernel.produced) or kernel.nodes[0].ordered is not None:
            continue
        if any(k.reads & set(kernel.produced) or k.nodes[0].ordered is not None for k in between):
            continue
        verdict = can_fuse(ctx, kernel, node, most_rows, memory)
        if verdict and verdict.matching is not None and _is_worth_it(kernel, node, verdict):
            apply(kernel, node, verdict.matching)
            kernels.insert(earliest, kernels.pop(kernel.order))
            return kernel
    return None


def _candidates(
    kernels: list[Kernel], node: Node, earliest: int, others: list[int], last_reader: dict[str, int]
) -> list[Kernel]:
    orders = {o for o in (earliest, *others) if o >= earliest}
    orders |= {last_reader[b] for b in node.reads if last_reader.get(b, -1) >= max(earliest, 0)}
    return [kernels[o] for o in sorted(orders) if o >= 0][:MOST_CANDIDATES]


class _Left:
    """The number of rows that wait for a kernel, of each node and all that it is connected to by intermediates.

    A branch that shares nothing with a kernel saves a launch there. Cut off by the limit of rows it would cost more:
    what crosses the cut is stored, often in a wider dtype than the branch's result.
    """

    def __init__(self, nodes: list[Node], outputs: Collection[str]) -> None:
        makers = {n.buffer.name: n for n in nodes if n.identity_store and n.buffer.name not in outputs}
        self._first = {n.name: n.name for n in nodes}  # a forest (union-find)
        self._rows: dict[str, int] = {}
        for node in nodes:
            for b in node.reads & makers.keys():
                self._first[self._root(makers[b].name)] = self._root(node.name)
        self._size = {n.name: n.size_of_code() for n in nodes}
        for name, size in self._size.items():
            root = self._root(name)
            self._rows[root] = self._rows.get(root, 0) + size
        self._waiting = {**self._rows}

    def _root(self, name: str) -> str:
        while self._first[name] != name:
            self._first[name] = name = self._first[self._first[name]]
        return name

    def has_room(self, kernel: Kernel, node: Node, most_rows: int) -> bool:
        """Whether the kernel has room for all that waits with `node`, or no kernel has."""
        root = self._root(node.name)
        return self._rows[root] > most_rows or kernel.n_rows + self._waiting[root] <= most_rows

    def take(self, node: Node) -> None:
        """The node is in a kernel."""
        self._waiting[self._root(node.name)] -= self._size[node.name]


def _is_worth_it(kernel: Kernel, node: Node, verdict: Verdict, has_room: bool = True) -> bool:
    """Whether fusing saves something: memory traffic, or for pointwise loops of equal sizes a launch.

    A pointwise node may join loops of equal sizes without common reads: a later node often reads both. A node that
    reads nothing along its loops, such as random numbers, may also join the loops of a reduction. `has_room`: for all
    that is connected to the node.
    """
    if not node.is_reduction and not any(symbols(e) for r in loads_in(node.rows) for e in r.indices):
        return True
    if node.reads & set(kernel.produced) or _shares_an_access(kernel, node, verdict):
        return True
    return not node.is_reduction and not kernel.reduced and has_room


def _shares_an_access(kernel: Kernel, node: Node, verdict: Verdict) -> bool:
    """Whether the kernel reads or makes some element that the node reads, at the same point of its loops."""
    matching = verdict.matching
    assert matching is not None
    mine = {v: matching.expression(v) for v, _ in node.domain if matching.is_assigned(v)}
    wanted = {
        (r.buffer, tuple(substitute(e, mine) for e in r.indices)) for r in loads_in(node.rows)
    }
    if any(b in kernel.produced for b, _ in wanted):
        return True
    buffers = {b for b, _ in wanted}
    for other in kernel.nodes:
        if not other.reads & buffers:
            continue
        theirs = {v: substitute(e, matching.axis_splits) for v, e in kernel.maps[other.name].items()}
        for r in other.rows:
            if r.op == "load" and (r.buffer, tuple(substitute(e, theirs) for e in r.indices)) in wanted:
                return True
    return False


__all__ = ["Fusion", "Kernel", "Verdict", "can_fuse", "fuse", "score_fusion", "start_kernel", "ZERO"]
