"""Equal functions of one source share a body; their results are those of functions of their own."""

from __future__ import annotations

import re

import torch
from torch import fx

from fuser import compiler, config, interface, pipeline
from fuser.canonical import canonicalize
from fuser.cpu import passes, sharing
from fuser.cpu.records import SIGNATURE, Function
from fuser.ir.sizes import ONE
from fuser.kernel_cache import Registry
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


def function(name: str, body: str, least: int = sharing.LEAST) -> Function:
    text = f'extern "C" void {name}({SIGNATURE}) {{\n{body}  // {"." * least}\n}}\n'
    return Function(name, text, ONE, ONE, ONE)


def plain(at: int, factor: str, buffer: str = "in0") -> str:
    return (
        f"  const float* __restrict {buffer} = (const float*)ptrs[{at}];\n  const i64 n{at} = s[{at}];\n"
        f"  const float t1 = t0 * {factor};\n  use({buffer}, n{at}, f[3]);\n"
    )


def test_what_is_taken_may_differ_and_nothing_else():
    one, two = function("k0", plain(4, "2.0f")), function("k1", plain(7, "(-0x1.8p-10f)", "buf3"))
    (texts,) = sharing.shared([one, two])
    body, first, second = texts
    assert body.startswith(f"static __attribute__((noinline)) void k0_body({SIGNATURE}) {{\n")
    assert "own0 = (float)f[1];" in body and "t0 * own0;" in body and "use(arg0, arg1, f[0])" in body
    assert "{ptrs[4]}" in first and "{s[4]}" in first and "{f[3], (double)2.0f}" in first
    assert "{ptrs[7]}" in second and "{s[7]}" in second and "{f[3], (double)(-0x1.8p-10f)}" in second
    for other in ("  const float t1 = fuser_x(2.0f);\n", "  if (t0 > 2.0f) return;\n", "  i64 n = 3;\n"):
        texts = sharing.shared([one, function("k1", plain(7, "2.0f") + other)])
        assert texts == [[one.text], [function("k1", plain(7, "2.0f") + other).text]]


def test_functions_with_more_of_their_own_share_nothing():
    for body in ("  static i64 k0_count;\n", "  float s[4];\n  other(s);\n", "  call(ptrs);\n"):
        one, two = function("k0", body), function("k0", body)
        assert [len(texts) for texts in sharing.shared([one, two])] != [3]
    short = [function(name, plain(1, "2.0f"), 1) for name in ("k0", "k1")]
    assert sharing.shared(short) == [[f.text] for f in short]


def test_what_a_nest_asks_of_its_passes_grows_with_their_number(monkeypatch):
    """It once grew with the cube: a chain of 180 softmaxes took minutes."""
    asked = []
    closure = passes.Passes.closure
    monkeypatch.setattr(passes.Passes, "closure", lambda *args: asked.append(1) or closure(*args))
    counts = []
    for n in (5, 10, 20):
        del asked[:]
        with config.override(max_body_rows=10**4):
            source_of(chain(n), torch.randn(20, 77))
        counts.append(len(asked))
    assert counts[2] - counts[1] < 2.2 * (counts[1] - counts[0])
