"""Canonical graphs: one text and hash for one meaning, in every spelling and every process; errors that say what."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

import fuser
from fuser import interface
from fuser.canonical import canonicalize, interpret, schemas
from fuser.canonical.aliases import ALIASES
from fuser.errors import GraphError
from fuser.fallback import Fallback
from tests import forked
from tests.unit.canonical_cases import DIFFERENT, MEANING, SAME, X, Y


def trace(fn):
    return fx.symbolic_trace(fn)


def text(fn):
    return canonicalize(trace(fn)).graph.text


@pytest.mark.parametrize("name", SAME)
def test_one_text_for_all_spellings(name):
    inputs, spellings = SAME[name]
    texts = {text(fn) for fn in spellings}
    assert len(texts) == 1, "\n".join(texts)
    want = spellings[0](*inputs)
    for fn in spellings:
        assert torch.equal(interpret(canonicalize(trace(fn)).graph, inputs), want)


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_what_differs_has_another_text(a, b):
    assert text(a) != text(b)


@pytest.mark.parametrize("name", MEANING)
def test_means_what_eager_does(name):
    inputs, fn = MEANING[name]
    got, want = interpret(canonicalize(trace(fn)).graph, inputs), fn(*inputs)
    got, want = (torch.utils._pytree.tree_leaves(v) for v in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def test_names_dead_code_metadata_and_order_of_independent_attributes_do_not_count():
    plain, decorated = trace(lambda x, y: x * y + 1), trace(lambda first, second: first * second + 1)
    graph = decorated.graph
    with graph.inserting_after(next(iter(graph.nodes))):
        dead = graph.call_function(torch.sin, (next(iter(graph.nodes)),))
    dead.meta["note"] = "never read"
    keys = [fuser.register_fusion(g) for g in (plain, decorated, plain.graph, graph)]
    assert keys[0] == keys[2] and keys[1] == keys[3]
    assert len({id(interface.kernel_spec(key)) for key in keys}) == 1


def test_held_tensors_are_inputs_and_their_values_do_not_count():
    class Scale(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = torch.nn.Parameter(torch.full((6,), by), requires_grad=False)

        def forward(self, x):
            return x * self.by

    two, three = fx.symbolic_trace(Scale(2.0)), fx.symbolic_trace(Scale(3.0))
    assert canonicalize(two).graph == canonicalize(three).graph
    keys = [fuser.register_fusion(m) for m in (two, three)]
    assert keys[0] != keys[1]
    for key, factor in zip(keys, (2, 3)):
        torch.testing.assert_close(fuser.run_fusion(key, [X])[0], X * factor)


def test_every_alias_has_the_schema_of_its_usual_name():
    def rest(op):
        return str(op._schema).partition("(")[2]

    for name, usual in ALIASES.items():
        packet, other = getattr(torch.ops.aten, name), getattr(torch.ops.aten, usual)
        for overload in packet.overloads():
            if not overload.endswith("out") and overload not in ("bool", "int"):  # of numbers alone
                assert rest(getattr(packet, overload)) == rest(getattr(other, overload))


_PRINT_TEXTS = """
from torch import fx
from fuser.canonical import canonicalize
from tests.unit.canonical_cases import MEANING
for _, fn in MEANING.values():
    print(canonicalize(fx.symbolic_trace(fn)).graph.hash)
"""


def test_another_process_gives_the_same_hashes():
    here = [canonicalize(trace(fn)).graph.hash for _, fn in MEANING.values()]
    done = forked.run(["-c", _PRINT_TEXTS], check=True)
    assert done.stdout.split() == here


# -- what is no graph --------------------------------------------------------------------------------------------------
def graph_of(build):
    graph = fx.Graph()
    build(graph)
    return graph


def named(target):
    """A graph that calls an operator by a name, as a graph read from a file might."""

    def build(graph):
        node = graph.call_function(torch.relu, (graph.placeholder("x"),))
        node.target = target
        graph.output(node)

    return graph_of(build)


def cyclic(graph):
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.neg, (a,))
    a.args = (b,)
    graph.output(b)


def own_argument(graph):
    a = graph.call_function(torch.relu, (graph.placeholder("x"),))
    a.args = (a,)
    graph.output(a)


def foreign(graph):
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), fx.Graph().placeholder("y"))))


def wrong_arguments(graph):
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"),)))


def unknown_method(graph):
    graph.output(graph.call_method("rellu", (graph.placeholder("x"),)))


def no_module(graph):
    graph.output(graph.call_function(torch.relu, (graph.get_attr("weight"),)))


BAD = {
    "empty": (lambda: fx.Graph(), "the graph is empty: expected placeholders, calls and an output"),
    "a function": (lambda: torch.relu, "expected, a torch.fx.Graph or GraphModule, and not builtin"),
    "none": (lambda: None, "not NoneType: torch.fx.symbolic_trace makes one"),
    "no output": (lambda: graph_of(lambda g: g.placeholder("x")), "no output node: end it with graph.output"),
    "returns none": (lambda: graph_of(lambda g: g.output(g.placeholder("x") and None)), "the graph returns nothing"),
    "cyclic": (lambda: graph_of(cyclic), "node 'relu' uses 'neg', which is defined after it: the graph is cyclic"),
    "its own argument": (lambda: graph_of(own_argument), "node 'relu' uses 'relu', which is defined after it"),
    "foreign node": (lambda: graph_of(foreign), "node 'add' uses 'y', which belongs to another graph"),
    "operator": (lambda: named("aten.rellu"), "node 'relu': operator 'aten.rellu' does not exist"),
    "namespace": (lambda: named("nowhere::relu"), "node 'relu': operator 'nowhere::relu' does not exist"),
    "overload": (lambda: named("aten.add.Tensr"), "node 'relu': operator 'aten.add.Tensr' does not exist"),
    "method": (lambda: graph_of(unknown_method), "method 'rellu' does not exist: expected a method of torch.Tensor"),
    "arguments": (lambda: graph_of(wrong_arguments), "node 'add_tensor': aten.add.Tensor cannot be called with 1"),
    "attribute": (lambda: graph_of(no_module), "reads the attribute 'weight', but the graph has no module"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_graph_is_an_error_that_names_it(name):
    make, says = BAD[name]
    graph = make()
    with pytest.raises(GraphError) as error:
        fuser.register_fusion(graph)
    assert says in str(error.value)


def test_two_outputs():
    """torch.fx does not let one write such a graph any more; one that was changed by hand may be one all the same."""
    module = trace(lambda x, y: x + y)
    call = next(n for n in module.graph.nodes if n.op == "call_function")
    call.op, call.target, call.args = "output", "output", (call.args[0],)
    with pytest.raises(GraphError, match="uses 'add'|second output"):
        fuser.register_fusion(module)


def test_equal_graphs_share_a_specification_across_held_tensors():
    """The specification, with its kernels, belongs to the canonical graph, not to the registration."""
    weights = [torch.nn.Linear(6, 6) for _ in range(2)]

    def module_of(layer):
        graph = fx.Graph()
        x, w = graph.placeholder("x"), graph.get_attr("weight")
        graph.output(graph.call_function(torch.mul, (x, w)))
        return fx.GraphModule(layer, graph)

    with torch.no_grad():
        keys = [fuser.register_fusion(module_of(layer)) for layer in weights]
        specs = {id(fuser.interface.kernel_spec(k)) for k in keys}
        assert len(set(keys)) == 2 and len(specs) == 1
        for key, layer in zip(keys, weights):
            torch.testing.assert_close(fuser.run_fusion(key, [Y])[0], Y * layer.weight)


def test_hash_collisions_of_names_are_no_equality():
    fns = [lambda x, n=n: x * n for n in (1, 1.0, True, -1, 0.0, -0.0)]
    for a, b in itertools.combinations(fns, 2):
        assert text(a) != text(b)


# -- calls of modules --------------------------------------------------------------------------------------------------
class _Doubling(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class _WithCalls(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = torch.nn.LayerNorm(4), torch.nn.GELU()

    def forward(self, x):
        return self.act(self.norm(x)), self.norm(x)


def test_modules_of_torch_are_the_calls_that_they_make():
    model = _WithCalls()
    registered = canonicalize(fx.symbolic_trace(model))
    ops = [n.op for n in registered.graph.calls]
    assert ops == ["aten.layer_norm", "aten.gelu", "aten.layer_norm"] and not registered.blocked
    assert [id(t) for t in registered.bound] == [id(model.norm.weight), id(model.norm.bias)]
    x = torch.randn(3, 4)
    for got, want in zip(Fallback(registered)(*registered.bound, x), model(x)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["hook", "dropout", "batch norm", "own"])
def test_other_modules_run_as_they_are(name):
    inner = {
        "hook": torch.nn.ReLU(),
        "dropout": torch.nn.Dropout(0.5),
        "batch norm": torch.nn.BatchNorm1d(4),
        "own": _Doubling(),
    }[name]
    if name == "hook":
        inner.register_forward_hook(lambda module, args, result: result + 1)
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    root = torch.nn.Module()
    root.inner = inner
    registered = canonicalize(fx.GraphModule(root, graph))
    assert registered.blocked == (f"call.module.{type(inner).__name__} is not an operator that can be fused",)
    x = torch.randn(8, 4)
    for training in (False, True):
        inner.train(training)
        torch.manual_seed(1)
        want = inner(x)
        torch.manual_seed(1)
        assert torch.equal(Fallback(registered)(x), want)


def test_one_answer_whether_an_operator_is_elementwise(monkeypatch):
    """The tag is not all: torch 2.11 does not tag `leaky_relu`."""
    asked = schemas.signature.__wrapped__
    assert asked(torch.ops.aten.leaky_relu.default).pointwise and not asked(torch.ops.aten.mm.default).pointwise
    monkeypatch.setattr(schemas, "is_pointwise", lambda target: target is torch.ops.aten.mm.default)
    assert asked(torch.ops.aten.mm.default).pointwise
