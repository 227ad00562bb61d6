"""Products into chosen memory: right for every order of the operands, in ordinary tensors."""

import pytest
import torch

from fuser import config
from fuser.runtime import launcher, products, untouched, warm

pytestmark = pytest.mark.skipif(not products.are_possible(), reason="this torch has no such call of oneDNN")
SIZES = [(1, 1, 1), (2, 3, 5), (64, 33, 129), (300, 70, 4000)]


def matrix(rows, columns, order):
    made = {
        "rows": lambda: torch.randn(rows, columns),
        "columns": lambda: torch.randn(columns, rows).t(),
        "part": lambda: torch.randn(rows, columns + 3)[:, 1:-2],
        "strided": lambda: torch.randn(2 * rows, 3 * columns)[::2, ::3],
    }
    return made[order]()


@pytest.fixture
def native():
    launcher.prepare()
    if not launcher.wait() or launcher.native() is None:
        pytest.skip("no native launcher here")
    if products._into() is None:
        pytest.skip("oneDNN refuses such a call on this processor")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("left", ["rows", "columns", "part", "strided"])
@pytest.mark.parametrize("right", ["rows", "columns", "strided"])
def test_every_order(native, sizes, left, right):
    torch.manual_seed(0)
    x, w = matrix(sizes[0], sizes[1], left), matrix(sizes[1], sizes[2], right)
    out = products.product(x, w)
    assert out.is_contiguous() and out.shape == (sizes[0], sizes[2])
    torch.testing.assert_close(out.double(), x.double() @ w.double(), rtol=1e-4, atol=1e-4)


def test_the_call_is_found_and_checked(native):
    assert products._into() is not None


def test_an_ordinary_tensor(native):
    x, w = torch.randn(40, 30), torch.nn.Parameter(torch.randn(30, 20))
    with torch.no_grad():
        out = products.product(x, w)
    assert not out.requires_grad
    out.untyped_storage().resize_(0)
    assert out.untyped_storage().nbytes() == 0


def test_warm_memory_is_used_again(native):
    warm.outputs.trim()
    x, w = torch.randn(1024, 8), torch.randn(8, 2048)
    address = products.product(x, w).data_ptr()
    second = products.product(x, w)
    assert second.data_ptr() == address
    assert products.product(x, w).data_ptr() != address
    with config.override(output_limit_bytes=0):
        torch.testing.assert_close(products.product(x, w), second)
    warm.outputs.trim()


def test_a_step_keeps_what_products_left_and_nothing_else(native):
    warm.outputs.trim()
    with config.override(output_limit_bytes=0):
        x, w = torch.randn(4096, 8), torch.randn(8, 2048)  # 32 MiB
        first = products.product(x, w)
        address = first.data_ptr()
        assert warm.outputs.stats()["held_bytes"] == first.nbytes
        other = warm.empty_strided((4096, 2048), (2048, 1), torch.float32)
        assert other.data_ptr() != address, "somebody reads it"
        del first, other
        again = warm.empty_strided((2048, 4096), (4096, 1), torch.float32)
        assert again.data_ptr() == address, "another result of as many bytes"
        del again
        warm.empty_strided((4096, 2049), (2049, 1), torch.float32)
        assert warm.outputs.stats()["held"] == 1
        rows = torch.tensor([0])
        zeros = untouched.zeros((4096, 2048), torch.float32, rows)
        assert zeros.data_ptr() == address and not zeros.any()
        del zeros
    with config.override(product_limit_bytes=0):
        products.product(x, w)
    warm.outputs.trim()


def test_without_the_native_launcher(monkeypatch):
    monkeypatch.setattr(launcher, "native", lambda: None)
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    torch.testing.assert_close(products.product(x, w), x @ w)
