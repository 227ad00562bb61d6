"""The version of torch, for tests of behaviour that torch itself has changed."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
IS_OLD = TORCH < (2, 12)
