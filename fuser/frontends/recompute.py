"""Additions to torch's min-cut of a joint graph: operators that the package's kernels fuse with their neighbours.

The cut has a list of operators whose recomputation beside their readers is free; it saves what other operators read.
The list is TorchInductor's, which sees `hardswish` or a group norm's gradient only decomposed. All arguments of the
whole operators would be saved: twice the bytes in a step of a convolution, a group norm and two activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser import compiler, forks
from fuser.canonical.schemas import is_pointwise
from fuser.passes.classify import after_tangents, is_read, is_view

# Elementwise operators and data movement: recomputed where they are read.
ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_conj_physical _prelu_kernel _prelu_kernel_backward binary_cross_entropy_backward "
        "binary_cross_entropy_with_logits channel_shuffle constant_pad_nd copy elu_backward expand_copy fill flip "
        "floor_divide glu glu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward "
        "hardtanh_backward huber_loss_backward "
        "leaky_relu leaky_relu_backward log_sigmoid_backward log_sigmoid_forward mish_backward mse_loss_backward "
        "native_channel_shuffle new_full new_ones ones_like permute_copy pixel_shuffle pixel_unshuffle "
        "reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d "
        "replication_pad3d roll select_copy select_scatter slice_copy slice_scatter smooth_l1_loss_backward "
        "soft_margin_loss_backward softplus_backward softshrink_backward squeeze_copy transpose_copy tril "
        "unsqueeze_copy view_copy"
    ).split()
)
# These read recomputed values without materialising them; their own results are saved.
READERS = frozenset(
    f"aten.{name}"
    for name in (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d _fused_rms_norm _fused_rms_norm_backward _log_softmax _unsafe_index "
        "_log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training _safe_softmax _softmax _softmax_backward_data all amin aminmax argmin "
        "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward binary_cross_entropy count_nonzero huber_loss "
        "linalg_vector_norm logsumexp max_pool2d_with_indices max_pool2d_with_indices_backward mse_loss nansum "
        "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm "
        "native_layer_norm_backward nll_loss_backward nll_loss_forward norm prod smooth_l1_loss soft_margin_loss "
        "std_mean"
    ).split()
) | {"fuser.avg_pool2d_backward", "fuser.max_pool_offsets", "fuser.max_pool_offsets_backward"}
_patched = forks.rlock()


def _packets(names: Iterable[str]) -> list[Any]:
    found = ((getattr(torch.ops, space), name) for space, _, name in (n.partition(".") for n in names))
    return [packet for packet in (getattr(space, name, None) for space, name in found) if packet is not None]


def _with_own(original: Any, joint: fx.GraphModule) -> Any:
    """The list with the package's operators and the graph's elementwise operators.

    Of the latter, torch's list has only those that the process had used when the list was first requested.
    """
    known = original()
    views = _packets(compiler.views())
    met = {n.target.overloadpacket for n in joint.graph.nodes if is_pointwise(n.target)}
    again, readers = [*_packets(ELEMENTWISE), *met, *views], _packets(READERS)
    sets = {"fusible_ops": (*again, *readers), "recomputable_ops": again, "view_ops": views}
    for name, own in sets.items():
        sets[name] = getattr(known, name) | dict.fromkeys(own).keys()
    return dataclasses.replace(known, **sets)


@contextlib.contextmanager
def told_to_the_cut(joint: fx.GraphModule) -> Iterator[None]:
    """A block in which torch's cut knows the operators of the package and of a graph, by a patch of its list."""
    from torch._functorch import partitioners

    with _patched:
        original = partitioners.get_default_op_list
        partitioners.get_default_op_list = functools.partial(_with_own, original, joint)
        try:
            yield
        finally:
            partitioners.get_default_op_list = original


_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
     _aten.convolution_backward.default}
)  # fmt: skip


def keep_for_products(joint: fx.GraphModule) -> None:
    """Let the cut save a pointwise function of a product, its only reader, if a product of the backward reads it.

    The product itself has as many bytes, and the function would be recomputed from it and written again.
    """
    behind = after_tangents(joint.graph)
    for node in joint.graph.nodes:
        if node.target in _PRODUCTS and node not in behind:
            while len(node.users) == 1 and is_view(next(iter(node.users)).target):
                (node,) = node.users
            if len(node.users) != 1:
                continue
            (user,) = node.users
            free = user not in behind and "recompute" not in user.meta  # else it has a policy of the user's
            if not (free and is_pointwise(user.target) and user.all_input_nodes == [node]):
                continue
            if is_read(user, lambda u: u in behind and u.target in _PRODUCTS):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def written_inputs(joint: fx.GraphModule) -> frozenset[str]:
    """The names of the inputs that a joint graph writes, or that its caller writes from the graph's results.

    It has to be called before passes run: for writes by the caller, AOTAutograd has cloned inputs that need gradients,
    without a source line.
    """
    found = set()
    for node in joint.graph.nodes:
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or first.op != "placeholder":
            continue
        own_clone = node.target is _aten.clone.default and not node.meta.get("stack_trace")
        if own_clone or node.target is _aten.copy_.default:
            found.add(first.name)
    return frozenset(found)


def keep_from_written(joint: fx.GraphModule, written: frozenset[str]) -> None:
    """Let the cut save values computed directly from an input that is written.

    When the backward runs, that input has its new content, so nothing can be recomputed from it.
    """
    behind = after_tangents(joint.graph)
    told = [n for n in joint.graph.nodes if n.op == "placeholder" and n.name in written]
    while told:
        for user in told.pop().users:
            if user in behind or user.op == "output" or user.target is _aten.copy_.default:
                continue
            if is_view(user.target) or user.target is _aten.clone.default:
                told.append(user)
            user.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


__all__ = ["ELEMENTWISE", "READERS", "keep_for_products", "keep_from_written", "told_to_the_cut", "written_inputs"]
