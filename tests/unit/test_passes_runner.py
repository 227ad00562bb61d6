"""The pipeline: order, switches, limit, checks, errors, dumps, users' passes and patterns, bisection, the page."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import sys
import warnings

import pytest
import torch
from torch import fx

import fuser.passes
from fuser import config, debug
from fuser.errors import ConfigError, PassError
from fuser.frontends.dynamo import forget_compilations, fuser_backend, last_compilation
from fuser.passes import registry
from fuser.passes.runner import Numbered, Pass, run_passes
from tests import forked

aten = torch.ops.aten
X, Y = torch.randn(6, 4), torch.randn(6, 4)


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    forget_compilations()
    yield
    torch._dynamo.reset()
    for p in registry.numbered():
        if not p.item.built_in:
            fuser.passes.unregister(p.item.name)


def f(x, y):
    return torch.relu(x * y) + torch.relu(x * y)


def run(g=f, **options):
    return torch.compile(g, backend=fuser_backend, options=options)(X, Y)


def names():
    return [record.name for record in last_compilation().passes]


def changed(name):
    return next(record.changed for record in last_compilation().passes if record.name == name)


def swap(module: fx.GraphModule) -> int:
    """A wrong pass: every relu becomes a sigmoid."""
    found = [n for n in module.graph.nodes if n.target is aten.relu.default]
    for n in found:
        n.target = aten.sigmoid.default
    return len(found)


def test_passes_run_in_order_and_are_timed():
    run()
    listed = [p.item.name for p in registry.numbered()]
    assert names() == listed and len(set(listed)) == len(listed)
    assert changed("merge_equal") == 2
    assert all(r.seconds >= 0 and r.stage for r in last_compilation().passes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_passes_of_another_device_are_skipped(device):
    """Their modules are not imported either: `later` imports one when its pass runs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(aten.relu.default, (x,))
    x.meta["val"] = relu.meta["val"] = torch.empty(2)
    graph.output((relu,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    only = Numbered(1, "post_grad", Pass("swap", swap, calls="aten.relu", device=device))
    with config.override(check_passes=False):
        (record,) = run_passes(module, [only], frozenset())
    assert record.changed == (device == "cpu")
    if device == "cuda":
        with config.override(check_passes=True), pytest.raises(PassError, match="cuda"):
            run_passes(module, [only], frozenset())


def test_switched_off_by_name():
    run(disable_passes="merge_equal, drop_dead")
    assert "merge_equal" not in names() and "drop_dead" not in names() and "remove_noops" in names()
    torch._dynamo.reset()
    with config.override(disable_passes="merge_equal"):
        run()
    assert "merge_equal" not in names()


def test_unknown_name_is_an_error():
    with pytest.raises(Exception, match="no_such.*expected names from.*merge_equal"):
        run(disable_passes="no_such")


def test_limit_counts_over_all_stages():
    number = next(p.number for p in registry.numbered() if p.item.name == "merge_equal")
    run(pass_limit=number)
    assert names()[-1] == "merge_equal"
    torch._dynamo.reset()
    run(pass_limit=0)
    assert names() == []


def test_table_lists_every_pass_with_a_line():
    with config.override(disable_passes="merge_equal"):
        table = debug.passes()
    assert [row[0] for row in table] == list(range(1, len(table) + 1))
    assert all(row[4] for row in table), "each pass says in one line what it does"
    assert [row[2] for row in table if not row[3]] == ["merge_equal"]
    assert "merge_equal" in str(table)


def test_bisection_finds_the_broken_pass():
    def is_right():
        return torch.allclose(run(), f(X, Y))

    assert debug.bisect_passes(is_right) is None
    fuser.passes.register("post_grad", "swap", swap, before="merge_equal")
    assert debug.bisect_passes(is_right) == "swap"
    assert config.pass_limit == -1


def test_registered_pass_takes_its_place():
    seen = []
    fuser.passes.register("post_grad", "look", lambda module: seen.append(module) or 0, after="remove_noops")
    fuser.passes.register("joint_graph", "look_joint", lambda module: False)
    fuser.passes.register("pre_grad", "look_early", lambda module: 0)
    run()
    assert len(seen) == 1 and names().index("look") == names().index("remove_noops") + 1
    with pytest.raises(ConfigError, match="registered already"):
        fuser.passes.register("post_grad", "look", swap)
    with pytest.raises(ConfigError, match="unknown stage"):
        fuser.passes.register("later", "other", swap)
    with pytest.raises(ConfigError, match="has no pass 'nobody'"):
        fuser.passes.register("post_grad", "other", swap, before="nobody")
    with pytest.raises(ConfigError, match="built-in"):
        fuser.passes.unregister("merge_equal")


def raising(module):
    for node in module.graph.nodes:
        if node.target is aten.relu.default:
            raise ZeroDivisionError("by zero")


def dangling(module):
    add = next(n for n in module.graph.nodes if n.target is aten.add.Tensor)
    with module.graph.inserting_after(add):
        late = module.graph.call_function(aten.neg.default, (add,))
    add.args = (late, add.args[1])


def shorter(module):
    add = next(n for n in module.graph.nodes if n.target is aten.add.Tensor)
    with module.graph.inserting_after(add):
        part = module.graph.call_function(aten.slice.Tensor, (add, 0, 0, 2))
    module.graph.output_node().args = ((part,),)


def wider(module):
    relu = next(n for n in module.graph.nodes if n.target is aten.relu.default)
    relu.target, relu.args = aten.cat.default, ([relu.args[0], relu.args[0]], 1)


def uncomputable(module):
    mul = next(n for n in module.graph.nodes if n.target is aten.mul.Tensor)
    mul.target = aten.mm.default


def another_kind(module):
    return "done"


BROKEN = {
    raising: "'raising'.*at node 'relu'.*ZeroDivisionError: by zero",
    dangling: "'dangling'.*does not hold together",
    shorter: r"'shorter'.*at node 'output'.*was torch.float32 \[6, 4\].*is torch.float32 \[2, 4\]",
    wider: r"'wider'.*at node 'relu'.*\[6, 4\].*\[6, 8\]",
    uncomputable: "'uncomputable'.*at node 'mul'.*cannot be computed",
    another_kind: "'another_kind'.*returned a str",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda p: p.__name__)
def test_failing_pass_is_named_with_its_node_or_left_out(broken):
    fuser.passes.register("post_grad", broken.__name__, broken, before="merge_equal")
    with pytest.raises(Exception, match=BROKEN[broken]):
        run()
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(run(on_pass_error="skip"), f(X, Y))
    assert sum(broken.__name__ in str(w.message) for w in said) == 1
    record = next(r for r in last_compilation().passes if r.name == broken.__name__)
    assert record.error and record.changed == 0 and changed("merge_equal") == 2


def test_failing_pass_before_autograd_is_left_out():
    def shorter(module):
        add = next(n for n in module.graph.nodes if n.op == "call_function")
        with module.graph.inserting_after(add):
            part = module.graph.call_function(torch.narrow, (add, 0, 0, 2))
        module.graph.output_node().args = ((part,),)

    fuser.passes.register("pre_grad", "shorter", shorter)
    with pytest.warns(RuntimeWarning, match="'shorter'.*the graph stays as it was before"):
        torch.testing.assert_close(run(on_pass_error="skip"), f(X, Y))


def test_what_is_no_function_is_no_pass():
    with pytest.raises(ConfigError, match="pass 'five' is a int: expected a function of a graph module"):
        fuser.passes.register("post_grad", "five", 5)


@pytest.mark.parametrize("name", [3, "", " ", "one,two"])
def test_names_that_no_setting_could_list_are_refused(name):
    with pytest.raises(ConfigError, match="expected a name without commas"):
        fuser.passes.register("post_grad", name, swap)


def test_other_misuse_of_passes_and_patterns_is_said():
    register = fuser.passes.register_pattern
    with pytest.raises(ConfigError, match=r"unknown stage \[\]"):
        fuser.passes.register([], "other", swap)
    with pytest.raises(ConfigError, match="the pattern of pass 'odd' is a int: expected a function"):
        register("post_grad", "odd", 3, torch.relu, [X])
    with pytest.raises(ConfigError, match="the replacement of pass 'odd' is a int: expected a function"):
        register("post_grad", "odd", torch.relu, 3, [X])
    with pytest.raises(ConfigError, match="the example inputs of pass 'odd' are a Tensor: expected a list of tensors"):
        register("post_grad", "odd", torch.relu, torch.sigmoid, X)
    register("post_grad", "odd", functools.partial(torch.add, 1), torch.relu, [X])  # it has no name
    assert "pattern becomes relu" in str(debug.passes())


def test_a_broken_graph_is_told_in_a_line():
    fuser.passes.register("post_grad", "dangling", dangling)
    with pytest.raises(Exception, match="does not hold together") as error:
        run()
    assert "graph():" not in str(error.value)


def test_failing_pass_in_training_names_the_stage():
    fuser.passes.register("joint_graph", "raising", raising)
    with pytest.raises(Exception, match=r"'raising' \(number \d+, joint_graph\).*ZeroDivisionError"):
        torch.compile(f, backend=fuser_backend)(X.clone().requires_grad_(), Y)


def test_new_nodes_get_their_values():
    def negate_twice(module):
        for node in list(module.graph.nodes):
            if node.target is aten.relu.default:
                users = list(node.users)
                with module.graph.inserting_after(node):
                    once = module.graph.call_function(aten.neg.default, (node,))
                with module.graph.inserting_after(once):
                    twice = module.graph.call_function(aten.neg.default, (once,))
                for user in users:
                    user.replace_input_with(node, twice)

    fuser.passes.register("joint_graph", "negate_twice", negate_twice)
    torch.testing.assert_close(run(), f(X, Y))
    assert last_compilation().groups[0].ops.count("aten.neg") >= 2, "they have values, so they are fused"


TURNS = {
    "unsqueeze_": (0,), "squeeze_": (0,), "t_": (), "transpose_": (0, 1), "swapaxes_": (0, 1), "swapdims_": (0, 1),
    "as_strided_": ((4,), (1,)), "resize_": ((2, 2),),
}  # fmt: skip


@pytest.mark.sampled(10, also=("resize_-function-False",))
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("spelled", ["method", "function"])
@pytest.mark.parametrize("name", TURNS)
def test_graphs_that_turn_a_tensor_pass_the_check(name, spelled, dynamo):
    """Values before such a call are of other sizes than those behind it. A pass changes readers on both sides."""

    def turn(x):
        if spelled == "method" or not hasattr(torch, name):
            return getattr(x, name)(*TURNS[name])
        return getattr(torch, name)(x, *TURNS[name])

    def program(x, y):
        x = x * 2
        filled = y.exp().fill_(0.5)
        same = x.mul_(3)
        before = torch.where(y > 0.25, x, filled) + filled.sum() + same
        turn(x)
        behind = x + filled.sum()
        return before, behind, same + filled.sum(), x

    args = (torch.rand(1, 8), torch.rand(1, 8))
    expected = program(*args)
    compiled = torch.compile(program, backend="fuser") if dynamo else fuser_backend(fx.symbolic_trace(program), args)
    with config.override(check_passes=True):
        for result, wanted in zip(compiled(*args), expected):
            torch.testing.assert_close(result, wanted)
            assert result.stride() == wanted.stride()


def test_a_pass_may_return_another_module():
    def rebuilt(module):
        graph = fx.Graph()
        env = {}
        for node in module.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        return fx.GraphModule(module, graph)

    fuser.passes.register("post_grad", "rebuilt", rebuilt)
    torch.testing.assert_close(run(), f(X, Y))


@pytest.mark.parametrize("stage", ["pre_grad", "joint_graph", "post_grad"])
def test_pattern_is_replaced(stage):
    def pattern(x, y):
        return torch.relu(x * y)

    def replacement(x, y):
        return torch.sigmoid(x) - y

    fuser.passes.register_pattern(stage, "odd", pattern, replacement, [torch.randn(2, 2), torch.randn(2, 2)])
    torch.testing.assert_close(run(), 2 * (torch.sigmoid(X) - Y))
    assert changed("odd") >= 1
    torch._dynamo.reset()
    torch.testing.assert_close(run(lambda x, y: torch.relu(x + y)), torch.relu(X + Y))
    assert changed("odd") == 0


def test_dump_shows_what_changed(tmp_path):
    run(dump_passes=str(tmp_path))
    (path,) = [p for p in tmp_path.iterdir() if "merge_equal" in p.name]
    text = path.read_text()
    assert "-" in text and "relu_1" in text and "before merge_equal" in text


def test_page_is_current():
    root = pathlib.Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("passes_doc", root / "tools" / "passes_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (root / "docs" / "passes.md").read_text() == module.text(), "run python tools/passes_doc.py"


def listed(monkeypatch, **needs):
    """Have `swap` run as a pass of the package that says what it needs; how often it was called."""
    called = []
    item = Pass("swap", lambda module: (called.append(module), swap(module))[1], **needs)
    monkeypatch.setitem(registry._passes, "joint_graph", (item, *registry._passes["joint_graph"]))
    return called


@pytest.mark.parametrize("needs", [{"calls": "aten.sin aten.cos*"}, {"setting": "freeze"}])
def test_a_pass_whose_calls_a_graph_lacks_is_not_run(needs, monkeypatch):
    called = listed(monkeypatch, **needs)
    torch.testing.assert_close(run(check_passes=False), f(X, Y))
    assert not called and changed("swap") == 0


@pytest.mark.parametrize("needs", [{"calls": "aten.sin aten.relu"}, {"calls": "aten.rel*"}, {}])
def test_a_pass_whose_calls_a_graph_has_is_run(needs, monkeypatch):
    listed(monkeypatch, **needs)
    torch.testing.assert_close(run(check_passes=False), 2 * torch.sigmoid(X * Y))
    assert changed("swap") == 2


@pytest.mark.parametrize("checked", [False, True])
def test_a_pass_that_may_round_does_not_run_with_eagers_numbers(checked, monkeypatch):
    called = listed(monkeypatch, rounds=True)
    torch.testing.assert_close(run(check_passes=checked, numerics="eager"), f(X, Y))
    assert not called and changed("swap") == 0
    run(check_passes=False)
    assert called and changed("swap") == 2


def test_passes_of_libraries_may_round():
    """Passes that give products, convolutions, norms or attention to another kernel say that they may round."""
    rounding = {p.item.name for p in registry.numbered() if p.item.rounds}
    assert rounding == set(MAY_ROUND.split())


MAY_ROUND = """
add_rows_in_place add_rows_to_zeros add_to_addmm addmm_to_add aligned_products attention_by_blocks attention_by_parts
bias_behind_convolution bias_gradients_apart convolutions_channels_last decompose_norms depthwise_by_kernels
depthwise_gradients fold_batch_norms fold_into_cublas fuse_attention grouped_points_to_products keep_logits
linear_to_onednn long_windows_to_products norms_again patches_to_products products_in_float32 small_products_to_sums
tensor_cores_channels_last
"""


def test_a_pass_that_changes_a_graph_without_what_it_says_is_found(monkeypatch):
    listed(monkeypatch, calls="aten.sin")
    with pytest.raises(Exception, match="pass 'swap' changed a graph without what it is said to need: aten.sin"):
        run(check_passes=True)


def test_what_an_earlier_pass_wrote_counts(monkeypatch):
    listed(monkeypatch, calls="aten.sigmoid")
    fuser.passes.register("joint_graph", "before", swap, before="swap")
    later: list[fx.GraphModule] = []
    item = Pass("behind", lambda module: len(later.append(module) or ()), calls="aten.sigmoid")
    monkeypatch.setitem(registry._passes, "post_grad", (item, *registry._passes["post_grad"]))
    run(check_passes=False)
    assert changed("before") == 2 and len(later) == 1


LAZY = """
import sys, torch, fuser
with torch.no_grad():
    torch.compile(lambda x, y: torch.relu(x * y) - y, backend=fuser.backend)(torch.ones(4), torch.ones(4))
print([m for m in sys.modules if m.startswith(tuple(f"fuser.passes.{name}" for name in (
    "attention", "batch_norms", "conv", "cublas", "flex_attention", "foreach", "freezing", "losses", "matmuls", "norm",
    "onednn", "pools", "providers", "wide_products", "written_pieces",
))) and m != "fuser.passes.normalise"])
"""


def test_passes_are_imported_where_a_graph_needs_them():
    env = {**os.environ, "FUSER_CHECK_PASSES": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = forked.run(["-c", LAZY], env, dynamo=True)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_every_pass_can_be_loaded_and_says_what_it_does():
    for p in registry.numbered():
        assert p.item.doc and callable(getattr(p.item.function, "loaded", p.item.function))


SIZED_BY_DATA = {
    "index": lambda x: (x > 0).nonzero().float().sum() + x[x > 0].sum(),
    "masked_select": lambda x: x.masked_select(x > 0).sum() + x.masked_select(x > 0).exp().sum(),
    "nonzero": lambda x: (x + 1 > 0).nonzero() + (x + 1 > 0).nonzero(),
    "unique": lambda x: x.to(torch.int64).to(torch.int64).unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.flatten().long().abs().reshape(-1).reshape(-1)[:6], 0) * 2,
    "bincount": lambda x: torch.bincount(x.long().abs().reshape(-1).reshape(-1)) + (x.t().t() > 0).sum(),
    "item": lambda x: torch.zeros(x.reshape(-1).reshape(-1).abs().sum().long().item()) + (x > 0).sum() + (x > 0).sum(),
    "slice": lambda x: x.flatten()[: (x > 0).sum().item()] + (x > 0).sum(),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SIZED_BY_DATA)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_checked_graphs_may_have_sizes_that_depend_on_data(name, requires_grad):
    """A pass that changes what such a node reads does not change its size."""
    g = SIZED_BY_DATA[name]
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    x = torch.linspace(-3, 4, 24).reshape(6, 4).requires_grad_(requires_grad)
    with torch._dynamo.config.patch(settings), config.override(check_passes=True):
        result = torch.compile(g, backend=fuser_backend)(x)
    torch.testing.assert_close(result, g(x))
    assert last_compilation().passes
