"""Graphs fuse that return containers, numbers or views, take containers or numbers, or hold a call of ATen's."""

from __future__ import annotations

import collections
import copy
import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fuser
from fuser import interface
from fuser.errors import InputError

pytestmark = [
    pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
X = torch.linspace(-2, 2, 48).reshape(6, 8)
W = torch.linspace(-1, 1, 32).reshape(4, 8)
Pair = collections.namedtuple("Pair", "a b")


def kernels_of(key):
    """How many kernels a fusion and the pieces that it was split into have."""
    store = interface.kernel_spec(key).store
    pieces = store.splits[-1].keys if store.splits else ()
    return len(store.kernels) + sum(map(kernels_of, pieces))


def assert_same(got, want):
    """Equal in form, types, dtypes, strides and values."""
    mine, one = pytree.tree_flatten(got)
    theirs, other = pytree.tree_flatten(want)
    assert one == other, (one, other)
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b), (a, b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a == b


RETURNED = {
    "a number": lambda x: (torch.sin(x) * 2, x.shape[0]),
    "numbers made of sizes": lambda x: (torch.sin(x) * 3, x.shape[0] * 2 + x.size(1), x.numel() / 2),
    "sizes": lambda x: (torch.sin(x) * 4, x.shape, x.size()),
    "facts": lambda x: (torch.sin(x) * 5, x.dtype, x.dim() == 2, x.is_floating_point()),
    "None": lambda x: (torch.sin(x) * 6, None),
    "None and one result": lambda x: [None, torch.sin(x) * 7],
    "constants": lambda x: (torch.sin(x) * 8, "text", torch.float16, 2.5, True, -3),
    "a dict": lambda x: {"a": torch.sin(x) * 9, 7: x + 1},
    "containers in containers": lambda x: (torch.sin(x) * 10, [x + 1, (x + 2, {"k": x * 3, "l": [None, ()]})]),
    "named tuples in a list": lambda x: [Pair(torch.sin(x) * 11, Pair(x * 2, None))],
    "one result in several places": lambda x: ((y := torch.sin(x) * 12), {"y": y, "x": x}),
    "a view of a result": lambda x: ((y := torch.sin(x) * 13), y.t()),
    "a view alone": lambda x: (torch.sin(x) * 14).view(-1)[1:],
    "views in a dict": lambda x: {"y": (y := torch.sin(x) * 15), "rows": [y[0], y[:, 1]], "n": y.shape[1]},
    "an input and a view of it": lambda x: (torch.sin(x) * 16, x, x.t()),
}


@pytest.mark.sampled(9, also=("facts", "numbers made of sizes"))
@pytest.mark.parametrize("name", RETURNED)
def test_what_a_graph_returns(name):
    fn = RETURNED[name]
    keys = [fuser.register_fusion(fx.symbolic_trace(fn)) for _ in range(2)]
    assert keys[0] == keys[1]
    handle = fuser.fusion_handle(keys[0])
    for x in (X, X, X[:3]):
        assert_same(handle(x), fn(x))
    want = fn(X)
    assert_same(fuser.run_fusion(keys[0], [X]), list(want) if isinstance(want, (tuple, list)) else [want])
    assert kernels_of(keys[0])


def test_views_and_results_returned_twice_share_memory():
    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(RETURNED["views in a dict"])))
    for _ in range(2):
        got = handle(X)
        got["y"].zero_()
        assert not got["rows"][0].any() and not got["rows"][1].any()
    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(RETURNED["one result in several places"])))
    for _ in range(2):
        y, held = handle(X)
        assert held["y"] is y and held["x"] is X


# Returned calls that give several tensors, and whether a kernel makes them: 1, or 0 for those that are left to ATen.
SEVERAL = {
    "max": (lambda x: torch.sin(x).max(1), 1),
    "min by function": (lambda x: torch.min(torch.sin(x) * 2, 1, keepdim=True), 1),
    "aminmax": (lambda x: torch.aminmax(torch.sin(x) * 3, dim=0), 1),
    "var_mean": (lambda x: torch.var_mean(torch.sin(x) * 4, 1), 1),
    "std_mean, whole": (lambda x: torch.std_mean(torch.sin(x) * 5), 1),
    "an operator": (lambda x: torch.ops.aten.max.dim(torch.sin(x) * 6, 1), 1),
    "an operator by packet": (lambda x: torch.ops.aten.var_mean(torch.sin(x) * 7, [1]), 1),
    "native_layer_norm": (lambda x: torch.native_layer_norm(torch.sin(x) * 8, [8], None, None, 1e-5), 1),
    "in a tuple": (lambda x: (torch.sin(x) * 9, torch.sin(x).max(0), 3), 1),
    "in a dict, twice": (lambda x: {"a": (y := (torch.sin(x) * 10).min(0)), "b": [y, x + 1]}, 1),
    "alone in a tuple": (lambda x: ((torch.sin(x) * 11).max(0),), 1),
    "with one of its results": (lambda x: ((y := torch.var_mean(torch.sin(x) * 12, 1)), y[0]), 1),
    "cummax": (lambda x: torch.cummax(torch.sin(x) * 13, 0), 0),
    "sort": (lambda x: (torch.sin(x) * 14).sort(0), 0),
    "topk": (lambda x: torch.topk(torch.sin(x) * 15, 2), 0),
    "kthvalue": (lambda x: torch.kthvalue(torch.sin(x) * 16, 2), 0),
    "median": (lambda x: (torch.sin(x) * 17).median(1), 0),
    "nanmedian": (lambda x: (torch.sin(x) * 18).nanmedian(1), 0),
    "mode": (lambda x: torch.mode(torch.sin(x) * 19), 0),
    "frexp": (lambda x: torch.frexp(torch.sin(x) * 20), 0),
    "slogdet": (lambda x: torch.linalg.slogdet(torch.sin(x)[:, :6] + 21 * torch.eye(6)), 0),
    "histogram": (lambda x: torch.histogram(torch.sin(x) * 22, 4), 0),
    "pooling with indices": (lambda x: F.max_pool1d(torch.sin(x)[None] * 23, 2, return_indices=True), 0),
    "chunks": (lambda x: (torch.sin(x) * 24).chunk(2), 0),
    "unbind": (lambda x: (torch.sin(x) * 25).unbind(), 0),
}


@pytest.mark.sampled(
    20,
    also=(
        "an operator", "an operator by packet", "in a dict, twice", "in a tuple", "native_layer_norm",
    ),
)  # fmt: skip
@pytest.mark.parametrize("function, fused", SEVERAL.values(), ids=SEVERAL)
def test_returned_calls_with_several_results(function, fused):
    key = interface.register_fusion(fx.symbolic_trace(function))
    for _ in range(2):
        got, want = fuser.fusion_handle(key)(X), function(X)
        assert_same(got, want)
        assert type(got) is type(want)
    assert kernels_of(key) and (not fused or not interface.kernel_spec(key).store.splits)
    assert_same(pickle.loads(pickle.dumps(fuser.fusion_handle(key)))(X), want)


def test_gradients_reach_through_containers():
    fn = RETURNED["containers in containers"]
    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(fn)))
    grads = []
    for f in (handle, fn):
        x = X.clone().requires_grad_()
        sum(t.sum() for t in pytree.tree_leaves(f(x)) if t is not None).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_forms_that_differ_are_different_fusions():
    forms = [
        lambda x: (x * 3.5, None), lambda x: [x * 3.5, None], lambda x: (None, x * 3.5), lambda x: (x * 3.5, 1),
        lambda x: (x * 3.5, True), lambda x: (x * 3.5, 1.0), lambda x: {"a": x * 3.5}, lambda x: {"b": x * 3.5},
        lambda x: Pair(x * 3.5, None), lambda x: x * 3.5, lambda x: (x * 3.5,),
    ]  # fmt: skip
    graphs = [fx.symbolic_trace(f) for f in forms]
    keys = [fuser.register_fusion(g) for g in graphs]
    assert len(set(keys)) == len(forms)
    for key, fn in zip(keys, forms, strict=True):
        assert_same(fuser.fusion_handle(key)(X), fn(X))
    assert sum(len(s.store.kernels) for s in {interface.kernel_spec(k) for k in keys}) <= 2


# -- names -------------------------------------------------------------------------------------------------------------
def difference(first, second, *given):
    """A graph that subtracts an input from another; `given` is the order in which they are given."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in given}
    graph.output(graph.call_function(torch.sub, (inputs[first], inputs[second])))
    return fx.GraphModule(torch.nn.Module(), graph)


NAMED = {
    "x - y": ("x", "y", "x", "y"), "y - x": ("y", "x", "y", "x"), "a - b": ("a", "b", "a", "b"),
    "x - y, y first": ("x", "y", "y", "x"), "y - x, x first": ("y", "x", "x", "y"),
}  # fmt: skip


def test_equal_graphs_with_other_names():
    """They share kernels. Each is called by its own names, and messages have them."""
    graphs = {name: difference(*spec) for name, spec in NAMED.items()}
    keys = {name: fuser.register_fusion(graph) for name, graph in graphs.items()}
    assert len({id(interface.kernel_spec(key)) for key in keys.values()}) == 2
    assert keys["x - y"] == fuser.register_fusion(difference(*NAMED["x - y"]))
    for name, (first, second, *given) in NAMED.items():
        handle = fuser.fusion_handle(keys[name])
        for call in (handle, pickle.loads(pickle.dumps(handle)), copy.copy(handle)):
            torch.testing.assert_close(call(**{first: X, second: X + 3}), torch.full_like(X, -3))
            torch.testing.assert_close(call(X, **{given[1]: X + 3}), graphs[name](X, X + 3))
            assert call(5, **{given[1]: 2}) == graphs[name](5, 2)
        said = rf"fusion {keys[name]} was called with 1 inputs: expected 2 \({given[0]}, {given[1]}\)"
        for wrong in (lambda call=handle: call(X), lambda key=keys[name]: fuser.run_fusion(key, [X])):
            with pytest.raises(InputError, match=said):
                wrong()
        with pytest.raises(InputError, match=rf"fusion {keys[name]} .* none of its inputs \({given[0]}, {given[1]}\)"):
            handle(X, z=X)
        with pytest.raises(InputError, match=rf"input 1 \({given[1]}\) of fusion {keys[name]} is of type str"):
            fuser.prepare(keys[name], [X, "x"])


class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("held", X + 1)

    def forward(self, x):
        return torch.tanh(x) * self.held


WAYS = {
    "plain": lambda x: torch.tanh(x), "bound": Held(), "container": lambda x: {"a": torch.tanh(x)},
    "renamed": lambda other: torch.tanh(other), "respelled": lambda x: x.tanh(),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_handle_counts(way):
    fuser.register_fusion(fx.symbolic_trace(WAYS["plain"]))
    handle = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(WAYS[way])))
    for _ in range(3):
        handle(X)
    assert handle.kernel_count == 1 and handle.misses == 1 and handle.hits >= 2


# -- numbers -----------------------------------------------------------------------------------------------------------
ON_NUMBERS = {
    "1 - p": lambda p: 1 - p, "p - 1": lambda p: p - 1, "1 / p": lambda p: 1 / p, "3 / p": lambda p: 3 / p,
    "p / 3": lambda p: p / 3, "p ** 2": lambda p: p**2, "2 ** p": lambda p: 2**p, "p // 0.25": lambda p: p // 0.25,
    "p % 0.25": lambda p: p % 0.25, "-p": lambda p: -p, "abs": abs, "1 - 1 / p": lambda p: 1 - 1 / p,
    "1 / (1 - p)": lambda p: 1 / (1 - p), "p < 1": lambda p: p < 1, "p == 0.3": lambda p: p == 0.3,
    "sym_max": lambda p: torch.sym_max(p, 0.5), "sym_min": lambda p: torch.sym_min(p, 0.5),
    "sym_int": lambda p: torch.sym_int(p * 7), "sym_sqrt": lambda p: torch.sym_sqrt(p),
}  # fmt: skip
CALLED = {
    "max": (max, 0.5), "min": (min, 0.5), "pow": (pow, 3), "floordiv": (operator.floordiv, 0.2), "round": (round,),
    "int": (int,), "float": (float,), "sqrt": (math.sqrt,), "floor": (math.floor,), "exp": (math.exp,),
    "not": (operator.not_,), "lt": (operator.lt, 0.5),
}  # fmt: skip
VALUES = (0.3, 0.7, 1.6, 2.0, 0.3, 5.125)


def with_number(name):
    """A graph of a tensor and a number on which something is computed."""
    if name in ON_NUMBERS:
        return fx.symbolic_trace(lambda x, p: torch.tanh(x) * ON_NUMBERS[name](p) + x * 0.4375)
    function, *more = CALLED[name]
    graph = fx.Graph()
    x, p = graph.placeholder("x"), graph.placeholder("p")
    number = graph.call_function(function, (p, *more))
    product = graph.call_function(torch.mul, (graph.call_function(torch.tanh, (x,)), number))
    graph.output(graph.call_function(torch.add, (product, x)))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.sampled(17, also=("1 / (1 - p)", "2 ** p", "float"))
@pytest.mark.parametrize("name", [*ON_NUMBERS, *CALLED])
def test_arithmetic_on_numbers(name):
    """Numbers of every value share a kernel, of the whole or of a piece that is given what Python made of them."""
    module = with_number(name)
    key = fuser.register_fusion(module)
    handle = fuser.fusion_handle(key)
    for p in VALUES:
        assert_same(handle(X, p), module(X, p))
    assert 1 <= kernels_of(key) <= 2
    if name in ("1 / p", "3 / p"):
        with pytest.raises(ZeroDivisionError):
            handle(X, 0.0)


def test_a_quotient_of_numbers_is_rounded_once():
    """c / p, and not c times 1 / p."""
    x = torch.ones(4, dtype=torch.float64)
    key = fuser.register_fusion(fx.symbolic_trace(lambda x, p: x * (3 / p)))
    for p in (0.1, 0.7, 49.0, 1.1, 0.3):
        assert fuser.run_fusion(key, [x, p])[0][0].item() == 3 / p


# -- calls of ATen's between -------------------------------------------------------------------------------------------
def test_a_group_on_each_side_of_a_product():
    fn = lambda x, w: torch.relu(F.linear(torch.sin(x) * 2, w)) + 1  # noqa: E731
    key = fuser.register_fusion(fx.symbolic_trace(fn))
    for x in (X, X, X[:2]):
        assert_same(fuser.fusion_handle(key)(x, W), fn(x, W))
    (made,) = interface.kernel_spec(key).store.splits
    assert [op.op for op in made.unfused] == ["aten.linear"] and len(made.keys) == 2 == kernels_of(key)


SHIFTS = [f"__{side}shift__" for side in "lr"] + [f"bitwise_{side}_shift" for side in ("left", "right")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_shifts_under_all_their_names(dtype):
    def fn(x, own, wide):
        ops = [getattr(torch.ops.aten, name) for name in SHIFTS]
        return [-op(x, by) for op in ops for by in (0, 1, 3, 7, own, wide)]

    x = torch.tensor([0, 1, 2, 3, 5, 100, 127, -1, -7, -128]).to(dtype)
    inputs = x, torch.arange(10).to(dtype), torch.tensor([0, 1] * 5)
    key = fuser.register_fusion(fx.symbolic_trace(fn))
    assert_same(fuser.fusion_handle(key)(*inputs), fn(*inputs))
    assert interface.kernel_spec(key).store.kernels, interface.kernel_spec(key).store.fallbacks


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_bitwise_operators_under_their_python_names(name):
    op = getattr(torch.ops.aten, f"__{name}__")
    x, y = torch.arange(8), torch.arange(8).flip(0)
    key = fuser.register_fusion(fx.symbolic_trace(lambda x, y: op(op(x, y), 5) + 1))
    assert_same(fuser.run_fusion(key, [x, y])[0], op(op(x, y), 5) + 1)
    assert interface.kernel_spec(key).store.kernels


# -- exported programs -------------------------------------------------------------------------------------------------
class Exported(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, torch.nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, x, more=None):
        y = torch.sin(x if more is None else x + more["k"][0]) * self.weight
        if self.form == "single":
            return y * 2.5
        return (y + 1, y.sum()) if self.form == "tuple" else {"a": y + 1, "b": [x * 2, (y.sum(), None, 3)]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inputs", [(X,), (X, {"k": [X]})], ids=["flat", "nested"])
@pytest.mark.parametrize("form", ["single", "tuple", "nested"])
def test_an_exported_program_keeps_its_form(form, inputs):
    n = torch.export.Dim("n", max=100)
    sizes = ({0: n}, *({"k": [{0: n}]} for _ in inputs[1:]))
    module = torch.export.export(Exported(form), inputs, dynamic_shapes=sizes).module()
    key = fuser.register_fusion(module)
    assert fuser.register_fusion(module) == key
    handle = fuser.fusion_handle(key)
    with torch.no_grad():
        for rows in (6, 6, 2):
            given = pytree.tree_map(lambda t: t[:rows], inputs)  # noqa: B023
            assert_same(handle(*given), module(*given))
        got, want = fuser.run_fusion(key, list(inputs)), module(*inputs)
        assert_same(got, list(want) if isinstance(want, (tuple, list)) else [want])
        interface.prepare(key, list(inputs)).result(60)
        fuser.debug.explain(key)
        wrong = pytree.tree_map(lambda t: t[:, :5], inputs)
        for f in (module, handle):
            with pytest.raises(AssertionError, match="Guard failed"):
                f(*wrong)
        if len(inputs) > 1:
            with pytest.raises(InputError, match="arguments of the form"):
                handle(X, X)
    assert kernels_of(key)


def test_an_exported_program_takes_arguments_by_name():
    class Named(torch.nn.Module):
        def forward(self, x, *, scale, shift):
            return torch.sin(x) * scale - shift

    module = torch.export.export(Named(), (X,), {"scale": X, "shift": X * 2}).module()
    handle = fuser.fusion_handle(fuser.register_fusion(module))
    want = module(X, scale=X, shift=X * 2)
    assert_same(handle(X, scale=X, shift=X * 2), want)
    assert_same(handle(X, shift=X * 2, scale=X), want)
    with pytest.raises(InputError):
        handle(X, scale=X)


TAKEN = {
    "a list": (lambda xs: xs[0] + torch.sin(xs[1]), ([X, X * 2],)),
    "a dict": (lambda x, more: x * more["k"] + torch.sin(more["j"]), (X, {"k": X * 2, "j": X + 1})),
    "both, and two results": (lambda x, y: {"a": x[0] * y["k"], "b": [x[1], x[0] + 1]}, ([X, X * 2], {"k": X})),
    "containers in containers": (lambda x, t: (torch.sin(x[0]["a"][0]) + t, x[1]), (({"a": [X]}, X * 3), X)),
    "a tuple beside a tensor": (lambda x, t: x[0] * t - x[1], ((X, X + 1), X * 2)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_traced_function_takes_its_own_containers(name):
    function, inputs = TAKEN[name]
    graph = make_fx(function)(*inputs)
    key = fuser.register_fusion(graph)
    handle = fuser.fusion_handle(key)
    for rows in (6, 6, 2):
        given = pytree.tree_map(lambda t: t[:rows], inputs)  # noqa: B023
        assert_same(handle(*given), graph(*given))
    assert kernels_of(key)
    with pytest.raises(InputError, match="arguments of the form"):
        handle(X, X, X)
    assert_same(pickle.loads(pickle.dumps(handle))(*inputs), graph(*inputs))
