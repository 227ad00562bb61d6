"""Distances from float64 over several draws of a program's inputs: one draw may miss a limit by chance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ULPS = 2


class Distances:
    """Root mean squares of the distances of a result and of eager's from float64, over all draws.

    The unit is the largest element of all draws: in a draw whose gradient is nearly nothing, its own largest element
    would make it count more than all others together.

    Where the terms of a result cancel, eager's few roundings may be near to float64 by luck. Runs in float64 whose
    operators round at random then show what roundings amount to: eager's distance counts as no less than theirs.
    """

    def __init__(self) -> None:
        self.mine = self.eagers = 0.0
        self.count = 0
        self.largest = self.unit = 0.0

    def add(
        self, got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, rounded: Sequence[torch.Tensor] = ()
    ) -> bool:  # fmt: skip
        """Count a draw; False if the results differ in more than roundings, so that no number of draws helps.

        Elsewhere than where eager is infinite or NaN the result must be finite. Elements that are not finite in eager
        are no measure; with `rounded`, results of runs that round at random, they are measured by these.
        """
        got, want, exact = got.detach(), want.detach(), exact.detach().double()
        if got.dtype != want.dtype or got.shape != want.shape:
            return False
        if not want.is_floating_point():
            return torch.equal(got, want)
        if not got[want.isfinite()].isfinite().all():
            return False
        spread = torch.zeros_like(exact)
        if rounded:
            squares = torch.stack([(r.detach().double() - exact).square() for r in rounded])
            spread = squares.mean(0).sqrt().nan_to_num(0.0, 0.0)
        measured = exact.to(want.dtype).isfinite() if rounded else torch.zeros_like(want, dtype=torch.bool)
        kept = got.isfinite() & exact.isfinite() & (want.isfinite() | measured)
        if kept.any():
            eagers = (want.double() - exact).abs().nan_to_num(0.0, 0.0).maximum(spread)
            self.mine += float((got.double() - exact)[kept].square().sum())
            self.eagers += float(eagers[kept].square().sum())
            self.largest = max(self.largest, float(exact[kept].abs().amax()))
            self.count += int(kept.sum())
        self.unit = torch.finfo(want.dtype).eps
        return True

    @property
    def is_right(self) -> bool:
        """Whether the result is within twice eager's distance plus 2 ulp."""
        count = max(self.count, 1)
        return (self.mine / count) ** 0.5 <= 2 * (self.eagers / count) ** 0.5 + ULPS * self.unit * self.largest
