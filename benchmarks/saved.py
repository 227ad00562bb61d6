"""What a training step saves between forward and backward: `python -m benchmarks.saved [MODEL ...]`.

Nothing is compiled or run: the joint graph of each model is cut by torch's default rules, as TorchInductor cuts it, and
by fuser's passes and rules. Parameters, inputs and numbers are not counted; views of one tensor count once.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import fx

from benchmarks import training
from fuser.frontends import training as frontend
from fuser.frontends.dynamo import fuser_backend


class _Enough(Exception):
    """Both cuts are made."""


def saved_mib(forward: fx.GraphModule, results: int) -> float:
    """MiB of the tensors that a forward hands to its backward, each memory once."""
    found: dict[fx.Node, int] = {}
    for node in forward.graph.output_node().args[0][results:]:  # type: ignore[index]
        while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
            node = node.args[0]
        value = node.meta["val"]
        if node.op != "placeholder" and isinstance(value, torch.Tensor):
            found[node] = value.numel() * value.element_size()
    return sum(found.values()) / (1 << 20)


def both(model: str) -> tuple[float, float]:
    """MiB saved by torch's default cut, and by fuser's."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[float] = []
    own = frontend.Training.partition

    def partition(self: Any, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        plain, _ = min_cut_rematerialization_partition(copy.deepcopy(joint), inputs, **kwargs)
        found.append(saved_mib(plain, kwargs["num_fwd_outputs"]))
        found.append(saved_mib(own(self, joint, inputs, **kwargs)[0], kwargs["num_fwd_outputs"]))
        raise _Enough

    module, inputs = training.build(model, False, "cpu")
    frontend.Training.partition = partition  # type: ignore[method-assign]
    try:
        torch.compile(training.LOSSES[model][0], backend=fuser_backend)(module, *inputs)
    except Exception as error:
        if len(found) < 2:
            raise error
    finally:
        frontend.Training.partition = own  # type: ignore[method-assign]
    return found[0], found[1]


def main() -> None:
    """Print the table."""
    print("| model | torch's default cut | fuser's |\n|---|---:|---:|")
    for model in sys.argv[1:] or training.LOSSES:
        default, own = both(model)
        print(f"| {model} | {default:.0f} MiB | {own:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
