"""A pass over graphs, and a decomposition: what `torch.compile` gives to fuser, rewritten first.

    python examples/extending/a_pass.py
"""

from __future__ import annotations

import torch
from torch import fx

import fuser

aten = torch.ops.aten


@torch.library.custom_op("examples::scaled_add", mutates_args=())
def scaled_add(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """x + factor * y."""
    return x + factor * y


@scaled_add.register_fake
def _(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def take_apart(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """The same by operators that fuser knows."""
    return x + factor * y


SEEN: list[int] = []


def powers_to_products(module: fx.GraphModule) -> None:
    """x ** 3 becomes x * x * x, where the graph is functional ATen calls (the stage `post_grad`)."""
    graph, found = module.graph, 0
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        x, exponent = node.args
        if exponent != 3:
            continue
        with graph.inserting_before(node):
            square = graph.call_function(aten.mul.Tensor, (x, x))
            cube = graph.call_function(aten.mul.Tensor, (square, x))
        for made in (square, cube):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(cube)
        graph.erase_node(node)
        found += 1
    SEEN.append(found)


def main() -> None:
    """Register both, compile, and compare with eager."""
    fuser.register_pass("post_grad", "powers_to_products", powers_to_products)
    fuser.register_decomposition(torch.ops.examples.scaled_add.default, take_apart)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.examples.scaled_add(x, y, 0.5) ** 3

    x, y = torch.rand(64, 1000), torch.rand(64, 1000)
    compiled = torch.compile(program, backend=fuser.backend)
    torch.testing.assert_close(compiled(x, y), program(x, y))
    assert SEEN[-1] == 1
    print(fuser.stats()["kernels"], "kernel, and", SEEN[-1], "power replaced")


if __name__ == "__main__":
    main()
