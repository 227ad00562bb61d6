"""C++ for scans along rows.

A scan is a chain in which each step waits for the one before it. A unit runs several chains side by side, so that the
machine has something to do meanwhile: of neighbouring rows, or where rows are few and long, of chunks of them. Chunks
need a first pass for what comes before each; they depend on sizes alone, so the bits are the same on any threads.
"""

from __future__ import annotations

import math

import torch

from fuser.cpu.ordered import Scan
from fuser.cpu.records import Bindings, Function, Generated, Partial
from fuser.cpu.text import cpp_expr
from fuser.ir.sizes import Expr, expr, floordiv, minimum, product
from fuser.ops import CPP_TYPES, SCANS, cpp_constant, cpp_convert, cpp_step
from fuser.scheduler.nodes import row_cost
from fuser.scheduler.plan import Axis, KernelPlan

SIDE_BY_SIDE = 4  # chains of a unit
SIDE_BY_SIDE_FROM = 25  # elements of a row: processors look ahead over several shorter ones by themselves
FEW_ROWS, LONG = 16, 1 << 15  # fewer and longer rows than this are cut
FILLED_COST, FILLED = 8, 256  # operations of an element from which lanes compute a block before its scan; its elements
LEAST_CHUNK, MOST_CHUNKS = 4096, 64


class ChainedScan(Scan):
    """A scan whose axis is one loop, over no lanes."""

    @classmethod
    def of(cls, plan: KernelPlan, name: str, bindings: Bindings) -> ChainedScan | None:
        """The nest of a scan along rows; None if it does not pay."""
        return cls(plan, name, bindings) if plan.reduced_axes[0].hint >= SIDE_BY_SIDE_FROM else None

    def generate(self) -> Generated:
        """One function, or where rows are cut one for what chunks add up to and one for the scan."""
        (axis,) = self.red_axes
        cut = self._is_cut(axis)
        chunks = minimum(floordiv(axis.size + (LEAST_CHUNK - 1), expr(LEAST_CHUNK)), MOST_CHUNKS) if cut else expr(1)
        if not cut:
            return Generated((self._pass("", chunks, True),), ())
        total = product(a.size for a in self.kept) * chunks
        self.partials = [Partial(f"{self.name}_p", self.accumulator(), total)]
        if self._has_index():
            self.partials.append(Partial(f"{self.name}_i", torch.int64, total))
        for p in self.partials:
            self.bindings.pointers[p.name] = len(self.bindings.pointers)
        functions = (self._pass("_partial", chunks, False), self._pass("_scan", chunks, True))
        return Generated(functions, tuple(self.partials))

    def _is_cut(self, axis: Axis) -> bool:
        """Few long rows, of sums whose order does not show: not of float64, where each rounding does.

        Extremes wait for nothing: they seldom change, which the machine foresees.
        """
        if SCANS[self.ordered.how].extreme:
            return False
        shows = self.dtypes[self.plan.stores[0].buffer] is torch.float64
        return not shows and axis.hint >= LONG and math.prod(a.hint for a in self.kept) < FEW_ROWS

    def _has_index(self) -> bool:
        return SCANS[self.ordered.how].index

    def _pass(self, suffix: str, chunks: Expr, stores: bool) -> Function:
        """One function: units of chains, each from a row's or chunk's start; it stores results, or their last ones."""
        name = self.open_function(suffix)
        (axis,) = self.red_axes
        digits = [*((a.sym.name, f"n_{a.sym.name}") for a in self.kept), ("chunk", "chunks")]
        self.emit_constants()
        self.out.add(f"const i64 chunks = {cpp_expr(chunks)}, n = n_{axis.sym.name};")
        self.out.add("const i64 each = chunks ? (n + chunks - 1) / chunks : 0;")
        self.out.add(f"const i64 chains = {' * '.join(size for _, size in digits)};")
        self._point(axis.sym.name, stores)
        self.out.open("for (i64 u = begin; u < end; ++u)")
        self.out.add(f"const i64 first = u * {SIDE_BY_SIDE};")
        self.out.add(f"const i64 count = first + {SIDE_BY_SIDE} < chains ? {SIDE_BY_SIDE} : chains - first;")
        self._starts(digits, joins=bool(self.partials) and stores)
        self._run()
        if not stores:
            self.out.open("for (i64 j = 0; j < count; ++j)")
            self.out.add(f"{self.name}_p[first + j] = accs[j];")
            self.out.add(f"{self.name}_i[first + j] = ats[j];") if self._has_index() else None
            self.out.close()
        self.out.close()
        units = floordiv(product(a.size for a in self.kept) * chunks + (SIDE_BY_SIDE - 1), expr(SIDE_BY_SIDE))
        units = units * minimum(axis.size, 1)
        return Function(name, self.close_function(), units, self.work(), expr(0))

    def _varying(self, roots: list[int]) -> list[int]:
        """The rows that vary at all of those that `roots` need."""
        wanted: set[int] = set()
        pending = list(roots)
        while pending:
            n = pending.pop()
            if n not in wanted and self.plan.varies[n]:
                wanted.add(n)
                pending += self.deps(n)
        return sorted(wanted)

    def _fills(self) -> bool:
        """Whether what is scanned costs so much that lanes compute it before, a block at a time."""
        cost = sum(row_cost(self.plan.rows[n]) for n in self._varying([self.value_row()]))
        return cost >= FILLED_COST and not self._has_index()

    def _point(self, axis: str, stores: bool) -> None:
        """A function that takes a chain one step on: all rows that vary at all are computed in it, or before."""
        kept = "".join(f"const i64 {a.sym.name}, " for a in self.kept)
        kind, value = CPP_TYPES[self.accumulator()], self.value_row()
        given = ""
        if self._fills():
            given = f", const {kind} x"
            self.out.open(f"auto fill = [&]({kind}* xs, {kept}const i64 from, const i64 count)")
            self.out.add(self.pragma())
            self.out.open("for (i64 l = 0; l < count; ++l)")
            self.out.add(f"const i64 {axis} = from + l;")
            for n in self._varying([value]):
                self.declare(n)
            self.out.add(f"xs[l] = {cpp_convert(self.plan.rows[value].dtype, self.accumulator(), self.ref(value))};")
            self.out.close()
            self.out.close("};")
        self.out.open(
            f"auto point = [&]({kind}& acc, i64& at, {kept}const i64 {axis}{given}) __attribute__((always_inline))"
        )
        for n in self._varying(self._wanted()) if not given else ():
            self.declare(n)
        self.put(stores, given=bool(given))
        self.out.close("};")

    def _starts(self, digits: list[tuple[str, str]], joins: bool) -> None:
        """Where the chains of a unit are, from where to where they run, and what they start with."""
        kind, spec, width = self.accumulator(), SCANS[self.ordered.how], SIDE_BY_SIDE
        at = "".join(f", of_{variable}[{width}]" for variable, _ in digits[:-1])
        self.out.add(f"{CPP_TYPES[kind]} accs[{width}];")
        self.out.add(f"i64 ats[{width}] = {{}}, low[{width}], high[{width}]{at};")
        self.out.open("for (i64 j = 0; j < count; ++j)")
        self.out.add("i64 unit = first + j;")
        for position, (variable, size) in reversed(list(enumerate(digits))):
            target = f"of_{variable}[j]" if position < len(digits) - 1 else "const i64 chunk"
            self.out.add(f"{target} = unit % ({size}); unit /= {size};" if position else f"{target} = unit;")
        self.out.add("low[j] = chunk * each < n ? chunk * each : n;")
        self.out.add("high[j] = low[j] + each < n ? low[j] + each : n;")
        self.out.add(f"accs[j] = {cpp_constant(spec.identity(kind), kind)};")
        if joins:
            self.out.open("for (i64 c = first + j - chunk; c < first + j; ++c)")
            step = cpp_step(self.ordered.how, kind, "accs[j]", "x")
            self.out.add(f"const {CPP_TYPES[kind]} x = {self.name}_p[c];")
            if spec.index:
                self.out.add(f"if ({step}) {{ accs[j] = x; ats[j] = {self.name}_i[c]; }}")
            else:
                self.out.add(f"accs[j] = {step};")
            self.out.close()
        self.out.close()

    def _run(self) -> None:
        """All chains side by side as far as the shortest goes, then each to its end; perhaps block by block."""
        fills, every = self._fills(), range(SIDE_BY_SIDE)
        kind = CPP_TYPES[self.accumulator()]

        def call(acc: str, at: str, j: object, place: str) -> str:
            kept = "".join(f"of_{a.sym.name}[{j}], " for a in self.kept)
            return f"point({acc}, {at}, {kept}low[{j}] + {place}{f', xs[{j}][{place}]' if fills else ''});"

        self.out.add(f"i64 size[{SIDE_BY_SIDE}];")
        if fills:
            self.out.add(f"{kind} xs[{SIDE_BY_SIDE}][{FILLED}] {self.aligned};")
            self.out.add("i64 longest = 0;")
            self.out.add("for (i64 j = 0; j < count; ++j) if (high[j] - low[j] > longest) longest = high[j] - low[j];")
            self.out.open(f"for (i64 b = 0; b < longest; b += {FILLED})")
        self.out.open("for (i64 j = 0; j < count; ++j)")
        self.out.add("size[j] = high[j] - low[j];")
        if fills:
            self.out.add(f"if (size[j] > {FILLED}) size[j] = {FILLED};")
            self.out.add(f"fill(xs[j], {''.join(f'of_{a.sym.name}[j], ' for a in self.kept)}low[j], size[j]);")
        self.out.close()
        self.out.add("i64 done = 0;")
        self.out.open(f"if (count == {SIDE_BY_SIDE})")
        self.out.add("done = size[0];")
        for j in every[1:]:
            self.out.add(f"if (size[{j}] < done) done = size[{j}];")
        self.out.add(f"{kind} {', '.join(f'acc{j} = accs[{j}]' for j in every)};")
        self.out.add(f"i64 {', '.join(f'at{j} = ats[{j}]' for j in every)};")
        self.out.open("for (i64 i = 0; i < done; ++i)")
        for j in every:
            self.out.add(call(f"acc{j}", f"at{j}", j, "i"))
        self.out.close()
        for j in every:
            self.out.add(f"accs[{j}] = acc{j}; ats[{j}] = at{j};")
        self.out.close()
        self._run_rest(kind, call("acc", "at", "j", "i"), fills)
        if fills:
            self.out.close()

    def _run_rest(self, kind: str, step: str, fills: bool) -> None:
        """Each chain by itself to its end."""
        self.out.open("for (i64 j = 0; j < count; ++j)")
        self.out.add(f"{kind} acc = accs[j];")
        self.out.add("i64 at = ats[j];")
        self.out.open("for (i64 i = done; i < size[j]; ++i)")
        self.out.add(step)
        self.out.close()
        self.out.add("accs[j] = acc; ats[j] = at;")
        self.out.add("low[j] += size[j];") if fills else None
        self.out.close()


__all__ = ["ChainedScan"]
