"""What is said where kernels for CUDA cannot be had, and that calls run by ATen then."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import CASES, Case, reduced_into

from fuser import compiler, config
from fuser.cuda import driver, toolchain
from fuser.errors import CompileError, Unsupported
from fuser.lowering import supports


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
        toolchain.compile_kernel(toolchain.Request(text, "broken", (("x", "*fp32"),), (0,), 4, 90, True, False))


def test_a_failed_launch_says_what_was_launched() -> None:
    library = driver.Library.__new__(driver.Library)
    library.path, library.parts = "/there/source.py", (driver.Entry("k0_pw", b"", 0, 128, 0),)
    said = library.failure(0, 1, (torch.ones(2, 3), 0.5))
    assert "k0_pw" in said and "/there/source.py" in said and "float32[2, 3] strides [3, 1] on cpu, 0.5" in said


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
