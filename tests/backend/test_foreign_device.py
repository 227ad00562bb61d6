"""A device from outside the package: registration says what is missing, and the example's device runs groups."""

from __future__ import annotations

import pathlib

import pytest

import fuser
from fuser import targets
from fuser.compiler import CpuBackend
from fuser.errors import BackendError
from fuser.targets import Target
from tests import forked


def test_groups_run_on_a_device_from_outside():
    program = pathlib.Path(__file__).with_name("foreign_programs.py")
    done = forked.run([str(program)], timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("target", "runtime", "why"),
    (
        (None, None, "needs a fuser.targets.Target"),
        (Target("hpu"), None, "needs a fuser.targets.Target"),
        (Target("xpu"), None, "NoneType is no runtime for 'xpu': it lacks allocate, encode, load, launch"),
        (Target("xpu"), object(), "object is no runtime for 'xpu'"),
    ),
)
def test_a_device_that_cannot_run_kernels_is_refused(target, runtime, why):
    with pytest.raises(BackendError, match=why):
        fuser.register_fusion_backend("xpu", CpuBackend(), target, runtime)
    assert not fuser.has_fusion_backend("xpu") and targets.known("xpu") is None
