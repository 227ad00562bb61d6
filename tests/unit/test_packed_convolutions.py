"""Convolutions by packed weights: results at every edge of their blocks, what is part of them, and who makes them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuser import config, machines
from fuser.contests import race
from fuser.cpu import convolve, convolve_cpp, dots, epilogues
from fuser.frontends.dynamo import compilations, last_compilation
from fuser.passes import conv_forms, providers
from fuser.passes.conv_forms import LAST, LINEAR, OWN, PACKED, USUAL

pytestmark = pytest.mark.usefixtures("clean")
DTYPES = (torch.float32, torch.bfloat16)
NAMES = [m for m in ("avx512", "avx2") if machines.why_not(machines.find(m)) is None]
MACHINES = ["", *NAMES]
BOUND = {torch.float32: 4e-6, torch.bfloat16: 1e-2}  # of the largest result
NORM = ("times", "plus")
CHANNELS_LAST = torch.channels_last


def skip_unless_made():
    """Kernels of bfloat16 are slow without instructions for it, and right."""
    why = convolve.why_not(torch.float32, 16)
    if why is not None:
        pytest.skip(why)


def images(*sizes, dtype=torch.float32):
    return torch.randn(sizes).to(dtype).contiguous(memory_format=CHANNELS_LAST)


def wanted(x, w, stride, padding, epilogue, factors, others):
    """In float64."""
    out = F.conv2d(x.double(), w.double(), None, stride, padding)
    return epilogues.applied(
        epilogue, out, None if factors is None else factors.double(), *(t.double() for t in others)
    )


def check(x, w, stride=(1, 1), padding=(0, 0), epilogue=(), others=()):
    """A convolution is as near to float64 as its dtype allows, and made by the kernel rather than in its place."""
    columns, channels, *kernel = w.shape
    panels = convolve.pack(w)
    assert torch.equal(convolve.unpacked(panels, columns, channels, kernel), w)
    count = sum(step in epilogues.PER_CHANNEL for step in epilogue)
    factors = torch.randn(count, columns) if count else None
    handle = convolve.CONVOLUTIONS.handle(config.isa, x.dtype, columns, epilogue)
    hits, misses = handle.hits, handle.misses
    got = convolve.convolution(x, panels, columns, kernel, stride, padding, epilogue, factors, *others)
    assert (handle.hits, handle.misses) == (hits + 1, misses)
    want = wanted(x, w, stride, padding, epilogue, factors, others)
    assert got.shape == want.shape and got.dtype is x.dtype and got.is_contiguous(memory_format=CHANNELS_LAST)
    if want.numel():
        assert (got.double() - want).abs().max() <= BOUND[x.dtype] * max(float(want.abs().max()), 1.0)


@pytest.mark.parametrize("isa", MACHINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_every_block(dtype, isa):
    with config.override(isa=isa):
        skip_unless_made()
        part, most = convolve_cpp.PART_BYTES // dtype.itemsize, convolve_cpp.MOST_ROWS

        def sizes(n, c, h, w, columns, kernel, *rest):
            check(images(n, c, h, w, dtype=dtype), (torch.randn(columns, c, *kernel) / 4).to(dtype), *rest)

        for points in (0, 1, 5, 6, 7, 8, 9, most - 1, most, most + 1, 2 * most + 1):
            sizes(1, 8, 1, points + 2, 24, (1, 3)) if points else sizes(0, 8, 3, 3, 24, (1, 3))
        ninth = part // 9 // 2 * 2
        for channels in (8, ninth, ninth + 2, part // 2, part - 2, part, part + 2, 2 * part + 2):
            sizes(1, channels, 3, 4, 20, (3, 3), (1, 1), (1, 1))
            sizes(1, channels, 2, 4, 20, (1, 1))
        for columns in (1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 3 * 64 + 5):
            sizes(2, 10, 3, 5, columns, (2, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_and_padding(dtype):
    """Also more padding than the kernel has places: points that see none of the image."""
    skip_unless_made()
    w = {k: (torch.randn(40, 16, *k) / 4).to(dtype) for k in ((1, 1), (3, 3), (2, 5), (7, 7))}
    for kernel, stride, padding in itertools.product(w, ((1, 1), (2, 2), (1, 3)), ((0, 0), (1, 1), (3, 0), (8, 9))):
        check(images(2, 16, 8, 9, dtype=dtype), w[kernel], stride, padding)


def test_few_channels():
    """A line of the kernel is one run: inside of images as it lies, at edges and in images with gaps a copy."""
    skip_unless_made()
    kernels, paddings = ((7, 7), (3, 3), (1, 4), (2, 1)), ((0, 0), (3, 3), (1, 9))
    for channels, kernel, padding in itertools.product((1, 3, 7), kernels, paddings):
        w = torch.randn(20, channels, *kernel) / 4
        whole = images(2, channels + 1, 16, 18)
        for x in (images(2, channels, 8, 9), whole[:, 1:, ::2, ::2], whole[:, :-1, :9].transpose(2, 3)):
            check(x, w, (2, 1), padding, (*NORM, "relu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_in_any_order(dtype):
    skip_unless_made()
    w, own = (torch.randn(40, 16, 3, 3) / 4).to(dtype), {"padding": (1, 1), "epilogue": ("sum",)}
    whole = images(3, 32, 12, 14, dtype=dtype)
    other = images(3, 40, 12, 14, dtype=dtype)
    check(whole[:, 8:24], w, **own, others=[other])  # channels of larger images
    check(whole[:, :16].contiguous(), w, **own, others=[other])  # row-major
    check(whole[:, :16], w, **own, others=[other.contiguous()])
    check(whole[:, :16, ::2, 1:-1:3], w, **own, others=[other[:, :, ::2, 1:-1:3]])
    check(whole[:, :16].transpose(2, 3), w, **own, others=[other.transpose(2, 3)])
    check(whole[:1, :16, :1].expand(3, 16, 12, 14), w, **own, others=[other[:, :, :1].expand(3, 40, 12, 14)])
    check(whole[:, ::2], w, **own, others=[other.flip(1)])


def test_one_kernel_serves_every_size():
    skip_unless_made()
    check(images(1, 16, 5, 5), torch.randn(64, 16, 3, 3))
    before = convolve.CONVOLUTIONS.made.cache_info().misses
    check(images(2, 24, 9, 4), torch.randn(128, 24, 1, 2), (2, 1), (0, 3))
    assert convolve.CONVOLUTIONS.made.cache_info().misses == before


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", epilogues.ACTIVATIONS)
def test_activations(name, dtype):
    """As near to float64 as eager's on the rounded sum is, and float64's on what is no number."""
    skip_unless_made()
    x, w = images(2, 16, 5, 5, dtype=dtype), (torch.randn(40, 16, 3, 3) / 4).to(dtype)
    factors, steps, others = torch.randn(2, 40), (*NORM, name), ()
    if name == "relu":  # others are as much behind a sum, or before one
        steps, others = (*NORM, "sum", name, "sum"), (images(2, 40, 3, 3, dtype=dtype),) * 2
    got = convolve.convolution(x, convolve.pack(w), 40, (3, 3), (1, 1), (0, 0), steps, factors, *others)
    want = wanted(x, w, 1, 0, steps, factors, others)
    eager = epilogues.applied(steps, F.conv2d(x, w), factors.to(dtype), *others)
    allowed = 2 * (eager.double() - want).abs().max() + BOUND[dtype] / 10
    assert got.dtype is dtype and (got.double() - want).abs().max() <= allowed
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 100.0, -100.0, *range(-8, 9)]).repeat(2)
    factors, w = torch.stack([torch.ones(48), special]), torch.zeros(48, 16, 1, 1).to(dtype)
    got = convolve.convolution(x, convolve.pack(w), 48, (1, 1), (1, 1), (0, 0), (*NORM, name), factors)
    want = wanted(x, w, 1, 0, (*NORM, name), factors, ()).to(dtype)
    torch.testing.assert_close(got.contiguous(), want, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_so(dtype):
    """In the points that see it, and nowhere else; padding is 0 beside it."""
    skip_unless_made()
    x, w = torch.zeros(2, 16, 9, 9).to(dtype), torch.rand(40, 16, 3, 3).to(dtype) + 0.5
    x[0, 3, 0, 0], x[1, 7, 8, 4], x[1, 0, 4, 4] = math.nan, math.inf, -math.inf
    got = convolve.convolution(x, convolve.pack(w), 40, (3, 3), (2, 2), (1, 1), ("relu",), None)
    want = F.relu(F.conv2d(x.double(), w.double(), None, 2, 1)).to(dtype)
    torch.testing.assert_close(got.contiguous(), want, equal_nan=True)
    factors = torch.ones(2, 40)
    factors[0, 3], factors[1, 5] = math.inf, math.nan
    got = convolve.convolution(x, convolve.pack(w), 40, (3, 3), (1, 1), (0, 0), (*NORM, "relu"), factors)
    want = wanted(x, w, 1, 0, (*NORM, "relu"), factors, ()).to(dtype)
    torch.testing.assert_close(got.contiguous(), want, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_threads_share_a_convolution(threads, kept_threads):
    skip_unless_made()
    x, w = images(3, 64, 14, 15), torch.randn(200, 64, 3, 3) / 20
    torch.set_num_threads(threads)
    check(x, w, (1, 1), (1, 1), (*NORM, "relu"))


@pytest.fixture
def kept_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_that_no_kernel_takes(dtype):
    skip_unless_made()
    x, w, factors = images(2, 16, 9, 9, dtype=dtype), (torch.randn(40, 16, 3, 3) / 4).to(dtype), torch.randn(2, 40)
    with config.override(enabled=False):
        got = convolve.convolution(x, convolve.pack(w), 40, (3, 3), (2, 2), (1, 1), (*NORM, "relu"), factors)
    want = wanted(x, w, 2, 1, (*NORM, "relu"), factors, ()).to(dtype)
    torch.testing.assert_close(got.contiguous(), want)


@pytest.mark.parametrize("isa", NAMES)
def test_a_weight_that_was_packed_for_another_machine(isa):
    x, w = images(2, 16, 9, 9), torch.randn(100, 16, 3, 3)
    with config.override(isa=isa):
        made = convolve.pack(w)
    for other in MACHINES:
        with config.override(isa=other):
            got = convolve.convolution(x, made, 100, (3, 3), (1, 1), (0, 0), (), None)
            torch.testing.assert_close(got, F.conv2d(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("machine", [m for m in machines.ROWS if m.fma], ids=lambda m: m.name)
def test_a_text_for_every_machine(machine):
    """One that is for no vectors names none."""
    for dtype, name, columns in itertools.product(DTYPES, epilogues.ACTIVATIONS, (48, 64)):
        shape = dots.shape_of(columns, machine)
        assert convolve_cpp.MOST_ROWS % shape.rows == 0
        text = convolve_cpp.routine(dtype, shape, (*NORM, "sum", name), machine).source
        assert bool(machine.lanes) == ("fuser_lanes" in text)


def test_what_no_kernel_takes():
    assert convolve.why_not(torch.float64, 16) and convolve.why_not(torch.bfloat16, 17)
    with config.override(isa="scalar"):
        assert convolve.why_not(torch.float32, 16)


# -- in models ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def own(monkeypatch):
    """The package's kernel is the fastest wherever it competes. What is asked for."""
    asked = []

    def seconds(c):
        asked.append(c)
        return {USUAL: 3.0, LAST: 2.0} if c.epilogue is None else {USUAL: 3.0, LAST: 2.0, PACKED: 1.5, OWN: 1.0}

    skip_unless_made()
    monkeypatch.setattr(conv_forms, "seconds", seconds)
    monkeypatch.setattr(conv_forms, "seconds_a_byte", lambda: 0.0)
    with config.override(convolution_layout="measured"):
        yield asked


class Branches(nn.Module):
    """Two convolutions whose results are added, as in a residual block, and one that two readers read."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 24, 3, 2, 1, bias=False), nn.Conv2d(16, 24, 1, 2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(24), nn.BatchNorm2d(24, affine=False)])
        self.last, self.activation = nn.Conv2d(24, 16, 3), activation()

    def forward(self, x):
        out = self.activation(self.norms[0](self.one(x)) + self.norms[1](self.two(x)))
        read = self.last(out)
        return self.activation(read), read * 2


def settled(model, dtype=torch.float32):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
            if m.affine:
                nn.init.normal_(m.weight)
                nn.init.normal_(m.bias)
    return model.to(dtype).eval()


def steps_of(asked):
    return [c.epilogue for c in asked]


def check_model(model, *inputs, options=None):
    """Results are as near to float64 as eager's are, and lie as eager's do."""
    compiled = torch.compile(model, backend="fuser", options=options or {"freeze": True})
    with torch.no_grad():
        got, want = compiled(*inputs), model(*inputs)
        exact = model.double()(*(x.double() for x in inputs))
        model.to(inputs[0].dtype)
    for g, w, e in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want, exact)), strict=True):
        assert g.shape == w.shape and g.stride() == w.stride() and g.dtype is w.dtype
        allowed = 2 * (w.double() - e).abs().max() + 1e-6 * e.abs().max()
        assert (g.double() - e).abs().max() <= allowed
    return compiled


def unfused():
    return [u.op for c in compilations() for u in c.unfused if "convolution" in u.op]


def test_a_sum_is_part_of_the_later_convolution(own):
    check_model(settled(Branches()), torch.randn(2, 16, 9, 11))
    assert steps_of(own) == [NORM, ("plus", *NORM, "sum", "relu"), ("plus",)]
    assert unfused() == 3 * ["packed_convolution_and_more"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("activation", "step"),
    [(nn.ReLU6, "relu6"), (nn.Hardswish, "hardswish"), (lambda: nn.GELU("tanh"), "gelu_tanh"), (nn.GELU, "gelu"),
     (lambda: nn.Hardtanh(-1, 6), None), (nn.Mish, None)],
)  # fmt: skip
def test_activations_of_models(own, activation, step):
    check_model(settled(nn.Sequential(nn.Conv2d(16, 24, 3), activation(), nn.Flatten())), torch.randn(2, 16, 9, 11))
    assert steps_of(own) == [("plus",) if step is None else ("plus", step)]


class Cases:
    """Models with one convolution each, whose bias and norm are all that may be part of it."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(16, 24, 3)

        def forward(self, x):
            y = self.conv(x)
            return y + y

    class Broadcast(Twice):
        def forward(self, x):
            y = self.conv(x)
            return torch.relu(y + y.detach().mean((2, 3), keepdim=True))

    class Scaled(Twice):
        def forward(self, x):
            return torch.relu(torch.add(self.conv(x), x[:, :1, 2:, 2:].expand(-1, 24, -1, -1), alpha=2))

    class OfStatistics(Twice):
        def forward(self, x):
            y = self.conv(x)
            return torch.relu(F.batch_norm(y, x.mean((0, 2, 3))[:1].expand(24), x.var((0, 2, 3))[:1].expand(24)))

    class Wide(Twice):
        def forward(self, x):
            return torch.relu(self.conv(x).double())

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(16, 24, 3, groups=2)

        def forward(self, x):
            return torch.relu(self.conv(x))


@pytest.mark.sampled(2, also=("OfStatistics",))
@pytest.mark.parametrize("case", [c for c in vars(Cases) if not c.startswith("_")])
def test_what_is_no_part_of_a_convolution(own, case):
    check_model(getattr(Cases, case)().eval(), torch.randn(2, 16, 9, 11))
    assert steps_of(own) == [None if case == "Grouped" else ("plus",)]


def test_weights_that_change_are_seen(own):
    """Packed panels and numbers for each channel are made anew."""
    model = settled(Branches())
    x = torch.randn(2, 16, 9, 11)
    compiled = torch.compile(model, backend="fuser", options={"freeze": True})
    with torch.no_grad():
        for change in (None, model.one.weight, model.two.bias, model.norms[0].weight, model.norms[1].running_var):
            if change is not None:
                change.mul_(2)
            for got, want in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(compiled(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)


def test_weights_that_may_change_are_not_packed(own):
    check_model(settled(Branches()), torch.randn(2, 16, 9, 11), options={"dump_passes": ""})
    assert steps_of(own) == 3 * [None]


def test_images_and_results_in_channels_last(own):
    model = settled(Branches()).to(memory_format=CHANNELS_LAST)
    check_model(model, images(2, 16, 9, 11))
    assert "PACKED_CONVOLUTION_AND_MORE" in last_compilation().source


def test_a_free_batch_stays_with_libraries(own):
    """Layouts of graphs with symbolic sizes are eager's."""
    model = settled(Branches())
    compiled = torch.compile(model, backend="fuser", options={"freeze": True}, dynamic=True)
    with torch.no_grad():
        for n, size in ((2, 9), (5, 12)):
            x = torch.randn(n, 16, size, size)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


EPILOGUES = [(), ("relu",), NORM, (*NORM, "sum", "relu"), (*NORM, "silu"), ("plus", *NORM, "relu6"), ("plus",)]


@pytest.mark.parametrize("steps", EPILOGUES, ids="-".join)
def test_it_competes_and_all_give_one_result(steps):
    skip_unless_made()
    if providers.linear_op() is None:
        pytest.skip("this torch has no oneDNN")
    for kernel, stride in ((1, 1), (3, 2)):
        height = (12 + 2 * (kernel // 2) - kernel) // stride + 1
        c = conv_forms.Convolution(
            x=(2, 16, 12, 12), weight=(24, 16, kernel, kernel), out=(24, height, height), dtype=torch.float32,
            bias=steps[:1] == ("plus",), stride=(stride, stride), padding=(kernel // 2,) * 2, dilation=(1, 1),
            transposed=False, output_padding=(0, 0), groups=1, frozen=True, epilogue=steps,
        )  # fmt: skip
        names = [USUAL, LAST, PACKED, OWN, *([LINEAR] if kernel == 1 else [])]
        fit, failed = race._checked(conv_forms._contestants(c, names), USUAL)
        assert set(fit) == set(names) and not failed
