"""Calls of fused scripts, and of groups inside branches and loops: by the native launcher, and its Python stand-ins."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import fuser
from fuser.frontends import script_operators
from fuser.frontends.fuse_script import FusedFunction
from fuser.runtime import launcher
from tests.unit.test_fuse_script import assert_alike, error_line
from tests.unit.test_torchscript_programs import outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(not launcher.wait(60), reason="there is no native launcher"),
]


def several(x: Tensor, y: Tensor, a: float, n: int, flag: bool):
    if n > 0:
        p = torch.relu(x * y + a) * n
        return p, (p > 0) == flag, p.sum(-1)
    return x, y > 0, y


def looped(x: Tensor, y: Tensor, n: int):
    for _ in range(n):
        x = torch.tanh(x * y + 1)
    return x


def fused_of(program):
    return fuser.fuse_script(torch.jit.script(program))


def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def operator_of(fused):
    (group,) = fused.fusion.groups
    return group.operator


@pytest.fixture(params=["native", "python"])
def operators(request, monkeypatch):
    """Both implementations: operators are made anew, by a graph of their own."""
    monkeypatch.setattr(script_operators, "_known", weakref.WeakValueDictionary())
    if request.param == "python":
        monkeypatch.setattr(script_operators, "_is_usable", lambda _: False)
    return request.param


def test_every_argument_and_result(operators):
    script, fused = torch.jit.script(several), fused_of(several)
    assert (operator_of(fused).number is not None) == (operators == "native")
    base = torch.randn(6, 8)
    views = [base, base.t(), base[::2, 1:], base[:, :0], base[0, 0]]
    for x in (*views, base.double(), base.to(torch.bfloat16), base.int()):
        for a, n, flag in ((0.5, 2, True), (-1.25, 3, False), (float("inf"), 1 << 40, True), (1.0, -1, True)):
            with torch.no_grad():
                assert_alike(fused(x, x, a, n, flag), script(x, x, a, n, flag))
    handle = operator_of(fused).handle
    assert handle.hits > 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("elements", [16, 3 << 20])  # results of 4 MiB and more come from warm storages
def test_results_die_with_their_readers(operators, elements):
    fused = fused_of(looped)
    x, y = torch.rand(elements), torch.rand(elements)
    expected = torch.jit.script(looped)(x, y, 3)
    torch.testing.assert_close(fused(x, y, 3), expected)
    assert operator_of(fused).handle.hits
    result = fused(x, y, 3)
    held = [weakref.ref(t.untyped_storage()) for t in ((x, y, result) if elements < 1 << 20 else (x, y))]
    assert x._use_count() == y._use_count() == result._use_count() == 1
    before = resident_mib()
    for _ in range(40 if elements > 1 << 20 else 0):
        fused(x, y, 3)
    assert resident_mib() - before < 120  # 40 results are 480 MiB
    del x, y, result
    gc.collect()
    assert all(storage() is None for storage in held)


def test_gradients_errors_and_switches(operators):
    script, fused = torch.jit.script(looped), fused_of(looped)
    x, y = torch.rand(5, 4), torch.rand(4)
    found = []
    for f in (script, fused):
        v = x.clone().requires_grad_()
        found.append(torch.autograd.grad(f(v, y, 2).sum(), v)[0])
    torch.testing.assert_close(*found)
    for args in ((x, torch.rand(3), 2), (x, torch.empty(4, device="meta"), 2)):
        messages = []
        for f in (script, fused):
            with pytest.raises(RuntimeError) as caught:
                f(*args)
            messages.append(error_line(caught.value))
        assert messages[0] == messages[1]
    assert x._use_count() == 1  # an error keeps no argument
    hits = operator_of(fused).handle.hits
    for context in (fuser.config.override(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context, torch.no_grad():
            assert_alike(fused(x, y, 2), script(x, y, 2))
    assert operator_of(fused).handle.hits == hits
    with torch.inference_mode():
        assert fused(x, y, 2).is_inference()


def test_threads():
    fused = fused_of(looped)
    x, y = torch.rand(64), torch.rand(64)
    want = fused(x, y, 50)
    wrong = []

    def call():
        for _ in range(30):
            if not fused(x, y, 50).equal(want):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_an_operator_that_is_gone():
    monkey = fused_of(looped)
    operator = operator_of(monkey)
    name = operator.name.split("::")[1]
    number, native = operator.number, launcher.native()
    assert number is not None and native is not None
    call = getattr(torch.ops.fuser_ts, name)
    x = torch.rand(4)
    torch.testing.assert_close(call(x, x, number), torch.tanh(x * x + 1))
    with pytest.raises(RuntimeError, match="gone with the script"):
        call(x, x, number + 1000)
    with pytest.raises(RuntimeError, match="gone with the script"):
        call(x, x, -1)
    native.unscripted(number)  # as if its script had been dropped during the call
    with pytest.raises(RuntimeError, match="gone with the script"):
        call(x, x, number)


def test_what_the_launcher_does_not_take():
    native = launcher.native()
    assert native is not None
    assert native.scripted(lambda x: x, "t", 1) is None  # no native handle
    assert native.scripted(launcher.make_handle(lambda a, s: a), "x", 1) is None
    for wrong in (3, torch.empty(2, device="meta"), torch.empty(2).to_sparse()):
        assert not native.reads_alike(wrong)


# -- scripts called by the launcher ------------------------------------------------------------------------------------
def plain(x: Tensor, y: Tensor):
    return torch.relu(x * y + 1)


def numbers(y: Tensor, n: int, x: Tensor, a: float, flag: bool):
    return (x * a + n).tanh() * y, (x > a) == flag


def with_defaults(x: Tensor, y: Tensor, a: float = 0.5):
    return torch.relu(x * y + a)


_X = torch.linspace(-2, 2, 12).view(3, 4)
CALLS = {
    plain: [(_X, _X), (_X, _X[0]), (_X,), (_X, _X, _X), (_X, 2.0), (_X, None), (_X, nn.Parameter(_X))],
    numbers: [(_X, 2, _X, 0.5, True), (_X, True, _X, 1, False), (_X, 2.0, _X, 0.5, True), (_X, 2, _X, 0.5, 1), ()],
    with_defaults: [(_X, _X), (_X, _X, 2.0), (_X, _X, 3), (_X,)],
    several: [(_X, _X, 0.5, 1, True), (_X, _X, 1, True, False), (_X, _X, 0.5, 0, True)],
}
NAMED = {
    plain: [((_X,), {"y": _X}), ((), {"y": _X, "x": _X[:1]}), ((_X,), {"z": _X})],
    with_defaults: [((_X,), {"y": _X}), ((_X, _X), {"a": 2.0}), ((_X, _X, 1.0), {"a": 2.0})],
}


@pytest.mark.sampled(4, also=("plain-python", "with_defaults-python"))
@pytest.mark.parametrize("by", ["launcher", "python"])
@pytest.mark.parametrize("program", list(CALLS), ids=lambda p: p.__name__)
def test_every_way_to_call(program, by, monkeypatch):
    if by == "python":
        monkeypatch.setattr(launcher, "_native", None)
    script, fused = torch.jit.script(program), fused_of(program)
    assert isinstance(fused, FusedFunction) and (type(fused) is FusedFunction) == (by == "python")
    assert str(fused.schema) == str(script.schema)
    contexts = (
        contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.device("cpu"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: fuser.config.override(enabled=False),
    )  # fmt: skip
    for context in contexts:
        for args, kwargs in (*((args, {}) for args in CALLS[program]), *NAMED.get(program, ())):
            with context():
                want, expected = outcome(lambda *a, k=kwargs: script(*a, **k), args)
                got, error = outcome(lambda *a, k=kwargs: fused(*a, **k), args)
            assert type(error) is type(expected), (args, error, expected)
            if expected is None:
                assert_alike(got, want)
                leaves = torch.utils._pytree.tree_leaves
                assert [t.requires_grad for t in leaves(got)] == [t.requires_grad for t in leaves(want)]
