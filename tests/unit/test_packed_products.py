"""Products by packed weights: results at every edge of their blocks, and who makes the products of a frozen model."""

from __future__ import annotations

import functools
import itertools
import math
import re
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import config, machines
from fuser.contests import race
from fuser.cpu import attention_cpp, dots, packed, packed_cpp, toolchain
from fuser.errors import CompileError
from fuser.frontends.dynamo import compilations
from fuser.passes import providers
from fuser.passes.providers import OWN_PACKED

pytestmark = pytest.mark.usefixtures("clean")
DTYPES = (torch.float32, torch.bfloat16)
NAMES = [m for m in ("avx512", "avx2") if machines.why_not(machines.find(m)) is None]
MACHINES = ["", *NAMES]
BOUND = {torch.float32: 4e-6, torch.bfloat16: 1e-2}  # of the largest result


def skip_unless_made(dtype, inner=2):
    why = packed.why_not(dtype, inner)
    if why is not None:
        pytest.skip(why)


def forget_handles():
    packed.PRODUCTS.handle.cache_clear()
    packed.PRODUCTS.made.cache_clear()


def check(x, w, bias):
    """A product is as near to float64 as its dtype allows, and made by the kernel rather than in its place."""
    columns = w.shape[0]
    made = packed.pack(w)
    assert torch.equal(packed.unpacked(made, columns, w.shape[1]), w)
    handle = packed.PRODUCTS.handle(config.isa, x.dtype, columns, bias is not None, None)
    hits, misses = handle.hits, handle.misses
    got = packed.product(x, made, columns, bias)
    assert (handle.hits, handle.misses) == (hits + 1, misses)
    want = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert got.shape == want.shape and got.dtype is x.dtype and got.is_contiguous()
    if want.numel():
        assert (got.double() - want).abs().max() <= BOUND[x.dtype] * max(float(want.abs().max()), 1.0)


@pytest.mark.parametrize("isa", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_every_block(dtype, isa):
    with config.override(isa=isa):
        skip_unless_made(dtype)
        part = packed_cpp.PART_BYTES // dtype.itemsize
        for rows in (0, 1, 7, 8, 9, packed_cpp.MOST_ROWS, packed_cpp.MOST_ROWS + 1):
            check(torch.randn(rows, 6).to(dtype), torch.randn(50, 6).to(dtype), None)
        for inner in (2, 4, part - 2, part, part + 2, 2 * part + 2):
            check(torch.randn(9, inner).to(dtype), torch.randn(48, inner).to(dtype), torch.randn(48).to(dtype))
        for columns in (1, 15, 16, 47, 48, 49, 63, 64, 65, 4 * 48 + 1, 8 * 64):
            check(torch.randn(9, 10).to(dtype), torch.randn(columns, 10).to(dtype), torch.randn(columns).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_in_any_order(dtype):
    skip_unless_made(dtype)
    x, w = torch.randn(20, 3, 64).to(dtype), torch.randn(64, 96).to(dtype)
    bias = torch.randn(192).to(dtype)[::2]
    check(x[:, 1], w.t(), bias)  # rows apart
    check(x[:, 0].t().contiguous().t(), w.t(), bias)  # columns in one piece
    check(x[:1, 0].expand(20, 64), w.t(), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so(dtype):
    skip_unless_made(dtype)
    x, w = torch.zeros(10, 8).to(dtype), torch.ones(50, 8).to(dtype)
    x[3, 2], x[9, 7] = float("nan"), float("inf")
    got = packed.product(x, packed.pack(w), 50, None)
    assert torch.equal(got, F.linear(x, w)) or torch.isnan(got[3]).all() and (got[9] == float("inf")).all()
    assert not torch.isnan(got[[0, 1, 2, 4, 5, 6, 7, 8, 9]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", packed.EPILOGUES, ids="".join)
def test_activations(epilogue, dtype):
    """As near to float64 as eager's on the rounded product is, and float64's on what is no number."""
    skip_unless_made(dtype)
    x, w, bias = torch.randn(30, 64).to(dtype), torch.randn(100, 64).to(dtype) / 4, torch.randn(100).to(dtype)
    eager = functools.partial(packed.activated, epilogue)
    got = packed.product(x, packed.pack(w), 100, bias, epilogue)
    want = eager(F.linear(x.double(), w.double(), bias.double()))
    allowed = 2 * (eager(F.linear(x, w, bias)).double() - want).abs().max() + BOUND[dtype] / 10
    assert got.dtype is dtype and (got.double() - want).abs().max() <= allowed
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 100.0, -100.0]).to(dtype)
    zeros = torch.zeros(9, 4).to(dtype)
    found = packed.product(zeros, packed.pack(torch.zeros(6, 4).to(dtype)), 6, special, epilogue)
    torch.testing.assert_close(found[0], eager(special.double()).to(dtype), equal_nan=True)


def test_onednn_has_fewer_activations():
    assert set(packed.EPILOGUES) > providers.OF_ONEDNN


@pytest.mark.parametrize("machine", [m for m in machines.ROWS if m.fma], ids=lambda m: m.name)
def test_a_text_for_every_machine(machine):
    """One that is for no vectors names none."""
    for dtype, epilogue in itertools.product(DTYPES, (None, *packed.EPILOGUES)):
        for columns in (48, 64):
            text = packed_cpp.routine(dtype, dots.shape_of(columns, machine), True, epilogue, machine).source
            assert bool(machine.lanes) == ("fuser_lanes" in text)
    for dtype, mask in itertools.product(DTYPES, (None, *DTYPES)):
        text = attention_cpp.routine(dtype, dots.shape_of(None, machine), True, mask, machine).source
        assert bool(machine.lanes) == ("fuser_lanes" in text)


@pytest.mark.parametrize("tune", ["znver3", "generic"])
@pytest.mark.parametrize("isa", NAMES)
def test_registers_of_a_weight_are_read_once(isa, tune):
    """Whatever processor g++ weighs instructions for: each of six rows would read them again otherwise."""
    machine, compiler = machines.find(isa), toolchain.find_compiler()
    if not compiler[0].endswith("g++"):
        pytest.skip("-mtune is g++'s")
    text = packed_cpp.routine(torch.float32, dots.shape_of(64, machine), False, None, machine).source
    flags = [f for f in toolchain.flags_for(compiler, machine)[0] if not f.startswith("-mtune")]
    command = [*compiler, *flags, f"-mtune={tune}", "-x", "c++", "-S", "-o", "-", "-"]
    made = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"vfmadd\w+\s+[^%\s]*\([^)]*\), %[yz]mm", made)
    assert len(re.findall(r"vfmadd\w+\s+%[yz]mm", made)) >= 24


def test_an_odd_number_makes_no_pairs():
    assert packed.why_not(torch.bfloat16, 7) is not None and packed.why_not(torch.float64, 8) is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_that_no_kernel_takes(dtype):
    skip_unless_made(dtype)
    x, w = torch.randn(20, 64).to(dtype), torch.randn(96, 64).to(dtype)
    with config.override(enabled=False):
        torch.testing.assert_close(packed.product(x, packed.pack(w), 96, None), F.linear(x, w))


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("columns", [7, 96, 100])
def test_a_weight_that_was_packed_for_another_machine(columns, isa):
    x, w, bias = torch.randn(20, 64), torch.randn(columns, 64), torch.randn(columns)
    with config.override(isa=isa):
        made = packed.pack(w)
    for other in MACHINES:
        with config.override(isa=other):
            torch.testing.assert_close(packed.product(x, made, columns, bias), F.linear(x, w, bias))


@pytest.mark.parametrize("fault", [CompileError("no such flag"), OSError("no space")], ids=str)
def test_a_compiler_that_fails(fault, monkeypatch):
    """ATen serves, with one warning."""

    def refuse(*args):
        raise fault

    monkeypatch.setattr(toolchain, "compile_library", refuse)
    forget_handles()
    x, w = torch.randn(20, 64), torch.randn(96, 64)
    with pytest.warns(RuntimeWarning, match="run on ATen"):
        torch.testing.assert_close(packed.product(x, packed.pack(w), 96, None), F.linear(x, w))
    forget_handles()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Mish])
def test_a_frozen_model(activation, dtype, monkeypatch):
    """The winner of the contest serves with the activation behind, and weights that were written are packed anew."""
    skip_unless_made(dtype)
    monkeypatch.setattr(providers, "choose", lambda product: OWN_PACKED if product.frozen else providers.ATEN)
    model = nn.Sequential(nn.Linear(64, 96), activation(), nn.Linear(96, 50, bias=False)).to(dtype).eval()
    compiled = torch.compile(model, backend="fuser", options={"freeze": True})
    x = torch.randn(30, 64).to(dtype)
    with torch.no_grad(), config.override(linear_backend="measured"):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
            model[0].weight.mul_(-1)
    assert sum("packed_product" in u.op for c in compilations() for u in c.unfused) == 2
    groups = sum(len(c.groups) for c in compilations())
    assert groups == (1 if activation is nn.Mish else 0)


def test_it_competes_for_frozen_weights_of_many_rows():
    skip_unless_made(torch.float32)
    row = next(p for p in providers.PROVIDERS if p.name == OWN_PACKED)
    product = providers.Product(64, 256, 256, torch.float32, frozen=True)
    assert row.takes(product)
    for other in ({"frozen": False}, {"x_turned": True}, {"rows": 4}, {"dtype": torch.float64}):
        assert not row.takes(providers.Product(**{**product.__dict__, **other}))
    made = [d for d in DTYPES if packed.why_not(d, 64) is None]
    for dtype, epilogue in itertools.product(made, (None, *packed.EPILOGUES)):
        one = providers.Product(64, 64, 96, dtype, bias=True, epilogue=epilogue, frozen=True)
        fit = [p for p in providers.PROVIDERS if p.takes(one)]
        _, failed = race._checked(providers._contestants(one, fit), providers.ATEN)
        assert OWN_PACKED in [p.name for p in fit] and not failed  # all give one result
    operands = providers.operands_of(product)
    want = operands.x @ operands.weights[0]
    torch.testing.assert_close(row.call(product, operands)(), want, rtol=1e-4, atol=1e-4)
