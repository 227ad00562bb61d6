"""A share of a product of parameters in which any two values of two parameters still meet."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product whose positions add up to a multiple of a number; all rows with FUSER_TEST_ALL=1.

    For two values of two parameters, the positions of the others add up to each number from 0 to the sum of their last
    positions. That sum and one more is the largest divisor for which every two values meet.
    """
    values = [list(p) for p in parameters]
    last = sorted(len(v) - 1 for v in values)
    divisor = 1 if os.environ.get("FUSER_TEST_ALL") else sum(last[:-2]) + 1
    places = itertools.product(*(range(len(v)) for v in values))
    return [tuple(v[i] for v, i in zip(values, row)) for row in places if sum(row) % divisor == 0]
