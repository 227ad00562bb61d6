"""A loss of one's own and its backward, in few kernels, with a guarantee: `python examples/custom_loss.py`."""

from __future__ import annotations

import torch

import fuser


def focal_loss(scores: torch.Tensor, wanted: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    """Cross entropy that counts examples less the better they are classified. Lin et al., 2017, equation 4."""
    log_p = torch.log_softmax(scores, -1).gather(1, wanted[:, None]).squeeze(1)
    return (-((1 - log_p.exp()) ** gamma) * log_p).mean()


def gradient_of(loss: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The gradient by the scores."""
    (found,) = torch.autograd.grad(loss, scores)
    return found


def main() -> None:
    """Compile with the guarantee that all of it is fused, and compare with eager."""
    scores, wanted = torch.randn(128, 20, requires_grad=True), torch.randint(20, (128,))
    compiled = torch.compile(focal_loss, backend="fuser")
    with fuser.require_fused():  # NotFusedError, with line and reason, if an operator ran on ATen
        loss = compiled(scores, wanted)
        gradient = gradient_of(loss, scores)
    eager = focal_loss(scores, wanted)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(gradient, gradient_of(eager, scores))
    explained = fuser.explain(focal_loss, scores, wanted)
    for graph in explained.graphs:
        launches = sum(k.launches for g in graph.groups for k in g.kernels)
        print(f"{graph.stage}: {sum(len(g.operators) for g in graph.groups)} operators in {launches} loop nests")


if __name__ == "__main__":
    main()
