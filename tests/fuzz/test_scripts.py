"""Some random TorchScript programs, the same each time; `make scripts` runs as many others as asked for."""

from __future__ import annotations

import pytest
import torch

import fuser
from fuser.frontends import script_fusion
from tests.fuzz import scripts

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("first", [0, 40])
def test_fused_programs_do_what_the_script_does(first):
    found = list(scripts.run(range(first, first + 16)))
    wrong = [f"seed {seed}: {what}\n{text}" for seed, what, text in found if what not in ("", "-")]
    assert not wrong, "\n".join(wrong)
    assert sum(what == "" for _, what, _ in found) > 11


def test_writes_that_nobody_else_sees_keep_dtype_and_size():
    def f(x, y):
        v = x * 2
        v.add_(y)
        w = y + 1
        w.lt_(x)
        return v * 3 + 1, w

    script = torch.jit.script(f)
    fused = fuser.fuse_script(script)
    x, y = torch.randn(3), torch.randn(3).double()
    for args in ((x, y), (x, x), (y, x)):
        for got, want in zip(fused(*args), script(*args), strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want)
    for function, message in ((script, "broadcast shape"), (fused, r"expand\(.*size=\[3\]")):
        with pytest.raises(RuntimeError, match=message):
            function(x, torch.randn(2, 3))


def test_a_wrong_program_is_found_and_made_smaller(monkeypatch):
    monkeypatch.setattr(script_fusion, "written_copy", lambda graph, before, result: result)
    monkeypatch.setattr(script_fusion, "write_again", lambda graph, written: None)
    text = (
        "def program(x: Tensor, y: Tensor, n: int, flag: bool):\n"
        "    a = x * 2\n    b = y + 1\n    a.lt_(y)\n    c = b.tanh()\n    return (a, b)\n"
    )
    assert "value 0 differs" in str(scripts.problem(text))
    assert "tanh" not in scripts.smaller(text, 0, False)


def test_a_seed_gives_the_same_program():
    assert scripts.text_of(7) == scripts.text_of(7) != scripts.text_of(8)
