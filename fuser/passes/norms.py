"""Batch norms in training: the backward recomputes activations of their results from their input.

A batch norm's backward needs the norm's input in any case. Eager also saves the activation after the norm, for the next
convolution's backward. An activation is a few operations on the input and four numbers per channel. They run in the
same order as in the norm, so that the backward reads the same bits as the forward.
"""

from __future__ import annotations

import torch
from torch import fx

from fuser import targets
from fuser.canonical.schemas import is_pointwise
from fuser.passes.again import AGAIN
from fuser.passes.classify import after_tangents, draws
from fuser.passes.hints import same
from fuser.passes.norm_results import batch_operands, normalised
from fuser.passes.writing import Writer

aten = torch.ops.aten
_NORM = aten._native_batch_norm_legit_functional.default


def norms_again(module: fx.GraphModule) -> int:
    """An activation of a batch norm's result that the backward reads is recomputed from the norm's input."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    behind = after_tangents(module.graph)
    results = set(module.graph.output_node().all_input_nodes)
    changed = 0
    for norm in [n for n in order if n.target is _NORM and not n.kwargs]:
        out, mean, rstd = (_item(norm, i) for i in range(3))
        if out is None or mean is None or rstd is None or _why_not(norm) or not behind:
            continue
        changed += _Again(norm, (mean, rstd), order, behind, results).rewrite(out)
    return changed


def _item(node: fx.Node, at: int) -> fx.Node | None:
    return next((u for u in node.users if u.args == (node, at)), None)


def _why_not(norm: fx.Node) -> bool:
    """Whether a norm does not qualify: not float32 on the CPU in training, or its input is not saved."""
    x, weight, bias, _, _, training, *_ = norm.args
    tensors = [n.meta["val"] for n in (x, weight, bias) if isinstance(n, fx.Node)]
    plain = all(t.dtype is torch.float32 and targets.is_host(t.device) for t in tensors)
    kept = any(u.target is aten.native_batch_norm_backward.default for u in x.users)  # type: ignore[union-attr]
    return not (plain and kept and training is True and tensors[0].dim() > 1)


class _Again:
    """One norm: the values that depend on it alone, and their copies for the backward."""

    def __init__(
        self, norm: fx.Node, statistics: tuple[fx.Node, fx.Node], order: dict[fx.Node, int], behind: set[fx.Node],
        results: set[fx.Node],
    ) -> None:  # fmt: skip
        self.norm, self.statistics, self.order, self.behind, self.results = norm, statistics, order, behind, results
        self.copies: dict[fx.Node, fx.Node] = {}

    def rewrite(self, out: fx.Node) -> int:
        """Make the backward read copies; returns the number of readers changed."""
        values = self._values(out)
        readers = [(v, u) for v in values for u in v.users if u in self.behind and u.target is not aten.detach.default]
        kept = {_origin(v) for v in values if v in self.results}
        readers = [(v, u) for v, u in readers if _origin(v) not in kept]
        if not readers:
            return 0
        first = min((u for _, u in readers), key=self.order.__getitem__)
        write = Writer(first)
        write.mode = getattr(out.meta["val"], "fake_mode", None)
        if write.mode is None:
            return 0
        for value, reader in readers:
            source = self._source(value, reader)
            reader.replace_input_with(value, self._copy(source, write))
        return len(readers)

    def _values(self, out: fx.Node) -> list[fx.Node]:
        """The norm's result, its activations, and their detached copies."""
        found = [out]
        for value in found:
            for user in value.users:
                detached = user.target is aten.detach.default
                if user not in found and (detached or user not in self.behind and _is_activation(user)):
                    found.append(user)
        return found

    def _source(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """The value whose copy a reader uses: a ReLU's mask can be taken from the ReLU's argument."""
        origin = _origin(value)
        mask = reader.target is aten.threshold_backward.default and reader.args[1] is value and reader.args[2] == 0
        if mask and reader.args[0] is not value and origin.target is aten.relu.default:
            return origin.args[0]  # type: ignore[return-value]
        return value

    def _copy(self, value: fx.Node, write: Writer) -> fx.Node:
        value = _origin(value)
        found = self.copies.get(value)
        if found is None:
            if value.target is not _NORM and value.args[0] is not self.norm:
                args = fx.node.map_arg(value.args, lambda a: self._copy(a, write))
                found = _marked(write(value.target, *args, **value.kwargs))
            else:
                operands = batch_operands(write, self.norm, *self.statistics)
                found = normalised(write, self.norm.args[0], operands, _marked)
            self.copies[value] = found
        return found


def _marked(node: fx.Node) -> fx.Node:
    node.meta[AGAIN] = True
    return node


def _origin(node: fx.Node) -> fx.Node:
    while node.target is aten.detach.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_activation(node: fx.Node) -> bool:
    """Whether a call is elementwise in its one tensor, draws nothing, and keeps size and dtype."""
    target = node.target
    if not is_pointwise(target) or len(node.all_input_nodes) != 1 or draws(target) or target._schema.is_mutable:
        return False
    given, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return isinstance(value, torch.Tensor) and same(value.shape, given.shape) and value.dtype is given.dtype
