"""Tensors whose last dim holds a few components: points, colours, boxes, quaternions, complex numbers, rotated pairs.

Results as eager's; one loop computes all components of a place; a result in another shape is no copy.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuser
from benchmarks.component_rows import corners, hamilton, rotation
from fuser import config
from fuser.debug.reference import interpret_lowered, interpret_schedule
from fuser.lowering.graph import lower_graph
from fuser.scheduler.schedule import schedule
from fuser.scheduler.verifier import verify_lowered
from tests.backend.fused import check, compare, fuse, values

needs_compiler = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")


def decoded(anchors, rel):
    w, h = anchors[:, 2] - anchors[:, 0], anchors[:, 3] - anchors[:, 1]
    x, y = rel[:, 0::4] * w[:, None] + anchors[:, 0:1], rel[:, 1::4] * h[:, None] + anchors[:, 1:2]
    wide, high = rel[:, 2::4].exp() * w[:, None], rel[:, 3::4].exp() * h[:, None]
    return torch.stack((x - wide, y - high, x + wide, y + high), dim=2).flatten(1)


def pairs(q, c, s):
    a, b = q.reshape(*q.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def every_two(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def product(x, y):
    a, b, c, d = x[..., 0], x[..., 1], y[..., 0], y[..., 1]
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def yuv(im):
    r, g, b = im[..., 0], im[..., 1], im[..., 2]
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return torch.stack([y, (b - y) * 0.492, (r - y) * 0.877], -1)


def butterfly(x):
    return torch.stack([x[..., 0] + x[..., 1], x[..., 0] - x[..., 1]], -1).flatten(1)


def rounded_pairs(q, c, s):
    return pairs(q.float(), c, s).to(torch.bfloat16)


def by_matrices(m, x):
    return m[..., 0] * x[..., 0] + m[..., 1] * x[..., 1]


def products(a, b):
    terms = [a[..., k, None] * b[..., k, :].unsqueeze(-2) for k in range(a.shape[-1])]
    return sum(terms[1:], terms[0])


X = values(50, 4) / 20 + 3
Y = values(70, 3) / 64
PROGRAMS = {
    "corners": (corners, X),
    "centres": (lambda b: torch.cat([(b[:, :2] + b[:, 2:]) / 2, b[:, 2:] - b[:, :2]], -1), X),
    "areas": (lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]), X),
    "decoded": (decoded, X, X.flip(0) / 9),
    "hamilton": (hamilton, X, X.flip(0)),
    "rotation": (rotation, X),
    "rotation_of_many": (rotation, X.view(2, 5, 5, 4)),
    "homogeneous": (lambda p: torch.cat([p, torch.ones_like(p[:, :1])], -1), X[:, :3].contiguous()),
    "lengths": (lambda p: p / (p.norm(dim=-1, keepdim=True) + 1e-6), X[:, :3].contiguous()),
    "polar": (lambda p: torch.stack([p[:, 0] * p[:, 1].cos(), p[:, 0] * p[:, 1].sin()], 1), X[:, :2].contiguous()),
    "yuv": (yuv, values(20, 30, 3)),
    "grey": (lambda im: im[..., 0] * 0.299 + im[..., 1] * 0.587 + im[..., 2] * 0.114, values(20, 30, 3)),
    "pairs": (pairs, values(2, 6, 4, 32), values(6, 1, 16), values(6, 1, 16).flip(0)),
    "pairs_of_an_odd_number": (pairs, values(3, 2, 46), values(23), values(23).flip(0)),
    "every_two": (every_two, values(2, 6, 4, 32), values(6, 1, 32), values(6, 1, 32).flip(0)),
    "rounded_pairs": (rounded_pairs, values(2, 6, 4, 32).bfloat16(), values(6, 1, 16) / 64, values(6, 1, 16) / 32),
    "product": (product, values(9, 21, 2), values(9, 21, 2).flip(0)),
    "butterfly": (butterfly, values(9, 21, 2)),
    "three_of_four": (lambda x: torch.cat((x[:, :2] * 2 - 0.5, F.relu(x[:, 2:])), -1), X),
    "pieces_of_pieces": (lambda x: torch.cat((torch.stack((x[:, 0], x[:, 1] * 2), -1), x[:, 2:]), -1) + 1, X),
    "integers": (lambda x: torch.stack((x, x + 1, x * 2), -1).flatten(), values(77, dtype=torch.int32)),
    "truth": (lambda x: torch.stack((x > 0, x < 1), -1).flatten(), values(77)),
    "gradient": (lambda g, x: torch.select_scatter(x * 0, g, 1, 2) + torch.select_scatter(x * 0, g * 2, 1, 0),
                 X[:, 0].contiguous(), X),
    "by_matrices": (by_matrices, values(1, 6, 16, 2, 2), values(3, 6, 16, 1, 2)),
    "products": (products, values(40, 3, 3), values(40, 3, 2)),
    "outer": (lambda x, y: x[:, :, None] * y[:, None], values(40, 3), values(40, 2)),
    "turned_by_lines": (lambda x, y: x + y.movedim(0, -1), values(20, 30, 3), values(3, 20, 30)),
    "one_for_all": (lambda x, y: F.relu(x.unsqueeze(-1) + y), values(5, 70), values(5, 70, 2)),
    "masked": (lambda x, y: x.masked_fill(y.unsqueeze(-1) > 0, 0.5), values(5, 70, 3).bfloat16(), values(5, 70)),
    "looked_up": (lambda t, i: t[i] * 2, values(9, 3), values(70, dtype=torch.int64).remainder(9)),
    "weighted_loss": (lambda a, b, w: ((a - b).abs() * w.unsqueeze(-1)).mean(), Y, Y.flip(0), Y[:, 0].contiguous()),
    "unit_loss": (lambda a, b: (a / (a.norm(dim=-1, keepdim=True) + 1) - b).square().mean(), Y, Y.flip(0)),
    "means_of_shares": (lambda x: x.softmax(-1).mean(0), Y),
    "most": (lambda x, w: (x * w.unsqueeze(-1)).amax(0), Y, Y[:, 0].contiguous()),
    "least_and_most": (lambda x, w: (x * w.unsqueeze(-1)).amax() - (x + w.unsqueeze(-1)).amin(), Y,
                       Y[:, 1].contiguous()),
    "of_each_place": (lambda x, w: (x * w.unsqueeze(-1)).argmax(0), Y, Y[:, 0].contiguous()),
    "how_many": (lambda x, w: (x > w.unsqueeze(-1)).sum(), Y, Y[:, 0].contiguous()),
    "sums_of_six": (lambda x, w: (x * w.unsqueeze(-1)).sum(-1), values(70, 6) / 64, Y[:, 0].contiguous()),
    "nothing": (lambda x: x.narrow(-2, 2, 0) * 2, values(1, 4, 4, 3).permute(0, 3, 1, 2)),
    "numbers": (lambda x: torch.stack((x, torch.full_like(x, 3.0)), -1).flatten(), X[:, 0].contiguous()),
}  # fmt: skip


TOGETHER = ("corners", "decoded", "hamilton", "polar", "yuv", "pairs", "every_two", "rounded_pairs", "product",
            "butterfly", "three_of_four", "by_matrices", "products", "outer", "turned_by_lines",
            "one_for_all")  # fmt: skip


@pytest.mark.sampled(16)
@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("functional", [True, False])
def test_as_in_eager(name, functional):
    fn, *args = PROGRAMS[name]
    check(fn, *args, tol={"rtol": 2e-6, "atol": 2e-6}, functional=functional, aten=True)


def lowered_for(name):
    return lowered_as(*PROGRAMS[name])


def lowered_as(fn, *args):
    _, spec = fuse(fn, True, args)
    given = (*spec.registered.bound, *args)
    lowered = lower_graph(spec.graph, given)
    return lowered, schedule(lowered, config.max_body_rows), given, fn(*args)


@pytest.mark.sampled(15, also=("of_each_place",))
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_interpreters_agree(name):
    lowered, plans, args, want = lowered_for(name)
    verify_lowered(lowered, plans)
    close = {"rtol": 2e-6, "atol": 2e-6}
    compare(interpret_lowered(lowered, args), [want], tol=close)
    compare(interpret_schedule(lowered, plans, args), [want], tol=close)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "looked_up"])  # an index that is checked
def test_all_components_are_written_into_an_input(name):
    fn, *args = PROGRAMS[name]
    want = fn(*args)
    into = torch.zeros_like(want)
    lowered, plans, given, _ = lowered_as(lambda into, *args: into.copy_(fn(*args)), into, *args)
    into.zero_()
    interpret_schedule(lowered, plans, given)
    compare(into, want, tol={"rtol": 2e-6, "atol": 2e-6})


@pytest.mark.parametrize("name", TOGETHER)
def test_one_loop_computes_all_components_of_a_place(name):
    _, plans, _, want = lowered_for(name)
    (plan,) = plans.plans
    assert not [row for row in plan.rows if row.op == "where"]
    places = len(plan.stores)
    assert places > 1 and sum(s.buffer == plan.stores[0].buffer for s in plan.stores) == places
    points = 1
    for a in plan.axes:
        points *= a.hint
    assert points * places == want.numel()


@pytest.mark.parametrize("name", ["weighted_loss", "unit_loss", "means_of_shares", "most", "least_and_most"])
def test_a_reduction_takes_all_components_of_a_place_at_once(name):
    _, plans, _, _ = lowered_for(name)
    assert [len(p.axes) for p in plans.plans if p.reductions] == [1]


@pytest.mark.parametrize("name", ["rotation", "pairs", "decoded", "butterfly"])
def test_a_result_in_another_shape_is_no_copy(name):
    lowered, plans, _, want = lowered_for(name)
    (result,) = {b.name for b in plans.buffers} & {name for _, name in lowered.outputs}
    assert result and not any(b.origin == "copy of a view" for b in plans.buffers)
    assert want.is_contiguous()
