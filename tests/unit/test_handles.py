"""Handles that are pickled, copied and called in compiled functions."""

import collections
import copy
import json
import pickle

import pytest
import torch
from torch import fx

import fuser
from fuser.errors import GraphError
from fuser.executor import restored
from tests import forked

Pair = collections.namedtuple("Pair", "first second")


class Scaled(torch.nn.Module):
    """A module with a parameter, a container of results and a number that may be lifted."""

    def __init__(self, scale=2.7):
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(torch.linspace(0.5, 2, 4)), scale

    def forward(self, x, y):
        z = torch.relu(x * self.weight + y).masked_fill(x > 1, self.scale)
        return {"sum": z + y, "both": [z, (x - y).to(torch.float64)]}


def handle_of(function):
    return fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(function)))


def chain(x, y):
    return (x[:, 1:] * y).sigmoid() + 1, torch.nn.functional.gelu(y, approximate="tanh")


def in_words(x, y):
    return torch.add(x, y).mul(x)


def in_other_words(x, y):
    return (x + y) * x


X, Y = torch.linspace(-2, 3, 24).reshape(6, 4), torch.linspace(1, 4, 4)


def test_a_pickled_handle_is_the_handle_of_the_same_graph():
    plain = handle_of(in_words), handle_of(in_other_words)
    for handle in plain:
        assert pickle.loads(pickle.dumps(handle)) is handle
    bound = [handle_of(Scaled(scale)) for scale in (2.7, 3.1, 4.3)]  # the later ones have lifted numbers
    for handle in bound:
        for again in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
            got, want = again(X, Y), handle(X, Y)
            assert torch.equal(got["sum"], want["sum"]) and torch.equal(got["both"][1], want["both"][1])


def test_a_module_and_its_copy_have_their_own_parameters():
    module = Scaled()
    module.handle = handle_of(module)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
        assert torch.equal(twin.handle(X, Y)["both"][0], twin(X, Y)["both"][0])
        assert torch.equal(module.handle(X, Y)["both"][0], module(X, Y)["both"][0])


def test_another_process_gets_the_handle(tmp_path):
    handles = [handle_of(chain), handle_of(Scaled()), handle_of(in_words)]
    wanted = [h(X[:, :3], Y[:2]) if h is handles[0] else h(X, Y) for h in handles]
    (tmp_path / "handles").write_bytes(pickle.dumps((handles, wanted, X, Y)))
    script = (
        "import pickle, sys, torch\n"
        "(chain, scaled, words), wanted, x, y = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "close = torch.testing.assert_close\n"
        "with torch.no_grad():\n"
        "    close(chain(x[:, :3], y[:2]), wanted[0]); close(scaled(x, y), wanted[1]); close(words(x, y), wanted[2])\n"
        "f = torch.compile(lambda x, y: words(x, y) + 1, fullgraph=True, backend='eager')\n"
        "close(f(x, y), wanted[2] + 1)\n"
    )
    forked.run(["-c", script, str(tmp_path / "handles")], timeout=120, check=True)


def test_what_cannot_be_pickled_says_so():
    def own(x):
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(own, (graph.call_function(torch.sin, (x,)),)))
    handle = fuser.fusion_handle(fuser.register_fusion(graph))
    with pytest.raises(pickle.PicklingError, match="'own' is a Python object that another process cannot find"):
        pickle.dumps(handle)


@pytest.mark.parametrize(
    "row",
    [
        ["call", "builtins:eval", {"tuple": ["1"]}, {"dict": []}],
        ["call", "torch:load", {"tuple": ["x"]}, {"dict": []}],
        ["call", "torch:_dynamo", {"tuple": []}, {"dict": []}],
        ["call", "operator:attrgetter.x", {"tuple": []}, {"dict": []}],
        ["call", "aten::__class__", {"tuple": []}, {"dict": []}],
        ["method", "__reduce__", {"tuple": [{"ref": 0}]}, {"dict": []}],
        ["call", "aten::relu", {"tuple": [{"ref": 5}]}, {"dict": []}],
        ["call", "aten::relu", {"os": "system"}, {"dict": []}],
        ["import", "os"],
    ],
    ids=lambda row: "-".join(map(str, row[:2])),
)
def test_a_graph_as_data_names_nothing_but_functions_of_tensors(row):
    text = json.dumps({"rows": [["input", "x", 0, []], row], "output": {"ref": 1}})
    with pytest.raises(GraphError):
        restored(text, 0, False, False, ())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "fuser"])
def test_compiled_functions_call_handles_without_a_graph_break(backend):
    torch._dynamo.reset()
    words, scaled = handle_of(in_words), handle_of(Scaled())

    def function(x, y):
        return words(x, y=y) * 2 + scaled(x, y)["sum"] + words(x, 3.0)

    for x in (X, X.clone().requires_grad_(), X[:1]):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        got, want = compiled(x, Y), function(x, Y)
        torch.testing.assert_close(got, want)
        if x.requires_grad:
            (mine,) = torch.autograd.grad(got.square().sum(), x)
            (theirs,) = torch.autograd.grad(want.square().sum(), x)
            torch.testing.assert_close(mine, theirs)


def test_sizes_may_be_dynamic_around_handles():
    handle = handle_of(in_words)
    compiled = torch.compile(lambda x, y: handle(x, y) - x, fullgraph=True, dynamic=True, backend="fuser")
    for n in (2, 5, 9):
        x = torch.rand(n, 4)
        torch.testing.assert_close(compiled(x, Y), (x + Y) * x - x)
