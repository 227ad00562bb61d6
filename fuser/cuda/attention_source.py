"""The sources of attention kernels: from a graph of scores, example tensors and tiles to Triton and its launches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.canonical.graph import CanonicalGraph
from fuser.codegen.program import ProgramBuilder, entry_name
from fuser.cuda import codegen, fused_kernel
from fuser.cuda.attention import (
    DTYPES,
    LONGEST_HEAD,
    AttentionNest,
    AttentionTile,
    BlockLists,
    Operand,
    parts_of,
    write_forward,
    write_key_gradient,
    write_query_gradient,
)
from fuser.cuda.attention_rows import read_rows
from fuser.cuda.codegen import Function
from fuser.cuda.layout import Context
from fuser.errors import Unsupported
from fuser.ir.nodes import strides_of
from fuser.ir.sizes import Expr, symbols
from fuser.lazy_dataclasses import dataclass
from fuser.lowering.graph import Lowered, lower_graph
from fuser.lowering.inputs import TensorInput
from fuser.lowering.shapes import order_like
from fuser.reasons import because
from fuser.scheduler.schedule import schedule

STAND_INS = ("score", "b", "h", "q", "k", "gradient")
_SIZES = (3, 5, 7, 11)  # sizes of the stand-ins; their strides tell them apart
_STRIDES = (100003, 10007, 1009, 101)
_LEAST_BLOCK = 16  # queries or keys: the smallest side of a product of tiles
HEADS = ("q", "k", "v", "grad")  # tensors of shape [batch, heads, rows, elements of a head]


@dataclass(frozen=True)
class Asked:
    """A request for kernels. `others` are the names of the tensors before those that the rows read.

    `masks`: the graph has a masked score beside the modified one. `block`: the sides of a mask's block along queries
    and keys; None if one block is everything. `sums`: the forward kernel stores the logarithms of sums.
    """

    others: tuple[str, ...]
    masks: bool
    gradient: bool
    block: tuple[int, int] | None
    sums: bool
    precision: str
    wide_index: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs of the graph, by name."""
        names: tuple[str, ...] = ("mod", "masked") if self.masks else ("mod",)
        if self.gradient:
            names += ("gradient", "masked_gradient") if self.masks else ("gradient",)
        return names


def forward_tile(dtype: torch.dtype, head: int, matrix: bool = False) -> AttentionTile:
    """The tile of the forward kernel for heads of at most `head` elements: the fastest of a dozen on an H200.

    `matrix`: the rows load a number for each score.
    """
    if dtype.itemsize == 4:
        return AttentionTile(64, 32, 8, 2) if head <= 64 else AttentionTile(32, 16, 4, 2)
    if head <= 128 and matrix:
        return AttentionTile(128, 64, 8, 2)
    if head <= 64 or len(parts_of(head)) > 1:
        return AttentionTile(64, 64 if head > 128 else 128, 4, 2)
    return AttentionTile(128, 128, 8, 3) if head <= 128 else AttentionTile(64, 64, 8, 2)


def gradient_tiles(dtype: torch.dtype, head: int) -> tuple[AttentionTile, AttentionTile]:
    """The tiles of the gradients of queries, and of keys and values."""
    if dtype.itemsize == 4:
        both = AttentionTile(32, 32, 4, 1) if head <= 64 else AttentionTile(16, 16, 4, 1)
        return both, both
    if head <= 64:
        return AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 3)
    if head <= 128:
        return AttentionTile(64, 64, 4, 2), AttentionTile(32, 64, 4, 2)
    if head <= 192:
        return AttentionTile(128, 32, 8, 1), AttentionTile(64, 64, 8, 2)
    return AttentionTile(16, 32, 4, 1), AttentionTile(32, 32, 4, 1)


def fitted(tile: AttentionTile, block: tuple[int, int] | None, halvings: int) -> AttentionTile:
    """`tile` halved `halvings` times, with sides that divide a block. Unsupported if a side becomes too small."""
    queries, keys, stages = tile.queries, tile.keys, tile.stages
    for _ in range(halvings):
        stages = max(stages - 1, 1)
        queries, keys = (queries // 2, keys) if queries >= keys else (queries, keys // 2)
    if block is not None:
        queries, keys = (min(a, b & -b) for a, b in zip((queries, keys), block))
    if min(queries, keys) < _LEAST_BLOCK:
        raise Unsupported(f"a block mask with blocks of {block}: expected multiples of {_LEAST_BLOCK}")
    return AttentionTile(queries, keys, tile.warps, stages)


def make_source(
    graph: CanonicalGraph, asked: Asked, examples: Sequence[Any], numerics: str = "fast"
) -> fused_kernel.Source:  # fmt: skip
    """The kernels for tensors like `examples`: those of `asked.others`, then those that the rows of `graph` read.

    Their results are those of attention, and if asked, the logarithms to base 2 of sums; or the three gradients.
    Raises Unsupported.
    """
    q, k, v = examples[:3]
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise Unsupported(because("dtype", f"attention of {q.dtype}, {k.dtype} and {v.dtype}"))
    if max(q.shape[-1], v.shape[-1]) > LONGEST_HEAD:
        raise Unsupported(f"heads of {max(q.shape[-1], v.shape[-1])} elements: expected at most {LONGEST_HEAD}")
    stand_ins = STAND_INS if asked.gradient else STAND_INS[:-1]
    device = q.device.type
    all_examples = (*examples, *(_stand_in(name, asked.wide_index) for name in stand_ins))
    lowered = lower_graph(graph, all_examples, numerics, device)
    plan = schedule(lowered, 1 << 10)
    numbers = {name: len(examples) + i for i, name in enumerate(stand_ins)}
    rows = read_rows(lowered, plan, numbers, asked.results)
    _forget(lowered, len(examples))
    return _assembled(lowered, rows, asked, _write_gradients if asked.gradient else _write_forward, graph, {})


def _stand_in(name: str, wide: bool) -> torch.Tensor:
    """An example of all scores, or of an index of each. It has all dims, so all rows are in one kernel."""
    index = torch.int64 if wide else torch.int32
    dtype = torch.float32 if name in ("score", "gradient") else index
    return torch.empty_strided(_SIZES, _STRIDES, dtype=dtype, device="meta")


def _forget(lowered: Lowered, kept: int) -> None:
    """Remove the stand-ins from the inputs, with all facts and guards about their sizes."""
    own = {s for s in lowered.ctx.hints if any(s.name.startswith(f"x{n}_") for n in range(kept, len(lowered.inputs)))}
    lowered.inputs[:] = lowered.inputs[:kept]
    for s in [s for s, e in lowered.ctx.facts.items() if s in own or own & set(symbols(e))]:
        if s not in own:
            raise Unsupported("a captured tensor has sizes that depend on those of the scores")
    for guard in [g for g in lowered.ctx.guards if own & (set(symbols(g[1])) | set(symbols(g[2])))]:
        del lowered.ctx.guards[guard]


Write = Callable[..., tuple[list[Function], list[Any]]]


def _assembled(
    lowered: Lowered, rows: Any, asked: Asked, write: Write, graph: CanonicalGraph, levels: Mapping[int, int]
) -> fused_kernel.Source:  # fmt: skip
    ctx = lowered.ctx
    for name, record in zip(asked.others, lowered.inputs):
        if name in HEADS and isinstance(record, TensorInput):
            ctx.specialise(record.size[3])
    builder = ProgramBuilder(lowered)
    builder.bind_inputs()
    unaligned = {f"in{i}" for i, r in enumerate(lowered.inputs) if isinstance(r, TensorInput) and not r.aligned}
    operands = {
        name: _operand(lowered, i) for i, name in enumerate(asked.others) if isinstance(lowered.inputs[i], TensorInput)
    }
    made = _results(lowered, operands, asked)
    wide = fused_kernel.is_wide(builder, [(o.size, o.stride) for o in made.values()])
    for o in made.values():
        builder.add_buffer(o.name, o.dtype, o.size, o.stride, output=True)
    context = Context(ctx.hint, lambda b: b not in unaligned, wide, rough=False)
    functions, guards = write(rows, context, operands | made, asked, graph.text, levels)
    for relation, a, b in guards:
        builder.guard(relation, a, b)
    used = {p.value for f in functions for p in f.params if p.kind == "pointer" and p.divisor > 1}
    builder.align({str(b) for b in used} - {o.name for o in made.values()})
    text = codegen.source_text(functions, graph.text)
    steps = fused_kernel.launches(builder, functions)
    outputs = [("buffer", o.name) for o in made.values()]
    final = dataclasses.replace(builder, lowered=Lowered(ctx, lowered.inputs, outputs))
    program = final.finish(steps, made.values(), single=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]

    def again(levels: Mapping[int, int], other: Any = None) -> fused_kernel.Source:
        return _assembled(lowered, rows, asked, write, graph, levels)

    return fused_kernel.Source(
        f"attention_{digest}", text, tuple(functions), program, ctx.numerics, len(functions), (),
        tuple(range(len(functions))), again,
    )  # fmt: skip


def _operand(lowered: Lowered, number: int) -> Operand:
    record = lowered.inputs[number]
    assert isinstance(record, TensorInput)
    canon = lowered.ctx.canon
    return Operand(f"in{number}", tuple(map(canon, record.size)), tuple(map(canon, record.stride)), record.dtype)


def _results(lowered: Lowered, operands: dict[str, Operand], asked: Asked) -> dict[str, Operand]:
    """The kernels' results: dense tensors whose dims have the memory order of the tensors that eager follows."""
    q, k, v = (operands[name] for name in "qkv")

    def like(number: str, o: Operand, size: tuple[Expr, ...]) -> Operand:
        order = order_like([lowered.ctx.hint(s) for s in size], [lowered.ctx.hint(s) for s in o.stride])
        return Operand(number, size, strides_of(size, order), o.dtype)

    if asked.gradient:
        return {"dq": like("out0", q, q.size), "dk": like("out1", k, k.size), "dv": like("out2", v, v.size)}
    made = {"out": like("out0", q, (*q.size[:3], v.size[3]))}
    if asked.sums:
        size = q.size[:3]
        made["sums"] = Operand("out1", size, strides_of(size), torch.float32)
    return made


def _lists(operands: dict[str, Operand], asked: Asked, names: str) -> BlockLists | None:
    if asked.block is None:
        return None
    full = (operands[f"full_{names}_count"], operands[f"full_{names}"]) if f"full_{names}" in operands else None
    return BlockLists((operands[f"{names}_count"], operands[names]), full, *asked.block)


def _head(context: Context, operands: dict[str, Operand]) -> int:
    return max(context.hint(operands["q"].size[3]), context.hint(operands["v"].size[3]))


def _write_forward(
    rows: Any, context: Context, operands: dict[str, Operand], asked: Asked, text: str, levels: Mapping[int, int]
) -> tuple[list[Function], list[Any]]:  # fmt: skip
    head = _head(context, operands)
    tile = fitted(forward_tile(operands["q"].dtype, head, rows.reads_matrix), asked.block, levels.get(0, 0))
    name = entry_name(0, f"attention_d{head}", text)
    nest = AttentionNest(rows, name, context, tile, operands, _lists(operands, asked, "keys"), asked.precision)
    return [write_forward(nest)], nest.guards


def _write_gradients(
    rows: Any, context: Context, operands: dict[str, Operand], asked: Asked, text: str, levels: Mapping[int, int]
) -> tuple[list[Function], list[Any]]:  # fmt: skip
    tiles = gradient_tiles(operands["q"].dtype, _head(context, operands))
    functions, guards = [], []
    for number, (what, names, write) in enumerate(
        (("query", "keys", write_query_gradient), ("key", "queries", write_key_gradient))
    ):
        tile = fitted(tiles[number], asked.block, levels.get(number, 0))
        name = entry_name(number, f"attention_{what}_gradient_d{_head(context, operands)}", text)
        nest = AttentionNest(
            rows, name, context, tile, operands, _lists(operands, asked, names), asked.precision, what == "key"
        )
        functions.append(write(nest))
        guards += nest.guards
    return functions, guards


__all__ = ["Asked", "fitted", "forward_tile", "gradient_tiles", "make_source"]
