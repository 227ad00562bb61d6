"""Distances from float64 over several draws of a program's inputs: one draw may miss a limit by chance."""

from __future__ import annotations

import torch

ULPS = 2


class Distances:
    """Root mean squares of the distances of a result and of eager's from float64, relative to its largest element."""

    def __init__(self) -> None:
        self.mine = self.eagers = 0.0
        self.count = 0
        self.unit = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor) -> bool:
        """Count a draw; False if the results differ in more than roundings, so that no number of draws helps.

        Elements that are infinite or NaN in eager are no measure; elsewhere the result must be finite.
        """
        got, want, exact = got.detach(), want.detach(), exact.detach().double()
        if got.dtype != want.dtype or got.shape != want.shape:
            return False
        if not want.is_floating_point():
            return torch.equal(got, want)
        kept = want.isfinite()
        if not got[kept].isfinite().all():
            return False
        kept &= got.isfinite() & exact.isfinite()
        if kept.any():
            scale = exact[kept].abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
            self.mine += float(((got.double() - exact)[kept] / scale).square().sum())
            self.eagers += float(((want.double() - exact)[kept] / scale).square().sum())
            self.count += int(kept.sum())
        self.unit = torch.finfo(want.dtype).eps
        return True

    @property
    def is_right(self) -> bool:
        """Whether the result is within twice eager's distance plus 2 ulp."""
        count = max(self.count, 1)
        return (self.mine / count) ** 0.5 <= 2 * (self.eagers / count) ** 0.5 + ULPS * self.unit
