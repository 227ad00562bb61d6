"""Cross entropy in training: what is saved between forward and backward, and the gradient of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fuser.passes.hints import is_contiguous
from fuser.passes.writing import Writer

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # reductions of a loss
F32 = torch.float32
DTYPES = (F32, torch.bfloat16, torch.float16)


def keep_logits(module: fx.GraphModule) -> int:
    """A `log_softmax` with a backward is computed in float32 by single operators: two numbers per row are saved.

    The gradient of a cross entropy is then the probabilities minus the one-hot target, without a sum over classes. For
    16-bit floats it uses unrounded logarithms; other gradients use rounded ones, as in eager.
    """
    changed = 0
    results = set(module.graph.output_node().all_input_nodes)
    for node in list(module.graph.nodes):
        if node.target is not aten._log_softmax.default or node.kwargs or node.meta["val"].dtype not in DTYPES:
            continue
        known = _same(node)
        if results & set(known):  # the caller holds it, and may write the logits
            continue
        readers = [u for n in known for u in n.users if u.target is aten._log_softmax_backward_data.default]
        readers = [u for u in readers if u.args[1] in known and u.args[0] not in known]
        if not readers or _is_unfit(node.meta["val"]):
            continue
        for detached in reversed(known[1:]):  # would be saved: the cut does not recompute it
            detached.replace_all_uses_with(node)
            module.graph.erase_node(detached)
        wide, result = _spell_forward(node)
        for reader in readers:
            _spell_gradient(reader, wide)
        Writer(node).instead(result)
        changed += 1
    return changed


def _is_unfit(value: torch.Tensor) -> bool:
    """Whether some dim is empty, so that there is no maximum, or the value has no fake mode for new values."""
    return any(type(s) is int and s == 0 for s in value.shape) or getattr(value, "fake_mode", None) is None


def _same(node: fx.Node) -> list[fx.Node]:
    """The node and its detached copies."""
    found = [node]
    for n in found:
        found += [u for u in n.users if u.target is aten.detach.default]
    return found


def _spell_forward(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x - max - log(sum(exp(x - max))), in float32 and in the dtype of `node`.

    The backward recomputes all of it but the maximum and the sum of each row.
    """
    arguments: tuple[Any, ...] = node.args
    x, dim, _ = arguments
    write = Writer(node)
    wide = x if x.meta["val"].dtype is F32 else write(aten._to_copy.default, x, dtype=F32)
    most = write(aten.amax.default, wide, [dim], True)
    above = write(aten.sub.Tensor, wide, most)
    total = write(aten.sum.dim_IntList, write(aten.exp.default, above), [dim], True)
    result = write(aten.sub.Tensor, above, write(aten.log.default, total))
    own = node.meta["val"].dtype
    rounded = result if own is F32 else write(aten._to_copy.default, result, dtype=own)
    made = [above, result, rounded]
    if not is_contiguous(rounded.meta["val"]):  # eager's result is contiguous for any `x`
        made.append(write(aten.clone.default, rounded, memory_format=torch.contiguous_format))
    for again in made:
        again.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
    return result, made[-1]


def _spell_gradient(node: fx.Node, logs: fx.Node) -> None:
    """Replace the gradient by (class is the target) * v - exp(logs) * v, if a loss gives v to each row's target."""
    arguments: tuple[Any, ...] = node.args
    grad, _, dim, dtype = arguments
    if getattr(grad, "target", None) is not aten.nll_loss_backward.default or len(grad.users) != 1 or grad.kwargs:
        return
    from_loss, _, target, weight, reduction, ignored, total = grad.args
    shape = logs.meta["val"].shape
    if weight is not None or len(shape) != 2 or dim not in (1, -1) or not isinstance(shape[1], int):
        return
    write = Writer(node)
    device = logs.meta["val"].device
    if from_loss.meta["val"].dtype is not F32:
        from_loss, total = (write(aten._to_copy.default, n, dtype=F32) for n in (from_loss, total))
    each = write(aten.div.Tensor, from_loss, total) if reduction == _MEAN else from_loss
    each = write(aten.neg.default, write(aten.unsqueeze.default, each, 1) if reduction == _NONE else each)
    to = write(aten.unsqueeze.default, target, 1)
    nothing = write(aten.full.default, [], 0.0, dtype=F32, device=device, pin_memory=False)
    each = write(aten.where.self, write(aten.ne.Scalar, to, ignored), each, nothing)
    classes = write(aten.arange.default, shape[1], dtype=torch.int64, device=device, pin_memory=False)
    here = write(aten.where.self, write(aten.eq.Tensor, to, classes), each, nothing)
    result = write(aten.sub.Tensor, here, write(aten.mul.Tensor, write(aten.exp.default, logs), each))
    if dtype is not F32:
        result = write(aten._to_copy.default, result, dtype=dtype)
    write.instead(result)
    grad.graph.erase_node(grad)
