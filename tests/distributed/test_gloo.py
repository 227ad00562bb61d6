"""Jobs of several processes on the CPU: compiled and eager agree, and a host compiles each kernel once."""

from __future__ import annotations

import os

import pytest
import torch.distributed

import fuser
from tests.distributed import jobs
from tests.distributed.programs import ALWAYS, CASES

pytestmark = [
    pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.xdist_group("distributed"),
]


ALL = bool(os.environ.get("FUSER_TEST_ALL"))
NAMES = list(CASES) if ALL else [f.__name__ for f in ALWAYS]
FOUR = pytest.mark.skipif(not ALL, reason="FUSER_TEST_ALL is not set")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=FOUR)])
def job(request, tmp_path_factory):
    """(what each rank says, the job's cache)"""
    folder = tmp_path_factory.mktemp(f"job{request.param}")
    return jobs.run(request.param, folder, "cpu", NAMES), folder / "cache"


@pytest.mark.parametrize("name", NAMES)
def test_as_in_eager(job, name):
    jobs.check_case(job[0], name)


def test_a_host_compiles_each_kernel_once(job):
    said, cache = job
    jobs.check_compiled_once(said, list((cache / "cpu").glob("*.so")))


def test_ranks_start_together(job):
    jobs.check_skew(job[0])
