"""Convolutions on CUDA in channels-last memory: what the pass makes of graphs on fake tensors, without a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._functorch.partitioners import must_recompute
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from fuser.passes import conv_tensor_cores, example_sizes
from fuser.passes.classify import tensors_of
from fuser.passes.conv_tensor_cores import tensor_cores_channels_last
from fuser.passes.layouts import Relayout

aten = torch.ops.aten
SHAPES = (2, 8, 12, 12), (16, 8, 3, 3), (16,), (16, 16, 3, 3)


def as_by_cudnn(monkeypatch):
    """Shapes of results as cuDNN makes them: a build of torch for CPUs does not know."""
    plain, of_symbols = Relayout._value, example_sizes._computed

    def last(found, node, mode):
        if conv_tensor_cores._images(node) is None:
            return found

        def turned(t):
            return torch.empty_like(t, memory_format=torch.channels_last) if t.dim() == 4 else t

        with mode:
            return pytree.tree_map_only(torch.Tensor, turned, found)

    monkeypatch.setattr(Relayout, "_value", lambda walk, node: last(plain(walk, node), node, walk.mode))
    monkeypatch.setattr(
        example_sizes, "_computed", lambda graph, node, mode: last(of_symbols(graph, node, mode), node, mode)
    )
    monkeypatch.setattr(conv_tensor_cores, "_LEAST", 0)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    as_by_cudnn(monkeypatch)


def conv(x, w, b, v=None):
    return grouped(x, w, b, 1)


def grouped(x, w, b, groups):
    return aten.convolution.default(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], groups)


def transposed(x, w, b):
    return aten.convolution.default(x, w.transpose(0, 1), b, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)


def block(x, w, b, v):
    """What stands between the convolutions of a network."""
    y = aten.max_pool2d_with_indices.default(conv(x, w, b).relu(), [2, 2], [2, 2])[0]
    wide = aten.convolution.default(y, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return torch.cat([wide.sigmoid() + y, y], 1).mean([2, 3])


def points(x, w, b, v):
    """A convolution of single points, which cuDNN does not turn."""
    point = aten.slice.Tensor(aten.slice.Tensor(w, 2, 0, 1), 3, 0, 1)
    return aten.convolution.default(x, point, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).relu()


def gradients(x, w, b, v):
    y = aten.convolution.default(x.relu(), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    grad = y.sigmoid() * 2
    into = aten.convolution_backward.default
    found = into(grad, x.relu(), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    return found[0] * 2, found[1]


def traced(f, *shapes, dtype=torch.bfloat16, device="cuda"):
    with FakeTensorMode():
        return make_fx(f)(*(torch.empty(s, device=device, dtype=dtype) for s in shapes))


def tf32(allowed):
    """The setting for a block: torch's tests forbid to assign it."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed)


def epilogue(x, w, b, v=None):
    return (conv(x, w, b).sigmoid() * 2).relu()


def two(x, w, b, v):
    y = conv(x, w, b).relu()
    wide = aten.convolution.default(y, v, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return wide.sigmoid(), y


def upwards(x, w, b, v):
    return transposed(x, w, b).relu()


def normalised(x, w, b, v):
    """A kernel with several results stores one of them for the copy back."""
    y = aten._native_batch_norm_legit.no_stats(conv(x, w, b).relu(), b, b, True, 0.1, 1e-5)
    return y[0], y[1]


def pieces(x, w, b, v):
    """A part of the channels as rows, which only a part of row-major images can be viewed as."""
    y = conv(x, w, b).relu()
    part = aten.slice.Tensor(y, 1, 0, 8)
    return aten.view.default(part, [2, 2, 4, 100]).softmax(1), y


def pools(x, w, b, v):
    """Pools of the same images, whose gradients are parts of one tensor's channels."""
    y = conv(x, w, b).relu()
    how = [3, 3], [1, 1], [1, 1], [1, 1], False
    most, offsets = torch.ops.fuser.max_pool_offsets.default(y, *how)
    mean = aten.avg_pool2d.default(most, [3, 3], [1, 1], [1, 1])
    both = torch.cat([most, mean], 1).sigmoid()
    first, second = (aten.slice.Tensor(both, 1, at, at + 16) for at in (0, 16))
    grad = aten.avg_pool2d_backward.default(second, y, [3, 3], [1, 1], [1, 1], False, True, None)
    back = torch.ops.fuser.max_pool_offsets_backward.default(first, offsets, y.shape, *how, False)
    wide = aten.convolution.default(back + grad, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return wide.relu(), back, grad


def over_channels(x, w, b, v):
    """Attention between channels: neighbours in its last dim are those of row-major images."""
    y = aten.max_pool2d_with_indices.default(conv(x, w, b).relu(), [2, 2], [2, 2])[0]
    for _ in range(4):
        y = aten.convolution.default(y, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu()
    q = aten.view.default(y, [2, 2, 8, 25])
    return aten._scaled_dot_product_efficient_attention.default(q, q, q, None, False)[0], q


def resized(x, w, b, v):
    """Bilinear resizing, whose four gathers ATen gives in row-major memory."""
    y = conv(x, w, b).relu()
    at = aten.slice.Tensor(b.abs() * 4, 0, 0, 6).clamp(max=9).to(torch.int64)
    rows, columns = at.view(6, 1), at
    gathered = [aten._unsafe_index.Tensor(y, [None, None, r, c]) for r in (rows, rows + 0) for c in (columns, columns)]
    z = sum(gathered[1:], gathered[0])
    return aten.convolution.default(z, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu(), z


def row_major_copy(x, w, b, v):
    """A copy that a group norm asks for, of images that are in channels-last memory without the pass, too."""
    y = conv(x, w, b).permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
    rows = (y * 2).clone(memory_format=torch.contiguous_format)
    z = aten.native_group_norm.default(rows, b, b, x.shape[0], 16, 100, 4, 1e-5)[0]
    return aten.convolution.default(z, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu(), rows


def group_norms(x, w, b, v):
    """A group norm and its gradient, which ATen gives in row-major memory."""
    how = x.shape[0], 16, 100, 4
    y = conv(x, w, b).relu()
    z, mean, rstd = aten.native_group_norm.default(y, b, b, *how, 1e-5)
    grad = aten.native_group_norm_backward.default(z.sigmoid(), y, mean, rstd, b, *how, [True, True, True])
    return aten.convolution.default(grad[0] * 2, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), z, grad[1]


def written_views(x, w, b, v):
    """What autograd records for the gradient of a tensor into whose view a program wrote."""
    grad = conv(x, w, b).relu()
    memory = aten.new_empty_strided.default(grad, [x.shape[0], 16, 10, 10], [1600, 100, 10, 1])
    whole = aten.copy.default(memory, grad)
    part = aten.slice.Tensor(whole, 1, 0, 8) * 2
    z = aten.slice_scatter.default(whole, part, 1, 0, 8)
    return aten.convolution.default(z, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def parts_of_channels(x, w, b, v):
    """Slices of channels, which ATen copies for a convolution in either order, beside a convolution of volumes."""
    y = conv(x, w, b).relu()
    half = aten.slice.Tensor(v, 1, 0, 8) * 0.1
    for _ in range(8):
        part = aten.slice.Tensor(y, 1, 0, 8)
        y = aten.convolution.default(part, half, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).relu()
    cubes = aten.unsqueeze.default(aten.slice.Tensor(v, 1, 0, 1), 2)
    volume = aten.unsqueeze.default(y, 1)
    return y, aten.convolution.default(volume, cubes, b, [1] * 3, [0, 1, 1], [1] * 3, False, [0] * 3, 1)


def kinds_of(module, target):
    return [n.meta["val"] for n in module.graph.nodes if n.target is target]


def test_what_is_gathered_from_images_follows_them():
    module = traced(resized, *SHAPES)
    assert tensor_cores_channels_last(module) == 2
    sums = kinds_of(module, aten.add.Tensor)[-3:]
    assert len(sums) == 3 and all(v.is_contiguous(memory_format=torch.channels_last) for v in sums)


def test_row_major_copies_stay_in_the_order_of_images():
    module = traced(row_major_copy, *SHAPES)
    assert tensor_cores_channels_last(module) == 2
    (norm,) = (n for n in module.graph.nodes if n.target is aten.native_group_norm.default)
    assert norm.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_group_norms_keep_the_order_of_images():
    module = traced(group_norms, *SHAPES)
    assert tensor_cores_channels_last(module) == 2
    for target in (aten.sigmoid.default, aten.mul.Tensor):
        (value,) = kinds_of(module, target)
        assert value.is_contiguous(memory_format=torch.channels_last)


def test_memory_for_gradients_of_written_views_is_in_the_order_of_images():
    module = traced(written_views, *SHAPES)
    assert tensor_cores_channels_last(module) == 2
    for target in (aten.copy.default, aten.slice_scatter.default):
        (value,) = kinds_of(module, target)
        assert value.is_contiguous(memory_format=torch.channels_last)


def test_copies_of_large_weights_are_not_kept_for_the_backward(monkeypatch):
    monkeypatch.setattr(conv_tensor_cores, "_KEPT", 16 * 16 * 9 * 2)
    module = traced(two, *SHAPES)
    assert tensor_cores_channels_last(module) == 2
    copies = {n.args[0].name: n for n in module.graph.nodes if n.target is aten.clone.default}
    again = {name: must_recompute(copy) for name, copy in copies.items() if name in ("w_1", "v_1")}
    assert again == {"w_1": False, "v_1": True}


def test_copies_that_aten_makes_anyway_do_not_count(monkeypatch):
    """Nine convolutions and eight copies of slices would be too many copies otherwise."""
    monkeypatch.setattr(conv_tensor_cores, "_LEAST", 1 << 20)
    module = traced(parts_of_channels, *SHAPES)
    assert tensor_cores_channels_last(module) == 9


def test_operators_that_refuse_strides_get_their_own():
    module = traced(over_channels, *SHAPES)
    assert tensor_cores_channels_last(module) == 5
    target = aten._scaled_dot_product_efficient_attention.default
    node = next(n for n in module.graph.nodes if n.target is target)
    assert all(a.meta["val"].is_contiguous() for a in node.all_input_nodes)


CONVERTED = {
    resized: 2, row_major_copy: 2, group_norms: 2, parts_of_channels: 9, pieces: 1, pools: 2, epilogue: 1, two: 2,
    block: 2, upwards: 1, normalised: 1, gradients: 2, written_views: 2,
}  # fmt: skip


@pytest.mark.parametrize("f", CONVERTED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_converted_graphs_give_eagers_results_and_strides(f, dtype):
    module = traced(f, *SHAPES, dtype=dtype)
    before = copy.deepcopy([n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes])
    with tf32(True):
        n = tensor_cores_channels_last(module)
    assert n == CONVERTED[f]
    module.graph.lint()
    assert [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes] == before
    for node in module.graph.nodes:
        operands = conv_tensor_cores._images(node)
        for operand in operands or ():
            value = operand.meta["val"]
            assert value.dim() == 5 or value.is_contiguous(memory_format=torch.channels_last)
    args = [torch.randn(s) for s in SHAPES]
    got, want = torch.fx.Interpreter(module).run(*args), f(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def traced_of_any_batch(f, *shapes):
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        real = torch.empty(shapes[0], device="meta")
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
        n = mode.from_tensor(real, symbolic_context=context).shape[0]
        sizes = [(n, *shapes[0][1:]), *shapes[1:]]
        return make_fx(f)(*(torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in sizes)), env


OF_ANY_BATCH = [f for f in CONVERTED if f not in (pieces, pools, row_major_copy, group_norms, written_views)]


@pytest.mark.parametrize("f", OF_ANY_BATCH, ids=lambda f: f.__name__)
def test_any_number_of_images(f):
    """The number of images stays free: no guard is added, and each value has the strides of the example."""
    module, env = traced_of_any_batch(f, *SHAPES)
    known = traced(f, *SHAPES)
    before = [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes]
    guards = len(env.guards)
    assert tensor_cores_channels_last(module) == tensor_cores_channels_last(known) == CONVERTED[f]
    assert len(env.guards) == guards
    module.graph.lint()
    assert [n.meta["val"].stride() for n in module.graph.output_node().all_input_nodes] == before
    for free, fixed in zip(module.graph.nodes, known.graph.nodes, strict=True):
        assert free.target == fixed.target
        for a, b in zip(tensors_of(free.meta.get("val")), tensors_of(fixed.meta.get("val")), strict=True):
            assert [int(s) for s in (*a.shape, *a.stride())] == [*b.shape, *b.stride()]
    args = [torch.randn(s) for s in ((5, *SHAPES[0][1:]), *SHAPES[1:])]
    torch.testing.assert_close(torch.fx.Interpreter(module).run(*args), f(*args), rtol=1e-4, atol=1e-4)


def norms(x, w, b, v):
    """Small convolutions with group norms between, whose eager kernels give contiguous images."""
    for _ in range(8):
        x = aten.convolution.default(x, v, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        x = aten.native_group_norm.default(x.contiguous(), b, b, x.shape[0], 16, 144, 4, 1e-5)[0]
        x = x.sigmoid().clone(memory_format=torch.contiguous_format)
    return x


def test_copies_that_kernels_store_do_not_count(monkeypatch):
    monkeypatch.setattr(conv_tensor_cores, "_LEAST", 1 << 20)
    shapes = (2, 16, 12, 12), *SHAPES[1:]
    assert tensor_cores_channels_last(traced(norms, *shapes)) == 8


@pytest.mark.parametrize(("side", "padding", "own"), [(7, 3, True), (7, 0, False), (3, 1, True)])
def test_gradients_of_padded_pools(side, padding, own):
    """ATen's are wrong for channels-last images on CUDA; the package's operator copies them where no kernel is made."""

    def f(x, w, b, v):
        y = conv(x, w, b).relu()
        how = [side] * 2, [1, 1], [padding] * 2, False, True, None
        grad = aten.avg_pool2d.default(y, *how)
        return aten.avg_pool2d_backward.default(grad, y, *how) * 2

    module = traced(f, *SHAPES)
    assert tensor_cores_channels_last(module) == 1
    target = torch.ops.fuser.avg_pool2d_backward.default if own else aten.avg_pool2d_backward.default
    node = next(n for n in module.graph.nodes if n.target is target)
    values = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    assert all(v.is_contiguous(memory_format=torch.channels_last) for v in values)


CASES = {
    "nothing stores the result": (conv, {}, True),
    "no TF32": (epilogue, {"dtype": torch.float32}, False),
    "double": (epilogue, {"dtype": torch.float64}, True),
    "cpu": (epilogue, {"device": "cpu"}, True),
    "single points": (points, {}, True),
    "groups": (lambda x, w, b, v: grouped(x, aten.slice.Tensor(w, 1, 0, 4), b, 2).relu(), {}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_left_alone(name):
    f, options, allowed = CASES[name]
    module = traced(f, *SHAPES, **options)
    with tf32(allowed):
        assert tensor_cores_channels_last(module) == 0


def test_small_convolutions_stay(monkeypatch):
    monkeypatch.setattr(conv_tensor_cores, "_LEAST", 1 << 20)
    for size, expected in ((12, 0), (256, 1)):
        shapes = (2, 8, size, size), *SHAPES[1:]
        assert tensor_cores_channels_last(traced(epilogue, *shapes)) == expected
