"""What a training step saves for its backward: `python -m benchmarks.saved [--as-on-gpu] [MODEL or FOLDER ...]`.

Nothing is compiled or run. The joint graph of each model is cut three times: as TorchInductor traces and cuts it, by
torch's default rules as the package traces it, and by the package's passes and rules. A folder holds problems in
KernelBench's form (`benchmarks/problems.py`), whose sizes are divided by 16. Parameters, inputs, results and numbers
are not counted; views of one tensor count once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from benchmarks import problems, training
from fuser import targets
from fuser.cuda import target as cuda_target
from fuser.frontends import training as frontend
from fuser.frontends.dynamo import fuser_backend

SMALLER = 16


class _Enough(Exception):
    """Both cuts are made."""


def saved_mib(forward: fx.GraphModule, results: int) -> float:
    """MiB of the tensors that a forward hands to its backward alone, each memory once."""
    handed: Any = forward.graph.output_node().args[0]
    known = {_memory(node) for node in handed[:results] if isinstance(node, fx.Node)}
    found: dict[fx.Node, int] = {}
    for node in map(_memory, handed[results:]):
        value = node.meta["val"]
        if node.op != "placeholder" and node not in known and isinstance(value, torch.Tensor):
            found[node] = value.numel() * value.element_size()
    return sum(found.values()) / (1 << 20)


def _memory(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.args[0]  # type: ignore[assignment]
    return node


def saved_by(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[float, float, float]:
    """MiB saved by TorchInductor's cut, torch's default one, and fuser's."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[float] = []
    own = frontend.Training.partition

    def rivals(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        forward, _ = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        found.append(saved_mib(forward, kwargs["num_fwd_outputs"]))
        raise _Enough

    def partition(self: Any, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        plain, _ = min_cut_rematerialization_partition(copy.deepcopy(joint), inputs, **kwargs)
        found.append(saved_mib(plain, kwargs["num_fwd_outputs"]))
        found.append(saved_mib(own(self, joint, inputs, **kwargs)[0], kwargs["num_fwd_outputs"]))
        raise _Enough

    rival = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=rivals, decompositions=select_decomp_table())
    frontend.Training.partition = partition  # type: ignore[method-assign]
    try:
        for number, backend in ((1, rival), (3, fuser_backend)):
            torch._dynamo.reset()
            try:
                torch.compile(function, backend=backend, dynamic=False)(*inputs)
            except Exception as error:
                if len(found) != number:
                    raise error
    finally:
        frontend.Training.partition = own  # type: ignore[method-assign]
    return found[0], found[1], found[2]


def _programs(asked: list[str]) -> Iterator[tuple[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]]]:
    """Names and what makes a function and its inputs."""
    for name in asked:
        if name in training.LOSSES:
            module, inputs = training.build(name, False, "cpu")
            yield name, lambda: (training.LOSSES[name][0], (module, *inputs))  # noqa: B023
            continue
        for path in problems.paths(pathlib.Path(name)):
            yield path.stem, lambda: _problem(path)  # noqa: B023


def _problem(path: pathlib.Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model, args = problems.load(path, "cpu", SMALLER)
    return model, tuple(problems.with_gradients(args))


def main() -> None:
    """Print a row for each program, then geometric means over those that save anything."""
    print("| program | TorchInductor | torch's default cut | fuser's |\n|---|---:|---:|---:|")
    ratios, asked = [], sys.argv[1:]
    if "--as-on-gpu" in asked:  # where nothing that a product of the backward reads is computed again
        asked.remove("--as-on-gpu")
        frontend.is_on_cpu = lambda joint: False
        targets.keep(dataclasses.replace(cuda_target.TARGET, device_type="cpu"))
    for name, make in _programs(asked or list(training.LOSSES)):
        try:
            rival, default, own = saved_by(*make())
        except Exception as error:  # a file from outside may fail in any way
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:80]} |", flush=True)
            continue
        ratios.append((own + 1e-3) / (rival + 1e-3))  # a KiB more or less is nothing
        print(f"| {name} | {rival:.2f} MiB | {default:.2f} MiB | {own:.2f} MiB |", flush=True)
    mean = math.exp(sum(map(math.log, ratios)) / max(len(ratios), 1))
    print(f"{len(ratios)} programs: {mean:.2f} of TorchInductor's bytes; {sum(r > 1.02 for r in ratios)} save more")


if __name__ == "__main__":
    main()
