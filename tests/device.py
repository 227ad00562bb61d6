"""The device that the fuzzer and the operators' runner work on: `--device cuda`, or FUSER_TEST_DEVICE=cuda."""

from __future__ import annotations

import os

VARIABLE = "FUSER_TEST_DEVICE"


def test_device() -> str:
    """The device of this process: "cpu" unless it is told otherwise."""
    return os.environ.get(VARIABLE, "cpu")


def use_device(name: str | None) -> None:
    """Work on another device, in this process and in those that it starts. SystemExit where there is none."""
    if name is not None:
        os.environ[VARIABLE] = name
    if test_device() != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit(f"--device {test_device()}: torch finds no CUDA device here")
