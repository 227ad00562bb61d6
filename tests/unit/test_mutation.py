"""What counts as a write: no spelling of an operator is taken for one by its name, and none of a write is missed."""

from __future__ import annotations

import inspect
import operator
import os

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fuser
from fuser.canonical.aliases import packet_named
from fuser.canonical.mutation import Effect, effect
from fuser.frontends.dynamo import fuser_backend

HOMES = (torch, torch._C._nn, torch._C._special, torch._C._linalg, torch._C._fft)
BUILTIN = (type(torch.add), type(len))
# They answer with their argument, and write its flags or nothing at all: no value and no version tells.
SILENT = frozenset(
    "detach_ requires_grad_ resize_ resize_as_ as_strided_ set_ rrelu_ dropout_ rrelu_with_noise alpha_dropout "
    "feature_alpha_dropout".split()
)


def _has_operator(name):
    public = not name.startswith("_") or name.startswith(("__", "_foreach"))  # others may crash on our arguments
    return public and isinstance(getattr(torch.ops.aten, name, None), torch._ops.OpOverloadPacket)


def _functions():
    for home in HOMES:
        for name in dir(home):
            function = getattr(home, name)
            if isinstance(function, BUILTIN) and _has_operator(name):
                yield "call_function", function
    functions = [f for n, f in vars(F).items() if inspect.isfunction(f) and not n.startswith("_")]
    yield from (("call_function", f) for f in functions)
    yield from (("call_function", getattr(operator, n)) for n in operator.__all__ if n != "call")


def _methods():
    for name in dir(torch.Tensor):
        is_operator = name.startswith("__") and hasattr(operator, name)
        is_operator |= name[2:3] == "r" and hasattr(operator, f"__{name[3:]}")
        if callable(getattr(torch.Tensor, name)) and (_has_operator(name) or is_operator):
            yield "call_method", name
    yield from (("call_function", getattr(torch.Tensor, n)) for n in ("add_", "mul", "__iadd__", "__and__", "norm"))


def _arguments():
    x, n = torch.rand(3, 3) + 0.25, torch.randint(1, 5, (3, 3))
    stats = (torch.rand(3), torch.rand(3))
    for first in (x, n):
        yield from ((first,), (first, first + 1), (first, 2), (2, first), (first, first + 1, first + 2), (first, 0, 1))
    yield from ((n, x), (x, 0, n % 3, x), (x, n > 2, 1.5), (x, *stats, None, None, True))
    yield (x, None, None, *stats, True, 0.1, 1e-5, False)
    yield from (([x, x + 1],), ([x, x + 1], [x, x]), ([x, x + 1], 2.0), (n, slice(None), 3), (x.T, 0, x))  # fmt: skip


def _keywords(op, target):
    """Keywords that ask for writes, where a call may take them."""
    yield {}
    if isinstance(target, BUILTIN) and not hasattr(operator, target.__name__):
        yield {"out": torch.empty(0)}
    if inspect.isfunction(target):
        asked = ({"inplace": True}, {"inplace": False}, {"out": torch.empty(0)}, {"max_norm": 0.1})
        yield from (kwargs for kwargs in asked if kwargs.keys() <= inspect.signature(target).parameters.keys())


def _tensors(values):
    return [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(t, torch.Tensor)]


def _ran(op, target, args, kwargs):
    """The result of a call, and whether a tensor among its arguments was written; None if eager refuses."""
    fn = getattr(args[0], target, None) if op == "call_method" else target
    tensors = _tensors((*args, *kwargs.values()))
    before = [(t.clone(), t._version) for t in tensors]
    try:
        result = fn(*(args[1:] if op == "call_method" else args), **kwargs)
    except Exception:
        return None
    if result is NotImplemented:
        return None
    same = (b.shape == t.shape and torch.equal(b, t) and v == t._version for t, (b, v) in zip(tensors, before))
    return result, not all(same)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls", [_functions, _methods], ids=["functions", "methods"])
def test_every_callable_of_torch_and_of_python(calls):
    wrong, seen = [], 0
    for op, target in calls():
        for kwargs in _keywords(op, target):
            for args in _arguments():
                if op == "call_method" and not isinstance(args[0], torch.Tensor):
                    continue
                ran = _ran(op, target, args, kwargs)
                if ran is None:
                    continue
                seen += 1
                result, wrote = ran
                name = target if op == "call_method" else target.__name__
                found = effect(op, target, args, kwargs)
                first = isinstance(args[0], torch.Tensor)
                said = found is not Effect.NONE and (first or found is not Effect.RETURNS_WRITTEN)
                if (wrote, said) not in ((True, True), (False, False)) and name not in SILENT:
                    wrong.append((name, *kwargs, found.name, f"wrote: {wrote}"))
                if found is Effect.RETURNS_WRITTEN and first and result is not args[0]:
                    wrong.append((name, "does not return its argument"))
    assert not wrong and seen > 1000


def test_what_nobody_knows_may_write():
    def and_(a, b):
        return a.add_(b)

    for op, target in (("call_function", and_), ("call_method", "no_method_"), ("call_module", "layer")):
        assert effect(op, target, (), {}) is Effect.UNKNOWN
    assert effect("call_function", F.embedding, (1, 2, None, 1.0), {}) is Effect.WRITES
    assert effect("call_function", F.batch_norm, (1, 2, 3), {"training": True}) is Effect.WRITES
    assert effect("call_function", F.batch_norm, (1, 2, 3), {}) is Effect.NONE


def _spelled(a, b):
    """Every spelling of every operator that eager takes for these, each followed by another use of its argument."""
    two = 2.5 if a.is_floating_point() else 2
    found = []
    for name in (n for n in operator.__all__ if n not in ("call", "inv")):  # which Dynamo does not trace
        function = getattr(operator, name)
        for args in ((a,), (a, b), (a, two), (two, a)):
            found.append((function, args))
        for names in (name, f"{name.strip('_')}_", f"r{name.strip('_')}", f"bitwise_{name.strip('_')}"):
            for args in ((a,), (a, b)):
                found += [(getattr(torch, names, None), args), (getattr(torch.Tensor, f"__{names}__", None), args)]
                found.append((getattr(torch.Tensor, names, None), args))
    return found


def _takes(function, args):
    """Whether eager takes a call, and answers with one tensor."""
    try:
        return isinstance(function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in args)), torch.Tensor)
    except Exception:
        return False


def _roles(a, b):
    """The spellings that eager takes for these: functions, and arguments that name the inputs."""
    chosen = [(f, args) for f, args in _spelled(a, b) if f is not None and _takes(f, args)]
    return [(f, tuple("ab"[x is b] if isinstance(x, torch.Tensor) else x for x in args)) for f, args in chosen]


def _spelling(role):
    """A role without its number."""
    return role[0], tuple(x if isinstance(x, str) else "number" for x in role[1])


def _program(roles):

    def program(a, b):
        results = []
        for function, args in roles:
            c = a * 1
            values = {"a": c, "b": b}
            results += [function(*(values.get(x, x) for x in args)), c + 1]
        return tuple(results)

    return program


def _graph_of(roles):
    """The same program as a graph, methods as calls of methods."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    results = []
    for function, args in roles:
        c = graph.call_function(operator.mul, (a, 1))
        given = tuple({"a": c, "b": b}.get(x, x) for x in args)
        name = getattr(function, "__name__", "")
        if getattr(torch.Tensor, name, None) is function:
            results.append(graph.call_method(name, given))
        else:
            results.append(graph.call_function(function, given))
        results.append(graph.call_function(operator.add, (c, 1)))
    graph.output(tuple(results))
    return graph


def _compared(program, function, *args):
    want = program(*args)
    got = function(*args)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == w.dtype, i
        torch.testing.assert_close(g, w, equal_nan=True, msg=lambda m, i=i: f"result {i}: {m}")


ALL = bool(os.environ.get("FUSER_TEST_ALL"))
INTEGERS = (torch.arange(1, 10).reshape(3, 3), torch.arange(2, 11).reshape(3, 3) % 4 + 1)
FLOATS = (torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("args", [INTEGERS, FLOATS], ids=["integers", "floats"])
def test_every_spelling_leaves_its_argument_as_eager_does(args):
    """In a run integers and floats take turns with the spellings that both have."""
    roles = _roles(*args)
    assert len(roles) > 100
    if not ALL:
        turns = {_spelling(role): n for n, role in enumerate(_roles(*FLOATS))}
        roles = [role for role in roles if turns.get(_spelling(role), 0) % 2 == (args is FLOATS)]
    program = _program(roles)
    _compared(program, torch.compile(program, backend=fuser_backend, fullgraph=True), *args)
    _compared(program, fuser.fusion_handle(fuser.register_fusion(_graph_of(roles))), *args)


def test_two_readers_of_one_input():
    for f in (lambda a: (a & 1, a + 1), lambda a: (a | 1, a + 1), lambda a: (operator.and_(a, a), a - 1)):
        _compared(f, torch.compile(f, backend=fuser_backend), torch.arange(6))


def test_matrix_product_in_place_makes_a_new_tensor():
    def f(a, b):
        c = a
        c @= b
        return c, a + 1

    _compared(f, torch.compile(f, backend=fuser_backend), *FLOATS)


def test_attributes_of_every_python_object_are_no_operators():
    assert packet_named("add_") is torch.ops.aten.add_
    assert packet_named("__and__") is torch.ops.aten.__and__
    assert not any(map(packet_named, dir(object)))


@pytest.mark.parametrize("norm", [F.instance_norm, F.batch_norm])
def test_statistics_that_a_norm_writes_are_read_behind_it(norm):
    """ATen's graph of an instance norm reads the copies of the statistics in which the batch norm has written."""

    def program(x, mean, deviation):
        means, deviations = mean * 1, deviation * 1
        made = norm(x, means, deviations, None, None, True)
        return made, mean.copy_(means * 2), deviations + 1

    x = torch.randn(3, 5, 4)
    graph = torch.fx.experimental.proxy_tensor.make_fx(program)(x, torch.zeros(5), torch.ones(5))
    handle = fuser.fusion_handle(fuser.register_fusion(graph))
    given, own = (x, torch.zeros(5), torch.ones(5)), (x, torch.zeros(5), torch.ones(5))
    got, want = handle(*given), program(*own)
    torch.testing.assert_close((*got, *given), (*want, *own))
