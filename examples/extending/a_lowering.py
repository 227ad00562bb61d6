"""A lowering: a custom operator of one's own becomes part of fused kernels.

    python examples/extending/a_lowering.py
"""

from __future__ import annotations

import torch

import fuser
from fuser.ir.loop_body import Value, ops
from fuser.lowering.pointwise import elementwise


@torch.library.custom_op("examples::squareplus", mutates_args=())
def squareplus(x: torch.Tensor, b: float) -> torch.Tensor:
    """A smooth relu: (x + sqrt(x² + b)) / 2."""
    return (x + torch.sqrt(x * x + b)) / 2


@squareplus.register_fake
def _(x: torch.Tensor, b: float) -> torch.Tensor:
    return torch.empty_like(x)


def lower_squareplus(ctx, x, b):
    """The same, for one element: `elementwise` loads the operands, broadcasts them and stores the result."""

    def body(v: Value, number: Value) -> Value:
        root = ops.sqrt(ops.add(ops.mul(v, v), number))
        return ops.mul(ops.add(v, root), 0.5)

    return elementwise(ctx, [x, b], body)


def main() -> None:
    """Fuse the operator with what is around it, and compare with torch."""
    fuser.register_lowering(squareplus, lower_squareplus)
    graph = torch.fx.symbolic_trace(lambda x, y: torch.ops.examples.squareplus(x * y, 4.0).sum(-1))
    key = fuser.register_fusion(graph)
    x, y = torch.randn(64, 1000), torch.randn(64, 1000)
    (result,) = fuser.run_fusion(key, [x, y])
    torch.testing.assert_close(result, squareplus(x * y, 4.0).sum(-1), rtol=1e-5, atol=1e-3)
    assert fuser.fusion_handle(key).kernel_count == 1  # one kernel for all of it
    print(fuser.debug.trace(key).plans[0])


if __name__ == "__main__":
    main()
