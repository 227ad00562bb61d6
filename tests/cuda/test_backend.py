"""What is said where kernels for CUDA cannot be had, and that calls run by ATen then."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from cuda_cases import CASES, Case, reduced_into

import fuser
from fuser import compiler, config, interface
from fuser.cuda import driver, fused_kernel, toolchain
from fuser.errors import CompileError, Unsupported
from fuser.lowering.registry import supports


@pytest.mark.parametrize(
    ("version", "said"),
    ((None, "Triton is not installed"), ("3.1.0", "Triton 3.1.0 is installed"), ("9.0", "one from 3.4 to 3.7")),
)
def test_triton_that_does_not_fit(version: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "triton_version", lambda: version)
    reason = toolchain.why_not()
    assert reason is not None and said in reason
    assert compiler.CudaBackend().can_fuse() == reason
    with pytest.raises(CompileError, match="Triton"):
        toolchain.compile_now(toolchain.Request("", "k", (), (), 4, 90, True, False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu() -> None:
    reason = driver.why_not()
    assert reason is not None and "no CUDA device" in reason


class OldDriver:
    """The driver's library, of another version."""

    def cuDriverGetVersion(self, out: object) -> int:
        out._obj.value = 11040
        return 0


def test_old_driver_and_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_library", lambda: None)
    assert "libcuda.so.1" in (driver.why_not() or "")
    monkeypatch.setattr(driver, "_library", OldDriver)
    assert "CUDA 11.4: 12.0 is needed" in (driver.why_not() or "")
    monkeypatch.setattr(driver, "OLDEST_DRIVER", 11000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "an old card")
    assert driver.why_not() == "an old card has compute capability 6.1: 7.0 is needed"


def test_a_kernel_that_triton_refuses_is_named(fresh_cache_dir: str) -> None:
    pytest.importorskip("triton")
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef broken(x):\n    tl.store(x, unknown)\n"
    with pytest.raises(CompileError, match="cannot compile kernel broken .*cuda.*unknown"):
        toolchain.compile_kernel(toolchain.Request(text, "broken", (("x", "*fp32"),), ((0, 16),), 4, 90, True, False))


def test_a_failed_launch_says_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver.Library.__new__(driver.Library)
    library.path, library.parts = "/there/source.py", (driver.Entry("k0_pw", b"", 0, 128, 0),)
    args = (torch.ones(2, 3), 0.5)
    this = "kernel k0_pw (/there/source.py) for (float32[2, 3] strides [3, 1] on cpu, 0.5)"
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert library.failure(0, 1, args).startswith(f"{this} could not be launched: ")
    assert "a kernel that ran before failed" in library.failure(0, 700, args)
    assert "CUDA_LAUNCH_BLOCKING=1" in library.failure(0, 700, args)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert library.failure(0, 700, args).startswith(f"{this} failed: ")


class Refusing:
    """A driver's library in which one function gives an error code."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> object:
        return lambda *args: 209 if name == self.name else 0


@pytest.mark.parametrize(
    ("function", "said"),
    (
        ("cuInit", "the driver cannot be started: CUDA error 209"),
        ("cuLibraryLoadData", "kernel k0_pw of /there/source.py cannot be loaded: CUDA error 209"),
        ("cuLibraryGetKernel", "/there/source.py has no kernel k0_pw: CUDA error 209"),
        ("cuKernelSetAttribute", "kernel k0_pw needs 100000 bytes of shared memory: CUDA error 209"),
    ),
)
def test_a_driver_that_refuses_a_kernel(function: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", lambda: Refusing(function))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CompileError) as found:
        driver.Library("/there/source.py", [driver.Entry("k0_pw", b"", 100_000, 128, 0)])
    assert str(found.value) == said


@pytest.mark.parametrize("what", ("triton", "driver", "compiling"))
def test_calls_run_by_aten_with_one_warning(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose Triton or driver is missing, or whose Triton fails, but for tensors on the CPU."""
    said = f"the {what} of this test is missing"
    monkeypatch.setattr(toolchain, "why_not", lambda: said if what == "triton" else None)
    monkeypatch.setattr(driver, "why_not", lambda: said if what == "driver" else None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "capability", lambda device: 90)

    def fail(source: object, capability: int) -> None:
        raise CompileError(said)

    monkeypatch.setattr(fused_kernel, "fitting", fail)
    fuser.register_fusion_backend("cpu", compiler.CudaBackend())
    try:
        key = fuser.register_fusion(torch.fx.symbolic_trace(lambda x: torch.relu(x) * 3 + len(what)))
        x = torch.linspace(-1, 1, 40)
        with pytest.warns(RuntimeWarning, match=f"{said}; the groups concerned run by ATen") as found:
            for n in (40, 20, 30):
                torch.testing.assert_close(fuser.run_fusion(key, [x[:n]])[0], torch.relu(x[:n]) * 3 + len(what))
        assert len(found) == 1
        assert not interface.kernel_spec(key).store.kernels
    finally:
        fuser.register_fusion_backend("cpu", None)


def test_what_two_kernels_need_is_computed_twice_instead_of_stored() -> None:
    case = CASES["norm_gradients/bf16"]
    source = case.source(case.fake_args())
    temporaries = [b for b in source.program.buffers if not b.output]
    assert all(len(b.sizes) == 1 for b in temporaries), "a whole tensor goes from one kernel to another"
    assert source.n_kernels == 2


def test_wide_addresses() -> None:
    case = CASES["relu_mul_add/2"]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        large = tuple(torch.empty(1 << 16, 1 << 16, device="cuda") for _ in range(2))
    wide, narrow = case.source(large).text, case.source(case.fake_args()).text
    assert "tl.program_id(0).to(tl.int64)" in wide and "tl.int64" not in narrow


def test_what_torch_wants_in_one_order_is_left_to_aten() -> None:
    case = CASES["index_add"]
    assert supports("aten.index_add", "cuda") is None
    before = config.key()
    torch.use_deterministic_algorithms(True)
    try:
        assert "use_deterministic_algorithms" in (supports("aten.index_add", "cuda") or "")
        assert supports("aten.index_add", "cpu") is None
        assert config.key() != before
        with pytest.raises(Unsupported, match="use_deterministic_algorithms"):
            case.source(case.fake_args())
        with config.override(deterministic="no"):
            case.source(case.fake_args())
    finally:
        torch.use_deterministic_algorithms(False)
    assert config.key() == before
    with config.override(deterministic="yes"), pytest.raises(Unsupported, match="order"):
        case.source(case.fake_args())


def test_what_no_atomic_operation_combines() -> None:
    case = Case("product", reduced_into("prod"), CASES["scatter_amax"].make)
    with pytest.raises(Unsupported, match="no atomic operation combines torch.float32 by 'prod'"):
        case.source(case.fake_args())


def test_no_kernels_are_no_error() -> None:
    assert toolchain.compile_all(()) == ()


def of_nothing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Elements, scans and reductions with an extent of 0 in each place, and two sums over it."""
    return x.exp() + y, x.cummax(0)[1], x.cumsum(1), y.cummax(1)[0], x.sum(1), x.expand(3, 5, 33, 0) * y


def test_kernels_that_make_no_element_are_left_out() -> None:
    """Found by random programs: an address along an extent of 0 varies along no axis, and its mask does."""
    case = Case("", of_nothing, lambda i: (i.normal(5, 33, 0), i.normal(5, 33, 1)))
    functions = case.source(case.fake_args()).functions
    assert len(functions) == 1 and "scan_max" in functions[0].name
    case = Case("", lambda x: (x.diagonal(40).exp(), x.diagonal(40).cumsum(0)), lambda i: (i.normal(5, 33),))
    assert not case.source(case.fake_args()).functions


def test_an_output_that_is_not_there_is_left_to_eager() -> None:
    """Found by random programs: a chunk of a shorter tensor has fewer parts."""
    case = Case("", lambda x: x.chunk(3)[2] * 2, lambda i: (i.normal(2),))
    with pytest.raises(Unsupported, match="there are 2 results, and none at 2"):
        case.source(case.fake_args())


EMPTY = {
    "logsumexp": lambda x, y, z: (x.logsumexp(0), x.repeat_interleave(2, 0).atan()),
    "sum": lambda x, y, z: (x.sum(0), x * 2, y + 1),
    "prod": lambda x, y, z: (x.prod(0) + y, x.exp().amin(1)),
    "pad": lambda x, y, z: F.pad(x, (0, 0, 1, 2), value=0.5) * 2,
    "cat": lambda x, y, z: torch.cat([x, y[None], x]) * 2,
    "wide": lambda x, y, z: ((x + y).sum(0), (x * y).relu(), y.softmax(0)),
    "halves": lambda x, y, z: (x[: x.shape[0] // 2].sum(0), x.repeat(2, 1).cumsum(0)),
    "known": lambda x, y, z: (x.logsumexp((0,)), z.softmax(1), torch.repeat_interleave(x, 2, dim=-2).atan()),
    "norm": lambda x, y, z: (F.layer_norm(x, x.shape[1:], y), y * 2),
}


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_elements_is_read_under_a_mask(name, expanded, width):
    """Its address may be 0, which a load that no mask covers would read."""

    def make(i):
        x = i.normal(1, width).expand(0, width) if expanded else i.normal(2, width)[:0]
        return x, i.normal(width), i.normal(8, 3).permute(1, 0)

    case = Case(name, EMPTY[name], make)
    for load in re.findall(r"tl\.load\((in0\b.*)\)", case.source(case.fake_args()).text):
        assert re.search(r", (m|t\d)", load), load


def test_a_kernel_for_repeated_elements_takes_no_tensor_without_any():
    """It reads each once, whatever the size of the dim along which they repeat, and there may be none to read."""
    call = fuser.fusion_handle(fuser.register_fusion(torch.fx.symbolic_trace(lambda x: (x.sum(0), x.exp().amax(1)))))
    x = torch.randn(1, 8)
    call(x.expand(4, 8))
    made = fuser.num_compiled_kernels()
    call(x.expand(6, 8))
    assert fuser.num_compiled_kernels() == made
    total, most = call(x.expand(0, 8))
    assert torch.equal(total, torch.zeros(8)) and most.shape == (0,)
    assert fuser.num_compiled_kernels() > made
