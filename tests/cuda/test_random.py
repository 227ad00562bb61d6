"""Random numbers on CUDA: what the pass writes, and kernels that compute a block of Philox for each four elements."""

from __future__ import annotations

from importlib import util

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import CASES, Case, dropped, seeded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuser import compiler, config
from fuser.cuda import fused_kernel
from fuser.passes.randomness import functional_random


@pytest.fixture(autouse=True)
def fuses_without_a_gpu():
    compiler.override_can_fuse("cuda", True)
    yield
    compiler.override_can_fuse("cuda", None)


def rewritten(fn, *size, dtype=torch.float32):
    """The graph of a function of a CUDA tensor, with its random operators made functional; and how many there were."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make_fx(fn)(torch.empty(size, dtype=dtype, device="cuda"))
    for node in module.graph.nodes:
        node.meta.setdefault("val", None)
    count = functional_random(module)
    module.graph.lint()
    return count, [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def test_the_pass_draws_seeds_on_the_device():
    count, calls = rewritten(lambda x: torch.ops.aten.native_dropout(x, 0.1, True)[0] + torch.rand_like(x), 8, 16)
    assert count == 2 and calls.count("aten.randint.low") == 1
    assert "fuser.uniform_like.default" in calls and not any("dropout" in c or "rand_like" in c for c in calls)


def test_eager_numbers_and_missing_kernels_leave_the_operators():
    def fn(x):
        return torch.ops.aten.native_dropout(x, 0.1, True)[0]

    with config.override(random="eager"):
        assert rewritten(fn, 8, 16)[0] == 0
    compiler.override_can_fuse("cuda", False)
    assert rewritten(fn, 8, 16)[0] == 0


SHARED = ("random", "dropout", "dropout/wide", "dropout/rows", "dropout/long", "dropout/columns", "dropout/split",
          "normal", "normal/columns")  # fmt: skip


@pytest.mark.parametrize("name", (*SHARED, "dropout/odd", "normal/odd"))
def test_four_neighbours_share_a_block(name):
    case = CASES[name]
    text = case.source(case.fake_args()).text
    assert ("= fuser_philox_quads(" in text) == (name in SHARED)
    assert ("= fuser_philox_word(" in text) == (name not in SHARED)


def test_a_masks_rows_are_softmaxs_too():
    case = CASES["dropout/rows"]
    assert len(case.source(case.fake_args()).functions) == 1


def test_approximations_stay_where_a_mask_is_drawn():
    """A comparison of random numbers is exact: it does not ask for exact arithmetic beside it."""
    case = CASES["dropout/wide"]
    assert "fuser_normal_cdf_fast(" in case.source(case.fake_args()).text


def test_seeds_share_a_kernel_wherever_they_lie():
    case = CASES["dropout/wide"]
    seed, x = case.fake_args()
    source = case.source((seed, x))
    assert [p.aligned for p in source.program.inputs] == [False, True]
    with FakeTensorMode():
        drawn = torch.empty(3, dtype=torch.int64, device="cuda").unbind()
    assert len({case.source((s, x)).text for s in drawn}) == 1


@pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize("name", ["dropout/wide", "normal/wide"])
def test_words_stay_in_their_threads(name, capability):
    """Four words of a block meet their elements without a way through shared memory."""
    case = CASES[name]
    (entry,) = fused_kernel.compile_entries(case.source(case.fake_args()), capability)
    assert entry.shared == 0


@pytest.mark.skipif(util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
def test_a_mask_that_is_kept_changes_no_threads():
    """16384 × 8192: with tiles of 2048 elements values went through shared memory, and all threads waited for it."""
    case = Case("", lambda s, x: dropped(s, F.gelu(x)), seeded(16384, 8192, dtype=torch.bfloat16))
    (entry,) = fused_kernel.compile_entries(case.source(case.fake_args()), 90)
    assert entry.shared == 0


def test_places_are_words_of_blocks_in_order():
    from fuser.ops.random import philox

    seed, stream = torch.tensor(0x299F31D0A4093822), (7 << 32) + 5
    zero = torch.zeros(3, dtype=torch.int64)
    key = (torch.tensor(0xA4093822), torch.tensor(0x299F31D0))
    blocks = philox(key, (torch.arange(3), zero, zero + 5, zero + 7))
    want = (torch.stack(blocks, 1).flatten() >> 8).float() / 2**24
    assert torch.equal(torch.ops.fuser.uniform_like(seed, stream, torch.empty(11)), want[:11])
    assert F.mse_loss(want, torch.full_like(want, 0.5)) > 0.01


DRAWING = {
    "bernoulli": torch.bernoulli,
    "bernoulli of a number": lambda p: torch.bernoulli(p, 0.25),
    "bernoulli_": lambda p: torch.empty_like(p).bernoulli_(0.25) + p,
    "normal": lambda p: torch.normal(p, p + 1),
    "rand_like": lambda p: torch.rand_like(p) + p,
    "randn": lambda p: torch.randn(20, 20, device=p.device) + p,
    "randint": lambda p: torch.randint(0, 9, (20, 20), device=p.device) + p,
    "randperm": lambda p: torch.randperm(20, device=p.device) + p,
    "uniform_": lambda p: torch.empty_like(p).uniform_() + p,
    "exponential_": lambda p: torch.empty_like(p).exponential_() + p,
    "multinomial": lambda p: torch.multinomial(p + 1, 3),
    "dropout": lambda p: F.dropout(p * 2, 0.25) + 1,
    "rrelu": lambda p: F.rrelu(p - 0.5, training=True),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DRAWING)
def test_eager_numbers_on_request(name, dynamic):
    def results(f):
        torch.manual_seed(0)
        return [f(p), f(p), torch.cuda.get_rng_state()]

    p = torch.rand(20, 20, device="cuda")
    torch._dynamo.reset()
    f = torch.compile(DRAWING[name], backend="fuser", dynamic=dynamic, options={"random": "eager"})
    torch.testing.assert_close(results(f), results(DRAWING[name]), rtol=0, atol=0)
