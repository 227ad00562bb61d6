"""Tensors without dims: written, read as numbers, used as places, with other values in each call.

Dynamo makes a number of what a float64 tensor without dims holds, and took a write into one for an input that nobody
uses: the write was lost, with every backend that traces by AOTAutograd.
"""

import pytest
import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def added(s, t, x):
    s.add_(t)
    return x + 1


def chained(s, t, x):
    s.mul_(2).add_(t, alpha=1)
    return x * s


def copied(s, t, x):
    s.copy_(t)
    return x + 1


def filled(s, t, x):
    s.fill_(t)


def set_whole(s, t, x):
    s[()] = t + 1
    return x + s


def given_out(s, t, x):
    torch.mul(s, t, out=s)
    torch.add(s, 1, out=s)
    return x + 1


def through_view(s, t, x):
    s.view(1).add_(1)
    s.unsqueeze(0).mul_(t)
    return s.expand(3) * x[0, :3]


def swapped(s, t, x):
    old = s.clone()
    s.copy_(t)
    t.copy_(old)
    return x + s


def detached(s, t, x):
    s.detach().add_(1)
    return x + s


def read_before(s, t, x):
    value = s.item()
    s.add_(1)
    return x * value + s


def read_after(s, t, x):
    s.add_(1)
    return x * s.item()


def place(s, t, x):
    return x[s.long() % 4], x[: int(t) % 4 + 1]


def bounds(s, t, x):
    return x.clamp(min=float(s) - 3, max=float(t)), torch.where(x > s, x, t.to(x.dtype))


def branch(s, t, x):
    return x + 1 if s > t else x - 1


def factor(s, t, x):
    return torch.add(x, x, alpha=float(s)), x.abs() ** s


def largest(s, t, x):
    s.copy_(x.max())
    return x / s


PROGRAMS = (
    added, chained, copied, filled, set_whole, given_out, through_view, swapped, detached, read_before, read_after,
    place, bounds, branch, factor, largest,
)  # fmt: skip


def _calls(function, dtype, parameters):
    """All results and what the arguments hold, of five calls with other values; an error by its type."""
    torch.manual_seed(0)
    found = []
    for first, second in ((1, 2), (3, 1), (3, 1), (0, 5), (2, 2)):
        s, t, x = torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype), torch.randn(4, 4)
        if parameters:
            s, t = torch.nn.Parameter(s), torch.nn.Parameter(t)
        with torch.no_grad():
            found.append((function(s, t, x), s.detach(), t.detach(), x))
    return found


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_as_in_eager(program, dtype):
    """Every program that eager can run."""
    for parameters in (False, True) if dtype.is_floating_point else (False,):
        try:
            want = _calls(program, dtype, parameters)
        except RuntimeError as error:
            pytest.skip(f"eager: {error}")
        compiled = torch.compile(lambda s, t, x: program(s, t, x), backend="fuser")
        torch.testing.assert_close(_calls(compiled, dtype, parameters), want, equal_nan=True)


def _steps(compiled):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn((), dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True)
    step = torch.compile(optimizer.step, backend="fuser") if compiled else optimizer.step
    for _ in range(4):
        p.grad = torch.randn_like(p)
        step()
    return p.detach(), optimizer.state[p]["momentum_buffer"]


def test_an_optimizer_of_a_number():
    """SGD's momentum of a parameter without dims forgot every gradient but the first."""
    torch.testing.assert_close(_steps(True), _steps(False))


MADE = {
    "as_tensor": lambda n, x: torch.as_tensor(n), "of a sum": lambda n, x: torch.as_tensor(n + 1),
    "as_tensor of a list": lambda n, x: torch.as_tensor([n, 3]), "asarray": lambda n, x: torch.asarray(n),
    "tensor": lambda n, x: torch.tensor([n, 3]), "new_tensor": lambda n, x: x.new_tensor([n, 3]),
    "new_tensor of one": lambda n, x: x.new_tensor(n), "LongTensor": lambda n, x: torch.LongTensor([n, 3]),
    "float64": lambda n, x: torch.as_tensor(n, dtype=torch.float64),
    "scalar_tensor": lambda n, x: torch.scalar_tensor(n),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_integers_keep_all_their_bits(clean, name, differentiable):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=differentiable)
    fn = lambda x, n: MADE[name](n, x) * x  # noqa: E731
    compiled = torch.compile(fn, backend="fuser", dynamic=True)
    for n in (7, 2**31 + 5, -(2**33), 2**53 + 1):
        got, want = compiled(x, n), fn(x, n)
        assert torch.equal(got, want) and got.dtype == want.dtype, n
