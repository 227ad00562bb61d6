"""`torch.compile(backend=fuser_backend)` against eager: values, strides, aliases, writes, routes, records, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuser import config, interface
from fuser.errors import ConfigError
from fuser.frontends.dynamo import compilations, fuser_backend, last_compilation

pytestmark = pytest.mark.usefixtures("clean")


def compiled(f, **kwargs):
    return torch.compile(f, backend=fuser_backend, **kwargs)


def strides(t):
    """Those that can be observed: of dimensions with at least two elements, of tensors that are not empty."""
    return [st for sz, st in zip(t.shape, t.stride()) if sz > 1 and t.numel()]


def same(got, want):
    """Equal values, dtypes and strides, through tuples."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want):
            same(g, w)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got.dtype == want.dtype and got.shape == want.shape and strides(got) == strides(want)
    else:
        assert got == want


def check(f, *args, **kwargs):
    same(compiled(f, **kwargs)(*args), f(*args))
    return last_compilation()


X, Y, W = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)

FUNCTIONS = {
    "chain": lambda x, y: torch.relu(x * y + 1),
    "two results": lambda x, y: (x + y, (x * y).sum(1)),
    "matmul": lambda x, y: F.gelu(x @ y) + x,
    "softmax": lambda x, y: torch.softmax(x @ y, -1).to(torch.bfloat16),
    "layer norm": lambda x, y: F.layer_norm(x + y, [8]) @ y,
    "transposed result": lambda x, y: (x + 1).t(),
    "permuted matmul": lambda x, y: (x + y).t() @ y.t(),
    "split": lambda x, y: [p * 2 for p in (x + y).split(3)],
    "chunks to matmul": lambda x, y: [p @ y for p in x.chunk(2)],
    "cat": lambda x, y: torch.cat([x, y.relu()], 1) * 2,
    "view of input": lambda x, y: (x.t(), x + y),
    "input itself": lambda x, y: (x, x + y),
    "result twice": lambda x, y: (lambda z: (z, z))(x + y),
    "two views of one": lambda x, y: (lambda z: (z[:4], z[4:]))(x + y),
    "number and tensor": lambda x, y: (x + y, 3, None),
    "argmax": lambda x, y: (x + y).argmax(1),
    "clone": lambda x, y: x.clone(),
    "constant": lambda x, y: x + torch.arange(8),
    "constant tensor": lambda x, y: x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]) @ y,
    "indexed": lambda x, y: x[torch.tensor([1, 3])] + y[:2],
    "complex": lambda x, y: torch.view_as_real(torch.fft.fft(x + 1)) * 2,
    "empty": lambda x, y: x[:0] + y[:0],
    "masked": lambda x, y: x.masked_fill(y > 0, -1e9).softmax(-1),
    "infinite": lambda x, y: torch.where(y > 0, x, float("-inf")),
    "roll": lambda x, y: torch.roll(x @ y, 1, 0) + 1,
    "full like": lambda x, y: torch.zeros_like(x) + torch.full((8, 8), 2.5) @ y,
    "nothing": lambda x, y: x,
}


@pytest.mark.sampled(28, also=("two results-True",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name, dynamic):
    with torch.no_grad():
        same(compiled(FUNCTIONS[name], dynamic=dynamic)(X, Y), FUNCTIONS[name](X, Y))


def test_a_fused_graph_is_called_as_the_handle_itself():
    record = check(lambda x, y: torch.relu(x * y + 1), X, Y)
    assert record.route == "direct" and len(record.groups) == 1 and not record.unfused
    assert record.ops_fused == 3


def test_direct_program_with_externs():
    record = check(lambda x, y: (x + 1) @ y + x, X, Y)
    assert record.route == "direct"
    assert [(u.op, "library" in u.reason) for u in record.unfused] == [("aten.mm", True)]
    assert "del" in record.source


def test_alias_of_input_is_still_an_alias():
    x = X.clone()
    view, total = compiled(lambda x, y: (x.t(), x + y))(x, Y)
    assert last_compilation().route == "wrapped"
    assert view.data_ptr() == x.data_ptr() and view._base is x
    view[0, 0] = 7
    assert x[0, 0] == 7


def test_views_of_one_result_share_memory():
    a, b = compiled(lambda x, y: (lambda z: (z[:4], z))(x + y))(X, Y)
    assert a.data_ptr() == b.data_ptr()


def test_result_that_is_an_input():
    x = X.clone()
    got, _ = compiled(lambda x, y: (x, x + y))(x, Y)
    assert got is x


def test_input_is_written():
    def f(x, y):
        x.add_(y)
        return x * 2

    a, b = X.clone(), X.clone()
    same(compiled(f)(a, Y), f(b, Y))
    same(a, b)


def test_a_view_of_an_input_is_written():
    def f(x, y):
        x[2:4].mul_(y[2:4])
        x.t()[0].zero_()
        return x.sum()

    a, b = X.clone(), X.clone()
    same(compiled(f)(a, Y), f(b, Y))
    same(a, b)


def test_one_tensor_given_twice():
    def f(x, y):
        x.add_(1)
        return x + y

    a, b = X.clone(), X.clone()
    same(compiled(f)(a, a), f(b, b))
    same(a, b)


def test_running_statistics_are_written_back():
    m = torch.nn.BatchNorm1d(8)
    n = torch.nn.BatchNorm1d(8)
    with torch.no_grad():
        same(compiled(m)(X), n(X))
    same(m.running_mean, n.running_mean)
    assert m.num_batches_tracked == n.num_batches_tracked == 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.norm = torch.nn.LayerNorm(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(self.norm(x))))
        return x


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_module_in_inference(context):
    m = Net().eval()
    with context():
        record = check(m, X)
        assert compiled(m)(X).is_inference() == (context is torch.inference_mode)
    assert record.route == "direct"
    assert len(record.keys) < len(record.groups), "equal layers share one fusion"


def test_no_grad_inside_the_function():
    m = torch.nn.Linear(8, 8)

    def f(x):
        with torch.no_grad():
            y = m(x).relu()
        return y + 1

    out = compiled(f)(X)
    same(out, f(X).detach())
    assert not out.requires_grad


def test_requires_grad_switched_on_later():
    f = compiled(lambda x: torch.sin(x) * 2)
    f(X)
    x = X.clone().requires_grad_()
    f(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.cos(X) * 2)


def test_graph_break():
    def f(x, y):
        x = torch.relu(x + y)
        torch._dynamo.graph_break()
        return x * 2 @ y

    same(compiled(f)(X, Y), f(X, Y))
    assert len(compilations()) == 2


def test_sizes_change():
    f = compiled(lambda x, w: F.gelu(x @ w).sum(-1, keepdim=True) + x.shape[0])
    for n in (8, 5, 3, 17, 1, 0):
        x = torch.randn(n, 8)
        same(f(x, W), F.gelu(x @ W).sum(-1, keepdim=True) + n)
    assert len(compilations()) <= 4


def test_symbolic_sizes_are_numbers_in_the_program():
    def f(x):
        return (x.view(-1) * x.shape[0] + x.shape[1] // 2).reshape(x.shape[1], -1).sum(0)

    g = compiled(f, dynamic=True)
    for shape in ((4, 6), (3, 8), (5, 2)):
        x = torch.randn(shape)
        same(g(x), f(x))
    assert len(compilations()) == 1


def test_python_numbers():
    f = compiled(lambda x, a, b: x * a + b)
    for a, b in ((2, 0.5), (3, 0.25), (4, 1.5)):
        same(f(X, a, b), X * a + b)


def test_random_numbers_stay_random():
    f = compiled(lambda x: F.dropout(x + 1, 0.5))
    torch.manual_seed(3)
    first = f(X)
    torch.manual_seed(3)
    same(f(X), first)
    assert not torch.equal(f(X), first)


def test_autocast_is_kept():
    def f(x, y):
        return torch.softmax(x @ y, -1)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        same(compiled(f)(X, Y), f(X, Y))
    assert last_compilation().route == "wrapped"


def test_subclass_arguments():
    class Tagged(torch.Tensor):
        pass

    x = X.as_subclass(Tagged)
    f = compiled(lambda x, y: torch.relu(x + y))
    assert type(f(x, Y)) is Tagged
    torch.testing.assert_close(f(x, Y).as_subclass(torch.Tensor), torch.relu(X + Y))


def test_data_dependent_branch_and_item():
    def f(x):
        n = int(x.sum().item() > 0)
        return x * n + 1

    same(compiled(f)(X), f(X))


def test_options_hold_at_compile_time_and_at_calls(monkeypatch):
    from fuser import interface

    seen = []
    real = interface.fusion_handle

    def spy(key):
        handle = real(key)
        return lambda *args: (seen.append(config.max_body_rows), handle(*args))[1]

    monkeypatch.setattr(interface, "fusion_handle", spy)
    f = compiled(lambda x: torch.relu(x + 1), options={"max_body_rows": 17})
    same(f(X), torch.relu(X + 1))
    assert seen == [17] and config.max_body_rows != 17
    assert last_compilation().options == {"max_body_rows": 17}


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"options": {"no_such_setting": 1}}, "no_such_setting"),
        ({"options": {"numerics": "sloppy"}}, "'fast', 'eager'"),
        ({"mode": "ludicrous"}, "ludicrous"),
    ],
)
def test_bad_options_are_errors(kwargs, says):
    with pytest.raises(ConfigError, match=says):
        compiled(lambda x: x + 1, **kwargs)(X)


def test_known_modes_are_accepted():
    same(compiled(lambda x: x + 1, mode="max-autotune")(X), X + 1)


def test_disabled_runs_unfused():
    same(compiled(lambda x: x + 1, options={"enabled": False})(X), X + 1)
    assert last_compilation().route == "eager"


def test_called_directly_as_a_function():
    import torch.fx

    gm = torch.fx.symbolic_trace(lambda x, y: torch.relu(x + y) @ y)
    f = fuser_backend(gm, [X, Y])
    same(f(X, Y), torch.relu(X + Y) @ Y)


def test_kept_whole():
    def f(q, k, v):
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.layer_norm(a, [8]), F.silu(a), F.log_softmax(a, -1)

    q = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        record = check(f, q, q + 1, q + 2)
    assert [u.op for u in record.unfused] == ["aten._scaled_dot_product_flash_attention_for_cpu"]
    fused = {op for g in record.groups for op in g.ops}
    assert {"aten.native_layer_norm", "aten.silu", "aten._log_softmax"} <= fused


def test_values_die_early():
    record = check(lambda x, y: ((x @ y).relu() @ y).relu() @ y, X, Y)
    lines = [line.strip() for line in record.source.splitlines()]
    for i, line in enumerate(lines):
        name = line.split(" = ")[0]
        if line.startswith(("mm", "relu")) and f"return ({name}" not in lines[-1]:
            assert name in lines[i + 2], "deleted right after the one statement that reads it"
    assert sum(line.startswith("del") for line in lines) >= 3


def test_equal_groups_are_compiled_ahead_once(monkeypatch):
    asked = []
    prepare = interface.prepare
    monkeypatch.setattr(interface, "prepare", lambda key, args: asked.append(key) or prepare(key, args))
    x = torch.randn(8, 8)

    def f(x):
        for _ in range(4):
            x = (x @ x).sigmoid() * 0.5
        return x

    record = check(f, x)
    assert len(record.groups) == 4 and len(asked) == 1
