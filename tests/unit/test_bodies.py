"""Operators on graphs: `cond`, `while_loop`, `scan`, `map`, nested regions. Their graphs are compiled, and right."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import cond, scan, while_loop
from torch._higher_order_ops.map import map as map_rows
from torch.utils import _pytree as pytree

import fuser
from fuser.frontends.records import CompiledGraph, compilations, forget_compilations
from tests.versions import IS_OLD

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _clean(clean: None) -> Iterator[None]:
    torch._dynamo.reset()
    forget_compilations()
    yield
    torch._dynamo.reset()


# -- bodies ------------------------------------------------------------------------------------------------------------
def _pointwise(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(c * 0.5 + x) * torch.sigmoid(x) + 0.1


def _reducing(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(c + x, -1) * (x - x.mean(-1, keepdim=True)) + c.amax(0) * 0.1


def _product(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh((c @ x.t()) @ x * 0.1 + c).relu() + x


def _norm(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(c + x, (x.shape[-1],)) * 0.5


def _turned(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (torch.cat([c[:, 1:], x[:, :1]], 1) + x.flip(0)).clone()


def _unchanged(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return c.clone()


def _branching(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cond(c.sum() > 0, lambda c, x: (c - x).sin() * 0.5, lambda c, x: (c + x).cos() * 0.7, (c, x))


BODIES: dict[str, Function] = {
    f.__name__.strip("_"): f for f in (_pointwise, _reducing, _product, _norm, _turned, _unchanged, _branching)
}


# -- what operators mean, in Python ------------------------------------------------------------------------------------
def _stacked(rows: list[Any]) -> Any:
    return pytree.tree_map(lambda *row: torch.stack(row), rows[0], *rows[1:])


def _plain_cond(truth: torch.Tensor, yes: Function, no: Function, given: tuple[torch.Tensor, ...]) -> Any:
    return (yes if truth else no)(*given)


def _plain_while(goes_on: Function, body: Function, carried: Any) -> Any:
    while goes_on(*carried):
        carried = body(*carried)
    return carried


def _plain_scan(step: Function, carried: Any, xs: torch.Tensor, reverse: bool = False) -> Any:
    rows = []
    for x in reversed(xs.unbind()) if reverse else xs.unbind():
        carried, row = step(carried, x)
        rows.append(row)
    return carried, _stacked(rows[::-1] if reverse else rows)


def _plain_map(body: Function, xs: torch.Tensor, *given: torch.Tensor) -> Any:
    return _stacked([body(x, *given) for x in xs.unbind()])


PLAIN = {"cond": _plain_cond, "while_loop": _plain_while, "scan": _plain_scan, "map_rows": _plain_map}


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """The operators of this module as Python's branches and loops: torch itself compiles each at each call in eager."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in PLAIN.items():
            patch.setitem(globals(), name, function)
        yield


# -- operators ---------------------------------------------------------------------------------------------------------
def _of_cond(body: Function) -> Function:
    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        x = xs[0] * 2
        return cond(c.sum() > x.sum(), lambda c, x: body(c, x) + 1, lambda c, x: body(x, c) * 2, (c, x)) * 3

    return program


def _of_while(body: Function) -> Function:
    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        x = xs[0].sin()

        def step(i: torch.Tensor, c: torch.Tensor) -> Any:
            return i + 1, body(c, x)

        return while_loop(lambda i, c: i < 3, step, (torch.zeros((), dtype=torch.int64), c))[1] + 1

    return program


def _of_scan(body: Function) -> Function:
    def step(c: torch.Tensor, x: torch.Tensor) -> Any:
        made = body(c, x)
        return made, made * 2 - x

    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        return scan(step, c * 1.0, xs)

    return program


def _of_reversed_scan(body: Function) -> Function:
    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        weight = c[:1] + 1  # from outside the body

        def step(carry: Any, x: torch.Tensor) -> Any:
            made = body(carry[0], x) * weight
            return [made, carry[1] + x], {"a": made.clone(), "b": made.sum(-1)}

        return scan(step, [c * 1.0, c * 0.0], xs, reverse=True)

    return program


def _of_map(body: Function) -> Function:
    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        return map_rows(lambda x, c: body(c, x) + 1, xs, c)

    return program


def _of_region(body: Function) -> Function:
    region = torch.compiler.nested_compile_region(body)

    def program(c: torch.Tensor, xs: torch.Tensor) -> Any:
        for i in range(2):
            c = region(c, xs[i]) + 1
        return c

    return program


OPERATORS: dict[str, Function] = {
    "cond": _of_cond, "while": _of_while, "scan": _of_scan, "reversed": _of_reversed_scan, "map": _of_map,
    "region": _of_region,
}  # fmt: skip


def _inputs(dtype: torch.dtype, rows: int = 4, steps: int = 3, width: int = 5) -> list[torch.Tensor]:
    torch.manual_seed(rows * width)
    return [torch.randn(rows, width).to(dtype), torch.randn(steps, rows, width).to(dtype)]


def _run(function: Function, inputs: list[torch.Tensor], gradients: bool) -> list[torch.Tensor]:
    given = [t.clone().requires_grad_(gradients) for t in inputs]
    made = [t for t in pytree.tree_leaves(function(*given)) if isinstance(t, torch.Tensor)]
    if gradients:
        sum((t.float() * t.float()).sum() for t in made if t.requires_grad).backward()  # type: ignore[union-attr]
    return [t.detach() for t in made] + [torch.zeros(()) if t.grad is None else t.grad for t in given]


def _same(found: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype) -> None:
    wide = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 6e-2, torch.float16: 1e-2}.get(dtype, 0.0)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=wide, atol=wide, equal_nan=True)


def _graphs() -> list[CompiledGraph]:
    return [r for r in compilations() if r.body]


def _check(program: Function, inputs: list[torch.Tensor], gradients: bool, dynamic: bool) -> bool:
    """Compare a program with eager, with `dynamic` at two sizes; whether no graph of it runs in eager."""
    dtype = inputs[0].dtype
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fuser", dynamic=dynamic)
    sizes = [inputs, _inputs(dtype, 7, 4, 6)] if dynamic else [inputs]
    for given in sizes:
        with _in_python():
            wanted = _run(program, given, gradients)
        for _ in range(2):
            _same(_run(compiled, given, gradients), wanted, dtype)
    return all(r.route != "eager" for r in compilations())


@pytest.mark.sampled(12, also=("cond-unchanged", "scan-norm"))
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_inference(operator: str, body: str) -> None:
    dtype = torch.float32 if len(body) % 2 else torch.bfloat16
    with torch.no_grad():
        assert _check(OPERATORS[operator](BODIES[body]), _inputs(dtype), False, False)
    assert _graphs() and any(r.groups for r in _graphs())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("operator", "body"), zip(OPERATORS, itertools.cycle(["branching", "reducing"])))
def test_gradients(operator: str, body: str) -> None:
    assert _check(OPERATORS[operator](BODIES[body]), _inputs(torch.float32), True, False)
    assert {r.stage for r in _graphs() if r.groups} == {"forward", "backward"}


@pytest.mark.sampled(7, also=("map-inference", "while-gradients"))
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_symbolic_sizes(operator: str, gradients: bool) -> None:
    assert _check(OPERATORS[operator](_product), _inputs(torch.float64), gradients, True)


def _rows_of_many_kinds(c: torch.Tensor, xs: torch.Tensor) -> Any:
    """Rows of sizes that no input of the step has, rows that are inputs, turned ones, and of other dtypes."""

    def step(c: torch.Tensor, x: torch.Tensor) -> Any:
        made = (c * x).sin()
        return made, (torch.cat([x, made]), x.clone(), (made * 2).t(), made > 0, made.clone(), made.sum())

    return scan(step, c * 1.0, xs)


@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
def test_rows(dynamic: bool) -> None:
    with torch.no_grad():
        assert _check(_rows_of_many_kinds, _inputs(torch.float32), False, dynamic)


# -- writes, random numbers, graphs that eager runs --------------------------------------------------------------------
def _writes_in_branch(c: torch.Tensor, xs: torch.Tensor) -> Any:
    def true(c: torch.Tensor, x: torch.Tensor) -> Any:
        c.mul_(2)
        return (c + x).sin()

    return cond(xs.sum() > -100, true, lambda c, x: (c - x).cos(), (c, xs[0])) + c


def _writes_in_loop(c: torch.Tensor, xs: torch.Tensor) -> Any:
    count = c * 0

    def step(i: torch.Tensor, c: torch.Tensor) -> Any:
        count.add_(1)
        return i + 1, torch.sin(c * 2) + count

    return while_loop(lambda i, c: i < 3, step, (torch.zeros((), dtype=torch.int64), c)), count


def _writes_in_region(c: torch.Tensor, xs: torch.Tensor) -> Any:
    @torch.compiler.nested_compile_region
    def region(c: torch.Tensor, x: torch.Tensor) -> Any:
        c.add_(1)
        return (c * x).sin()

    return region(c, xs[0]) + region(c, xs[1]) + c


@pytest.mark.sampled(3, also=("_writes_in_loop",))
@pytest.mark.parametrize("program", [_writes_in_branch, _writes_in_loop, _writes_in_region])
def test_writes(program: Function) -> None:
    if IS_OLD and program is not _writes_in_region:
        pytest.skip("torch captures no operator that writes an argument")
    with torch.no_grad():
        ours, eager = _inputs(torch.float32), _inputs(torch.float32)
        found = pytree.tree_leaves(torch.compile(program, backend="fuser")(*ours))
        wanted = pytree.tree_leaves(program(*eager))
    _same([*found, *ours], [*wanted, *eager], torch.float32)
    assert all(r.route != "eager" for r in compilations())


@pytest.mark.parametrize("random", ["philox", "eager"])
def test_draws_anew_at_each_step(random: str) -> None:
    def program(x: torch.Tensor) -> Any:
        return scan(lambda c, r: (c + 1, torch.nn.functional.dropout(r, 0.5)), x[0] * 0, x)[1]

    x = torch.ones(4, 100, requires_grad=True)
    made = torch.compile(program, backend="fuser", options={"random": random})(x)
    made.sum().backward()
    assert len({tuple(row.tolist()) for row in made}) == 4
    torch.testing.assert_close(x.grad, made.detach())


def test_regions_in_eager() -> None:
    """What runs in place of a compiled graph has the gradients of its regions, and theirs."""
    program, (c, xs) = _of_region(_reducing), _inputs(torch.float64)

    def twice(function: Function) -> list[torch.Tensor]:
        given = c.clone().requires_grad_()
        (once,) = torch.autograd.grad(function(given, xs).square().sum(), given, create_graph=True)
        return [once.detach(), *torch.autograd.grad(once.square().sum(), given)]

    wanted = twice(program)
    _same(twice(torch.compile(program, backend="fuser")), wanted, torch.float64)
    torch._dynamo.reset()
    _same(twice(torch.compile(program, backend="fuser", options={"enabled": False})), wanted, torch.float64)


def test_attention_in_a_region() -> None:
    def attend(c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(c @ x.transpose(-1, -2) / 8, -1) @ x

    torch.manual_seed(0)
    inputs = [torch.randn(1, 4, 256, 64), torch.randn(2, 1, 4, 256, 64)]
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert _check(_of_region(attend), inputs, gradients, False)
        assert any("flash_attention" in u.op for r in _graphs() for u in r.unfused)


def test_under_a_mode_the_operator_runs() -> None:
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    inputs = _inputs(torch.float32)
    compiled = torch.compile(_of_map(_pointwise), backend="fuser")
    with torch.no_grad():
        wanted = compiled(*inputs)
        with Seen():
            torch.testing.assert_close(compiled(*inputs), wanted)
    assert "map_impl" in names


# -- what is said of them ----------------------------------------------------------------------------------------------
def test_explained() -> None:
    program = _of_scan(_pointwise)
    with torch.no_grad():
        told = fuser.explain(program, *_inputs(torch.float32))
        fuser.testing.assert_fused(program, *_inputs(torch.float32))
    body, outer = told.graphs
    assert (body.body, outer.body) == ("scan_combine_graph_0 of scan", "") and body.groups[0].hits > 0
    assert [o.code for o in outer.not_fused] == ["bodies"] and not body.not_fused
    assert "inference, scan_combine_graph_0 of scan" in str(told) and str(told).startswith("1 graph,")
    assert "scan_combine_graph_0 of scan" in told.to_json()
