"""Complex arithmetic is made of real and imaginary parts: results and gradients as eager's, in kernels."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser import config, interface
from fuser.frontends.dynamo import compilations

pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


def made(*size, dtype=torch.complex64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.view_as_complex(torch.randn(*size, 2, generator=g, dtype=torch.float64)).to(dtype)


def reals(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rotary(x, f):
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * f[:, None]).flatten(-2).type_as(x)


def kernel_of_a_state_space_model(a, c, t):
    return 2 * (c[:, None] * torch.exp(a[:, None] * t)).sum(0).real


def moved_in_phase(magnitude, phase, z):
    return (torch.polar(magnitude, phase) * z + magnitude).abs()


def many(z, w):
    y = torch.exp(z * w) / (2 + z.conj())
    return z.abs(), (y + 1j).real, torch.angle(y), y.clone()


PROGRAMS = {
    "rotary": (rotary, reals(3, 4, 2, 8), made(4, 4, seed=1)),
    "rotary_of_16_bits": (rotary, reals(3, 4, 2, 8).bfloat16(), made(4, 4, seed=1)),
    "rotary_in_double": (rotary, reals(3, 4, 2, 8).double(), made(4, 4, seed=1, dtype=torch.complex128)),
    "state_space": (kernel_of_a_state_space_model, made(6) / 4, made(6, seed=1), reals(9)),
    "phase": (moved_in_phase, reals(3, 5).abs(), reals(3, 5, seed=1), made(3, 5, seed=2)),
    "spectrum": (lambda x: torch.fft.rfft(x).abs().log1p(), reals(4, 16)),
    "filtered": (lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w, n=16) * 2, reals(4, 16), made(9, seed=1)),
    "phase_of_a_spectrum": (
        lambda x: torch.fft.irfft(torch.polar(torch.fft.rfft(x).abs() + 1, torch.fft.rfft(x).angle()), n=16),
        reals(4, 16),
    ),
    "many": (many, made(3, 4), made(4, seed=1)),
    "divided": (lambda a, b: torch.view_as_real(a / b), made(5, 7), made(5, 7, seed=1)),
    "divided_by_real": (lambda a, b: torch.view_as_real(a / b), made(5, 7), reals(5, 7, seed=1)),
    "number_divided": (lambda a: torch.view_as_real((2 + 1j) / a + 1 / a), made(5, 7)),
    "numbers": (lambda a: torch.view_as_real((a * 2 - 1j) * 1j + (0.5 - a) - 3), made(5, 7)),
    "squared": (lambda a: (a**2 + a * a.conj()).real + (a**2).imag, made(5, 7)),
    "log": (lambda a: torch.view_as_real(torch.log(a) + torch.sgn(a)), made(5, 7)),
    "of_parts": (lambda a, b: (torch.complex(a, b) * torch.complex(b, a)).imag * 2, reals(5, 7), reals(5, 7, seed=1)),
    "complex_result": (lambda a, b: torch.complex(a.sin(), b.cos()) * 2 + 1, reals(5, 7), reals(5, 7, seed=1)),
    "complex_and_real_results": (lambda z: (z * z, (z * z).real + 1, z * 2), made(5, 7)),
    "lazy_result": (lambda z: ((z * 2).conj(), (z * 2).abs()), made(5, 7)),
    "turned": (lambda z: ((z.t() * 2 + 1j).abs(), z.t() * (1 + 2j) + z.t().abs()), made(5, 7)),
    "turned_given": (lambda z: ((z * 2 + 1j).abs(), z * (1 + 2j) * z.abs()), made(7, 5).t()),
    "views": (lambda z: (z[:, 1:3].unsqueeze(1).expand(-1, 2, -1) * z[0, :2]).abs().sum(1), made(5, 7)),
    "joined": (lambda z, w: torch.cat([z * 2, torch.stack([w, w * 1j])], 0).abs(), made(5, 7), made(7, seed=1)),
    "sums": (lambda z: ((z * z).sum(1).abs(), (z * 2).mean(0).real, (z + 1).sum().angle()), made(5, 7)),
    "chosen": (lambda z, x: torch.where(x > 0, z * 2, z.conj()).imag, made(5, 7), reals(5, 7)),
    "no_dims": (lambda z, x: (z * x).abs() + (z * (1 + 2j)).real, made(), reals(5)),
    "mixed_precision": (lambda z, x: torch.view_as_real(z * x + x), made(5, 7), reals(5, 7).double()),
    "integers": (lambda z, n: (z * n + n).abs(), made(5, 7), torch.arange(7)),
    "equal": (lambda z: ((z * 1) == z.detach()) & (z.abs() > 0.1), made(5, 7)),
    "written": (lambda z: z.mul_(1j).real + z.abs(), made(5, 7)),
    "of_a_library": (lambda z, w: ((z @ w) * 2).abs(), made(5, 7), made(7, 3, seed=1)),
}  # fmt: skip
FLOATING = [n for n in PROGRAMS if n not in ("equal", "written")]


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="fuser", **options)


def flat(value):
    return [v for item in value for v in flat(item)] if isinstance(value, (tuple, list)) else [value]


def agree(got, want):
    for a, b in zip(flat(got), flat(want), strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape and a.is_conj() == b.is_conj()
        assert a.stride() == b.stride()
        tol = 1e-12 if a.dtype in (torch.float64, torch.complex128) else 2e-2 if a.dtype is torch.bfloat16 else 3e-6
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, equal_nan=True)


@pytest.mark.sampled(32, also=("many-False",))
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name, dynamic):
    fn, *args = PROGRAMS[name]
    mine, own = ([a.clone() if name == "written" else a for a in args] for _ in range(2))
    run = compiled(fn, dynamic=dynamic)
    with torch.no_grad():
        agree(run(*mine), fn(*own))
    if name == "written":
        agree(mine, own)


@pytest.mark.sampled(11, also=("log", "mixed_precision", "squared", "sums", "turned_given", "views"))
@pytest.mark.parametrize("name", FLOATING)
def test_gradients(name):
    fn, *args = PROGRAMS[name]
    grads = []
    for run in (fn, compiled(fn)):
        leaves = [a.detach().clone().requires_grad_() if a.is_floating_point() or a.is_complex() else a for a in args]
        results = [r for r in flat(run(*leaves)) if r.requires_grad]
        scale = torch.Generator().manual_seed(5)
        loss = sum((torch.view_as_real(r.resolve_conj()) if r.is_complex() else r).double().mul(
            torch.rand((), generator=scale)).sum() for r in results)  # fmt: skip
        found = torch.autograd.grad(loss, [a for a in leaves if a.requires_grad], allow_unused=True)
        grads.append([g for g in found if g is not None])
    for a, b in zip(*reversed(grads), strict=True):
        tol = 2e-2 if a.dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)



@pytest.mark.parametrize("name", ["rotary", "rotary_of_16_bits", "state_space", "phase", "of_parts", "squared"])
def test_one_kernel(name):
    fn, *args = PROGRAMS[name]
    with torch.no_grad(), config.override(check_passes=True):
        run = compiled(fn)
        run(*args)
    (key,) = compilations()[-1].keys
    spec = interface.kernel_spec(key)
    assert sum(len(k.program.steps) for k in spec.store.kernels) <= 2
    assert not spec.blocked and not spec.store.fallbacks


SPECIAL = [0.0, -0.0, 1.0, -1.5, float("inf"), -float("inf"), float("nan"), 1e-30, 1e30, 3e38]


@pytest.mark.parametrize("name", ["mul", "add", "sub", "abs", "real_mul", "number"])
def test_special_values(name):
    a = torch.complex(*map(torch.flatten, torch.meshgrid(torch.tensor(SPECIAL), torch.tensor(SPECIAL), indexing="ij")))
    a, b = a.repeat(len(a)), a.repeat_interleave(len(a))
    fn = {
        "mul": lambda a, b: torch.view_as_real(a * b), "add": lambda a, b: torch.view_as_real(a + b),
        "sub": lambda a, b: torch.view_as_real(a - b), "abs": lambda a, b: a.abs() + 0,
        "real_mul": lambda a, b: torch.view_as_real(a * b.real), "number": lambda a, b: torch.view_as_real(a * 2 + 1),
    }[name]  # fmt: skip
    if name in ("add", "sub"):  # eager multiplies the second operand by 1 + 0j, and infinity by 0 is NaN
        finite = torch.view_as_real(b).isfinite().all(-1)
        a, b = a[finite], b[finite]
    torch.testing.assert_close(compiled(fn)(a, b), fn(a, b), rtol=1e-6, atol=0, equal_nan=True)


def test_quotients_of_any_size():
    g = torch.Generator().manual_seed(1)
    scale = lambda: 10.0 ** torch.randint(-30, 31, (4000,), generator=g)  # noqa: E731
    a, b = (torch.complex(*(torch.randn(4000, generator=g) * scale() for _ in "xy")) for _ in "ab")
    got = compiled(lambda a, b: torch.view_as_real(a / b))(a, b)
    want = torch.view_as_real(a.to(torch.complex128) / b.to(torch.complex128))
    length = want.norm(dim=-1)
    fits = (length < 3e38) & (length > 1e-37)
    assert ((got.double() - want).norm(dim=-1) <= 1e-6 * length)[fits].all() and fits.sum() > 2000


def test_products_between_transforms_are_left():
    run = compiled(lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * w, n=16))
    with torch.no_grad():
        run(reals(4, 16), made(9))
    assert not compilations()[-1].keys


def test_inputs_that_are_conjugated_views():
    """Their memory has the imaginary parts with the other sign."""

    def fn(z):
        return (z * (1 + 2j)).imag + 1, (2 - z).abs()

    z = made(5, 7).conj()
    assert z.is_conj()
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn)(z), fn(z))
    assert compilations()[-1].keys
