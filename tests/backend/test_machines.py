"""Each machine's row that runs here gives right results, and with FUSER_TEST_ALL=1 those that qemu runs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.fx

from fuser import config, machines, register_fusion
from fuser.errors import CompileError, ConfigError
from fuser.kernel_cache import REGISTRY
from fuser.runtime import compilers
from tests.backend import emulated, machine_cases, reference_cases
from tests.backend.support import check

ALL = os.environ.get("FUSER_TEST_ALL") == "1"
BEST = next(row for row in machines.ROWS if machines.why_not(row) is None)  # whose tests are all the others
HERE = [row.name for row in machines.ROWS if machines.why_not(row) is None and row is not BEST]
SLACK = {torch.float32: 4.0, torch.float64: 4.0, torch.float16: 1.0, torch.bfloat16: 1.0}


def judge(got, fn, args) -> None:
    """As right as eager, nearly: by float64, which integers and halves come from, too."""
    wide = [a.double() if a.dtype in (torch.float32, torch.float16, torch.bfloat16) else a for a in args]
    eager, exact = (r if isinstance(r, (tuple, list)) else [r] for r in (fn(*args), fn(*wide)))
    assert len(got) == len(eager)
    for n, (mine, own, true) in enumerate(zip(got, eager, exact)):
        floor = float(true.abs().max()) if true.is_floating_point() and true.numel() else 0.0
        truth = true if true.dtype is torch.float64 else None
        check(mine, own, truth, f"result {n}", slack=SLACK.get(own.dtype, 0.0), zeros=False, floor=floor)


FEW = {"sse4.2": ("pointwise", "integers")}  # of what is scalar's but for the flags, unless all is asked for
RUNS = [(n, isa) for isa in HERE for n in machine_cases.CASES if ALL or n in FEW.get(isa, machine_cases.CASES)]


@pytest.mark.parametrize(("name", "isa"), RUNS)
def test_a_machine_that_runs_here(name, isa):
    fn, args = machine_cases.CASES[name]
    with config.override(isa=isa):
        registration = REGISTRY.find(register_fusion(torch.fx.symbolic_trace(fn), functional=True))
        got = registration.handle(*args)
    (kernel,) = registration.spec.store.kernels
    assert dict(registration.spec.config)["isa"] == isa and kernel.source
    judge(got, fn, args)


@pytest.mark.skipif(not ALL, reason="FUSER_TEST_ALL=1 runs kernels by qemu")
@pytest.mark.parametrize("emulator", emulated.EMULATORS, ids=lambda e: e.isa)
@pytest.mark.parametrize("name", [*machine_cases.CASES, *(f"reference {n}" for n in reference_cases.CASES)])
def test_a_machine_that_qemu_runs(name, emulator, tmp_path):
    if emulator.why_not() is not None:
        pytest.skip(emulator.why_not())
    if name in machine_cases.CASES:
        fn, args = machine_cases.CASES[name]
    else:
        fn, *args = reference_cases.CASES[name.removeprefix("reference ")]
    if not all(isinstance(a, torch.Tensor) for a in args):
        pytest.skip("the call has numbers")
    judge(emulated.run(emulator, fn, args, tmp_path), fn, args)


def test_a_name_that_is_no_row_is_an_error():
    for name, says in (("avx3", "one of .*'avx2'"), ("avx2+vnni", "no optional part 'vnni'")):
        with pytest.raises(ConfigError, match=says):
            config.check("isa", name)
    assert machines.find("avx512+vnni").dots and not machines.find("avx512").dots


def test_kernels_of_another_machine_are_not_loaded():
    from fuser.cpu import toolchain

    other = next(row for row in machines.ROWS if machines.why_not(row) is not None)
    with pytest.raises(CompileError, match=f"config.isa is '{other.name}', but "):
        toolchain.compile_library(("int x;",), other)


def test_the_full_name_of_the_machine_is_part_of_the_key():
    with config.override(isa=""):
        assert dict(config.key())["isa"] == machines.here().name
        own = config.key()
    with config.override(isa="scalar"):
        assert config.key() != own


def test_no_flag_asks_for_what_this_machine_has():
    """A tuning for it uses no instruction that others lack."""
    for kind in compilers.KINDS:
        for row in machines.ROWS:
            assert not {"-march=native", "-mcpu=native"}.intersection(kind.flags_for(row))
