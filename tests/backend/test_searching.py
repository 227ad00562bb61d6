"""Places found by comparing values; what was once missed for bools, negative pads, no dims and no inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.backend.fused import check, check_falls_back, compare, fuse, no_fallback, values

SORTED = torch.tensor([-1.5, -1.0, 0.0, 0.0, 0.25, 2.0, 7.0])
X = torch.tensor([[-3.0, -1.0, 0.0], [0.1, 7.0, float("nan")], [float("inf"), 2.0, -1.5]])


@pytest.mark.parametrize("right", [False, True])
def test_binary_search(right):
    def fn(x, b):
        side = "right" if right else "left"
        return torch.searchsorted(b, x, side=side), torch.bucketize(x * 2, b, out_int32=True, right=right)

    check(fn, X, SORTED)
    check(fn, X.half(), SORTED.half())
    check(fn, (X.nan_to_num(3) * 2).to(torch.int64).clamp(-9, 9), SORTED.long().sort().values)


def test_binary_search_of_each_row_and_by_a_sorter():
    rows = torch.stack([SORTED, SORTED * 2, SORTED + 1])
    turned = SORTED.flip(0).contiguous()
    check(lambda x, b: torch.searchsorted(b, x), X, rows)
    check(lambda x, b, s: torch.searchsorted(b, x, sorter=s), X, turned, turned.argsort())


def test_searches_ask_the_elements_that_eager_asks():
    """A sort puts NaN last, where every comparison with it is false; nor is a list that is not sorted an error."""
    for n in (1, 2, 8, 13, 16, 33):
        rows = values(3, n).sort().values
        rows[1, -1], rows[2, n // 2 :] = float("nan"), float("nan")
        for right in (False, True):
            check(lambda x, b, right=right: torch.searchsorted(b, x, right=right), X, rows)
            check(lambda x, b, right=right: torch.bucketize(x, b, right=right), X, rows[1])
            check(lambda x, b, right=right: torch.searchsorted(b, x, right=right), X, rows.flip(1).contiguous())


def test_one_search_serves_lists_of_several_lengths():
    handle, spec = fuse(lambda x, b: torch.searchsorted(b, x) + 5)
    for n, kernels in ((4, 1), (7, 1), (5, 1), (33, 2), (63, 2)):
        b = torch.linspace(-2, 8, n)
        compare(handle(X, b), torch.searchsorted(b, X) + 5)
        assert sum(len(e.kernels) for e in spec.store.entries) == kernels
    for n in (0, 1):
        compare(handle(X, SORTED[:n]), torch.searchsorted(SORTED[:n], X) + 5)
    no_fallback(spec)


def test_elements_where_a_mask_holds():
    x, mask = values(4, 5), values(4, 5) > 0
    fn = lambda x, m, s: x.masked_scatter(m, s) + 1  # noqa: E731
    check(fn, x, mask, values(30))
    check(fn, x, mask[0], values(5, 4))
    check(fn, x, mask & False, values(1))
    handle, spec = fuse(fn)
    with pytest.raises(RuntimeError):
        handle(x, mask | True, values(3))  # fewer than the mask takes: eager's own error
    check_falls_back(fn, x, mask, values(5, 4).t(), reason="row-major order")


def test_bools():
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check(lambda a, b: (a.fmax(b), a.fmin(b), a.heaviside(b), a.max(0).indices), a, b)


def test_an_index_into_a_tensor_of_no_dims():
    x, i, s = torch.tensor(2.0), torch.tensor([0]), torch.tensor(3.0)
    check(lambda x, i, s: (x.index_add(0, i, s), x.index_copy(0, i, s), x.index_fill(0, i, 5.0)), x, i, s)


def test_an_index_without_elements():
    x, none = values(5), torch.empty(2, 0, dtype=torch.uint8)
    check(lambda x, i: torch.gather(x, 0, i), x, none)
    check(lambda x, i: torch.take(x, i), torch.empty(0), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["replicate", "reflect"])
def test_negative_pads(mode):
    x = values(2, 6, 7)
    check(lambda x: (F.pad(x, (-2, 3), mode), F.pad(x, (1, -2, -1, 2), mode), F.pad(x, (-2, -1), mode)), x)
    if mode == "replicate":
        check(lambda x: F.pad(x, (-8, 3), mode), x)  # nothing of the tensor but its edge


def test_fractions_and_exponents():
    x = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-40, 1e30, float("inf"), float("nan"), 0.1])
    check(lambda x: tuple(torch.frexp(x)), x, aten=True)
    check(lambda x: tuple(torch.frexp(x)), x.double(), aten=True)


def test_ranges_between_tensors():
    a, b = torch.tensor(-1.25), torch.tensor(7.75)
    near = {"rtol": 1.3e-6, "atol": 1e-6}
    check(lambda a, b: (torch.linspace(a, b, 7), torch.logspace(a, b, 5), torch.linspace(a, 3, 4)), a, b, tol=near)
    check(lambda a, b: torch.linspace(a, b, 7, dtype=torch.int64), a, b)


def test_a_graph_without_tensors_is_fused_where_it_names_the_cpu():
    def named():
        return torch.arange(3, device="cpu").float() + torch.ones(3, device="cpu")

    def open_device():
        return torch.ones(3) * 2

    handle, spec = fuse(named, examples=())
    compare(handle(), named())
    no_fallback(spec)
    assert sum(len(e.kernels) for e in spec.store.entries) == 1
    handle, spec = fuse(open_device)  # where it is made follows torch's default device
    compare(handle(), open_device())
    assert not any(e.kernels for e in spec.store.entries)


def test_trigamma_of_whole_numbers_is_what_eager_has():
    x = torch.tensor([0, -1, 2, -7], dtype=torch.int16)
    check(lambda x: torch.polygamma(1, x), x, tol={"rtol": 1.3e-6, "atol": 0.0})
