"""Attention whose scores pass through fused rows, as in FlashAttention: scores are in registers, never in memory.

A kernel computes tiles of scores by products, uses them as the values that the rows of `attention_rows` load as
scores, and emits the rows. A block mask's lists say which blocks of keys are computed.

Online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). Tiles, and the gradient
with recomputed scores: Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from fuser.cuda.attention_rows import ROLES, ScoreRows, behind
from fuser.cuda.layout import Context, Dim, Layout, blocks
from fuser.cuda.nest import PROGRAM, Function, Nest
from fuser.ir.loop_body import Row
from fuser.ir.sizes import Expr, expr
from fuser.lazy_dataclasses import dataclass
from fuser.scheduler.kernel_plan import Axis

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = math.log2(math.e)
LONGEST_HEAD = 256  # elements: a tile of queries has whole heads


@dataclass(frozen=True)
class AttentionTile:
    """A tile of `queries` × `keys` scores, computed by `warps` warps, with `stages` pipelined steps of the loop."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys} warps {self.warps} stages {self.stages}"


@dataclass(frozen=True)
class Operand:
    """A tensor that the kernels read or write: its name, sizes and strides."""

    name: str
    size: tuple[Expr, ...]
    stride: tuple[Expr, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BlockLists:
    """The lists of a block mask: counts and indices of its masked (`partial`) and unmasked (`full`) blocks.

    A block is `rows` × `columns` scores; the lists have an entry for each row of blocks. Without lists, one block is
    everything.
    """

    partial: tuple[Operand, Operand]
    full: tuple[Operand, Operand] | None
    rows: int
    columns: int


@dataclass(frozen=True)
class Part:
    """A tile of a head's elements: `width` of them from `first` on, padded to `padded`. `suffix` is for names."""

    suffix: str
    first: int
    width: int
    padded: int


def parts_of(width: int) -> list[Part]:
    """Tiles for `width` elements: one of a power of two, or two if more than an eighth of one would be padding."""
    padded = _power(width)
    if 8 * width >= 7 * padded or width <= 32:
        return [Part("", 0, width, padded)]
    half = padded // 2
    if half + _power(width - half) == padded:
        return [Part("", 0, width, padded)]
    return [Part("0", 0, half, half), Part("1", half, width - half, _power(width - half))]


def _power(width: int) -> int:
    """The smallest side of a product's operand that holds `width`: a power of two, at least 16."""
    return max(16, 1 << max(width - 1, 0).bit_length())


class AttentionNest(Nest):
    """What the attention kernels share: tiles of operands, the rows of a tile of scores, the loop over blocks.

    `flipped`: keys run along the first dim of a tile of scores, as in the gradients of keys and values.
    """

    def __init__(
        self, rows: ScoreRows, name: str, ctx: Context, tile: AttentionTile, operands: dict[str, Operand],
        lists: BlockLists | None, precision: str, flipped: bool = False,
    ) -> None:  # fmt: skip
        self.rows, self.tile, self.operands, self.lists = rows, tile, operands, lists
        self.precision, self.flipped = precision, flipped
        q, k = operands["q"], operands["k"]
        sizes = {"b": q.size[0], "h": q.size[1], "q": q.size[2], "k": k.size[2]}
        self.sizes = sizes
        hints = {role: ctx.hint(size) for role, size in sizes.items()}
        axes = {role: Axis(a.sym, sizes[role], reduced=False, hint=hints[role]) for role, a in rows.axes.items()}
        self.axis = {role: a.sym.name for role, a in axes.items()}
        self.y = Dim([axes["q"]], tile.queries, "y")
        self.x = Dim([axes["k"]], tile.keys, "x")
        dims = [self.x, self.y] if flipped else [self.y, self.x]
        super().__init__(rows.plan, name, ctx, Layout([axes["b"], axes["h"]], dims, tile.warps))
        self.contiguous = set()
        for o in (*operands.values(), *self.listed()):
            self.dtypes[o.name] = o.dtype
        self.layout.guards += rows.guards
        self.guard("eq", k.size[1] * self.group, q.size[1])
        self.guard("eq", k.size[2], operands["v"].size[2])
        self.guard("eq", k.size[0], expr(1) if self.repeats else q.size[0])
        self.whole = {d.name for d in (self.y, self.x) if self.divides(d.size, self._side(d))}

    def _side(self, dim: Dim) -> int:
        """Rows or columns that a program takes per block: those of a mask's block, of which tiles are parts."""
        if self.lists is None:
            return dim.block
        along = self.lists.columns if dim is self.x else self.lists.rows
        return max(dim.block, along)

    def listed(self) -> list[Operand]:
        """The tensors of the block lists."""
        if self.lists is None:
            return []
        return [*self.lists.partial, *(self.lists.full or ())]

    def guard(self, relation: str, a: Expr, b: Expr) -> None:
        """Add a guard: the kernel is valid only if the relation holds."""
        self.layout.guards.append((relation, a, b))

    @property
    def group(self) -> int:
        """The number of query heads that share one head of keys."""
        return self.ctx.hint(self.operands["q"].size[1]) // max(self.ctx.hint(self.operands["k"].size[1]), 1)

    @property
    def repeats(self) -> bool:
        """Whether all batches share one batch of keys."""
        q, k = (self.ctx.hint(self.operands[n].size[0]) for n in "qk")
        return k == 1 and q != 1

    # -- texts -------------------------------------------------------------------------------------------------------
    def mask(self, dims: Iterable[int], *more: str) -> str:
        """The mask of an access along `dims`, leaving out dims that blocks cover exactly."""
        return super().mask([i for i in dims if self.layout.dims[i].name not in self.whole], *more)

    def size(self, e: Expr, name: str = "") -> str:
        """A size as a literal or an argument of the launch."""
        return self.params.number(e, self.bits, name)

    def stride(self, o: Operand, dim: int, matters: bool = False) -> str:
        """A stride as a literal or an argument of the launch."""
        return self.params.number(o.stride[dim], self.bits, "", matters)

    def width(self, o: Operand) -> int:
        """The number of elements of a head."""
        n = o.size[3].as_int()
        assert n is not None, "a kernel is for one size of heads"
        return n

    def parts(self, o: Operand) -> list[Part]:
        """The tiles that hold a head's elements."""
        return parts_of(self.width(o))

    def base(self, label: str, o: Operand, b: str, h: str) -> None:
        """Declare `{label}p`, the address of the matrix of batch `b` and head `h`."""
        self.out.add(f"{label}p = {self.params.pointer(o.name)} + {b} * {self.stride(o, 0, matters=True)}"
                     f" + {h} * {self.stride(o, 1, matters=True)}")  # fmt: skip

    def of_keys(self, b: str, h: str) -> tuple[str, str]:
        """The batch and head of keys that belong to batch `b` and head `h` of queries."""
        return ("0" if self.repeats else b), (h if self.group == 1 else f"({h} // {self.group})")

    def load_tile(self, label: str, o: Operand, rows: str, dim: Dim, turned: bool = False) -> None:
        """Load a tile of the matrix `{label}p` as `label`: its rows are `rows`, a variable without dims, along `dim`.

        `turned`: the tile is transposed, so rows become its columns.
        """
        for part in self.parts(o):
            at, mask = self._place(o, rows, dim, turned, part)
            options = f", {mask}, other=0.0" if mask else ""
            self.out.add(f"{label}{part.suffix} = tl.load({label}p + ({at}){options})")

    def store_tile(self, label: str, o: Operand, rows: str, dim: Dim, value: str, after: str = "") -> None:
        """Store `value`, followed by the operator `after`, as a tile of the matrix `{label}p`."""
        for part in self.parts(o):
            at, mask = self._place(o, rows, dim, turned=False, part=part)
            stored = self.like(o, f"({value}{part.suffix}{after})")
            self.out.add(f"tl.store({label}p + ({at}), {stored}{f', {mask}' if mask else ''})")

    def like(self, o: Operand, value: str) -> str:
        """`value` converted to the dtype of `o`."""
        return f"{value}.to({self.params.pointer(o.name)}.dtype.element_ty)"

    def zeros(self, label: str, rows: int, o: Operand) -> None:
        """Declare a zero total of `rows` heads like those of `o`."""
        for part in self.parts(o):
            self.out.add(f"{label}{part.suffix} = tl.zeros([{rows}, {part.padded}], tl.float32)")

    def _place(self, o: Operand, rows: str, dim: Dim, turned: bool, part: Part) -> tuple[str, str]:
        """The offsets of a tile in its matrix, and the mask of elements inside the matrix; "" if all are."""
        first, second = ("[None, :]", "[:, None]") if turned else ("[:, None]", "[None, :]")
        column = f"tl.arange(0, {part.padded}){second}"
        column = f"({column} + {part.first})" if part.first else column
        masks = [] if dim.name in self.whole else [f"({rows} < {self.size(dim.size)}){first}"]
        masks += [] if part.padded == part.width else [f"({column} < {self.width(o)})"]
        at = f"{rows}{first} * {self.stride(o, 2, matters=True)} + {column} * {self.stride(o, 3, matters=True)}"
        return at, " & ".join(masks)

    def number_of(self, label: str, o: Operand, dim: Dim, missing: str) -> None:
        """Load a number for each row of `dim`, laid out like it; `o` is [B, H, rows]."""
        b, h = self.axis["b"], self.axis["h"]
        at = f"{b} * {self.stride(o, 0)} + {h} * {self.stride(o, 1)} + {dim.name} * {self.stride(o, 2)}"
        options = "" if dim.name in self.whole else f", m{dim.name}, other={missing}"
        self.out.add(f"{label} = tl.load({self.params.pointer(o.name)} + ({at}){options})")

    def inner(self, name: str, o: Operand, a: str, b: str) -> None:
        """Declare `name`, the product of tiles `a` and `b` over the elements of a head like those of `o`.

        `a` and `b` contain "{}" in place of the suffix of the head's part.
        """
        for part in self.parts(o):
            total = name if part.first else ""
            self.out.add(f"{name} = {self._dot(a.format(part.suffix), b.format(part.suffix), total)}")

    def outer(self, name: str, o: Operand, a: str, b: str, factor: str = "") -> None:
        """Multiply the total `name` by `factor` and add the product of tile `a` and heads `b`; "{}" as in `inner`."""
        for part in self.parts(o):
            total = f"{name}{part.suffix}"
            self.out.add(f"{total} = {self._dot(a, b.format(part.suffix), total + factor)}")

    def _dot(self, a: str, b: str, total: str) -> str:
        return f"tl.dot({a}, {b}, {f'{total}, ' if total else ''}input_precision='{self.precision}')"

    def reciprocal(self, row: Row) -> str | None:
        """The factor for a division by a constant: it adds one rounding error, as small as the product's before."""
        divisor = self.plan.rows[row.args[1]]
        if divisor.op != "const" or divisor.dtype is not torch.float32:
            return None
        value = float(divisor.attr)
        return repr(1 / value) if 1e-30 < abs(value) < 1e30 else None

    # -- rows of a tile ----------------------------------------------------------------------------------------------
    def behind(self, *roots: int) -> list[int]:
        """The rows that `roots` depend on, in order."""
        return behind(self.plan.rows, *roots)

    def needs(self, n: int, role: str) -> bool:
        """Whether row `n` depends on a load that stands for `role`."""
        return any(self.rows.given.get(m) == role for m in self.behind(n))

    def put(self, rows: Sequence[int], known: set[int], score: str, gradient: str = "") -> None:
        """Emit the rows that are not in `known`, and add them to it. `score` and `gradient`: their values here."""
        dtype = {torch.int32: "tl.int32", torch.int64: "tl.int64"}
        for n in rows:
            if n in known:
                continue
            known.add(n)
            role = self.rows.given.get(n)
            if role == "score":
                self.out.add(f"t{n} = {score}")
            elif role == "gradient":
                self.out.add(f"t{n} = {gradient}")
            elif role is not None:
                value = self.axis[role]
                text = f"tl.cast({value}, {dtype[self.plan.rows[n].dtype]})" if role in "bh" else (
                    f"{value}.to({dtype[self.plan.rows[n].dtype]})"
                )  # fmt: skip
                self.out.add(f"t{n} = {text}")
            elif n == self.rows.mod and self.rows.scaled is not None:
                self.out.add(f"t{n} = {score}")  # its factor is combined with that of the logarithm
            else:
                self.emit(n)

    def ahead(self, roots: Sequence[int], roles: str) -> set[int]:
        """Emit, before the loop, the rows of `roots` that depend on no index except `roles`; returns them."""
        out: set[int] = set()
        fixed = {self.rows.axes[r].sym for r in ROLES if r not in roles}
        for n in self.behind(*roots):
            own = self.needs(n, "score") or self.needs(n, "gradient")
            moving = bool(self.plan.varies[n] & fixed)
            if not own and not moving:
                self.put([n], out, "")
        return out

    @property
    def factor(self) -> float:
        """The factor that turns the row `mod` or `masked` into an exponent of two."""
        return LOG2E * (1.0 if self.rows.scaled is None else self.rows.scaled)

    # -- loops over blocks -------------------------------------------------------------------------------------------
    def walk(self, dim: Dim, block: str, body: Callable[[bool], None], b: str, h: str) -> None:
        """A loop that runs `body(masked)` for each tile along `dim`, at offset `start`; `block`: its row of blocks."""
        if self.lists is None:
            self.out.open(f"for start in tl.range(0, {self.size(dim.size)}, {dim.block})")
            body(True)
            self.out.close()
            return
        lists = self.lists
        along = lists.columns if dim is self.x else lists.rows
        each = along // dim.block
        for pair, masked in ((lists.partial, True), (lists.full, False)):
            if pair is None:
                continue
            count, index = pair
            at = [self._listed_at(o, b, h) for o in pair]
            kind = "masked" if masked else "full"
            first, second = (self.params.pointer(o.name) for o in pair)
            self.out.add(f"{kind} = tl.load({first} + {at[0]} + {block} * {self.stride(count, 2)})")
            self.out.add(f"{kind}p = {second} + {at[1]} + {block} * {self.stride(index, 2)}")
            self.out.open(f"for step in tl.range(0, {kind}{f' * {each}' if each > 1 else ''})")
            number, inside = ("step", "") if each == 1 else (f"(step // {each})", f" + step % {each} * {dim.block}")
            self.out.add(f"start = tl.load({kind}p + {number} * {self.stride(index, 3)}) * {along}{inside}")
            body(masked)
            self.out.close()

    def _listed_at(self, o: Operand, b: str, h: str) -> str:
        """The offset of a list's batch and head; a size of 1 is broadcast."""
        parts = []
        for dim, (value, full) in enumerate(((b, self.sizes["b"]), (h, self.sizes["h"]))):
            own = o.size[dim]
            if self.ctx.hint(own) == 1:
                self.guard("eq", own, expr(1))
                continue
            if self.ctx.hint(own) == self.ctx.hint(full):
                self.guard("eq", own, full)
            else:
                value = f"({value} % {self.size(own)})"
            parts.append(f"{value} * {self.stride(o, dim)}")
        return " + ".join(parts) or "0"

    def open_dim_at(self, d: Dim, start: str) -> None:
        """Declare the variables of a tile's dim: `{d}r` without dims, `{d}` laid out, the axis, the mask."""
        index = "[:, None]" if d is self.layout.dims[0] else "[None, :]"
        self.out.add(f"{d.name}r = {start} + tl.arange(0, {d.block})")
        self.out.add(f"{d.name} = {d.name}r{index}")
        if d.name not in self.whole:
            self.out.add(f"m{d.name} = {d.name} < {self.size(d.size)}")
        self.out.add(f"{d.axes[0].sym.name} = {d.name}")

    def open_heads(self, per: Dim, heads: Expr, b: str, h: str, last_first: bool) -> None:
        """Split the program's number into a block along `per`, a head and a batch."""
        wide = ".to(tl.int64)" if self.bits == 64 else ""
        n = self.params.number(blocks(per.size, per.block), self.bits, "n_blocks")
        self.out.add(f"pid = {PROGRAM}{wide}")
        self.out.add(f"block = {f'{n} - 1 - ' if last_first else ''}pid % {n}")
        self.out.add(f"{h} = pid // {n} % {self.size(heads)}")
        self.out.add(f"{b} = pid // ({n} * {self.size(heads)})")

    def closed(self, units: Expr, work: Expr) -> Function:
        """The finished function, with its work and pipeline stages."""
        made = self.close_function(self.name, units)
        return dataclasses.replace(made, work=work, stages=self.tile.stages)


def write_forward(nest: AttentionNest) -> Function:
    """The results, and if asked, the logarithms of sums: out[b, h, q] = Σ softmax(score)[k] · v[k]."""
    rows, add = nest.rows, nest.out.add
    q, k, v, o = (nest.operands[n] for n in ("q", "k", "v", "out"))
    b, h = nest.axis["b"], nest.axis["h"]
    nest.open_heads(nest.y, nest.sizes["h"], b, h, last_first=True)
    nest.open_dim_at(nest.y, f"block * {nest.tile.queries}")
    kb, kh = nest.of_keys(b, h)
    for label, operand, batch, head in (("q", q, b, h), ("k", k, kb, kh), ("v", v, kb, kh), ("o", o, b, h)):
        nest.base(label, operand, batch, head)
    nest.load_tile("q", q, "yr", nest.y)
    shape = f"[{nest.tile.queries}, 1]"
    add(f"highest = tl.full({shape}, float('-inf'), tl.float32)")
    add(f"total = tl.zeros({shape}, tl.float32)")
    nest.zeros("result", nest.tile.queries, v)
    known = nest.ahead([rows.mod, rows.masked], "bhq")

    def body(masked: bool) -> None:
        nest.open_dim_at(nest.x, "start")
        nest.load_tile("k", k, "xr", nest.x, turned=True)
        nest.inner("score", q, "q{}", "k{}")
        row = rows.masked if masked else rows.mod
        nest.put(nest.behind(row), set(known), "score")
        value = f"t{row}"
        if nest.x.name not in nest.whole:
            value = f"tl.where(mx, {value}, float('-inf'))"
        add(f"score = {value}")
        add(f"higher = tl.maximum(highest, tl.max(score, 1)[:, None] * {nest.factor!r})")
        add("base = tl.where(higher == float('-inf'), 0.0, higher)")
        add("factor = tl.exp2(highest - base)")
        add(f"weight = tl.exp2(score * {nest.factor!r} - base)")
        add("total = total * factor + tl.sum(weight, 1)[:, None]")
        nest.load_tile("v", v, "xr", nest.x)
        nest.outer("result", v, nest.like(v, "weight"), "v{}", " * factor")
        add("highest = higher")

    nest.walk(nest.x, _row_of_blocks(nest, nest.y), body, b, h)
    add("divisor = tl.where(total == 0.0, 1.0, total)")
    nest.store_tile("o", o, "yr", nest.y, "result", " / divisor")
    if "sums" in nest.operands:
        s = nest.operands["sums"]
        at = f"{b} * {nest.stride(s, 0)} + {h} * {nest.stride(s, 1)} + y * {nest.stride(s, 2)}"
        mask = "" if nest.y.name in nest.whole else ", my"
        add(f"tl.store({nest.params.pointer(s.name)} + ({at}), highest + tl.log2(total){mask})")
    heads = nest.sizes["b"] * nest.sizes["h"]
    return nest.closed(blocks(nest.y.size, nest.y.block) * heads, heads * nest.sizes["q"] * nest.sizes["k"])


def _row_of_blocks(nest: AttentionNest, dim: Dim) -> str:
    """The number of the row of blocks that contains a program's tile."""
    if nest.lists is None:
        return "0"
    size = nest.lists.rows if dim is nest.y else nest.lists.columns
    return f"(block // {size // dim.block})" if size > dim.block else "block"


def write_query_gradient(nest: AttentionNest) -> Function:
    """The gradient of the queries, from `grad` (of the results), the logarithms of sums, and `delta` = Σ grad · out."""
    rows = nest.rows
    q, k, v, g, dq = (nest.operands[n] for n in ("q", "k", "v", "grad", "dq"))
    b, h = nest.axis["b"], nest.axis["h"]
    nest.open_heads(nest.y, nest.sizes["h"], b, h, last_first=True)
    nest.open_dim_at(nest.y, f"block * {nest.tile.queries}")
    kb, kh = nest.of_keys(b, h)
    pairs = (("q", q, b, h), ("g", g, b, h), ("dq", dq, b, h), ("k", k, kb, kh), ("v", v, kb, kh))
    for label, operand, batch, head in pairs:
        nest.base(label, operand, batch, head)
    nest.load_tile("q", q, "yr", nest.y)
    nest.load_tile("g", g, "yr", nest.y)
    _rows_of_queries(nest)
    nest.zeros("result", nest.tile.queries, q)
    known = nest.ahead([rows.mod, rows.masked, rows.gradient, rows.masked_gradient], "bhq")

    def body(masked: bool) -> None:
        nest.open_dim_at(nest.x, "start")
        nest.load_tile("k", k, "xr", nest.x, turned=True)
        nest.load_tile("v", v, "xr", nest.x, turned=True)
        nest.inner("score", q, "q{}", "k{}")
        nest.inner("above", v, "g{}", "v{}")
        _gradient_of_score(nest, masked, known)
        nest.outer("result", q, nest.like(k, "slope"), "tl.trans(k{})")

    nest.walk(nest.x, _row_of_blocks(nest, nest.y), body, b, h)
    nest.store_tile("dq", dq, "yr", nest.y, "result")
    heads = nest.sizes["b"] * nest.sizes["h"]
    return nest.closed(blocks(nest.y.size, nest.y.block) * heads, heads * nest.sizes["q"] * nest.sizes["k"])


def write_key_gradient(nest: AttentionNest) -> Function:
    """The gradients of keys and values: each program sums over all queries that attend to its keys."""
    rows, add = nest.rows, nest.out.add
    q, k, v, g, dk, dv = (nest.operands[n] for n in ("q", "k", "v", "grad", "dk", "dv"))
    b, h = nest.axis["b"], nest.axis["h"]
    nest.open_heads(nest.x, k.size[1], "kb", "kh", last_first=False)
    nest.open_dim_at(nest.x, f"block * {nest.tile.keys}")
    for label, operand in (("k", k), ("v", v), ("dk", dk), ("dv", dv)):
        nest.base(label, operand, "kb", "kh")
    nest.load_tile("k", k, "xr", nest.x)
    nest.load_tile("v", v, "xr", nest.x)
    nest.zeros("result_k", nest.tile.keys, k)
    nest.zeros("result_v", nest.tile.keys, v)
    several = nest.group > 1 or nest.repeats
    if several:
        n = nest.size(nest.sizes["b"] * nest.group) if nest.repeats else str(nest.group)
        nest.out.open(f"for member in range(0, {n})")
    add(f"{h} = kh * {nest.group}{f' + member % {nest.group}' if several else ''}")
    add(f"{b} = {f'member // {nest.group}' if nest.repeats else 'kb'}")
    nest.base("q", q, b, h)
    nest.base("g", g, b, h)
    known = nest.ahead([rows.mod, rows.masked, rows.gradient, rows.masked_gradient], "bhk")

    def body(masked: bool) -> None:
        nest.open_dim_at(nest.y, "start")
        nest.load_tile("q", q, "yr", nest.y)
        nest.load_tile("g", g, "yr", nest.y)
        _rows_of_queries(nest)
        nest.inner("score", k, "k{}", "tl.trans(q{})")
        nest.inner("above", v, "v{}", "tl.trans(g{})")
        _gradient_of_score(nest, masked, known)
        nest.outer("result_v", v, nest.like(g, "weight"), "g{}")
        nest.outer("result_k", k, nest.like(q, "slope"), "q{}")

    nest.walk(nest.y, _row_of_blocks(nest, nest.x), body, b, h)
    if several:
        nest.out.close()
    nest.store_tile("dk", dk, "xr", nest.x, "result_k")
    nest.store_tile("dv", dv, "xr", nest.x, "result_v")
    heads = k.size[0] * k.size[1]
    work = nest.sizes["b"] * nest.sizes["h"] * nest.sizes["q"] * nest.sizes["k"]
    return nest.closed(blocks(nest.x.size, nest.x.block) * heads, work)


def _rows_of_queries(nest: AttentionNest) -> None:
    """Load the logarithm of the sum and `delta` of each query."""
    nest.number_of("sums", nest.operands["sums"], nest.y, "float('inf')")
    nest.number_of("delta", nest.operands["delta"], nest.y, "0.0")
    nest.out.add("sums = tl.where(sums == float('-inf'), float('inf'), sums)")  # no key is attended to: weights are 0


def _gradient_of_score(nest: AttentionNest, masked: bool, known: set[int]) -> None:
    """Declare `weight` and `slope`, the gradient of the score before scaling, for a tile with `score` and `above`."""
    rows, add = nest.rows, nest.out.add
    seen = set(known)
    row, gradient = (rows.masked, rows.masked_gradient) if masked else (rows.mod, rows.gradient)
    nest.put(nest.behind(row), seen, "score")
    add(f"weight = tl.exp2(t{row} * {nest.factor!r} - sums)")
    if nest.x.name not in nest.whole:
        add("weight = tl.where(mx, weight, 0.0)")
    add("above = weight * (above - delta)")
    nest.put(nest.behind(gradient), seen, "score", "above")
    add(f"slope = t{gradient}")


__all__ = [
    "AttentionNest",
    "AttentionTile",
    "BlockLists",
    "DTYPES",
    "Operand",
    "write_forward",
    "write_key_gradient",
    "write_query_gradient",
]
