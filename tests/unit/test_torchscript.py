"""TorchScript as a frontend: the same results as the scripted function, and reasons where it is none for us."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fuser
from fuser.errors import GraphError, InputError
from fuser.frontends.dynamo import fuser_backend
from fuser.frontends.torchscript import compile_script, to_fx

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler"),
]


def chain(x, y):
    z = (x + y * 2).relu()
    return z.sum(1, dtype=torch.float64), torch.sigmoid(z) - y, z.to(torch.bfloat16)


def shapes(x, y):
    b, c = x.size(0), x.shape[1]
    p, q = x.chunk(2, 1)
    u = torch.zeros([b, c], dtype=torch.float32)
    return torch.cat([q, p], 1) + u, x.view(b, c // 2, -1)[:, 0:1] * 2, y @ x.t()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.drop = nn.LayerNorm(16), nn.Linear(16, 32), nn.Dropout(0.5)
        self.scale = 0.5

    def forward(self, x):
        h = F.gelu(self.first(self.norm(x)), approximate="tanh")
        if self.training:
            h = h + 1
        return self.drop(h) * self.scale


def looped(x, n: int):
    for _ in range(n):
        x = x * 2
    return x


def branching(x, y):
    if bool(x.sum() > 0):
        return x
    return y


@pytest.fixture
def args():
    return torch.randn(6, 8), torch.randn(6, 8)


def traced(f, *inputs):
    return torch.jit.trace(f, inputs)


@pytest.mark.parametrize("make", [lambda f, *_: torch.jit.script(f), traced], ids=["script", "trace"])
@pytest.mark.parametrize("f", [chain, shapes])
def test_functions(make, f, args):
    gm = to_fx(make(f, *args))
    torch.testing.assert_close(gm(*args), f(*args), rtol=0, atol=0)
    torch.testing.assert_close(compile_script(make(f, *args))(*args), f(*args))


def test_registered_as_a_whole(args):
    key = fuser.register_fusion(to_fx(torch.jit.script(chain)))
    torch.testing.assert_close(fuser.run_fusion(key, args), list(chain(*args)))
    assert fuser.interface.kernel_spec(key).store.kernels and not fuser.interface.kernel_spec(key).store.fallbacks
    assert key == fuser.register_fusion(to_fx(traced(chain, *args))), "script and trace are the same group"


@pytest.mark.parametrize("training", [False, True])
def test_module_shares_its_parameters(training):
    torch.manual_seed(0)
    module, x = Block().train(training), torch.randn(4, 16)
    module.drop.p = 0.0
    scripted = torch.jit.script(module)
    run = compile_script(scripted)
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x))
        module.first.weight.mul_(2)
        torch.testing.assert_close(run(x), module(x))


def test_gradients_reach_the_parameters():
    torch.manual_seed(0)
    module, x = Block().eval(), torch.randn(4, 16)
    compile_script(torch.jit.script(module))(x).sum().backward()
    got = [p.grad for p in module.parameters()]
    for p in module.parameters():
        p.grad = None
    module(x).sum().backward()
    torch.testing.assert_close(got, [p.grad for p in module.parameters()])


def test_sizes_of_a_trace_stay_sizes():
    def halves(x):
        n = x.size(0) * 2 - 2
        return x.reshape(n // 2 + 1, -1) * n

    gm = to_fx(torch.jit.trace(halves, torch.randn(6, 8)))
    x = torch.randn(4, 10)
    torch.testing.assert_close(gm(x), halves(x))


def test_a_float_argument_stays_open_in_compiled_scripts():
    """It is compiled once for the first value, and once for all others."""

    def scaled(x, p: float):
        return (p - x) * (1 - p) + x / p - p + x * p

    made = []

    def backend(*args, **kwargs):
        made.append(args)
        return fuser_backend(*args, **kwargs)

    torch._dynamo.reset()
    x, script = torch.randn(8), torch.jit.script(scaled)
    compiled = torch.compile(to_fx(script), backend=backend)
    for p in (0.5, 1.5, 2.5, 3.5):
        torch.testing.assert_close(compiled(x, p), script(x, p))
    assert len(made) == 2


@pytest.mark.parametrize(("f", "said"), [(looped, "prim::Loop"), (branching, "a branch depends on")])
def test_control_flow_is_refused_with_its_line(f, said):
    with pytest.raises(GraphError, match=f"{said}.*torch.compile .*test_torchscript.py"):
        to_fx(torch.jit.script(f))


def test_what_is_no_torchscript():
    with pytest.raises(InputError, match="function is not TorchScript: expected what torch.jit.script"):
        to_fx(chain)


SIZES_AS_TENSORS = {
    "remainder": lambda y: torch.arange(3) % y.shape[1],
    "product": lambda y: y * y.shape[0],
    "quotient": lambda y: torch.arange(3) * (y.shape[1] / 4),
    "power": lambda y: torch.arange(3) // y.shape[0] + y.shape[1] ** 2,
    "of int32": lambda y: torch.arange(3, dtype=torch.int32) + y.shape[0],
    "of bool": lambda y: y.bool() * y.shape[0],
    "joined": lambda y: torch.stack([torch.as_tensor(y.shape[0]), torch.as_tensor(y.shape[1])]),
    "beside": lambda y: (y.shape[0] / y.shape[1]) * torch.arange(4),
    "alone": lambda y: torch.as_tensor(y.shape[0]),
}


@pytest.mark.parametrize("f", SIZES_AS_TENSORS.values(), ids=SIZES_AS_TENSORS)
def test_sizes_that_a_trace_has_as_tensors_keep_their_dtype(f):
    """A trace makes tensors of sizes, of int64."""
    x = torch.randn(3, 6)
    traced = torch.jit.trace(f, (x,), check_trace=False)
    got = fuser.fusion_handle(fuser.register_fusion(to_fx(traced)))(x)
    torch.testing.assert_close(got, traced(x))


def abs_of_all(x, n: int):
    y = abs(x * 2)
    if n > 0:
        y = y + abs(n)
    return [y, abs(x)][0] - abs(y - 3)


def abs_of_tensor(x):
    return abs(abs(x) - 2) * abs(x.size(0) - 9)


@pytest.mark.parametrize("n", [-2, 2])
def test_abs_of_tensors_and_numbers(n):
    """TorchScript has a node of its own for Python's `abs`."""
    script, x = torch.jit.script(abs_of_all), torch.randn(4, 4)
    fused = fuser.fuse_script(script)
    assert torch.equal(fused(x, n), script(x, n))
    assert "int = prim::abs" in str(fused.graph) and "Tensor = prim::abs" not in str(fused.graph)
    of_one = torch.jit.script(abs_of_tensor)
    assert torch.equal(to_fx(of_one)(x), of_one(x))
    assert torch.equal(fuser.run_fusion(fuser.register_fusion(to_fx(of_one)), [x])[0], of_one(x))
