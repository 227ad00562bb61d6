"""The printed IR parses back to equal objects, for every kind of loop and row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fuser import config, pipeline
from fuser.canonical import canonicalize
from fuser.errors import VerifyError
from fuser.ir.nodes import Pointwise, Reduction, Scan, Scatter
from fuser.ir.parser import parse_buffers, parse_expr, parse_loops
from fuser.ir.printer import loops_lines, print_buffers
from fuser.ir.sizes import LOOP, SIZE, STRIDE, expr, indirect, maximum, symbol
from fuser.lowering.graph import Lowered, lower_graph
from tests.backend.reference_cases import CASES

MORE = {
    "cumsum": (lambda x: x.cumsum(1), torch.rand(4, 9)),
    "cummax": (lambda x: x.cummax(0)[1], torch.rand(4, 9)),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), torch.rand(4, 9), torch.tensor([1, 0, 1]), torch.rand(3, 9)),
    "scatter": (lambda x, i, y: x.scatter(1, i, y), torch.rand(4, 9), torch.zeros(4, 2).long(), torch.rand(4, 2)),
    "numbers": (lambda x, n, f: x * n + f, torch.rand(4, 9), 3, 0.5),
}


def lowered_of(fn, *args) -> tuple[Lowered, tuple]:
    graph = canonicalize(torch.fx.symbolic_trace(fn))
    every = (*graph.bound, *args)
    numbers = frozenset(i for i, a in enumerate(every) if not isinstance(a, torch.Tensor))
    return lower_graph(pipeline.with_numbers(graph.graph, numbers), every, config.numerics), every


def test_what_is_printed_parses_back():
    seen: set[object] = set()
    for name, case in {**CASES, **MORE}.items():
        lowered, _ = lowered_of(*case)
        text = print_buffers(lowered.ctx.buffers)
        again = parse_buffers(text)
        assert print_buffers(again) == text
        for mine, other in zip(again, lowered.ctx.buffers, strict=True):
            for field in dataclasses.fields(mine):
                assert getattr(mine, field.name) == getattr(other, field.name), (name, field.name)
            for loops in other.loops:
                assert parse_loops("\n".join(loops_lines(loops))) == loops
                seen.update({type(loops), *(row.op for row in loops.body.rows)})
    kinds = {Pointwise, Reduction, Scan, Scatter}
    assert seen >= kinds | {"load", "const", "scalar", "index", "indirect", "pair", "round_to", "to_dtype"}


I0, I1, N = symbol("i0", LOOP), symbol("i1", LOOP), symbol("x0_1", SIZE)
EXPRESSIONS = [
    expr(0), -N, I0 * N + 2 * I1 - 3, (I0 + 1) // (N - 2) * symbol("x1", STRIDE) + I1 % (N + 1), 2 * I0 * I1 * (I0 % 2),
    maximum(expr(indirect(3)), symbol("x2_s1", STRIDE) - 1), (I0 // 3 * 5 + I1) % 7,
]  # fmt: skip


@pytest.mark.parametrize("e", EXPRESSIONS, ids=str)
def test_expressions_parse_back(e):
    assert parse_expr(str(e)) == e


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("buf0 float32[3]", "is no buffer"),
        ("buf0: float31[3] strides [1]", "'float31' is no dtype"),
        ("buf0: float32[3] strides [1]\n  for i0 < 3\n    %1 = in0[i0]", "is no row number 0"),
        ("buf0: float32[3] strides [1]\n  for i0 < 3\n    %0 = in0[i0]", "end of a loop"),
        ("buf0: float32[3 +] strides [1]", "no expression"),
        ("buf0: float32[(x0_0 ! 2)] strides [1]", "no expression"),
    ],
)
def test_other_text_is_refused_with_its_line(text, said):
    with pytest.raises(VerifyError, match=said):
        parse_buffers(text)
