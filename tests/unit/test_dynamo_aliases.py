"""`torch.compile` against eager for what functions do beside computing: writes, aliases, modes, odd results."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import compilations, fuser_backend, last_compilation

pytestmark = pytest.mark.usefixtures("clean")


def flat(value):
    """The leaves of nested tuples, lists and dictionaries, in order."""
    if isinstance(value, dict):
        return [v for k in sorted(value) for v in flat(value[k])]
    if isinstance(value, (tuple, list)):
        return [v for x in value for v in flat(x)]
    return [value]


def shared(tensors):
    """Pairs of positions whose tensors share memory."""
    at = [t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) and t.numel() else None for t in tensors]
    return {(i, j) for i, a in enumerate(at) for j, b in enumerate(at) if i < j and a is not None and a == b}


def equal(got, want):
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got.dtype == want.dtype and got.requires_grad == want.requires_grad
        assert got.is_inference() == want.is_inference()
    else:
        assert got == want


def check(f, make, calls=1, **kwargs):
    """The same results, writes and sharing of memory as eager, for `calls` calls on the same tensors."""
    g = torch.compile(f, backend=fuser_backend, **kwargs)
    mine, theirs = make(), make()
    for _ in range(calls):
        got, want = flat(g(*mine)), flat(f(*theirs))
        assert len(got) == len(want)
        for a, b in zip(got + flat(mine), want + flat(theirs)):
            equal(a, b)
        assert shared(got + flat(mine)) == shared(want + flat(theirs))
    return last_compilation()


def tensors(*shapes):
    def make():
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(s, generator=generator) for s in shapes]

    return make


def write_and_read(x, y):
    before = x * 2
    x.add_(y)
    return before, x * 2, x.sum()


def write_views(x, y):
    rows = x[1:5]
    rows.mul_(y[1:5])
    x.t()[2].copy_(y[0])
    return rows + 1, x.view(-1)[::3]


def write_a_result(x, y):
    z = x + y
    z[2:4] = 0
    z.t().mul_(2)
    return z, z[0], z.view(-1)


def write_with_index(x, y):
    x.index_add_(0, torch.tensor([0, 3]), y[:2])
    x.index_put_((torch.tensor([1]),), y[5], accumulate=True)
    x.scatter_(1, torch.tensor([[0], [1]]), 9.0)
    return x.softmax(-1)


def write_other_dtype(x, y):
    n = (x > 0).to(torch.int64)
    n.add_(1)
    n |= 4
    return n, n.to(torch.float64).div_(3)


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)
    return x - y


def write_out(x, y):
    torch.add(x, y, out=y)
    return torch.exp(y)


def resize_like(x, y):
    z = torch.empty_like(x)
    z.copy_(x)
    z.fill_diagonal_(0)
    z.zero_().add_(y)
    return z


def expanded(x, y):
    return x[0].expand(3, 8), x[None].expand(2, 8, 8) + y, x[:, 0].unsqueeze(1).expand(8, 4)


def views_of_inputs(x, y):
    return {"b": x.t(), "a": (x[1], x[1:3].view(-1), y), "c": [x, x], "d": y.unsqueeze(0)}


def views_of_results(x, y):
    z = x @ y
    return z, z.t(), z.view(4, 16)[1], z.relu(), z.relu().t()


def twice(x, y):
    z = torch.relu(x + y)
    return z, z, {"z": z}


def odd_results(x, y):
    return None, 3, 2.5, "text", x.shape, x.shape[0] * 2, x + y, (), [], True, x.dtype, {"k": None}


def nothing_at_all(x, y):
    return None


def nothing_computed(x, y):
    return x


def constants(x, y):
    a = torch.arange(8.0)
    return a, torch.ones(3), torch.full((2,), 7), a * 2, torch.tensor([1, 2]), torch.eye(3)


def copies(x, y):
    return x.clone(), x.contiguous(), x.t().contiguous(), x.detach(), x.float(), x.to(torch.float64)


def reshapes(x, y):
    return x.reshape(64), x.t().reshape(64), (x + y).reshape(4, 16), x.flatten(), x.ravel(), x.chunk(2), x.unbind(0)[:2]


def strange_layouts(x, y):
    z = x.t() + y
    return z, x.t().exp(), torch.relu(x[::2, ::3]), (x.as_strided((4, 4), (1, 8)) * 2)


FUNCTIONS = [
    write_and_read, write_views, write_a_result, write_with_index, write_other_dtype, swap, write_out, resize_like,
    expanded, views_of_inputs, views_of_results, twice, odd_results, nothing_at_all, nothing_computed, constants,
    copies, reshapes, strange_layouts,
]  # fmt: skip


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_function(f, dynamic):
    check(f, tensors((8, 8), (8, 8)), calls=2, dynamic=dynamic)


@pytest.mark.sampled(4, also=("write_and_read-inference_mode",))
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("f", [write_and_read, views_of_inputs, views_of_results, twice], ids=lambda f: f.__name__)
def test_modes(f, context):
    with context():
        check(f, tensors((8, 8), (8, 8)), calls=2)


def test_write_to_a_cache():
    def f(cache, x):
        cache[2:4] = x
        return (cache @ x.t()).relu(), cache[:4]

    check(f, tensors((6, 8), (2, 8)), calls=3)


def write_one_read_another(x, y):
    z = y * 3
    x[0].mul_(2)
    return z, y + 1, x.sum(0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: (lambda x: [x, x])(torch.ones(8, 8)),
        lambda: (lambda x: [x, x.t()])(torch.arange(64.0).view(8, 8)),
        lambda: (lambda x: [x[:8], x[4:]])(torch.arange(96.0).view(12, 8)),
    ],
    ids=["the same", "transposed", "overlapping"],
)
def test_inputs_that_share_memory(make):
    """Compiled first for inputs that do not."""
    g = torch.compile(write_one_read_another, backend=fuser_backend)
    g(*tensors((8, 8), (8, 8))())
    mine, theirs = make(), make()
    for a, b in zip([*g(*mine), *mine], [*write_one_read_another(*theirs), *theirs]):
        equal(a, b)


class Counter(torch.nn.Module):
    """Buffers written in forward, one of them replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.mean(0), 0.1)
        self.last = x[-1] * 2
        return self.norm(x) + self.mean + self.calls


@pytest.mark.parametrize("train", [False, True])
def test_buffers(train):
    mine, theirs = Counter().train(train), Counter().train(train)
    g = torch.compile(mine, backend=fuser_backend)
    with torch.no_grad():
        for i in range(3):
            x = torch.randn(4 + i, 8)
            equal(g(x), theirs(x))
    for (name, a), (_, b) in zip(mine.named_buffers(), theirs.named_buffers()):
        assert torch.allclose(a, b), name


def test_weights_changed_between_calls_are_seen():
    m = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU("tanh"), torch.nn.Linear(512, 256)).eval()
    g = torch.compile(m, backend=fuser_backend)
    x = torch.randn(128, 256)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: m[0].weight.mul_(2),
            lambda: m[0].weight.data.mul_(0.5),
            lambda: setattr(m[2], "bias", torch.nn.Parameter(torch.ones(256))),
            lambda: setattr(m[0].weight, "data", torch.randn(512, 256)),
            lambda: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
        ):
            change()
            torch.testing.assert_close(g(x), m(x), rtol=1e-4, atol=1e-4)


def test_marked_dynamic_dimension():
    def f(x, w):
        y = F.relu(x @ w)
        return y.view(-1, 4) * x.shape[0], y.sum(0), y.shape[0]

    g = torch.compile(f, backend=fuser_backend)
    w = torch.randn(8, 8)
    for n in (4, 7, 12, 33):
        x = torch.randn(n, 8)
        torch._dynamo.mark_dynamic(x, 0)
        for a, b in zip(g(x, w), f(x, w)):
            equal(a, b)
    assert len(compilations()) == 1


def test_sizes_as_results_and_arguments_under_dynamic():
    def f(x, n):
        y = x.new_zeros(x.shape[0] + n) + x.shape[1]
        return y, x.shape[0] + n, torch.arange(n * 2), x.repeat(n, 1), x.numel() / n

    g = torch.compile(f, backend=fuser_backend, dynamic=True)
    for n, shape in ((2, (3, 4)), (5, (6, 7)), (3, (9, 2))):
        x = torch.randn(shape)
        for a, b in zip(g(x, n), f(x, n)):
            equal(a, b)


def test_data_dependent_sizes():
    def f(x):
        picked = x[x > 0]
        return (picked * 2).sum(), picked.shape[0], torch.nonzero(x > 1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        g = torch.compile(f, backend=fuser_backend)
        for _ in range(3):
            x = torch.randn(40)
            for a, b in zip(g(x), f(x)):
                equal(a, b)


def test_inference_tensors_and_normal_ones():
    with torch.inference_mode():
        made = torch.randn(8, 8)
    f = torch.compile(lambda x, y: torch.relu(x @ y) + x, backend=fuser_backend)
    x = torch.randn(8, 8)
    for a in (x, made, x):
        with torch.no_grad():
            torch.testing.assert_close(f(a, x), torch.relu(a @ x) + a)
        with torch.inference_mode():
            torch.testing.assert_close(f(a, x), torch.relu(a @ x) + a)


def test_several_devices():
    def f(x, m):
        y = torch.relu(x + 1)
        z = torch.relu(m + 1) * 2
        return y, z, y.to("meta") + m

    y, z, both = torch.compile(f, backend=fuser_backend)(torch.ones(4), torch.empty(4, device="meta"))
    equal(y, torch.full((4,), 2.0))
    assert z.device.type == "meta" and both.device.type == "meta" and z.shape == (4,)


def test_errors_are_those_of_eager():
    g = torch.compile(lambda x, i: torch.relu(x)[i] + 1, backend=fuser_backend)
    x = torch.randn(4)
    g(x, torch.tensor([1]))
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        g(x, torch.tensor([9]))


def test_threads():
    m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).eval()
    g = torch.compile(m, backend=fuser_backend)
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n in (3, 4, 5, 6, 3, 4):
                x = torch.randn(n, 8, generator=generator)
                if not torch.allclose(g(x), m(x), atol=1e-5):
                    wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


PAIRS = {
    "max": lambda x: x.max(0).values,
    "max of relu": lambda x: x.relu().max(0).values,
    "indices": lambda x: x.sort().indices,
    "view": lambda x: x.sort().values.t(),
    "cummax": lambda x: torch.cummax(x, 1)[0],
    "var_mean": lambda x: torch.var_mean(x, 1)[1],
    "aminmax": lambda x: torch.aminmax(x).min,
    "topk": lambda x: x.topk(2).values,
    "kthvalue": lambda x: x.kthvalue(2).values,
    "frexp": lambda x: torch.frexp(x)[1],
    "one tensor": lambda x: x.neg(),
}


@pytest.mark.sampled(12, also=("True-var_mean",))
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_results_are_separate_tensors(name, dynamic):
    """Gradients of another result bring the partitioner, which merges equal calls."""
    function, x, w = PAIRS[name], torch.randn(4, 5), torch.randn(3, requires_grad=True)

    def program(x, w):
        return function(x), (w * 2).sum(), function(x), function(x)

    torch._dynamo.reset()
    first, _, second, third = torch.compile(program, backend=fuser_backend, dynamic=dynamic)(x, w)
    kept = second.clone()
    first.zero_()
    third.fill_(1)
    assert torch.equal(second, kept) and torch.equal(kept, function(x))
