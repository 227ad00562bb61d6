"""An op: a row of the table of loop-level operations, with its C++ and Triton, for an operator of one's own.

    python examples/extending/an_op.py
"""

from __future__ import annotations

import torch

import fuser
from fuser.ops import FLOATS, OpRow
from fuser.testing import check_op


@torch.library.custom_op("examples::softsign", mutates_args=())
def softsign(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + |x|)."""
    return x / (1 + x.abs())


@softsign.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def evaluate(x: torch.Tensor) -> torch.Tensor:
    """What the op means: the reference for its C++ and Triton."""
    return x / (1 + x.abs())


ROW = OpRow(
    "softsign",
    arity=1,
    eval=evaluate,
    cpp="({0} / (1 + __builtin_fabs{f}({0})))",  # {0} is the argument, {f} is "f" for float32
    triton="({0} / (1 + tl.abs({0})))",
    dtypes=FLOATS,
    cost=6,  # additions that it is worth: the scheduler asks before it computes one twice
    domain=(-8.0, 8.0),  # from which `check_op` draws
    ulps=1.0,
    keeps_zero=True,
)


def main() -> None:
    """Register the row for the operator, check it by itself, and fuse it."""
    fuser.register_op(ROW, operator=softsign)
    check_op("softsign")
    graph = torch.fx.symbolic_trace(lambda x, y: torch.ops.examples.softsign(x + y) * y)
    key = fuser.register_fusion(graph)
    x, y = torch.randn(64, 1000), torch.randn(64, 1000)
    (result,) = fuser.run_fusion(key, [x, y])
    torch.testing.assert_close(result, softsign(x + y) * y)
    assert fuser.fusion_handle(key).kernel_count == 1
    print(fuser.debug_get_fused_kernel_code(graph, [x, y])[-600:])


if __name__ == "__main__":
    main()
