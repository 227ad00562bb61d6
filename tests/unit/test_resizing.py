"""Gradients of resized images by gathers: the sums that autograd adds, of every element's readers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fuser.passes import resizing

MODES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
SIZES = tuple(itertools.product((1, 2, 5, 9), (1, 3, 5, 8, 17), (False, True), (None, 0.7, 1.5)))


@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode):
    dims, of_size = MODES[mode], {}
    for source, made, corners, factor in SIZES:
        shape = [source + d for d in range(dims)]
        if mode == "trilinear" and source * made > 40 or factor and made != 5:
            continue
        x = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)
        size = None if factor else [made + d for d in range(dims)]
        if factor and not all(int(n * factor) for n in shape):
            continue
        y = F.interpolate(x, size, factor, mode=mode, align_corners=corners)
        found = grad = torch.randn_like(y)
        (want,) = torch.autograd.grad(y, x, grad)
        for d in range(dims):
            axis = resizing._Axis(shape[d], y.shape[2 + d], corners, factor, mode == "bicubic")
            found = axis.gradient(found, d - dims)
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)
        of_size[source, made] = axis.readers
    assert max(of_size.values()) > 8


def test_a_number_that_is_none_stays_where_it_is():
    """Products with zeros would spread it over the row."""
    grad = torch.zeros(1, 1, 32, dtype=torch.float64)
    grad[..., 20] = torch.nan
    found = resizing._Axis(16, 32, False, None, True).gradient(grad, -1)
    assert found.isnan().sum() == 4


OPERATORS = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3}


@pytest.mark.parametrize("name", OPERATORS)
def test_images_that_keep_their_size_are_left_to_eager_which_copies_them_by_any_factor(name):
    dims = OPERATORS[name]
    x = torch.empty(1, 2, *[5] * dims, device="meta")
    how = [5] * dims, False, *[1.1] * dims
    assert resizing._resized(name, x, *how) is NotImplemented
    assert resizing._gradient(name, x, how[0], list(x.shape), *how[1:]) is NotImplemented


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_few_points_are_decomposed_but_on_the_host(name, last, monkeypatch):
    monkeypatch.setattr(resizing, "is_large", lambda name, x, made: made[0] > 20)
    dims = OPERATORS[name]
    form = (torch.channels_last if dims == 2 else torch.channels_last_3d) if last and dims > 1 else None

    def images(n, device):
        size = 2, 4, *[n] * dims
        return torch.empty(size, device=device, dtype=torch.bfloat16, memory_format=form or torch.contiguous_format)

    for size, device, is_taken in ((8, "meta", True), (8, "cpu", False), (32, "meta", False)):
        how = [size] * dims, False, *[None] * dims
        x, grad = images(10, device), images(size, device)
        made = resizing._resized(name, x, *how)
        found = resizing._gradient(name, grad, how[0], list(x.shape), *how[1:])
        assert (made is NotImplemented) is not is_taken
        is_left = device == "cpu" or size == 32 and name == "upsample_bilinear2d"
        assert (found is NotImplemented) is is_left
        if is_taken:
            meta = [getattr(torch.ops.aten, n).default for n in (name, f"{name}_backward")]
            eager = meta[0](x, *how), meta[1](grad, how[0], list(x.shape), *how[1:])
            for ours, theirs in zip((made, found), eager, strict=True):
                assert ours.shape == theirs.shape and ours.stride() == theirs.stride() and ours.dtype is theirs.dtype
