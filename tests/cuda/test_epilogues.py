"""cuBLASLt's own epilogues on a real GPU: no further from float64 than eager's separate calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

aten = torch.ops.aten


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((64, 96, 128), (1, 768, 3072), (512, 1024, 4096), (7, 33, 65)))
def test_gelu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    torch.manual_seed(1)
    x, w, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (k, n), (n,)))
    out = aten._addmm_activation.default(b, x, w, use_gelu=True)
    exact = gelu(torch.addmm(b.double(), x.double(), w.double()))
    eager = gelu(torch.addmm(b, x, w))
    error, theirs = ((t.double() - exact).abs() / (1 + exact.abs()) for t in (out, eager))
    assert error.max() <= 2 * theirs.max() + 2 * torch.finfo(dtype).eps
    assert error.square().mean().sqrt() <= 1.5 * theirs.square().mean().sqrt()
    x[0, 0] = float("nan")
    assert aten._addmm_activation.default(b, x, w, use_gelu=True)[0].isnan().all()


@pytest.mark.cuda
def test_compiled() -> None:
    from fuser.frontends.dynamo import fuser_backend
    from fuser.frontends.records import last_compilation

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU("tanh"), torch.nn.Linear(256, 64))
    model = model.cuda().bfloat16().eval()
    x = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        out = torch.compile(model, backend=fuser_backend)(x)
        eager, exact = model(x), model.double()(x.double())
    assert "_addmm_activation" in last_compilation().source
    assert (out - exact).square().mean() <= 2 * (eager - exact).square().mean()


@pytest.mark.cuda
def test_an_odd_vocabulary() -> None:
    """Logits of 5,001 words and their gradients are made of padded matrices, no further from float64 than eager's."""
    from fuser.contests import records
    from fuser.frontends.dynamo import fuser_backend

    def loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ w.t()).float(), target)

    torch.manual_seed(1)
    leaves = [torch.randn(n, 768, device="cuda").mul_(0.1).bfloat16().requires_grad_() for n in (4096, 5001)]
    target = torch.randint(5001, (4096,), device="cuda")
    found = torch.autograd.grad(torch.compile(loss, backend=fuser_backend)(*leaves, target), leaves)
    eager = torch.autograd.grad(loss(*leaves, target), leaves)
    exact = torch.autograd.grad(loss(*(t.double() for t in leaves), target), leaves)
    for mine, theirs, true in zip(found, eager, exact):
        assert mine.stride() == theirs.stride() and mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
        assert (mine - true).square().mean() <= 2 * (theirs - true).square().mean()
    raced = [c for c in records.choices() if "product of" in c.what and "5001" in c.what]
    assert len(raced) == 3 and all({n for n, _ in c.times} == {"as it is", "padded"} for c in raced)
    wide = [t.detach() for t in leaves]
    with torch.no_grad():
        logits = torch.compile(lambda x, w: x @ w.t(), backend=fuser_backend)(*wide)
    assert logits.is_contiguous() and torch.allclose(logits, wide[0] @ wide[1].t(), rtol=0.02, atol=0.02)
