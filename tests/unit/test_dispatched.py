"""Resized images and circular pads through torch.compile: traced in fast forms, with eager's bits and gradients."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import export
from torch.fx.experimental.proxy_tensor import make_fx

import fuser
from fuser import aot
from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes import decompositions, dispatched
from tests.unit.memory_layouts import LAYOUTS

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
MODES = {1: ("nearest", "nearest-exact", "linear"), 3: ("nearest", "nearest-exact", "trilinear")}
MODES[2] = ("nearest", "nearest-exact", "bilinear", "bicubic", "bilinear, antialiased", "bicubic, antialiased")
TO = {
    "twice": {"scale_factor": 2.0}, "by a half": {"scale_factor": 0.5}, "by 1.7": {"scale_factor": 1.7},
    "by 1.7, anew": {"scale_factor": 1.7, "recompute_scale_factor": True}, "to a size": {"size": 7},
}  # fmt: skip
# Modes take turns with the orders of memory, in which they are computed alike; each number of dims has both.
ORDERS = [(dims, mode, dims > 1 and n % 2 == 0) for dims, modes in MODES.items() for n, mode in enumerate(modes)]
if os.environ.get("FUSER_TEST_ALL"):
    ORDERS = [(dims, mode, last) for dims, mode, _ in ORDERS for last in (False, True)[:dims]]


def resized(x, mode, how, corners=None):
    mode, _, rest = mode.partition(", ")
    return F.interpolate(x, mode=mode, align_corners=corners, antialias=bool(rest), **how)


def targets(function, *args, **options):
    """The operators of the graph that AOTAutograd makes for inference."""
    found = []

    def keep(gm, inputs):
        found.extend(n.target for n in gm.graph.nodes if n.op == "call_function")
        return gm.forward

    from torch._functorch.aot_autograd import aot_module_simplified

    def backend(gm, inputs):
        with dispatched.in_fast_forms():
            return aot_module_simplified(gm, inputs, fw_compiler=keep)

    with torch.no_grad():
        torch.compile(function, backend=backend, **options)(*args)
    return found


@pytest.mark.sampled(12, also=("3-nearest-exact-False",))
@pytest.mark.parametrize(("dims", "mode", "last"), ORDERS)
def test_bits_and_gradients(clean, dims, mode, last):
    """To each size, from an input of its own, in one graph."""
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    xs = [torch.randn(2, 3, *(6, 5, 4)[:dims]) for _ in TO]
    xs = [x.contiguous(memory_format=formats[dims]) if last else x for x in xs]
    fn = lambda *xs: [resized(torch.sin(x), mode, to) * 2 + 1 for x, to in zip(xs, TO.values())]  # noqa: E731
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=False)
    mine, theirs = ([x.clone().requires_grad_() for x in xs] for _ in range(2))
    got, want = compiled(*mine), fn(*theirs)
    for results in (got, want):
        sum(y.square().sum() for y in results).backward()
    with torch.no_grad():
        again, wanted = compiled(*xs), fn(*xs)
    for to, *found in zip(TO, got, want, mine, theirs, again, wanted, strict=True):
        y, expected, a, b, inferred, e = found
        assert y.stride() == expected.stride() and inferred.stride() == e.stride(), to
        for p, q, most in ((y, expected, 2e-6), (a.grad, b.grad, 1e-5), (inferred, e, 2e-6)):
            torch.testing.assert_close(p, q, rtol=most, atol=most, msg=lambda m, to=to: f"{to}: {m}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dims", "last"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_gradients_of_any_number_of_images(clean, dims, last):
    """torch describes these gradients for sizes that are numbers alone: such graphs were run unfused as a whole."""
    fn = lambda x: [resized(x.sin(), m, TO["to a size"]) * 2 for m in MODES[dims]]  # noqa: E731
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=True)
    for n in (2, 3):
        x = torch.randn(n, 3, *(6, 5, 4)[:dims])
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[dims - 2]) if last else x
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        for results in (compiled(mine), fn(theirs)):
            sum(y.square().sum() for y in results).backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        assert mine.grad.stride() == theirs.grad.stride()
    assert {c.stage for c in compilations()} == {"forward", "backward"}


@pytest.mark.parametrize("mode", MODES[2])
def test_bytes_are_computed_in_fixed_point_as_eager_does(clean, mode):
    x = torch.randint(0, 256, (1, 3, 9, 8), dtype=torch.uint8)
    fn = lambda x: (resized(x, mode, {"scale_factor": 1.5}) >> 1, x + 1)  # noqa: E731
    for got, want in zip(torch.compile(fn, backend=fuser_backend, dynamic=False)(x), fn(x), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize("corners", [False, True])
def test_they_stay_whole(clean, corners):
    x = torch.randn(1, 2, 8, 8)
    found = targets(lambda x: resized(x, "bilinear", {"scale_factor": 2}, corners), x)
    assert found == [torch.ops.aten.upsample_bilinear2d.default]


def test_sizes_may_be_symbols(clean):
    fn = lambda x: resized(x * 2, "bilinear", {"scale_factor": 1.5}) + 1  # noqa: E731
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=True)
    for size in (8, 9, 31):
        x = torch.randn(1, 2, size, size + 3)
        torch.testing.assert_close(compiled(x), fn(x), rtol=2e-6, atol=2e-6)


def test_an_exported_program(tmp_path):
    class Up(torch.nn.Module):
        def forward(self, x):
            return resized(x.sin(), "bilinear", {"scale_factor": 2}) + 1

    x = torch.randn(1, 2, 5, 6)
    with torch.no_grad():
        path = aot.compile(export(Up(), (x,)), tmp_path / "up.fuser")
        torch.testing.assert_close(aot.load(path or tmp_path / "up.fuser")(x), Up()(x), rtol=2e-6, atol=2e-6)


def test_torchs_own_functions_come_back():
    overload = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(overload.py_kernels)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with dispatched.in_fast_forms():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ZeroDivisionError), dispatched.in_fast_forms():
        assert overload.py_kernels != before
        raise ZeroDivisionError
    assert overload.py_kernels != before  # the other thread traces still
    leave.set()
    thread.join()
    assert overload.py_kernels == before


def test_a_forked_child_has_torchs_own_functions():
    overload = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(overload.py_kernels)
    with dispatched.in_fast_forms():
        child = os.fork()
        if not child:
            with dispatched.in_fast_forms():
                os._exit(overload.py_kernels == before)
            os._exit(2)
        inside = overload.py_kernels != before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and inside
    pid = 0
    with dispatched.in_fast_forms():
        pid = os.fork()
        if not pid:
            os._exit(overload.py_kernels != before)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_no_other_operator_that_is_kept_is_taken_apart_by_the_dispatcher():
    """Dynamo leaves recurrent networks to eager."""
    for name in sorted(decompositions._KEPT_FOR_ATEN):
        packet = getattr(torch.ops.aten, name.removeprefix("aten."))
        for overload in packet.overloads():
            apart = [k for k in dispatched.KEYS if k in getattr(packet, overload).py_kernels]
            assert not apart or packet.__name__ in (*dispatched.RESIZING, *dispatched.WHOLE, "lstm", "gru"), name


@pytest.mark.parametrize("differentiable", [False, True])
def test_1d_pools_have_the_strides_of_eagers_kernel(clean, differentiable):
    xs = [make(torch.randn(2, 3, 6)) for name, make in LAYOUTS.items() if name != "no_channels"]
    xs = [x.requires_grad_(differentiable) for x in xs if x is not None]
    fn = lambda *xs: [F.max_pool1d(x, 2, 1) for x in xs]  # noqa: E731
    for got, want in zip(torch.compile(fn, backend=fuser_backend, dynamic=False)(*xs), fn(*xs), strict=True):
        assert torch.equal(got, want) and (got.stride() == want.stride() or not want.numel() or 1 in want.shape)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("pad", [(1, 2, 3, 0), (0, 0, 2, 1), (0, 4), (6, 6, 5, 5), (-1, 2, 0, 1), (0, 0, 0, 0), (1, 1)])
def test_circular_pads(clean, pad, last):
    x = torch.randn(2, 3, 5, 6) if len(pad) == 4 else torch.randn(2, 5, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x
    fn = lambda x: F.pad(x, pad, mode="circular")  # noqa: E731
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=False)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    got, want = compiled(mine), fn(theirs)
    assert torch.equal(got, want) and got.stride() == want.stride()
    weights = torch.randn_like(want)
    for y in (got, want):
        (y * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_circular_pads_are_joins(clean):
    x = torch.randn(2, 3, 5, 6)
    found = targets(lambda x: F.pad(x, (1, 2, 3, 0), mode="circular"), x)
    assert torch.ops.aten.cat.default in found and not any("scatter" in str(t) for t in found)
    compiled = torch.compile(lambda x: F.pad(x, (7, 0, 0, 0), mode="circular"), backend=fuser_backend)
    with pytest.raises(Exception, match="wrapping around more than once"):
        compiled(x)


DROPS = {
    "none": lambda x: F.dropout(x, 0.0),
    "evaluated": lambda x: F.dropout(x, 0.5, training=False),
    "module": lambda x: torch.nn.Dropout(0.1).eval()(x),
    "of nothing": lambda x: torch.dropout(x.transpose(0, 1), 0.3, False),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DROPS)
def test_a_dropout_that_drops_nothing_is_its_input(clean, name, requires_grad):
    """It shares memory with it, has its strides, and a write into the one is seen in the other."""
    drop = DROPS[name]

    def results(x):
        return drop(x), x + 1, drop(x * 2), x

    def writes(x):
        x = x * 2 if requires_grad else x
        y = drop(x)
        y += 1
        return x * 3, y

    for function in (results, writes):
        found = []
        for f in (torch.compile(function, backend=fuser_backend), function):
            x = torch.arange(24.0).view(4, 6)[:, ::2].requires_grad_(requires_grad)
            out = f(x)
            shared = [o.untyped_storage()._cdata == x.untyped_storage()._cdata for o in out]
            found.append(([o.detach().clone() for o in out], [o.stride() for o in out], shared, x.detach().clone()))
        (got, *form, after), (want, *wanted, expected) = found
        torch.testing.assert_close((got, after), (want, expected))
        assert form == wanted


def test_a_dropout_that_drops_is_drawn(clean):
    f = torch.compile(lambda x: F.dropout(x, 0.5), backend=fuser_backend)
    x = torch.ones(1000)
    assert 300 < (f(x) == 0).sum() < 700 and not torch.equal(f(x), f(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_classes_as_vectors_are_row_major(clean, dynamic):
    index = torch.randint(0, 5, (4, 3)).t()
    fn = lambda t: (F.one_hot(t, 5), F.one_hot(t[:, ::2], 6).float())  # noqa: E731
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=dynamic)
    for got, want in zip(compiled(index), fn(index), strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


LOSSES = {
    "labels": lambda x, r: F.multilabel_margin_loss(
        x, torch.tensor([[1, 3, -1, 0], [0, -1, 1, 2], [3, 2, 0, 1]]), reduction=r
    ),
    "no labels": lambda x, r: F.multilabel_margin_loss(x, torch.full((3, 4), -1), reduction=r),
    "one row of labels": lambda x, r: F.multilabel_margin_loss(x[0], torch.tensor([2, -1, 1, 0]), reduction=r),
    "classes": lambda x, r: F.multi_margin_loss(x, torch.tensor([1, 3, 0]), reduction=r),
    "squares and weights": lambda x, r: F.multi_margin_loss(
        x, torch.tensor([1, 3, 0]), p=2, margin=0.5, weight=torch.arange(1.0, 5.0), reduction=r
    ),
    "hardshrink": lambda x, r: F.hardshrink(x, 0.3),
    "softshrink": lambda x, r: F.softshrink(x, 0.3),
}


@pytest.mark.sampled(9, also=("squares and weights-none",))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_what_the_dispatcher_takes_apart_is_as_in_eager(clean, name, reduction):
    """Functions of autograd's key in Python, but for images and recursions, which have tests of their own."""
    fn = LOSSES[name]
    found = []
    for f in (torch.compile(lambda x: fn(x * 2, reduction), backend=fuser_backend), lambda x: fn(x * 2, reduction)):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = f(x)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
        with torch.no_grad():
            found[-1] += (f(x),)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("mode", "side", "is_whole"), [
    ("bilinear", 12, False), ("bilinear", 14, True), ("bicubic", 6, False), ("bicubic", 8, True),
])  # fmt: skip
def test_large_images_stay_whole_on_cuda(mode, side, is_whole, monkeypatch):
    """ATen has a thread for each place of the result. Without a GPU one counts as a single multiprocessor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fn(x):
        return F.interpolate(x, scale_factor=2.0, mode=mode) * 2

    with FakeTensorMode(), enable_python_dispatcher(), dispatched.in_fast_forms():
        graph = make_fx(fn)(torch.empty(2, 3, side, side, device="cuda")).graph
    names = {str(n.target) for n in graph.nodes if n.op == "call_function"}
    assert (f"aten.upsample_{mode}2d.default" in names) == is_whole
    assert ("aten._unsafe_index.Tensor" in names) != is_whole


@pytest.mark.parametrize("mode", ("nearest", "bilinear", "bicubic"))
@pytest.mark.parametrize("has_gradient", (False, True))
def test_images_with_gradients_stay_whole(mode, has_gradient):
    """Decomposed, their gradients would be scatters. A device that is not the CPU, without kernels."""

    def fn(x):
        return F.interpolate(x, scale_factor=2.0, mode=mode) * 2

    with FakeTensorMode(), enable_python_dispatcher(), dispatched.in_fast_forms():
        graph = make_fx(fn)(torch.empty(2, 3, 4, 4, device="meta", requires_grad=has_gradient)).graph
    names = {str(n.target) for n in graph.nodes if n.op == "call_function"}
    assert (f"aten.upsample_{mode}2d.default" in names) == has_gradient

