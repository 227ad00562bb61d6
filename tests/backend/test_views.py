"""Views read in a kernel cost nothing and mean what eager's mean; views that a user can see stay views."""

from __future__ import annotations

import pytest
import torch

from tests.backend.fused import check, check_each, check_falls_back, compare, fuse, in_layouts, no_fallback, values

X = values(4, 6, 8)

VIEWS = {
    "view": lambda x: x.reshape(24, 8) + 1,
    "view_split": lambda x: x.reshape(2, 2, 3, 2, -1) * 2,
    "view_merge_all": lambda x: x.reshape(-1) - 1,
    "view_across": lambda x: x.reshape(6, 4, 8) * x.reshape(6, 4, 8),
    "flatten": lambda x: x.flatten(1) + x.flatten(1).sum(1, keepdim=True),
    "unflatten": lambda x: x.unflatten(1, (2, 3)) * 2,
    "ravel": lambda x: x.ravel() * 2,
    "expand": lambda x: x[:, :1].expand(-1, 3, -1) + x[:, 3:],
    "expand_lead": lambda x: x.expand(2, 4, 6, 8) * 2,
    "broadcast_to": lambda x: torch.broadcast_to(x[0, :, :1], (4, 6, 8)) - x,
    "permute": lambda x: x.permute(2, 0, 1) * 2,
    "transpose": lambda x: x.transpose(0, -1) + 1,
    "mT": lambda x: x.mT * 2,
    "movedim": lambda x: torch.movedim(x, (0, 2), (2, 1)) * 2,
    "swapaxes": lambda x: torch.swapaxes(x, 1, 2) - 1,
    "t": lambda x: x[0].t() * 2,
    "slice": lambda x: x[1:3, ::2, 2:-1] * 2,
    "slice_beyond": lambda x: x[-100:2, 5:100, 3:] + 1,
    "select": lambda x: x[1] * x[-1] + x[0, 1, 2],
    "select_inner": lambda x: x[:, :, 3] + x[..., -1],
    "narrow": lambda x: x.narrow(1, 2, 3) * x.narrow(1, -3, 3),
    "squeeze": lambda x: x[:, :1].squeeze(1) + x[:, 0:1, :1].squeeze()[:, None] + x[:1, :1, :1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(-1) * x.unsqueeze(1)[:, :, :, :1, None],
    "split": lambda x: x.split(3, 1)[0] + x.split([2, 3, 1], 1)[1],
    "chunk": lambda x: torch.chunk(x, 3, 2)[1] * 2,
    "chunk_glu": lambda x: torch.chunk(x, 2, -1)[0] * torch.sigmoid(torch.chunk(x, 2, -1)[1]),
    "tensor_split": lambda x: torch.tensor_split(x, 4, 1)[0] + torch.tensor_split(x, (1, 3), 1)[1],
    "hsplit": lambda x: torch.hsplit(x, 3)[2] * 2,
    "unbind": lambda x: x.unbind(1)[0] - x.unbind(1)[5],
    "unfold": lambda x: x.unfold(2, 3, 2) * 2,
    "unfold_outer": lambda x: x.unfold(0, 2, 1).sum(-1),
    "diagonal": lambda x: x.diagonal(1, 1, 2) * 2,
    "diagonal_below": lambda x: torch.diagonal(x, -2) + 1,
    "as_computed_strided": lambda x: torch.as_strided(torch.relu(x).contiguous(), (3, 5), (2, 7), 4) * 2,
    "of_a_view": lambda x: x.permute(1, 0, 2)[1:5].reshape(2, 2, 32)[:, 1].t() * 2,
    "twice_the_same": lambda x: x.view_as(x) * x.reshape_as(x) + x.detach(),
}  # fmt: skip


@pytest.mark.sampled(20, also=("mT", "movedim"))
@pytest.mark.parametrize("name", VIEWS)
def test_read_in_a_kernel(name):
    tol = {"rtol": 1e-6, "atol": 1e-6} if name == "chunk_glu" else None
    check_each(VIEWS[name], in_layouts(X), tol=tol)


def test_small_sizes():
    deep, empty = values(1, 2, 1, 3, 1, 2, 2, 1), torch.empty(3, 0, 2)
    check(lambda x: (x.squeeze() * 2, x.reshape(2, 3, -1) + 1, x[0, :, 0] - 1), deep)
    check(lambda x: x.permute(7, 5, 3, 1, 0, 2, 4, 6) * 2, deep)
    check(lambda x: (x.transpose(0, 1) * 2, x.reshape(0, 6) + 1, x[:, :1] * 2, x.flatten() * 2, x[1:2] + 1), empty)
    check(lambda x: (x.reshape(1, 1) * 2, x.expand(2, 3) + 1, x.unsqueeze(0) * 2, x.squeeze() * 3), torch.tensor(3.0))


def test_expanded_and_overlapping_inputs():
    x = values(1, 6).expand(4, 6)
    windows = values(10).unfold(0, 4, 1)
    check(lambda x, w: (x * 2, x.t() + 1, w * w, w[1:].sum(1), w.reshape(-1) * 2), x, windows)


def test_channels_last():
    x = values(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: (x[:, 1:] * 2, x.flatten(2) + 1, x.permute(0, 2, 3, 1) * 2), x)
    check(lambda x: (x.transpose(1, 3) - 1, x[:, :, 0] * 2), x)


def test_views_cost_no_kernel():
    check(lambda x, y: x.permute(1, 0, 2).reshape(6, 32) + y[:, ::2] * 2, X, values(6, 64), kernels=1)


SEEN = {
    "of_an_input": lambda x: (x.t(), x * 2),
    "part_of_an_input": lambda x: (x[1:3, ::2], x + 1),
    "of_a_result": lambda x: (lambda y: (y, y[0]))(x * 2),
    "expanded": lambda x: (x * 2, x[:1].expand(3, 6)),
    "the_input": lambda x: (x.view_as(x), x.sum()),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_view_that_a_user_sees_shares_memory(name):
    fn = SEEN[name]
    handle, _ = fuse(fn)
    x = values(4, 6)
    got, want = handle(x), fn(x)
    compare(got, want)

    def memory(results):
        first = [x, *results]
        return [[a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a in first] for b in first]

    assert memory(got) == memory(want)
    x.add_(1)
    if name != "of_a_result":
        compare(got, want)


def test_views_that_are_copied_have_memory_of_their_own():
    aten = torch.ops.aten

    def fn(x):
        several = aten.unbind_copy(x, 1)[2], aten.split_with_sizes_copy(x, [1, 3], 0)[1]
        return (*several, aten.diagonal_copy(x, 1), aten.permute_copy(x, [1, 0]), aten.expand_copy(x[:1], [3, 6]),
                aten.view_copy(x, [6, 4]), aten.unsqueeze_copy(x, 1), aten.unfold_copy(x, 1, 3, 2), aten.alias_copy(x),
                aten.t_copy(x), aten.transpose_copy(x, 0, 1), aten.squeeze_copy(x[:1]))  # fmt: skip

    x = values(4, 6)
    check(fn, x)
    handle, _ = fuse(fn)
    results = handle(x)
    assert len({r.untyped_storage().data_ptr() for r in (x, *results)}) == len(results) + 1


def test_copies_stand_for_views_in_functional_graphs():
    fn = lambda x: (x.t(), x[1:3, ::2], (x * 2)[0])  # noqa: E731
    handle, spec = fuse(fn, functional=True)
    for a, b in zip(handle(values(4, 6)), fn(values(4, 6))):
        assert torch.equal(a, b)
    no_fallback(spec)


def test_other_sizes_need_no_other_kernel():
    def fn(x):
        a, b = x.chunk(2, -1)[0], x.chunk(2, -1)[1]
        return a * b, x.reshape(-1, 1, x.shape[0]).transpose(0, 2) + 1, x[1:, :-1] - x[:-1, 1:]

    handle, spec = fuse(fn)
    for size in ((4, 6), (3, 10), (60, 64), (9, 4)):
        compare(handle(values(*size)), fn(values(*size)))
    no_fallback(spec)
    assert len(spec.store.kernels) == 1


def test_what_is_left_to_aten():
    x = values(4, 6)
    check_falls_back(lambda x: x.view(torch.int32) + 1, x, reason="another dtype")
    check_falls_back(lambda x: torch.as_strided(x[1:], (3, 2), (6, 1), 3) * 2, x, reason="as_strided")


def test_strides_of_an_input_are_numbers():
    check(lambda x: x * x.stride(0) + x.stride(-1), X[0].t())
    check(lambda x: x * x.stride(0) + x.stride(-1), X[0])
