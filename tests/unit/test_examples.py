"""The examples that stand alone run, each with its own checks of results."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SAID = {
    "first_fusion": "times as fast as ATen",
    "training_loop": "as in eager",
    "serving_loop": "0 of them for 32 more sizes",
    "torchscript": r"fuser_ts::group_\d+: aten::mul, aten::tanh, aten::sub",
    "custom_loss": "forward: 15 operators in 2 loop nests",
    "reading_a_report": r"aten.sort \[left_to_aten\] moves",
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", SAID)
def test_the_example_runs(name, capsys):
    torch._dynamo.reset()
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert re.search(SAID[name], capsys.readouterr().out)
