"""Convolutions on a real GPU, in other forms than cuDNN's: no further from float64 than eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.cuda


def blocks(channels: int, number: int) -> nn.Sequential:
    """Convolutions with group norms between, as in diffusion networks."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.SiLU())
            for _ in range(number)
        ),
        nn.Conv2d(channels, 4, 3, padding=1),
    )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_group_norms_between_convolutions(dtype: torch.dtype) -> None:
    from fuser.frontends.dynamo import fuser_backend
    from fuser.frontends.records import last_compilation

    torch.manual_seed(1)
    model = blocks(64, 10).cuda().to(dtype).eval()
    x = torch.randn(2, 64, 32, 32, device="cuda", dtype=dtype)
    with torch.no_grad():
        found, eager = torch.compile(model, backend=fuser_backend)(x), model(x)
        exact = copy.deepcopy(model).double()(x.double())
    assert found.stride() == eager.stride()
    assert (found - exact).square().mean() <= 2 * (eager - exact).square().mean()
    assert any(p.name == "tensor_cores_channels_last" and p.changed for p in last_compilation().passes)


def compared(model: nn.Module, x: torch.Tensor, passed: str = "", train: bool = False) -> None:
    """Results, and in training gradients, are no further from float64 than eager's; a named pass changed the graph."""
    from fuser.frontends.dynamo import fuser_backend
    from fuser.frontends.records import compilations

    def run(model: nn.Module, call: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        if not train:
            with torch.no_grad():
                return [call(x)]
        out = call(x)
        out.float().square().mean().backward()
        return [out, *(p.grad for p in model.parameters() if p.grad is not None)]

    models = [copy.deepcopy(model) for _ in range(2)]
    found = run(models[0], torch.compile(models[0], backend=fuser_backend, dynamic=False), x)
    eager = run(models[1], models[1], x)
    model = model.double()
    exact = run(model, model, x.double())
    assert not passed or any(p.name == passed and p.changed for record in compilations()[-2:] for p in record.passes)
    for f, e, right in zip(found, eager, exact, strict=True):
        assert f.stride() == e.stride() and f.dtype is e.dtype
        assert (f - right).square().mean() <= 4 * (e - right).square().mean() + 1e-20


class Mobile(nn.Module):
    """Inverted residual blocks with squeezed gates."""

    def __init__(self, channels: int, stride: int, length: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)
        self.alone = nn.Conv2d(4 * channels, 4 * channels, length, stride, length // 2, groups=4 * channels, bias=False)
        self.norm, self.gate = nn.BatchNorm2d(4 * channels), nn.Conv2d(4 * channels, 4 * channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.alone(F.silu(self.widen(x)))))
        out: torch.Tensor = self.narrow(y * self.gate(y.mean([2, 3], keepdim=True)).sigmoid())
        return out


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("stride, length", ((1, 3), (2, 3), (1, 5), (2, 5)))
def test_depthwise(dtype: torch.dtype, stride: int, length: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(Mobile(24, stride if n == 1 else 1, length) for n in range(3))).cuda().to(dtype).eval()
    compared(model, torch.randn(8, 24, 56, 56, device="cuda", dtype=dtype), "depthwise_by_kernels")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_training(dtype: torch.dtype) -> None:
    """Plain and depthwise convolutions, batch norms and their gradients in channels-last memory."""
    torch.manual_seed(1)
    stem = nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU()
    model = nn.Sequential(*stem, Mobile(24, 1, 3), nn.MaxPool2d(3, 2, 1), Mobile(24, 2, 5)).cuda().to(dtype)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        compared(model, torch.randn(64, 3, 256, 256, device="cuda", dtype=dtype), "tensor_cores_channels_last", True)


@pytest.mark.parametrize("train", (False, True))
@pytest.mark.parametrize("size, length", ((224, 16), (224, 14)))
def test_patches(size: int, length: int, train: bool) -> None:
    torch.manual_seed(1)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.norm = nn.Conv2d(3, 192, length, length), nn.LayerNorm(192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens: torch.Tensor = self.norm(self.cut(x).flatten(2).transpose(1, 2))
            return tokens

    x = torch.randn(32, 3, size, size, device="cuda", dtype=torch.bfloat16)
    compared(Tokens().cuda().bfloat16().train(train), x, "patches_to_products", train)


class Between(nn.Module):
    """Convolutions of single points in groups between norms over channels, as in SqueezeBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv1d(768, 3072, 1, groups=4), nn.Conv1d(3072, 768, 1, groups=4)
        self.norm = nn.LayerNorm(768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(F.gelu(self.wide(self.norm(x).transpose(1, 2))))
        out: torch.Tensor = self.norm(x + y.transpose(1, 2))
        return out


@pytest.mark.parametrize("train", (False, True))
def test_points_in_groups(train: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(32, 256, 768, device="cuda", dtype=torch.bfloat16)
    compared(Between().cuda().bfloat16().train(train), x, "grouped_points_to_products", train)


@pytest.mark.parametrize("train", (False, True))
def test_long_windows(train: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(768, 768, 128, padding=64, groups=16), nn.GELU()).cuda().bfloat16()
    x = torch.randn(8, 768, 499, device="cuda", dtype=torch.bfloat16)
    compared(model.train(train), x, "long_windows_to_products", train)


@pytest.mark.parametrize("channels", (64, 96))
def test_groups(channels: int) -> None:
    """Whichever memory order wins."""
    torch.manual_seed(1)
    block = [nn.Conv2d(channels, channels, 3, padding=1, groups=4), nn.BatchNorm2d(channels), nn.ReLU()]
    model = nn.Sequential(*(copy.deepcopy(m) for _ in range(4) for m in block)).cuda().bfloat16().eval()
    x = torch.randn(16, channels, 56, 56, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found, eager = torch.compile(model, backend="fuser")(x), model(x)
        exact = copy.deepcopy(model).double()(x.double())
    assert found.stride() == eager.stride()
    assert (found - exact).square().mean() <= 4 * (eager - exact).square().mean()


class Positions(nn.Module):
    """Position embeddings of a vision transformer, resized for other images."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.table, self.after = nn.Parameter(torch.randn(1, before * before, 192)), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = int(self.table.shape[1] ** 0.5)
        images = self.table.transpose(1, 2).view(1, -1, side, side)
        made = F.interpolate(images, size=(self.after, self.after), mode="bicubic", align_corners=False)
        return (x + made.flatten(2).transpose(1, 2)).sin()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("sizes", ((24, 14), (14, 16), (7, 21)), ids=str)
def test_resized_positions(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = Positions(*sizes).cuda().to(dtype)
    x = torch.randn(2, sizes[1] ** 2, 192, device="cuda", dtype=dtype)
    compared(model, x, train=True)


@pytest.mark.parametrize("groups", (8, 32))
def test_group_norms_in_training(groups: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(groups, 64), nn.SiLU()) for _ in range(4)
    )).cuda().bfloat16()  # fmt: skip
    x = torch.randn(4, 64, 96, 96, device="cuda", dtype=torch.bfloat16)
    compared(model, x, "decompose_norms", train=True)
