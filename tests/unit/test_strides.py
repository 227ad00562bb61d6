"""Strides of elementwise results: what the package says is what eager does, for every operator that it lowers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuser.lowering.corrections import corrected
from fuser.lowering.graph import run_meta
from fuser.lowering.registry import LOWERINGS
from tests.backend.fused import handle_of
from tests.unit.memory_layouts import LAYOUTS, dense, with_strides
from tests.versions import IS_OLD

WHOLE = [name for name in LAYOUTS if not name.startswith(("one_", "no_", "channel_"))]  # which keep a tensor's size
# In torch 2.11 these follow other rules where dims have one element or elements share memory.
DIFFER = {"aten.log_sigmoid_backward.default", "aten.slice_scatter.default"} if IS_OLD else set()
ROUNDS = 400 if os.environ.get("FUSER_STRIDES") == "full" else 9
NUMBERS = {"number": 1.0, "float": 1.0, "int": 1, "bool": False}


def overloads() -> Iterator[tuple[str, Any]]:
    """Overloads of lowered operators that make one new tensor of tensors and numbers."""
    for name in sorted(n.removeprefix("aten.") for n in LOWERINGS if n.startswith("aten.")):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            schema = getattr(packet, overload)._schema
            plain = [str(r.type) for r in schema.returns] == ["Tensor"] and "out" not in overload
            if plain and not name.endswith("_") and not any(a.alias_info for a in schema.arguments):
                yield f"aten.{name}", getattr(packet, overload)


def tensors(draw: random.Random) -> list[torch.Tensor]:
    """Four that broadcast, of 2 to 5 dims, in memory of any kind."""
    size, ranks = [draw.choice((1, 2, 3, 4)) for _ in range(5)], draw.choice(((2, 3, 4, 4, 4), (2,), (3,), (4,), (5,)))
    share = draw.choice((1.0, 0.7))
    sizes = [[n if draw.random() < share else 1 for n in size[5 - draw.choice(ranks) :]] for _ in range(4)]
    return [_tensor(draw, own) for own in sizes]


def _tensor(draw: random.Random, size: list[int]) -> torch.Tensor:
    made = None
    while made is None:
        made = LAYOUTS[draw.choice(WHOLE)](torch.ones(size))
    return made


def arguments(overload: Any, given: list[torch.Tensor]) -> list[Any] | None:
    """Positional arguments of an overload; None if there is one of another kind."""
    rest, out = iter(given), []
    for a in overload._schema.arguments:
        kind = str(a.type)
        if a.kwarg_only:
            break
        if kind not in ("Tensor", "Optional[Tensor]", *NUMBERS) and not a.has_default_value():
            return None
        tensor = "Tensor" in kind and kind != "List[Tensor]"
        out.append(next(rest, None) if tensor else a.default_value if a.has_default_value() else NUMBERS[kind])
    return [0 if a.name == "reduction" else v for a, v in zip(overload._schema.arguments, out)]


def strides(overload: Any, name: str, given: list[torch.Tensor]) -> tuple[Any, Any] | None:
    """Eager's and ours; None where the operator does not take the arguments, or does not go by elements."""
    for dtype in (torch.float32, torch.int32):
        args = arguments(overload, [x.to(dtype) for x in given])
        mine = [a for a in args or () if isinstance(a, torch.Tensor)]
        try:
            want = overload(*args)
            if want.shape != torch.broadcast_shapes(*(a.shape for a in mine)):
                return None
        except Exception:  # whatever an operator has against the arguments
            continue
        meta = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor)
                else a for a in args]  # fmt: skip
        got = corrected(name, "cpu", run_meta(name, meta, {}), meta)
        return want.stride(), got.stride()
    return None


@pytest.mark.filterwarnings("ignore")
def test_strides_of_results_are_eagers():
    draw, compared, wrong = random.Random(11), set(), []
    for _ in range(ROUNDS):
        given = tensors(draw)
        for name, overload in overloads():
            both = strides(overload, name, given)
            if both is not None:
                compared.add(str(overload))
                if both[0] != both[1] and str(overload) not in DIFFER:
                    wrong.append((str(overload), [(tuple(x.shape), x.stride()) for x in given], both))
    assert not wrong, ({name for name, _, _ in wrong}, wrong[:3])
    assert len(compared) > 200 and {"aten.copysign.Tensor", "aten.rsub.Tensor", "aten.lerp.Tensor"} <= compared


FUNCTIONS = {
    "copysign": lambda x, y: torch.copysign(x, y),
    "rsub": lambda x, y: torch.rsub(x, y),
    "masked_fill": lambda x, y: torch.masked_fill(x, y > 0, 2.0),
    "hardtanh": lambda x, y: F.hardtanh(x) * 2,
    "pow": lambda x, y: 2.0**y,
    "log_softmax": lambda x, y: torch.log_softmax(x + y, -1),
    "tril": lambda x, y: torch.tril(y + 1.0),
    "logaddexp": lambda x, y: torch.logaddexp(x, y),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_write_where_eager_does(name):
    """In dims of several elements: one kernel serves all strides of the others."""
    fn, draw, seen = FUNCTIONS[name], random.Random(3), set()
    handle = handle_of(fn)
    for _ in range(8):
        x, y, *_ = tensors(draw)
        want, got = fn(x, y), handle(x, y)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
        wide = [d for d in range(want.dim()) if want.shape[d] > 1]
        assert [got.stride(d) for d in wide] == [want.stride(d) for d in wide]
        seen.add(tuple(sorted(wide, key=want.stride)))
    assert len(seen) > 1


def test_a_layout_hangs_on_the_strides_of_dims_of_one_element():
    """Seed 1629908: what is pooled is channels-last if the stride of its only image says so."""
    masks = (torch.arange(32).reshape(1, 2, 4, 4) % 3 == 0).contiguous(memory_format=torch.channels_last)
    x, fn = torch.randn(1, 2, 1, 1), lambda x, y, z: F.avg_pool2d(torch.addcmul(x, y, z), 2, 2)
    want, got = fn(x, masks[0], masks), handle_of(fn)(x, masks[0], masks)
    assert torch.allclose(got, want) and got.stride() == want.stride() == (8, 1, 4, 2)


def test_new_tensors_lie_as_the_layout_that_is_asked_for_says():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    layouts = (torch.preserve_format, torch.contiguous_format, torch.channels_last)
    for like in (torch.zeros_like, torch.ones_like, torch.empty_like):
        for y in (x, x.contiguous(), x[:, :, ::2], x[:1], x[:, :1]):
            for layout in layouts:
                fn = lambda y: like(y, memory_format=layout).fill_(2.0) + 1  # noqa: B023, E731
                want = fn(y)
                got = handle_of(fn)(y)
                wide = [d for d in range(4) if want.shape[d] > 1]
                assert [got.stride(d) for d in wide] == [want.stride(d) for d in wide]


def test_flips_lie_in_memory_as_copies():
    draw, flip = random.Random(5), torch.ops.aten.flip.default
    for _ in range(60):
        for x in tensors(draw):
            meta = torch.empty_strided(x.shape, x.stride(), device="meta")
            got = corrected("aten.flip", "cpu", run_meta("aten.flip", [meta, [0]], {}), [meta, [0]])
            assert got.stride() == flip(x, [0]).stride()


OF_IMAGES = {
    "cat": lambda x, y: torch.cat((x, y), 1),
    "cat_with_itself": lambda x, y: torch.cat((x, x), -1),
    "stack": lambda x, y: torch.stack((x, y), 1),
    "max_pool": lambda x, y: F.max_pool2d(x, 2),
    "avg_pool": lambda x, y: F.avg_pool2d(x, 2),
    "adaptive_pool": lambda x, y: F.adaptive_avg_pool2d(x, 2),
    "lp_pool": lambda x, y: F.lp_pool2d(x, 2, 2),
    "nearest": lambda x, y: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear": lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group_norm": lambda x, y: F.group_norm(x, 1),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    "reflect": lambda x, y: F.pad(x, (1, 1, 1, 1), "reflect"),
    "replicate": lambda x, y: F.pad(x, (1, 1, 1, 1), "replicate"),
    "circular": lambda x, y: F.pad(x, (1, 1, 1, 1), "circular"),
    "constant": lambda x, y: F.pad(x, (1, 1)),
    "pixel_shuffle": lambda x, y: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "broadcast": lambda x, y: x[..., :1] * y[:, :, :1],
    "where": lambda x, y: torch.where(x > 0, x, y[:, :1]),
    "lerp": lambda x, y: torch.lerp(x[:1], y, x[..., :1]),
    "sum": lambda x, y: x.sum(1, keepdim=True) + y,
    "softmax": lambda x, y: x.softmax(1),
    "cumsum": lambda x, y: x.cumsum(1),
    "repeat": lambda x, y: x.repeat(1, 2, 1, 1),
    "new_dim": lambda x, y: x[:, None] * y[..., :1, :].unsqueeze(2),
}


@pytest.mark.sampled(21, also=("adaptive_pool", "batch_norm"))
@pytest.mark.parametrize("name", OF_IMAGES)
def test_kernels_heed_strides_in_dims_of_one_element(name):
    """Tensors of one size that differ only there: eager's results may lie in other orders."""
    fn, draw, handle = OF_IMAGES[name], random.Random(name), handle_of(OF_IMAGES[name])
    for _ in range(4):
        size = [draw.choice((1, 2, 4)), draw.choice((1, 2, 4)), draw.choice((2, 4)), draw.choice((2, 4))]
        size[draw.choice((0, 1))] = 1
        order = draw.choice(((0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3)))
        for _ in range(4):
            strides = [[draw.choice((1, 2, 4, 8, 16, 32, 64, 128)) if n == 1 else s for n, s in
                        zip(size, dense(size, order))] for _ in range(2)]  # fmt: skip
            x, y = (with_strides(torch.randn(size), s) for s in strides)
            want, got = fn(x, y), handle(x, y)
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
            wide = [d for d in range(want.dim()) if want.shape[d] > 1]
            assert [got.stride(d) for d in wide] == [want.stride(d) for d in wide], (size, strides)


def test_a_kernel_of_another_graph_heeds_strides_in_dims_of_one_element():
    """Graphs that differ in a view alone share kernels (seed 23090814)."""
    x, y = torch.ones(1, 1).expand(4, 1), torch.randn(1, 4).permute(1, 0)
    for fn in (lambda x, y: (y.unsqueeze(2) * x, y.unsqueeze(2)), lambda x, y: (y[:, None] * x, y[:, None])):
        assert [t.stride() for t in handle_of(fn)(x, y)] == [t.stride() for t in fn(x, y)]


@pytest.mark.parametrize("sizes", [(4, 6), (3, 4, 6)])
def test_kernels_of_large_strides_heed_expanded_dims(sizes):
    """Strides of 0 say nothing of the order of dims in memory, from which eager takes the order of the result."""
    fn, back = lambda x: x * 1.5 + 0.25, tuple(reversed(range(len(sizes))))
    handle = handle_of(fn)
    handle(torch.randn(*reversed(sizes), 2)[..., 0].permute(back))
    for x in (torch.randn(1, *sizes[1:]), torch.randn(*reversed(sizes[1:]), 1).permute(back)):
        x = x.expand(sizes)
        assert torch.equal(handle(x), fn(x)) and handle(x).stride() == fn(x).stride(), x.stride()
