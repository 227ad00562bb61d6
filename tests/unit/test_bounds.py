"""Bounds of elements by blocks: no element of any expression lies outside, whatever its inputs hold."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.passes import bounds
from fuser.passes.bounds import Bounds, Interval

ROWS, KEYS, BLOCK = 23, 37, 7
I64, F32, F64, F16, BF16 = torch.int64, torch.float32, torch.float64, torch.float16, torch.bfloat16


def places(dtype=I64, start=0, step=1):
    """The places of rows, as a column, and of keys."""
    q = torch.arange(ROWS, dtype=dtype) * step + start
    return q[:, None], torch.arange(KEYS, dtype=dtype)[None]


def leaves():
    """Inputs of which nothing is known, with all that is special."""
    gen = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e30, -3e38, 0.5])
    floats = special[torch.randint(len(special), (ROWS, KEYS), generator=gen)]
    ints = torch.randint(-9, 10, (ROWS, KEYS), generator=gen)
    return floats, ints, torch.randint(0, 2, (1, KEYS), generator=gen).bool(), torch.randn(KEYS, generator=gen)


def difference(dtype=I64):
    q, k = places(dtype)
    return q - k


BINARY = "add sub mul div floor_divide remainder minimum maximum lt le gt ge eq ne".split()
TRUTHS = "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor".split()
OPERANDS = {
    "of places": lambda f, i, b: (places()[1], places()[0] + 1),
    "of a leaf": lambda f, i, b: (difference(), i * 2 + 1),
    "of floats": lambda f, i, b: (f, difference(F32)),
    "of a number": lambda f, i, b: (difference(), 3),
    "of a fraction": lambda f, i, b: (difference(F32), 0.3),
}
TRUTH_OPERANDS = {
    "of truths": lambda f, i, b: (difference() > 0, b),
    "of known truths": lambda f, i, b: (difference() > 0, difference() < 9),
    "of numbers": lambda f, i, b: (difference(), i),
}


def called(name, kind):
    make = {**OPERANDS, **TRUTH_OPERANDS}[kind]
    return lambda f, i, b, v: getattr(torch, name)(*make(f, i, b))


EXPRESSIONS = {
    "causal": lambda f, i, b, v: difference() >= 0,
    "window": lambda f, i, b, v: (difference() >= 0) & (difference() < 5),
    "dilated": lambda f, i, b, v: difference().abs() % 4 == 0,
    "far": lambda f, i, b, v: difference().abs() > 10,
    "prefix": lambda f, i, b, v: (difference() >= 0) | (places()[1] < 6),
    "blocks": lambda f, i, b, v: places()[0] // 8 == places()[1] // 8,
    "blocks of floats": lambda f, i, b, v: (places(F32)[0] / 8).floor() == (places(F32)[1] / 8).floor(),
    "padding": lambda f, i, b, v: b & (difference() >= 0),
    "padding added": lambda f, i, b, v: torch.where(b, 0.0, -math.inf) + torch.where(difference() >= 0, 0.0, -math.inf),
    "leaf added": lambda f, i, b, v: f + torch.where(difference() >= 0, 0.0, -math.inf),
    "filled": lambda f, i, b, v: f.masked_fill(difference() < 0, -math.inf),
    "filled by NaN": lambda f, i, b, v: f.masked_fill(difference() < 0, math.nan),
    "chosen": lambda f, i, b, v: torch.where(difference() < 0, -math.inf, f),
    "tril": lambda f, i, b, v: torch.ones(ROWS, KEYS).tril(3),
    "triu of a leaf": lambda f, i, b, v: f.triu(-2),
    "tril of bool": lambda f, i, b, v: torch.ones(ROWS, KEYS, dtype=torch.bool).tril(),
    "extended": lambda f, i, b, v: (1.0 - (b & (difference() >= 0)).float()) * -1e9,
    "ALiBi": lambda f, i, b, v: difference() * 0.1,
    "ALiBi in 16 bits": lambda f, i, b, v: difference(BF16) * 0.1,
    "16 bits round": lambda f, i, b, v: (places(BF16, 250)[0] - places(BF16)[1]) > 249,
    "half": lambda f, i, b, v: difference().to(F16) * 5000.0,
    "narrowed": lambda f, i, b, v: (difference() * 10).to(torch.int8),
    "unsigned": lambda f, i, b, v: difference().to(torch.uint8) > 3,
    "a product that wraps": lambda f, i, b, v: difference().to(torch.int8) * 20,
    "cast to integers": lambda f, i, b, v: (difference() * 0.3).to(torch.int32),
    "cast to bool": lambda f, i, b, v: difference().bool(),
    "rounded quotient": lambda f, i, b, v: torch.div(difference(), 3, rounding_mode="trunc"),
    "quotient by a row": lambda f, i, b, v: places()[1] // (2 * places()[0] - 5),
    "quotient of floats": lambda f, i, b, v: 1.0 / (difference(F32) - 2.5),
    "quotient by zero": lambda f, i, b, v: places()[1] / (places()[0] - 5),
    "remainder of a negative": lambda f, i, b, v: difference() % 7,
    "remainder of floats": lambda f, i, b, v: difference(F32) % 2.5,
    "remainder by a negative": lambda f, i, b, v: difference() % -7,
    "clamped": lambda f, i, b, v: difference().clamp(-3, 4),
    "clamped leaf": lambda f, i, b, v: f.clamp(min=0.0),
    "absolute leaf": lambda f, i, b, v: f.abs().minimum(torch.tensor(2.0)),
    "leaf times a mask": lambda f, i, b, v: f * (difference() > 0),
    "leaf against infinity": lambda f, i, b, v: f <= math.inf,
    "leaf equals itself": lambda f, i, b, v: f == f,
    "padded": lambda f, i, b, v: torch.nn.functional.pad(places(F32)[1].expand(ROWS, -1)[:, 4:], (3, 1), value=-1.0),
    "padded and cut": lambda f, i, b, v: torch.nn.functional.pad(difference(F32), (0, 3))[:, :KEYS],
    "sliced": lambda f, i, b, v: torch.arange(100)[10 : 10 + 2 * KEYS : 2].expand(ROWS, -1),
    "sliced from the end": lambda f, i, b, v: torch.arange(50)[-KEYS:].expand(ROWS, -1),
    "selected": lambda f, i, b, v: torch.stack([torch.arange(KEYS)] * 2)[-1].expand(ROWS, -1),
    "turned": lambda f, i, b, v: (torch.arange(KEYS)[:, None] - torch.arange(ROWS)).t(),
    "turned twice": lambda f, i, b, v: difference().t().permute(1, 0),
    "reshaped": lambda f, i, b, v: difference().view(1, ROWS, 1, KEYS).reshape(ROWS, KEYS),
    "flattened": lambda f, i, b, v: torch.arange(ROWS * KEYS).view(ROWS, KEYS),
    "looked up": lambda f, i, b, v: v[difference().abs()],
    "looked up in places": lambda f, i, b, v: torch.arange(90)[places()[1] + 2 * places()[0]],
    "looked up in a row": lambda f, i, b, v: torch.arange(KEYS)[None].expand(4, -1)[places()[0] % 4, places()[1]],
    "looked up from the end": lambda f, i, b, v: torch.arange(90)[difference()],
    "looked up by truths": lambda f, i, b, v: difference().flatten()[(difference() < 99).flatten()].view(ROWS, KEYS),
    "counted down": lambda f, i, b, v: torch.arange(KEYS, 0, -1).expand(ROWS, -1) - places()[0],
    "counted in floats": lambda f, i, b, v: torch.arange(0, KEYS * 0.1 - 0.05, 0.1).expand(ROWS, -1) < 0.3,
    "compared with a float": lambda f, i, b, v: (difference(F32) * 0.1) <= 0.1,
    "16 bits beside integers": lambda f, i, b, v: (torch.arange(KEYS, dtype=BF16) + 250) == places()[0] + 250,
    "filled by a number of another kind": lambda f, i, b, v: torch.full((ROWS, KEYS), 2.7, dtype=I64),
    "minus a leaf": lambda f, i, b, v: torch.where(difference() > 0, 0.0, -math.inf) - f,
    "factor of an addition": lambda f, i, b, v: torch.add(difference(), places()[1], alpha=-3),
    "factor of a difference": lambda f, i, b, v: torch.rsub(difference(), 4, alpha=2),
    "negated": lambda f, i, b, v: -difference().float(),
    "not": lambda f, i, b, v: ~difference(),
    "bits": lambda f, i, b, v: difference() & 3,
    "nan in a bound": lambda f, i, b, v: torch.where(b, math.nan, -math.inf).maximum(torch.tensor(0.0)),
    "iota": lambda f, i, b, v: torch.ops.prims.iota(
        KEYS, start=-3, step=2, dtype=I64, device="cpu", requires_grad=False
    ).expand(ROWS, -1),
    "converted": lambda f, i, b, v: torch.ops.prims.convert_element_type(difference() * 0.3, torch.int32),
    "alias": lambda f, i, b, v: torch.ops.aten.alias(torch.ops.aten.detach(difference().clone())),
    "new": lambda f, i, b, v: i.new_full((ROWS, KEYS), 3) + i.new_zeros(()) + i.new_ones(()) + torch.zeros(()),
    "alike": lambda f, i, b, v: torch.full_like(f, 2.0) + torch.zeros_like(i) + torch.ones_like(i),
    "squeezed": lambda f, i, b, v: difference()[None, :, None].squeeze(2).squeeze() * difference()[None].squeeze((0,)),
    "reshaped by another": lambda f, i, b, v: torch.ops.aten._unsafe_view(difference()[None], [ROWS, KEYS]),
    "transposed": lambda f, i, b, v: difference().transpose(0, 1).contiguous().transpose(-1, -2),
    "scalar": lambda f, i, b, v: torch.where(difference() > 0, torch.scalar_tensor(2), torch.scalar_tensor(-1)),
    "logical not": lambda f, i, b, v: difference().logical_not(),
    "counted across zero": lambda f, i, b, v: torch.arange(5, 5 - KEYS * 0.1 + 0.05, -0.1).expand(ROWS, -1),
    "an integer that no float is": lambda f, i, b, v: difference() * 0 + (2**53 + 1) == 2**53,
    "quotient of rounded integers": lambda f, i, b, v: (difference() * 0 + 3 * (2**24 + 1)) / (2**24 + 1),
    "nothing padded": lambda f, i, b, v: torch.constant_pad_nd(torch.ones(ROWS, 0), (KEYS, 0), -7.0),
    "looked up by bytes": lambda f, i, b, v: torch.arange(2 * KEYS)[(places()[0] + places()[1]).to(torch.int32)],
    **{
        f"{name} {kind}": called(name, kind)
        for name, kind in itertools.product(BINARY, OPERANDS)
        if "imum" not in name or kind not in ("of a number", "of a fraction")
    },
    **{f"{name} {kind}": called(name, kind) for name, kind in itertools.product(TRUTHS, TRUTH_OPERANDS)},
}  # fmt: skip


def read(function, block=BLOCK):
    """The bounds of the blocks of an expression, and its elements."""
    given = leaves()
    module = make_fx(function, tracing_mode="fake")(*given)
    (result,) = module.graph.output_node().all_input_nodes
    q, k = (torch.arange(0, n, block, dtype=F64) for n in (ROWS, KEYS))
    index = (
        Interval(q[:, None], (q + block - 1).clamp(max=ROWS - 1)[:, None]),
        Interval(k, (k + block - 1).clamp(max=KEYS - 1)),
    )
    found = Bounds().of(result, index)
    grid = len(q), len(k)
    return found.low.expand(grid), found.high.expand(grid), function(*given).double()


def expand(t, block=BLOCK):
    return t.repeat_interleave(block, 0)[:ROWS].repeat_interleave(block, 1)[:, :KEYS]


def inside(function, block):
    """Fails if an element is outside of its bounds."""
    low, high, elements = read(function, block)
    low, high = expand(low, block), expand(high, block)
    any_number = (low == -math.inf) & (high == math.inf)
    assert bool(((low <= elements) & (elements <= high) | any_number).all())


@pytest.mark.sampled(
    8,
    also=(
        "clamped leaf", "counted in floats", "floor_divide of places", "iota", "looked up from the end",
        "rounded quotient", "selected", "triu of a leaf",
    ),
)  # fmt: skip
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_elements_are_inside(name):
    for block in (1, BLOCK):
        inside(EXPRESSIONS[name], block)


NUMBERS = (2.7, -0.5, 5, -1, 300, math.nan, math.inf, 2**53 + 1)
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, I64, F16, BF16, F32, F64)
OF_A_NUMBER = {
    "full": lambda d, n: torch.full((ROWS, KEYS), n, dtype=d),
    "new_full": lambda d, n: torch.zeros(0, dtype=d).new_full((ROWS, KEYS), n),
    "full_like": lambda d, n: torch.full_like(difference(), n, dtype=d),
    "cast": lambda d, n: torch.full((ROWS, KEYS), n).to(d),
    "masked_fill": lambda d, n: (difference() > 0).to(d).masked_fill(difference() > 3, n),
    "where": lambda d, n: torch.where(difference() > 3, (difference() > 0).to(d), n),
    "pad": lambda d, n: torch.constant_pad_nd((difference() > 0).to(d)[:, 3:], (3, 0), n),
    "clamp_min": lambda d, n: (difference() > 0).to(d).clamp(min=n),
    "clamp_max": lambda d, n: (difference() > 0).to(d).clamp(max=n),
    "clamp": lambda d, n: (difference() > 0).to(d).clamp(n, 0.5),
    "arange from": lambda d, n: torch.arange(n, n + KEYS + 2, dtype=d)[:KEYS].expand(ROWS, -1),
    "arange by": lambda d, n: torch.arange(2, 2 + 5 * n * (KEYS + 2), 5 * n, dtype=d)[:KEYS].expand(ROWS, -1),
    **{
        name: lambda d, n, name=name: getattr(torch, name)((difference() > 0).to(d), n)
        for name in "add sub mul div floor_divide remainder lt le eq bitwise_and bitwise_xor".split()
    },
}
KNOWN = (
    "causal", "window", "far", "prefix", "padding", "tril", "tril of bool", "extended", "filled", "chosen", "clamped",
    "padding added", "sliced", "looked up in a row", "turned", "reshaped", "padded and cut",
)  # fmt: skip


@pytest.mark.sampled(24)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_numbers_of_other_dtypes(name, dtype):
    """A number is converted to the dtype of the elements as eager does it."""
    for number in NUMBERS:
        try:
            OF_A_NUMBER[name](dtype, number)
        except (RuntimeError, ValueError, OverflowError):
            continue  # eager refuses it
        inside(lambda *_, number=number: OF_A_NUMBER[name](dtype, number), 1)


@pytest.mark.parametrize("name", KNOWN)
def test_something_is_known(name):
    low, high, _ = read(EXPRESSIONS[name])
    truths = EXPRESSIONS[name](*leaves()).dtype is torch.bool
    unknown = (low == 0) & (high == 1) if truths else (low == -math.inf) & (high == math.inf)
    assert not bool(unknown.all())


def test_single_elements_of_known_expressions_are_exact():
    """Where every block is one element and all is known, bounds meet."""
    for name in ("causal", "window", "prefix", "blocks", "dilated", "tril", "clamped", "reshaped", "rounded quotient"):
        low, high, elements = read(EXPRESSIONS[name], 1)
        assert torch.equal(low, elements) and torch.equal(high, elements), name


def test_every_rule_is_tried():
    """The operators that have rules are those that the expressions call."""
    tried = set()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            tried.add(func.name().split(".")[0])
            return func(*args, **(kwargs or {}))

    given = leaves()
    with Noted():
        for function in EXPRESSIONS.values():
            function(*given)
    assert {t.name().split(".")[0] for t in bounds._RULES} <= tried


def test_a_deep_graph_is_unknown_rather_than_an_error():
    def deep(f, i, b, v):
        x = difference()
        for n in range(200):
            x = x + n
        return x

    low, high, elements = read(deep)
    assert bool((low == -math.inf).all()) and bool((high == math.inf).all())


def test_a_graph_that_doubles_is_read_once():
    def doubled(f, i, b, v):
        x = difference() >= 0
        for _ in range(40):
            x = x & x
        return x

    low, high, elements = read(doubled)
    assert bool((low <= high).all()) and not bool((high == 1).all())
