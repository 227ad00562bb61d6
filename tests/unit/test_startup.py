"""Dynamo's import with the collector at rest leaves the collector as it was."""

from __future__ import annotations

import os
import sys

import pytest

from tests import forked

SCRIPT = """
import gc, sys
{before}
state = gc.isenabled(), gc.get_threshold()
frozen = gc.get_freeze_count() > 0  # Python 3.12 begins with some
import torch
known = set(sys.modules)
import fuser
assert not {{"torch._dynamo", "sympy", "triton", "statistics", "decimal", "fractions"}} & (set(sys.modules) - known)
f = torch.compile(lambda x: torch.relu(x) * 2, backend=fuser.backend)
assert (gc.isenabled(), gc.get_threshold()) == state
print((gc.get_freeze_count() > 0) == frozen, f(torch.tensor([-1.0, 3.0])).tolist())
class Ring: pass
ring = Ring(); ring.self = ring
import weakref
dead = weakref.ref(ring)
del ring
gc.collect()
print(dead())
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", ["gc.unfreeze()", "gc.freeze()", "gc.disable()"])  # forked ones have frozen objects
def test_the_collector_is_left_as_it_was(before: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = forked.run(["-c", SCRIPT.format(before=before)], env)
    first, second = out.stdout.splitlines() or [out.stderr[-2000:], ""]
    same, result = first.split(" ", 1)
    assert same == "True" and result == "[0.0, 6.0]" and second == "None"


TRAINING = """
import sys, torch, fuser
f = torch.compile(lambda x, y: torch.relu(x * y + 1) * torch.relu(x * y + 1), backend=fuser.backend)
x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
f(x, y).sum().backward()
print(x.grad.tolist(), sorted({"pattern_matcher", "lowering", "scheduler", "select_algorithm"}
      & {name.removeprefix("torch._inductor.") for name in sys.modules}))
"""


def test_a_training_step_imports_nothing_of_torchs_own_compiler() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = forked.run(["-c", TRAINING], env, dynamo=True)
    assert out.stdout.strip() == "[4.0, 4.0, 4.0] []", out.stderr[-2000:]


WARM = """
import sys, torch, fuser
f = torch.compile(lambda x, y: torch.relu(x * y + 1) * torch.relu(x * y + 1), backend=fuser.backend)
x, y = (torch.ones(3, requires_grad={needed}) for _ in range(2))
result = f(x, y).sum()
if {needed}:
    result.backward()
fuser.wait()
late = ["pipeline", "lowering.registry", "ops", "scheduler", "codegen", "cpu.codegen", "passes.attention", "elsewhere"]
late += ["canonical.portable", "frontends.loops", "passes.patterns", "passes.scatters", "runtime.python_launcher"]
late += [] if {needed} else ["frontends.training"]
print(result.item(), sorted(set(late) & {{name.removeprefix("fuser.") for name in sys.modules}}))
"""


@pytest.mark.parametrize("needed", [False, True])
def test_the_first_call_of_a_warm_process_imports_nothing_that_makes_kernels(tmp_path, needed: bool) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "FUSER_CACHE_DIR": str(tmp_path)}
    env |= {"FUSER_CHECK_IR": "0", "FUSER_CHECK_PASSES": "0"}  # these need the lowerings, and run every pass
    for warm in (False, True):
        out = forked.run(["-c", WARM.format(needed=needed)], env, dynamo=True)
        assert out.stdout.startswith("12.0 "), out.stderr[-2000:]
        if warm:
            assert out.stdout.strip() == "12.0 []"
