"""Public convolutional architectures, inference: as `contractions`, with whole networks as rows."""

from __future__ import annotations

from benchmarks.convnet_models import ROWS
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.suites.contractions import run_rows


def run(options: Options) -> Report:
    """The rows of `convnet_models`."""
    return run_rows("convnets", ROWS, options)
