"""Scripts that run in fused groups: values, structure, state, errors and randomness of the script itself."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
from typing import Optional

import pytest
import torch
from torch import nn
from torch.jit.annotations import BroadcastingList2, BroadcastingList3

import fuser
from fuser.errors import InputError, Unsupported
from fuser.frontends.fuse_script import FusedFunction, FusedModule
from tests.unit import torchscript_corpus as corpus
from tests.unit.test_torchscript_programs import copied, outcome
from tests.unit.torchscript_programs import PROGRAMS, Plain, hooked, x

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")

_ALL = bool(os.environ.get("FUSER_TEST_ALL"))
_FOUND = [
    *((p, args) for p, args in corpus.FUNCTIONS),
    *((p, args) for p, args in corpus.MODULES),
    *((p, (x(), *args)) for p, args, _ in PROGRAMS),
]
_CASES = list(enumerate(_FOUND)) if _ALL else list(enumerate(_FOUND))[::12]


def scripted(program):
    torch.manual_seed(0)
    makes = inspect.isclass(program) or program.__name__ == "<lambda>"
    made = program() if makes else program
    return torch.jit.script(made.eval() if isinstance(made, nn.Module) else made)


def groups_of(fused):
    return fused.fusion.groups


def assert_alike(got, want):
    """The same structure, dtypes and strides, and values as near as eager's float32 allows."""
    named = isinstance(want, tuple) and hasattr(want, "_fields")
    assert got._fields == want._fields if named else type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        torch.testing.assert_close(got, want, equal_nan=True)
    elif isinstance(want, (list, tuple, dict)):
        assert len(got) == len(want)
        for k in want if isinstance(want, dict) else range(len(want)):
            assert_alike(got[k], want[k])
    else:
        assert got == want or (got != got and want != want)


def error_line(error):
    """What went wrong, without the traces of TorchScript and Python around it."""
    lines = str(error).splitlines()
    said: str = next((n for n in lines if n.startswith("RuntimeError: ")), lines[0])
    return said.replace("RuntimeError: ", "")


def bits(value):
    """The tensors of a result, NaN as a number."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [v.detach().nan_to_num(7) for v in leaves if isinstance(v, torch.Tensor)]


def same_bits(some, others):
    return all(a.equal(b) for a, b in zip(some, others, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("program", "args"), [c for _, c in _CASES], ids=[f"{i}-{getattr(p, '__name__', '')}" for i, (p, _) in _CASES]
)
def test_as_the_script(program, args):
    script = scripted(program)
    fused = fuser.fuse_script(script)
    assert isinstance(fused, (FusedFunction, FusedModule))
    calls, wanted = [], []
    for _ in range(3):
        given, passed = copied(args), copied(args)
        torch.manual_seed(1)
        want, expected = outcome(script, given)
        torch.manual_seed(1)
        got, error = outcome(fused, passed)
        # TorchScript drops checks when it optimises, in this test or before: it raises what comes after.
        dropped = expected is not None and type(error) is torch.jit.Error
        assert type(error) is type(expected) or dropped, (error, expected)
        if expected is None:
            assert_alike(got, want)
            assert_alike(passed, given)
            calls.append(bits(got))
            wanted.append(bits(want))
    assert not any(u.kind == "graph" for u in fused.fusion.unfused), fused.fusion.unfused
    if isinstance(script, nn.Module):
        assert_alike(dict(fused.state_dict()), dict(script.state_dict()))
        if list(script.buffers()):
            return  # its state may change from call to call
    if calls and all(map(same_bits, wanted[1:], wanted)):  # ATen's own products may differ between two calls
        for _ in range(97 if _ALL else 0):
            torch.manual_seed(1)
            calls.append(bits(fused(*copied(args))))
        assert all(map(same_bits, calls[1:], calls))


@pytest.mark.sampled(4, also=("optional_weights",))
@pytest.mark.parametrize(("program", "several"), corpus.CHANGING, ids=[p.__name__ for p, _ in corpus.CHANGING])
def test_arguments_that_change(program, several):
    script = scripted(program)
    fused = fuser.fuse_script(script)
    for args in (*several, *reversed(several)):
        given = x()[:4, :6]
        want, expected = outcome(script, (given, *args))
        got, error = outcome(fused, (given, *args))
        assert type(error) is type(expected), (error, expected)
        if expected is None:
            assert_alike(got, want)


# -- functions ---------------------------------------------------------------------------------------------------------
def test_defaults_and_keywords():
    @torch.jit.script
    def f(x, scale: float = 2.5, n: int = 3, flag: bool = True):
        if flag:
            return (x * scale + n).relu()
        return x - n

    fused = fuser.fuse_script(f)
    assert isinstance(fused, torch.jit.ScriptFunction)
    assert str(fused.schema) == str(f.schema)
    v = torch.randn(4, 6)
    named = (((v,), {"n": 2}), ((), {"x": v, "flag": False}))
    for args, kwargs in (((v,), {}), ((v, 1.5), {}), ((v, 1.0, 2, False), {}), *named):
        assert_alike(fused(*args, **kwargs), f(*args, **kwargs))
    with pytest.raises(RuntimeError):
        fused()


def stretched(x, by: BroadcastingList2[int], to: Optional[BroadcastingList3[float]] = None):  # noqa: UP045
    y = (x * by[0]).relu() + by[1]
    return y if to is None else y * to[0] + to[2]


class Stretched(nn.Module):
    def forward(self, x, by: BroadcastingList2[int], to: Optional[BroadcastingList3[float]] = None):  # noqa: UP045
        return stretched(x, by, to)


@pytest.mark.parametrize("program", [stretched, Stretched], ids=["function", "module"])
def test_one_number_stands_for_a_list(program):
    script = scripted(program)
    fused = fuser.fuse_script(script)
    for args, named in (((x(), 3), {}), ((x(), [2, 4]), {}), ((x(), 3, 2.5), {}), ((x(),), {"to": 1.5, "by": 2})):
        assert_alike(fused(*args, **named), script(*args, **named))
    for args in ((x(), 1.5), (x(), 3, 2)):  # of another kind
        for function in (script, fused):
            with pytest.raises(RuntimeError):
                function(*args)


def by_name(x, *, n: int, by: BroadcastingList2[int]):
    return (x * n).relu() + by[1]


class ByName(nn.Module):
    def forward(self, x, *, n: int, by: BroadcastingList2[int]):
        return by_name(x, n=n, by=by)


@pytest.mark.parametrize("program", [by_name, ByName], ids=["function", "module"])
def test_arguments_by_name_only(program):
    script = scripted(program)
    for function in (script, fuser.fuse_script(script)):
        assert_alike(function(x(), by=2, n=3), script(x(), n=3, by=[2, 2]))
        for args, named in (((x(), 3, 2), {}), ((x(), 3), {"by": 2}), ((x(),), {"n": 3}), ((), {"n": 3, "by": 2})):
            with pytest.raises(RuntimeError):
                function(*args, **named)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)

    def forward(self, x, flag: bool):
        a, b = self.norm(self.linear(x)).relu().chunk(2, 1)
        if flag:
            a = a.tanh() * b + 1
        return torch.cat([a, b.sigmoid() * 2 - a]), a.softmax(-1) * a.exp()


def autocasts(x):
    return (x * 2).softmax(-1) + 1


def attends(x):
    y = torch.relu(x) * 2 + 1
    return nn.functional.scaled_dot_product_attention(y, y, y) * 2 + 1


AUTOCAST = {
    "a function": (lambda: autocasts, lambda dtype: (torch.randn(4, 6).to(dtype),), True),
    "a module": (lambda: Cell().eval(), lambda dtype: (torch.randn(4, 6), dtype is torch.float32), True),
    "attention": (lambda: attends, lambda dtype: (torch.randn(1, 2, 8, 8).to(dtype),), False),
}  # fmt: skip


@pytest.mark.sampled(2, also=("a module-torch.float32",))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("program", AUTOCAST)
def test_autocast_casts_as_the_script_does(program, dtype):
    torch.manual_seed(0)
    make, given, fits = AUTOCAST[program]
    script, args = torch.jit.script(make()), given(dtype)
    fused = fuser.fuse_script(script)
    for enabled in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            for _ in range(2):
                want = script(*args)
            got = fused(*args)
            fusion = fused.fusion
            hits = [g.operator.handle.hits for g in fusion.groups]
            again = fused(*args)
        for a, b, c in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want, again)), strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(a, c)
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        if enabled and not fits:
            assert not fusion.groups and "autocast may change aten::scaled_dot_product_attention" in str(fusion.unfused)
        else:
            ran = [g.operator.handle.hits for g in fusion.groups]
            assert ran != hits and all(a <= b for a, b in zip(hits, ran))
    assert len(fuser.fuse_script(script).fusion.groups) == len(fused.fusion.groups)


def asks_for_autocast(x):
    y = torch.softmax((x * 2).relu(), -1)
    return y + 1 if torch.is_autocast_cpu_enabled() else y * 2


def test_a_script_that_asks_for_autocast():
    script = torch.jit.script(asks_for_autocast)
    fused = fuser.fuse_script(script)
    before = torch._C._jit_set_autocast_mode(False)  # torch's pass crashes on such a script
    try:
        for enabled in (True, False, True):
            with torch.autocast("cpu", enabled=enabled):
                assert_alike(fused(x()), script(x()))
    finally:
        torch._C._jit_set_autocast_mode(before)


def test_autocast_in_another_dtype_is_another_graph():
    script = torch.jit.script(product)
    fused, x = fuser.fuse_script(script), torch.randn(4, 4)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert fused(x).dtype is script(x).dtype is dtype


def product(x):
    return torch.relu(torch.mm(x, x)).neg()


def test_gradients_under_autocast():
    script = torch.jit.script(autocasts)
    fused = fuser.fuse_script(script)
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    found = []
    for function in (script, fused):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            function(leaf).square().sum().backward()
        found.append(leaf.grad)
    assert found[0].dtype is found[1].dtype
    torch.testing.assert_close(found[1], found[0], atol=2e-2, rtol=2e-2)


def test_fused_again():
    for script in (torch.jit.script(corpus.lstm_cell), torch.jit.script(Plain())):
        once = fuser.fuse_script(script)
        assert len(fuser.fuse_script(once).fusion.groups) == len(once.fusion.groups) > 0


def test_not_a_script():
    with pytest.raises(InputError, match="example_inputs is a Tensor: expected a list or tuple of the inputs of one"):
        fuser.fuse_script(torch.jit.script(nn.ReLU()), example_inputs=torch.ones(2, 3))
    with pytest.raises(InputError, match="not TorchScript"):
        fuser.fuse_script(lambda x: x)


def test_missing_torchscript(monkeypatch):
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    with pytest.raises(
        Unsupported, match="unavailable: this version of torch has no torch._C._create_function_from_graph"
    ):
        fuser.fuse_script(torch.jit.script(Plain()))


def test_a_defect_leaves_the_script(monkeypatch):
    from fuser.frontends import fuse_script

    def broken(*_):
        raise KeyError("defect")

    monkeypatch.setattr(fuse_script, "fused_graph", broken)
    script = torch.jit.script(Plain())
    with pytest.warns(RuntimeWarning, match="KeyError: 'defect'"):
        fused = fuser.fuse_script(script)
    assert_alike(fused(x()), script(x()))


def test_prepared_for_examples():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(torch.relu(self.norm(x)) * 2) + 1

    script = torch.jit.script(Draws())
    before = {k: v.clone() for k, v in script.state_dict().items()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    fused = fuser.fuse_script(script, example_inputs=(given,))
    assert torch.random.get_rng_state().equal(state)
    assert_alike({k: v.clone() for k, v in fused.state_dict().items()}, before)


# -- modules -----------------------------------------------------------------------------------------------------------
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.factor, self.sizes = 2.0, [2, 3]

    def forward(self, x, gain: float = 1.5):
        y = torch.relu(self.norm(self.linear(x)) * self.factor) + gain
        return self.drop(y).view([-1] + self.sizes)


def pair():
    torch.manual_seed(0)
    script = torch.jit.script(Normed())
    return script, fuser.fuse_script(script)


def test_training_and_evaluation():
    script, fused = pair()
    for mode in (True, False, True):
        script.train(mode), fused.train(mode)
        torch.manual_seed(1)
        want = script(x())
        torch.manual_seed(1)
        assert_alike(fused(x()), want)
        assert_alike(dict(fused.state_dict()), dict(script.state_dict()))
        assert len(fused.fusion.groups) == 1
    fused.eval()
    assert script.training and not fused.training and not fused.norm.training
    assert any("aten::batch_norm" in g.calls for g in fused.fusion.groups)


def test_submodule_flags_count():
    script, fused = pair()
    for m in (script, fused):
        m.eval()
        m.norm.train()
    assert_alike(fused(x()), script(x()))
    assert_alike(dict(fused.state_dict()), dict(script.state_dict()))


def test_attributes_state_and_moves():
    script, fused = pair()
    for m in (script, fused):
        m.eval()
        m.factor = 3.0
        m.sizes = [3, 2]
    assert_alike(fused(x()), script(x()))
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in script.named_parameters()]
    fused.to(torch.float64)
    assert fused(x().double()).dtype is torch.float64
    assert script(x()).dtype is torch.float32
    assert script.linear.weight.dtype is torch.float32
    other = {k: torch.ones_like(v) for k, v in script.state_dict().items()}
    fused.load_state_dict(other)
    assert fused.linear.weight.eq(1).all()


class Views(nn.Module):
    """Tensors that share memory: with each other, in containers, with a parameter."""

    def __init__(self):
        super().__init__()
        self.whole = torch.arange(6.0)
        self.turned = self.whole.view(2, 3).t()
        self.parts = [self.whole[1:3], torch.ones(2)]
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("middle", self.weight.detach()[1:3])
        self.register_buffer("equal", torch.ones(1).expand(2))

    def forward(self, x):
        self.turned[1] += 10
        self.parts[0][0] *= 2
        return (self.whole.sum() * x[:2, :2]).relu() + 1, self.turned * 2 + 1, self.middle * self.equal


def test_attributes_that_share_memory():
    script = scripted(Views)
    fused = fuser.fuse_script(script)
    again = fuser.fuse_script(fused)
    for _ in range(3):
        want = script(x())
        assert_alike(fused(x()), want)
        assert_alike(again(x()), want)
    with torch.no_grad():
        script.weight.add_(1)
    for module in (fused, again):
        assert module.middle.equal(script.middle) and module.equal.stride() == script.equal.stride()


def test_the_original_and_its_siblings_stay():
    first, second = torch.jit.script(Normed().eval()), torch.jit.script(Normed().eval())
    texts = str(first.graph), str(second.graph)
    wanted = first(x()), second(x())
    fused = fuser.fuse_script(first)
    fused.factor = 7.0
    fused.sizes = [6, 1]
    fused(x())
    assert (str(first.graph), str(second.graph)) == texts
    assert first(x()).equal(wanted[0])
    assert second(x()).equal(wanted[1])
    assert "fuser_ts" not in str(second.forward.inlined_graph)


@pytest.mark.parametrize(("top", "inner"), [(True, False), (False, True), (True, True)])
def test_hooks(top, inner):
    script = torch.jit.script(hooked(top, inner))
    assert_alike(fuser.fuse_script(script)(x()), script(x()))


def test_traced():
    class Traced(nn.Module):
        def forward(self, x):
            b, n = x.shape
            return (x * 2).relu().view(n, b) * n + b, x.chunk(2, 1)[1].exp() + 1

    module = torch.jit.trace(Traced(), (torch.randn(4, 6),))
    function = torch.jit.trace(lambda x: (x * 2 + 1).relu() * x.size(0), (torch.randn(4, 6),))
    for traced in (module, function):
        fused = fuser.fuse_script(traced)
        for shape in ((4, 6), (2, 8), (1, 2)):
            given = torch.randn(shape)
            assert_alike(fused(given), traced(given))
        assert fused.fusion.groups


@pytest.mark.parametrize(
    ("program", "args"),
    [(Normed, (x(),)), (corpus.Decoder, (torch.tensor([1, 2]),)), (corpus.branch_on_argument, (x(), True))],
)
def test_saved_is_the_original(program, args):
    script = scripted(program)
    fused = fuser.fuse_script(script)
    file = io.BytesIO()
    torch.jit.save(fused, file)
    assert b"fuser" not in file.getvalue()
    file.seek(0)
    loaded = torch.jit.load(file)
    assert_alike(loaded(*args), script(*args))
    again = fuser.fuse_script(loaded)
    assert_alike(again(*args), script(*args))
    assert len(again.fusion.groups) == len(fused.fusion.groups) > 0


def scaled(x, n: int = 2):
    return torch.softmax((x * n).relu() + 1, -1)


def halved(x):
    return (x / 2).tanh() - x


@pytest.mark.parametrize("callee", [torch.jit.script(scaled), torch.jit.trace(halved, x())], ids=["script", "trace"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_scripts_that_call_a_fused_one(callee, kept):
    """They call the original: with its defaults, in their files, and after the fused one is gone."""
    called = fuser.fuse_script(callee)

    def function(x):
        return called(x) + called(x * 3)

    class Module(nn.Module):
        def forward(self, x):
            return called(x) + called(x * 3)

    wanted = callee(x()) + callee(x() * 3)
    assert_alike(called(x()), callee(x()))
    scripts = torch.jit.script(function), torch.jit.script(Module())
    if not kept:
        called = None
        gc.collect()
    for script in scripts:
        assert "fuser_ts" not in str(script.inlined_graph)
        assert_alike(script(x()), wanted)
        assert_alike(fuser.fuse_script(script)(x()), wanted)
    file = io.BytesIO()
    torch.jit.save(scripts[1], file)
    file.seek(0)
    assert_alike(torch.jit.load(file)(x()), wanted)


def repeated(x, times: int):
    for i in range(times):
        x = (x * i).tanh() - x
    return x


class Calls(nn.Module):
    def __init__(self, called, *rest):
        super().__init__()
        self.called, self.rest = called, rest

    def forward(self, x):
        return self.called(x, *self.rest) + 1


@pytest.mark.parametrize(
    ("program", "rest"), [(scaled, ()), (repeated, (3,)), (Normed, ())], ids=["function", "loop", "module"]
)
def test_traces_of_a_fused_one(program, rest):
    """They have the original, which stays as it was: a trace may add methods to a module's type."""
    script = scripted(program)
    for called in (fuser.fuse_script(script), script):
        traced = torch.jit.trace(Calls(called, *rest).eval(), (x(),))
        assert "fuser_ts" not in str(traced.inlined_graph)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        assert_alike(torch.jit.load(file)(x()), script(x(), *rest) + 1)


def test_methods_and_containers():
    script = torch.jit.script(nn.Sequential(corpus.Exported(), corpus.Exported()))
    fused = fuser.fuse_script(script)
    assert len(fused) == 2
    assert_alike(fused[0].shifted(x()), script[0].shifted(x()))
    assert_alike(fused(x()), script(x()))
    single = fuser.fuse_script(torch.jit.script(corpus.Exported()))
    assert_alike(single.shifted(x()), x() + 1)


class Shelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))

    def forward(self, x):
        return (x[:, :3] * self.w).relu() + 1

    @torch.jit.export
    def __len__(self):
        return 3

    @torch.jit.export
    def __contains__(self, k: int):
        return k < 3

    @torch.jit.export
    def __getitem__(self, k: int):
        return self.w[k] * 2


def test_what_python_asks_a_module():
    script = scripted(Shelf)
    fused = fuser.fuse_script(script)
    assert (len(fused), 2 in fused, 5 in fused) == (3, True, False)
    assert_alike(fused[1], script[1])
    assert_alike(fused(x()), script(x()))
    assert fused.code == script.code
    assert fused.code_with_constants[0] == script.code_with_constants[0]


# -- what is told ------------------------------------------------------------------------------------------------------
def test_graph_for():
    fused = fuser.fuse_script(torch.jit.script(corpus.loop_break))
    text = fuser.debug.graph_for(fused, x(), 3)
    wanted = ("prim::Loop", "fuser_ts::group_", "aten.exp", "ran by kernels", "torchscript_corpus.py", "not fused:")
    for part in wanted:
        assert part in text, text
    with pytest.raises(InputError, match="expected what fuser.fuse_script returns"):
        fuser.debug.graph_for(corpus.loop_break)


# -- calls -------------------------------------------------------------------------------------------------------------
def _affine(x, y, scale: float, flag: bool):
    z = (x * scale + y).tanh()
    return z, z + y


def _other_order(x, y, unused: int):
    return (y + 1).relu() * x


@pytest.mark.parametrize("program", [_affine, _other_order], ids=lambda p: p.__name__)
def test_a_script_of_one_group_is_called_by_its_handle(program):
    _affine.__annotations__ = {"scale": float, "flag": bool}
    script = torch.jit.script(program)
    fused = fuser.fuse_script(script)
    assert fused.direct is not None
    u, v = torch.randn(3, 4), torch.randn(3, 4)
    rest = (2.5, True) if program is _affine else (3,)
    made = fused.fusion.groups[0].operator.handle
    for args in ((u, v), (nn.Parameter(u), v)):
        assert_alike(fused(*args, *rest), script(*args, *rest))
    with torch.no_grad():
        fused(u, v, *rest)
        before = made.hits
        fused(u, v, *rest)
        assert made.hits == before + 1
    wrong = [(u, v), (u, v, *rest, 1), (u, 3, *rest), (u, torch.randn(7, 9), *rest), (u, v.to("meta"), *rest)]
    wrong += [(u, v, 2, 1), (u, v, True, False), (u, v, "a", 0)] if program is _affine else [(u, v, 2.5)]
    for args in wrong:  # conversions and errors are the script's
        want, expected = outcome(script, args)
        got, error = outcome(fused, args)
        assert type(error) is type(expected), (args, error, expected)
        assert expected is not None or type(got) is type(want)
    w = u.clone().requires_grad_()
    parts = fused(w, v, *rest)
    (parts[0] if isinstance(parts, tuple) else parts).sum().backward()
    assert w.grad is not None


def test_exported_methods_are_fused_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 6))

        def forward(self, x):
            return self.encode(x, 1.5) * 2

        @torch.jit.export
        def encode(self, x, scale: float = 1.5):
            if self.training:
                return (x * self.w * scale).relu()
            return (x + self.w).tanh() * scale

    script = torch.jit.script(Two())
    fused = fuser.fuse_script(script)
    x = torch.randn(4, 6)
    for training in (True, False, True):
        for f in (script, fused):
            f.train(training)
        assert_alike(fused.encode(x), script.encode(x))
        assert_alike(fused.encode(x, scale=0.5), script.encode(x, scale=0.5))
        assert_alike(fused(x), script(x))
        assert len(groups_of(fused.encode)) > 0
    assert "group" in fuser.debug.graph_for(fused.encode, x)
    assert str(fused.encode.schema) == str(script.encode.schema)
    with torch.no_grad():
        fused.w.mul_(2)
    assert_alike(fused.encode(x), script.encode(x))
    assert_alike(copy.deepcopy(fused).encode(x), script.encode(x))
    loaded = io.BytesIO()
    torch.jit.save(fused, loaded)
    loaded.seek(0)
    assert_alike(torch.jit.load(loaded).encode(x), script.encode(x))
