"""Mistakes of a user, and the sentence that each gets: what is wrong, and the cure."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fuser
import fuser.debug
import fuser.testing
from fuser.canonical.keywords import unknown_keyword
from fuser.errors import ConfigError, FuserError, GraphError

X = torch.rand(4)


def call_with(target, **named):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),), named))
    return graph


class Double(nn.Module):
    def forward(self, x):
        return x * 2


NOT_SO = {
    "a graph for a key": (lambda: fuser.run_fusion(torch.fx.Graph(), [X]), "a Graph is no key: .* register_fusion"),
    "a model for a key": (lambda: fuser.debug.explain(Double()), r"a Double is no key: .*fuser.explain\(model"),
    "a key for a model": (lambda: fuser.explain(7), r"was given a int: .*fuser.debug.explain\(key\)"),
    "most kernels": (lambda: fuser.require_fused("one").__enter__(), "require_fused='one': expected"),
    "kernels": (lambda: fuser.testing.assert_fused(torch.relu, X, kernels="1"), "kernels='1': expected the most"),
    "seconds": (lambda: fuser.wait("long"), "wait was given 'long': expected seconds"),
    "reads": (lambda: fuser.testing.assert_fused(torch.relu, X, reads=-1), "reads=-1: expected the most"),
}


@pytest.mark.parametrize("name", NOT_SO)
def test_one_thing_for_another(name):
    call, said = NOT_SO[name]
    with pytest.raises(FuserError, match=said):
        call()


def test_names_that_the_package_lacks():
    """The error knows name and module, from which Python makes its "Did you mean"."""
    name = "expa" + "lin"
    with pytest.raises(AttributeError, match=f"no attribute '{name}'$") as caught:
        getattr(fuser, name)
    assert (caught.value.name, caught.value.obj) == (name, fuser)
    with pytest.raises(AttributeError, match=r"'compile': torch.compile\(model, backend='fuser'\)"):
        getattr(fuser, "com" + "pile")


NO_GRAPHS = {
    "ScriptFunction": (lambda: torch.jit.script(Double().forward), "fuser.fuse_script"),
    "RecursiveScriptModule": (lambda: torch.jit.script(Double()), "fuser.fuse_script"),
    "ExportedProgram": (lambda: torch.export.export(Double(), (X,)), r"its module\(\) is one"),
    "OptimizedModule": (lambda: torch.compile(Double()), "backend='fuser'"),
    "Node": (lambda: next(iter(call_with(torch.relu).nodes)), "the whole graph"),
    "Double": (Double, "torch.fx.symbolic_trace"),
    "int": (lambda: 3, "run_fusion"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", NO_GRAPHS)
def test_what_is_no_graph(name):
    make, cure = NO_GRAPHS[name]
    with pytest.raises(GraphError, match=f"and not {name}: .*{cure}"):
        fuser.register_fusion(make())


@pytest.mark.parametrize(
    "target, named, said",
    [
        (torch.add, {"other": 1, "alfa": 2}, "node 'add': add has no argument 'alfa': did you mean 'alpha'"),
        (torch.softmax, {"dims": 1}, "softmax has no argument 'dims': did you mean 'dim'"),
        (nn.functional.dropout, {"q": 0.5}, "dropout has no argument 'q'"),
    ],
)
def test_a_keyword_that_an_operator_lacks(target, named, said):
    with pytest.raises(GraphError, match=said):
        fuser.register_fusion(call_with(target, **named))


def test_keywords_of_numpy_are_taken():
    for named in ({"axis": 0}, {"dim": 0, "keepdim": True}, {"axis": 0, "keepdims": True}):
        key = fuser.register_fusion(call_with(torch.sum, **named))
        assert torch.equal(fuser.run_fusion(key, [X])[0], torch.sum(X, **named))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"backend": fuser}, "expected backend='fuser' or backend=fuser.backend"),
        ({"options": [1]}, r"options=\[1\]: expected a dict of settings"),
        ({"options": {"numeric": 1}}, "unknown setting 'numeric': did you mean 'numerics'"),
        ({"options": {"numerics": 1}}, "numerics=1: expected one of 'fast', 'eager'"),
        ({"options": {"verify": "many"}}, "verify='many': expected a number of calls"),
        ({"mode": "fast"}, "mode='fast': expected one of"),
    ],
)
def test_torch_compile(given, said):
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=said):
        torch.compile(lambda x: x * 2, **{"backend": "fuser", **given})(X)


@pytest.mark.parametrize(
    "wrong, meant", [("numeric", "numerics"), ("cache_limit", "cache_limit_bytes"), ("timeout", "compile_timeout")]
)
def test_near_misses_of_settings(wrong, meant):
    with pytest.raises(ConfigError, match=f"unknown setting '{wrong}': did you mean '{meant}"):
        fuser.config.set(**{wrong: 1})
    with pytest.raises(AttributeError, match=f"did you mean '{meant}"):
        getattr(fuser.config, wrong)


def test_everything_is_listed():
    assert set(fuser.__all__) <= set(dir(fuser)) and {"aot", "backend", "debug", "explain"} <= set(dir(fuser))
    assert {s.name for s in fuser.config.SETTINGS} <= set(dir(fuser.config))
    assert all(getattr(fuser, name) is not None for name in dir(fuser) if not name.startswith("_"))


def test_keywords_of_bindings_are_known():
    """Every keyword in the first line of a builtin's documentation is accepted, though no schema has it."""
    checked = 0
    for owner in (torch, torch.Tensor):
        for name in dir(owner):
            function = getattr(owner, name)
            line = str(getattr(function, "__doc__", None) or "").strip().partition("\n")[0]
            if not callable(function) or isinstance(function, type) or not line.startswith(f"{name}("):
                continue
            for keyword in re.findall(r"[(,]\s*\*?,?\s*(\w+)=", line):
                target = name if owner is torch.Tensor else function
                assert unknown_keyword(target, [keyword]) is None, (owner, name, keyword)
                checked += 1
    assert checked > 300
