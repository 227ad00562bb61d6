"""Equal functions of one source share a body; their results are those of functions of their own."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import fx

from fuser import compiler, config, interface, pipeline
from fuser.canonical import canonicalize
from fuser.cpu import sharing
from fuser.cpu.records import Function
from fuser.cpu.vir import nodes as ir
from fuser.cpu.vir.builder import Builder
from fuser.cpu.vir.printer import SIGNATURE
from fuser.ir.sizes import ONE
from fuser.kernel_cache import Registry
from fuser.scheduler.kernel_plan import Passes
from tests.backend.fused import fuse


def chain(n: int, factor=lambda k: k + 2):
    def function(x):
        for k in range(n):
            x = torch.softmax(x, -1) * factor(k)
        return x

    return function


def source_of(function, *inputs) -> str:
    graph = canonicalize(fx.symbolic_trace(function)).graph
    return pipeline.generate(graph, inputs, compiler.find_backend("cpu")).text


def test_the_layers_of_a_chain_share_a_body(monkeypatch):
    """The first function begins with its input, the last one has what is left: two bodies of their own."""
    x = torch.randn(20, 77)
    text = source_of(chain(120), x)
    body = r"k1_red_sum_max_softmax_mul_d2_\w{4}_body\("
    assert len(re.findall(rf"static __attribute__\(\(noinline\)\) void {body}", text)) == 1
    assert len(re.findall(rf"{body}own_ptrs", text)) == text.count('extern "C" void k') - 2 > 6
    monkeypatch.setattr(sharing, "LEAST", 10**9)
    assert len(source_of(chain(120), x)) > 3 * len(text)


def test_results_are_those_of_functions_of_their_own(monkeypatch):
    x = torch.randn(20, 77)
    function = chain(5, (2, 0.1, 1 / 3, -1e-3, 7).__getitem__)

    def run():
        with config.override(max_body_rows=8):
            handle, spec = fuse(function)
        result = handle(x)
        (kernel,) = spec.store.kernels
        assert handle.hits == 1
        return result, kernel.source.count("_body(own_ptrs")

    shared, callers = run()
    assert callers == 12
    torch.testing.assert_close(shared, function(x))
    monkeypatch.setattr(sharing, "LEAST", 10**9)
    monkeypatch.setattr(interface, "REGISTRY", Registry())
    apart, callers = run()
    assert not callers and torch.equal(shared, apart)


def function(name: str, at: int, factor: float, *more: ir.Statement, buffer: str = "in0", lines: int = 40) -> Function:
    """It takes a pointer, a size and a scalar, multiplies by a number, and has so many lines of no meaning."""
    b = Builder()
    b.add(ir.Pointer("float", buffer, ir.Slot("ptrs", at), True))
    b.let("i64", f"n{at}", ir.Slot("s", at))
    b.let("float", "t1", ir.Op("op", "mul", torch.float32, (ir.Name("t0"), ir.Number(factor, torch.float32))))
    b.do("use", buffer, f"n{at}", ir.Slot("f", 3))
    for _ in range(lines):
        b.do("some_function_of_its_own")
    return Function(ir.Kernel(name, (*b.statements, *more)), ONE, ONE, ONE)


def texts_of(*functions: Function) -> list[list[str]]:
    return [[t.text for t in texts] for texts in sharing.shared(functions)]


def test_what_is_taken_may_differ_and_nothing_else():
    one, two = function("k0", 4, 2.0), function("k1", 7, -(1 + 2**-20), buffer="buf3")
    ((body, first, second),) = texts_of(one, two)
    assert body.startswith(f"static __attribute__((noinline)) void k0_body({SIGNATURE}) {{\n")
    assert "own0 = (float)f[1];" in body and "t0 * own0;" in body and "use(arg0, arg1, f[0])" in body
    assert "{ptrs[4]}" in first and "{s[4]}" in first and "{f[3], (double)2.0f}" in first
    assert "{ptrs[7]}" in second and "{s[7]}" in second and "{f[3], (double)(-0x1.00001" in second
    for other in (
        ir.Do(ir.call("x", 2)),
        ir.Block(ir.If(ir.Name("t0") > 2), ()),
        ir.Let("i64", "n", ir.Number(3), False),
    ):
        more = function("k1", 7, 2.0, other)
        assert texts_of(one, more) == [[one.printed.text], [more.printed.text]]


def test_functions_with_data_of_their_own_and_short_ones_share_nothing():
    long = [function(name, 1, 2.0) for name in ("k0", "k1")]
    assert [len(texts) for texts in texts_of(*long)] == [3]
    checked = [Function(dataclasses.replace(f.code, checked=True), ONE, ONE, ONE) for f in long]
    short = [function(name, 1, 2.0, lines=1) for name in ("k0", "k1")]
    for functions in (checked, short):
        assert texts_of(*functions) == [[f.printed.text] for f in functions]


def test_what_a_nest_asks_of_its_passes_grows_with_their_number(monkeypatch):
    """It once grew with the cube: a chain of 180 softmaxes took minutes."""
    asked = []
    closure = Passes.closure
    monkeypatch.setattr(Passes, "closure", lambda *args: asked.append(1) or closure(*args))
    counts = []
    for n in (5, 10, 20):
        del asked[:]
        with config.override(max_body_rows=10**4):
            source_of(chain(n), torch.randn(20, 77))
        counts.append(len(asked))
    assert counts[2] - counts[1] < 2.2 * (counts[1] - counts[0])
