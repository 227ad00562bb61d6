"""Jobs of two processes on two GPUs of one host, through NCCL: compiled and eager agree, kernels are compiled once."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.programs import CASES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.xdist_group("distributed"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(what each rank says, the job's cache)"""
    folder = tmp_path_factory.mktemp("nccl")
    return jobs.run(2, folder, "cuda", list(CASES)), folder / "cache"


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(job, name):
    jobs.check_case(job[0], name)


def test_a_host_compiles_each_kernel_once(job):
    said, cache = job
    jobs.check_compiled_once(said, [*cache.glob("cuda/*.cubin"), *cache.glob("cpu/*.so")])  # scalars may be on the CPU


def test_ranks_start_together(job):
    jobs.check_skew(job[0])
