"""Mistakes of a user, and the sentence that each gets: what is wrong, and the cure."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch import nn

import fuser
import fuser.aot
import fuser.cache
import fuser.debug
import fuser.testing
from fuser.canonical.keywords import unknown_keyword
from fuser.compiler import CpuBackend
from fuser.errors import BackendError, ConfigError, FuserError, GraphError, InputError
from fuser.targets import Target

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


@pytest.fixture
def key():
    made = fuser.register_fusion(call_with(torch.relu))
    fuser.run_fusion(made, [X])
    fuser.wait()
    yield made
    fuser.unregister_fusion(made)


NO_KEYS_INPUTS = {
    "prepare": fuser.prepare,
    "measure": fuser.debug.measure,
    "explain_miss": fuser.cache.explain_miss,
    "repro": lambda key, inputs: fuser.debug.repro(key, inputs, "never made"),
    "debug_get_fused_kernel_code": lambda _, inputs: fuser.debug_get_fused_kernel_code(call_with(torch.relu), inputs),
}


@pytest.mark.parametrize("name", NO_KEYS_INPUTS)
@pytest.mark.parametrize("given", [None, "x"])
def test_inputs_that_are_none(name, given, key):
    with pytest.raises(InputError, match=f"input 0 .x. of fusion .* is of type {type(given).__name__}: expected a ten"):
        NO_KEYS_INPUTS[name](key, given)


def test_a_single_tensor_stands_alone(key):
    """Its rows are not the inputs."""
    rows = torch.rand(1, 4)
    assert fuser.cache.explain_miss(key, rows) == fuser.cache.explain_miss(key, [rows])
    code = [fuser.debug_get_fused_kernel_code(call_with(torch.relu), given) for given in (rows, [rows])]
    assert code[0] == code[1]


OF_A_KEY = {
    "class -1": (lambda key: fuser.debug.to_fx(key, -1), GraphError, "class -1 was asked for: call it"),
    "class -5": (lambda key: fuser.debug.trace(key, -5), GraphError, "class -5 was asked for"),
    "class 'a'": (lambda key: fuser.debug.trace(key, "a"), GraphError, "class a was asked for"),
    "loop -1": (lambda key: fuser.debug.loop_to_fx(key, "buf0", -1), GraphError, "has no loop -1 of 'buf0'"),
    "loop 'a'": (lambda key: fuser.debug.loop_to_fx(key, "buf0", "a"), GraphError, "has no loop a of 'buf0'"),
    "a key for keys": (fuser.debug.report, InputError, r"given a int: expected keys, such as \[key\]"),
}


@pytest.mark.parametrize("name", OF_A_KEY)
def test_parts_that_a_fusion_lacks(name, key):
    call, error, said = OF_A_KEY[name]
    with pytest.raises(error, match=said):
        call(key)


class Nothing:
    """It has a backend's names alone."""

    name = can_fuse = codegen = compile = None


CPU, register = CpuBackend(), fuser.register_fusion_backend
IN_WORDS = {
    "device type": (lambda: fuser.has_fusion_backend([3]), BackendError, r"\[3\] is no device type: expected one such"),
    "device": (lambda: fuser.has_fusion_backend(torch.device("cpu")), BackendError, "is no device type"),
    "class": (lambda: register("cpu", CpuBackend), BackendError, "CpuBackend is a class: expected an instance"),
    "names": (lambda: register("cpu", Nothing()), BackendError, "it lacks name, can_fuse, codegen, compile"),
    "target": (lambda: register("cpu", CPU, 3), BackendError, "needs a fuser.targets.Target"),
    "target of another": (lambda: register("cpu", CPU, Target("hpu")), BackendError, "needs a fuser.targets.Target"),
    "runtime": (lambda: register("cpu", CPU, None, 3), BackendError, "int is no runtime for 'cpu'"),
    "judge": (lambda: fuser.debug.bisect_passes(3), InputError, "was given a int: expected a function"),
    "one kind": (lambda: fuser.cache.clear("plan"), ValueError, "kinds='plan': expected a list of kinds"),
    "kinds": (lambda: fuser.cache.clear(3), ValueError, "kinds=3: expected a list of kinds"),
    "unused": (lambda: fuser.cache.clear(["plan"], "long"), ValueError, "unused='long': expected a number of seconds"),
    "key to export": (lambda: fuser.cache.export("never made", "key"), InputError, "is a str: expected bytes"),
    "key to import": (lambda: fuser.cache.import_("none", "key"), InputError, "is a str: expected bytes"),
    "key of a bundle": (lambda: fuser.cache.differences("none", "key"), InputError, "is a str: expected bytes"),
    "key of a program": (lambda: fuser.aot.load("none", key=3), InputError, "is a int: expected bytes"),
    "op": (lambda: fuser.testing.check_op([]), ConfigError, r"there is no op \[\]: expected"),
    "device of an op": (lambda: fuser.testing.check_op("relu", "nosuch"), ConfigError, "device='nosuch' cannot be"),
    "reduction": (lambda: fuser.testing.check_reduction([]), ConfigError, r"there is no reduction \[\]"),
    "positions": (lambda: fuser.testing.check_reduction("argmax"), ConfigError, "positions and contractions cannot be"),
    "domain": (lambda: fuser.testing.check_reduction("sum", domain=3), ConfigError, "domain=3: expected the lowest"),
    "rtol": (lambda: fuser.testing.check_reduction("sum", rtol="a"), ConfigError, "rtol='a': expected a relative"),
}


@pytest.mark.parametrize("name", IN_WORDS)
def test_misuse_is_said_in_the_packages_words(name):
    call, error, said = IN_WORDS[name]
    with pytest.raises(error, match=said):
        call()


def test_a_file_of_the_cache_may_be_a_path():
    assert fuser.cache.kind_of(pathlib.PurePosixPath("cpu", "0" * 32 + ".so")) == "library"


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
