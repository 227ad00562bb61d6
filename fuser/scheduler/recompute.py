"""Recomputes values that another kernel would have to write to memory.

Loops that cannot share a kernel (sums along rows and sums along columns of the same values) pass elementwise results
through memory. If a result is computed from less memory than it takes itself, each reader recomputes it: two kernels
read 16-bit floats, instead of one that writes float32 values and another that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from fuser.ir.loop_body import is_checked, loads_in
from fuser.ir.sizes import Expr, symbols
from fuser.scheduler.fusion import Fusion
from fuser.scheduler.inline import MOST_ROWS, inline_buffers
from fuser.scheduler.nodes import Node
from fuser.scheduler.traversal import Kernel
from fuser.targets import Target

Sizes = Mapping[str, tuple[int, int]]


def recompute(
    nodes: list[Node], fusion: Fusion, stored: Collection[str], sizes: Sizes, target: Target,
    hint: Callable[[Expr], int],
) -> bool:  # fmt: skip
    """Copy producers into readers in other kernels where that saves memory traffic. Returns whether any was copied.

    `stored` are buffers that are written in any case, `sizes` (bytes, elements) by buffer, `hint` gives a size's value
    in the example. Nodes without readers stay in `nodes`.
    """
    home = {n.buffer.name: k for k in fusion.kernels for n in k.nodes}
    makers = {n.buffer.name: n for n in nodes if n.identity_store and not n.is_reduction and not n.buffer.table}
    makers = {b: n for b, n in makers.items() if b not in stored}
    readers: dict[str, list[Kernel]] = {}
    for kernel in fusion.kernels:
        for b in {b for n in kernel.nodes for b in n.reads if home.get(b, kernel) is not kernel}:
            readers.setdefault(b, []).append(kernel)
    changed = False
    for b in makers:  # in the order of execution: what is copied first decides what fits after it
        kernels = readers.get(b, [])
        if not kernels:
            continue
        inner, leaves = _behind(b, makers, readers)
        cost = sum(sizes[leaf][0] for k in kernels for leaf in leaves if leaf not in k.reads)
        cost += sum(sizes[leaf][0] for leaf in leaves if leaf in home and leaf not in readers and leaf not in stored)
        found = [n for k in kernels for n in k.nodes if b in n.reads]
        # A reader of a part of a concatenation runs the part's operations at all its points.
        points = max(_points(n, b, hint) for n in found)
        again = sum(n.cost() for n in inner.values()) * max(1, points // max(sizes[b][1], 1))
        if cost >= sizes[b][0] * (target.write_worth + len(kernels)) or again > target.recompute_cost:
            continue
        rows = sum(len(n.rows) for n in inner.values())
        if any(is_checked(r) for n in inner.values() for r in n.rows):
            continue  # a reader of one part would check the bounds of that part alone
        for node in found:
            copies = len({r for r in loads_in(node.rows) if r.buffer == b})
            if node.ordered is None and not node.contracts and len(node.rows) + rows * copies <= MOST_ROWS:
                inline_buffers(node, inner)
                changed = True
    return changed


def _points(node: Node, b: str, hint: Callable[[Expr], int]) -> int:
    """At how many points a node reads `b`, the loops apart along which it reads the same element."""
    read = {v for r in loads_in(node.rows) if r.buffer == b for e in r.indices for v in symbols(e)}
    return math.prod(hint(size) for v, size in node.domain if v in read)


def _behind(b: str, makers: Mapping[str, Node], crossing: Collection[str]) -> tuple[dict[str, Node], set[str]]:
    """The elementwise loops that compute `b` from buffers in memory, by buffer, and the names of those buffers."""
    inner: dict[str, Node] = {}
    leaves: set[str] = set()
    pending = [b]
    while pending:
        name = pending.pop()
        if name != b and (name in crossing or name not in makers):
            leaves.add(name)
        elif name not in inner:
            inner[name] = makers[name]
            pending += makers[name].reads
    return inner, leaves
