"""What is compared, searched or made whole has the bits that eager's has, wherever a kernel computes it again.

Each decision is tried on values that a chain of operators makes: in one kernel, behind a product of a library, in a
backward that computes the chain again, in a checkpoint's region. Values are few, so that ties are many.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import debug
from fuser.frontends.dynamo import compilations, forget_compilations
from fuser.lowering.decisive import deciding
from fuser.lowering.registry import LOWERINGS
from tests.backend.planned import compiled

ALL = bool(os.environ.get("FUSER_TEST_ALL"))
LOW = (torch.bfloat16, torch.float16)
CHAINS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda x: x * 1.7,
    "shifted": lambda x: (x * 1.7 + 0.3) * 1.1,
    "activated": lambda x: F.relu(x - 0.1) * 1.3 - x * 0.7,
}
# What is decided: results that are no floats, or jump. Each equals eager's, bit by bit.
DECISIONS: dict[str, Callable[[Any], Any]] = {
    "is largest": lambda y: y == y.amax(1, keepdim=True),
    "of all": lambda y: (y == y.max()) | (y == y.min()),
    "equal copies": lambda y: y * 2 == (y + y.amin(1, keepdim=True)) - y.amin(1, keepdim=True) + y,
    "threshold": lambda y: torch.where(y > 0.3, y, -7.0),
    "above the mean": lambda y: y > y.mean(1, keepdim=True),
    "places": lambda y: (y.argmax(1), y.argmin(1)),
    "with places": lambda y: (y.max(1)[0], y.max(1)[1], y.min(0)[0], y.min(0)[1]),
    "running": lambda y: (y.cummax(1)[0], y.cummax(1)[1]),
    "floor": lambda y: (y * 3).floor(),
    "round": lambda y: (y * 16).round() / 16,
    "integers": lambda y: (y * 10).to(torch.int32),
    "truth": lambda y: (y - y.round()).to(torch.bool),
    "remainder": lambda y: (torch.remainder(y, 0.3), torch.fmod(y, 0.3)),
    "quotient": lambda y: torch.div(y, 0.1, rounding_mode="floor"),
    "sign": lambda y: (y - 0.3).sign(),
    "search": lambda y: torch.bucketize(y, torch.linspace(-4, 4, 33).to(y.dtype)),
    "finite": lambda y: ((y * 3e4).isfinite(), torch.nan_to_num(y * 3e4, posinf=1.0)),
    "looked up": lambda y: torch.arange(64.0)[(y * 4 + 30).to(torch.int64).clamp(0, 63)],
}  # fmt: skip
# Gradients that depend on what the backward compares.
LOSSES: dict[str, Callable[[Any], Any]] = {
    "amax": lambda y: y / y.abs().amax(1, keepdim=True),
    "extremes": lambda y: y.max() + y.min() + y * 0.1,
    "minimum": lambda y: torch.minimum(y, y.mean(1, keepdim=True)),
    "maximum": lambda y: torch.maximum(y, y.flip(1)),
    "largest": lambda y: y.max(1)[0] * y.min(1)[0],
    "relu": lambda y: F.relu(y - 0.3) * y,
    "clamp": lambda y: y.clamp(-0.3, 0.9) * y,
    "hard": lambda y: F.hardswish(y) + F.hardsigmoid(y) + F.hardtanh(y, -0.5, 0.5) + F.hardshrink(y, 0.3),
    "leaky": lambda y: F.leaky_relu(y, 0.2) + F.elu(y) + F.softshrink(y, 0.3),
    "where": lambda y: torch.where(y > y.mean(), y * 3, y.exp()),
    "abs": lambda y: (y - y.round()).abs(),
    "quantised": lambda y: y + ((y / y.abs().max() * 7).round() * y.abs().max() / 7 - y).detach() * y,
    "masked": lambda y: y.masked_fill(y < y.median(), 0.0).softmax(1),
    "running": lambda y: y.cummax(1)[0],
    "pooled": lambda y: F.max_pool1d(y[None], 3)[0],
    "norm": lambda y: y / y.norm(float("inf"), 1, keepdim=True),
}  # fmt: skip


def values(dtype: torch.dtype, n: int, rows: int = 24, columns: int = 33) -> list[torch.Tensor]:
    """`n` tensors of numbers with few digits, which meet each other and the thresholds."""
    g = torch.Generator().manual_seed(7)
    return [(torch.randn(rows, columns, generator=g) * 8).round().div(8).to(dtype) for _ in range(n)]


def leaves(value: Any) -> list[torch.Tensor]:
    return [t for v in value for t in leaves(v)] if isinstance(value, (tuple, list)) else [value]


@pytest.mark.sampled(4, also=("dtype0-activated",))
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", LOW)
def test_decisions_are_eagers_to_the_bit(dtype, chain):
    """Over one kernel; and over several, as another consumer needs the chain in memory."""
    decisions = [*DECISIONS.values()]
    turn = (LOW.index(dtype) + [*CHAINS].index(chain)) % 2  # of the several kernels, half of the decisions in turns
    decisions += decisions if ALL else decisions[turn::2]
    inputs = values(dtype, len(decisions))

    def every(*inputs):
        out = []
        for n, decide in enumerate(decisions):
            y = CHAINS[chain](inputs[n])
            out += [*leaves(decide(y)), *([y.t().contiguous()] if n >= len(DECISIONS) else [])]
        return out

    names = ", ".join(f"x{n}" for n in range(len(inputs)))
    program = eval(f"lambda {names}: every({names})", {"every": every})
    key = fuser.register_fusion(torch.fx.symbolic_trace(program))
    got, want = fuser.run_fusion(key, inputs), every(*inputs)
    assert not debug.report([key]).fallback_calls
    copies = {id(t) for t in want if t.shape == (33, 24)}
    for n, (a, b) in enumerate(zip(got, want)):
        assert id(b) in copies or torch.equal(a, b), (n, a[a != b][:5], b[a != b][:5])


@pytest.mark.parametrize("dtype", LOW)
def test_decisions_behind_a_product(dtype):
    """The chain is in one group, the product of a library between, the decision in another."""
    names = [(tuple(CHAINS)[(n + LOW.index(dtype)) % 3], decision) for n, decision in enumerate(DECISIONS)]
    inputs = values(dtype, len(names), 8, 16)
    w = torch.eye(16, dtype=dtype)

    def program(w, *inputs):
        out = []
        for (chain, decision), x in zip(names, inputs):
            y = CHAINS[chain](x)
            out.append(leaves(DECISIONS[decision](y + (y @ w) * 2)))
        return out

    got = torch.compile(program, backend="fuser", fullgraph=True)(w, *inputs)
    for name, a, b in zip(names, got, program(w, *inputs)):
        assert all(map(torch.equal, a, b)), (name, a, b)


def in_region(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The loss in a region whose backward runs its forward again."""
    return lambda x: checkpoint(loss, x, use_reentrant=False)


def program_of(names: Any, region: bool) -> Callable[..., Any]:
    """The results of a loss on a chain for each input, for names (chain, loss)."""
    whole = [lambda x, chain=chain, loss=loss: LOSSES[loss](CHAINS[chain](x)) for chain, loss in names]
    whole = [in_region(f) if region else f for f in whole]
    return lambda *inputs: torch.cat([(f(x).float() * 1.3).flatten() for f, x in zip(whole, inputs)])


def gradients(program: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(program(*inputs).square().sum(), inputs)


def judge(names: Any, got: Any, inputs: list[torch.Tensor], program: Callable[..., Any]) -> None:
    """Finite, and no further from float64 than twice eager's distance and two units in the last place."""
    wide = gradients(program, [x.double() for x in inputs])
    for name, x, a, b, exact in zip(names, inputs, got, gradients(program, inputs), wide):
        assert a.isfinite().all() or not b.isfinite().all(), name
        mine, its = ((t.double() - exact).abs().max() for t in (a, b))
        assert mine <= 2 * its + 2 * torch.finfo(x.dtype).eps * exact.abs().max(), (name, mine, its)


PLACES = itertools.product(LOW, ("cpu", "cuda")) if ALL else zip(LOW, ("cpu", "cuda"))


@pytest.mark.parametrize("dtype, device", [*PLACES])
def test_gradients_of_decisions(dtype, device):
    """As scheduled for both devices, with the backward as the partitioner cuts it."""
    turn = LOW.index(dtype) + (device == "cuda")
    names = [(tuple(CHAINS)[(n + turn) % 3], loss) for n, loss in enumerate(LOSSES)]
    inputs, program = values(dtype, len(names), 8, 16), program_of(names, False)
    _, got = compiled(program, tuple(x.clone().requires_grad_() for x in inputs), device)
    judge(names, got, inputs, program)


@pytest.mark.parametrize(("dtype", "region"), [(torch.bfloat16, True), (torch.float16, False)])
def test_gradients_of_decisions_by_kernels(dtype, region):
    names = [("shifted", loss) for loss in ("amax", "extremes", "largest")]
    inputs, program = values(dtype, len(names), 8, 16), program_of(names, region)
    forget_compilations()
    torch._dynamo.reset()
    judge(names, gradients(torch.compile(program, backend="fuser", fullgraph=True), inputs), inputs, program)
    assert any(c.groups and c.stage == "backward" for c in compilations())


# -- which operators decide --------------------------------------------------------------------------------------------
GRID = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 20.0)
STEP = 1e-12
# Operators that would read outside of memory with such arguments, or need others than tensors and numbers.
STRUCTURED = ("as_strided", "batch_norm", "group_norm", "dropout", "empty")
# At a pole, or where a ratio is undefined, any two neighbours are far apart: rounding changes nothing for the better.
POLES = (
    "polygamma", "special_zeta", "cosine_similarity", "binary_cross_entropy_backward", "_fused_rms_norm",
    "_log_softmax_backward_data", "log_sigmoid_backward",
)  # fmt: skip
_MADE = {"Tensor": GRID, "number": 0.5, "float": 0.5, "int": 1, "SymInt": 1, "bool": False, "str": "none"}


def arguments_of(schema: Any) -> list[Any] | None:
    """Required arguments: `GRID` for each tensor, numbers; None for an operator that needs others."""
    required = [a for a in schema.arguments if not a.kwarg_only and not a.has_default_value()]
    kinds = [str(a.type) for a in required]
    known = [None if k.startswith("Optional") else [0] if k == "List[int]" else _MADE.get(k) for k in kinds]
    if any(v is None and not k.startswith("Optional") for v, k in zip(known, kinds)) or schema.is_mutable:
        return None
    return known if 0 < known.count(GRID) < 4 else None


def results(overload: Any, args: list[Any]) -> list[torch.Tensor] | None:
    try:
        return [t for t in leaves(overload(*args)) if isinstance(t, torch.Tensor)]
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


def jumps_of(overload: Any) -> set[int]:
    """The tensor arguments of which a tiny step from a round number makes a float result jump, or an integer change."""
    args = arguments_of(overload._schema)
    if args is None:
        return set()
    at = [i for i, a in enumerate(args) if a is GRID]
    grid = GRID if len(at) < 3 else GRID[1:11:2]
    columns = torch.tensor([*itertools.product(grid, repeat=len(at))], dtype=torch.float64).unbind(1)
    found: set[int] = set()
    for rank in (1, 3):
        for i, column in zip(at, columns):
            args[i] = column.reshape(*[1] * (rank - 1), -1) if rank < 3 else column.reshape(1, len(grid), -1)
        base = results(overload, args)
        for i, sign in itertools.product(at if base else (), (1, -1)):
            near = args[i] * (1 + sign * STEP) + sign * STEP
            moved = results(overload, [*args[:i], near, *args[i + 1 :]])
            found |= {i for b, m in zip(base or (), moved or ()) if b.shape == m.shape and _are_far(b, m)}
    return found


def _are_far(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return not a.is_complex() and not torch.equal(a, b)
    finite = a.isfinite() & b.isfinite()
    return bool(((a - b).abs() > 1e-3 * (1 + a.abs()))[finite].any())


RANGES: dict[str, Callable[[int], Any]] = {
    "linspace": lambda n: torch.linspace(-1, 1, n),
    "linspace in float64": lambda n: torch.linspace(-1, 1, n, dtype=torch.float64),
    "arange": lambda n: torch.arange(-1, 1, 2 / n),
    "products": lambda n: torch.arange(n) * 0.1 - n * 0.05,
    "logspace": lambda n: torch.logspace(-1, 1, n) - 1,
    "hann": lambda n: torch.hann_window(n) - 0.5,
}


@pytest.mark.parametrize("name", RANGES)
def test_decisions_on_ranges(name):
    """A range crosses 0 or comes next to it: seed 23089135."""
    for n in (2, 13, 25, 75, 101, 300, 1000):
        fn = lambda x: (RANGES[name](n).sign() * x, RANGES[name](n) > 0)  # noqa: B023, E731
        x = torch.ones(n)
        for got, want in zip(torch.compile(fn, backend="fuser", dynamic=False)(x), fn(x)):
            assert torch.equal(got, want), n


@pytest.mark.filterwarnings("ignore")
def test_what_jumps_is_declared():
    """Every lowered operator that a last bit of a float can decide says so (`decisive`, `OpRow.jumps`)."""
    missing = []
    for name in sorted(n for n in LOWERINGS if n.startswith("aten.")):
        short = name.split(".")[1]
        if short in POLES or any(part in short for part in STRUCTURED):
            continue
        packet = getattr(torch.ops.aten, short)
        for overload in (getattr(packet, n) for n in packet.overloads()):
            for position in jumps_of(overload):
                marks = [object() if a.type.kind() == "TensorType" else 0.5 for a in overload._schema.arguments]
                given = [torch.int32 if "dtype" in a.name else m for a, m in zip(overload._schema.arguments, marks)]
                if not any(a is given[position] for a in deciding(name, given, {})):
                    missing.append(f"{name}.{overload._overloadname}: argument {position}")
    assert not missing, missing
