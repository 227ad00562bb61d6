"""`fmod`, `remainder` and `floor_divide` of floats are eager's to the bit, for quotients of every size.

Eager's of one element, that is: its vectors give NaN where a quotient is beyond the dtype, and round halves more often.
"""

from __future__ import annotations

import pytest
import torch

from fuser import register_fusion
from fuser.kernel_cache import REGISTRY

INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
CASES = [(name, dtype) for name in ("fmod", "remainder") for dtype in INTEGERS]
CASES += [("floor_divide", dtype) for dtype in (torch.float64, torch.float32)]  # eager's rounds halves on the way


def pairs(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every kind of number by every kind, random bits, and numbers that are used."""
    generator = torch.Generator().manual_seed(5)
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, float("inf"), -float("inf"), float("nan"), info.max, -info.max,
             info.tiny, info.smallest_normal * 3, info.eps, 7.0, 1 / 3]  # fmt: skip
    edge = torch.tensor(edges, dtype=dtype)
    whole = INTEGERS[dtype]
    ends = torch.iinfo(whole)
    bits = torch.randint(ends.min, ends.max, (2, 20_000), generator=generator, dtype=whole).view(dtype)
    usual = (torch.randn(2, 20_001, generator=generator) * 50).to(dtype)
    far = (torch.rand(2, 3_001, generator=generator) + 0.1).to(dtype)
    return [
        (edge.repeat(len(edge)), edge.repeat_interleave(len(edge))),
        (bits[0], bits[1]),
        (usual[0], usual[1]),
        (far[0] * 2**12, far[1] * 2.0**-12),
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_quotients_of_every_size(name: str, dtype: torch.dtype):
    fn = getattr(torch, name)
    registered = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(lambda a, b: fn(a, b)), functional=True))
    for a, b in pairs(dtype):
        apart = a.repeat_interleave(2)[::2], b.repeat_interleave(2)[::2]  # of which eager makes no vectors
        got, want = registered.handle(a, b), fn(*apart)
        same = (got == want) & (torch.signbit(got) == torch.signbit(want)) | got.isnan() & want.isnan()
        assert same.all(), (a[~same][:3], b[~same][:3], got[~same][:3], want[~same][:3])
    assert registered.spec.store.kernels and not registered.spec.store.fallbacks
