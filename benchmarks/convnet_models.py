"""The rows of the `convnets` suite: public architectures in a few lines each, random weights, eval mode.

ResNet-18 (He et al. 2015), VGG-16 (Simonyan and Zisserman 2014), SqueezeNet 1.1 (Iandola et al. 2016), MobileNetV2
(Sandler et al. 2018), DenseNet-121 (Huang et al. 2016), U-Net (Ronneberger et al. 2015), ConvNeXt-T (Liu et al. 2022);
ResNet-50 is that of the `models` suite. Classifiers end in 1,000 classes, the U-Net in 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contraction_rows import Row
from benchmarks.models import ResNet


def _conv(c: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Convolution, batch norm, and ReLU6 unless not wanted."""
    conv = nn.Conv2d(c, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), *([nn.ReLU6()] if act else []))


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, c: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(c, out, 3, stride), _conv(out, out, act=False))
        self.short = _conv(c, out, 1, stride, act=False) if stride != 1 or c != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Fire(nn.Module):
    """A 1x1 convolution, then a 1x1 and a 3x3 one side by side."""

    def __init__(self, c: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze, self.one = nn.Conv2d(c, squeeze, 1), nn.Conv2d(squeeze, expand, 1)
        self.three = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat((F.relu(self.one(x)), F.relu(self.three(x))), 1)


class Inverted(nn.Module):
    """Expand, depthwise, project; a shortcut where sizes allow."""

    def __init__(self, c: int, out: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = c * expand
        first = [_conv(c, inner, 1)] if expand > 1 else []
        self.body = nn.Sequential(*first, _conv(inner, inner, 3, stride, inner), _conv(inner, out, 1, act=False))
        self.same = stride == 1 and c == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


class Dense(nn.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3; the result beside the input."""

    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(c), nn.Conv2d(c, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat((x, self.conv2(F.relu(self.norm2(y)))), 1)


class Next(nn.Module):
    """Depthwise 7x7, layer norm over channels, a wide MLP, a scale, a shortcut."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down, self.scale = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ImageNorm(nn.Module):
    """A layer norm over the channels of images."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """Two scales down, two up by transposed convolutions, with the images of the way down beside."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.one, self.two, self.three = self._pair(3, c), self._pair(c, 2 * c), self._pair(2 * c, 4 * c)
        self.up2, self.back2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), self._pair(4 * c, 2 * c)
        self.up1, self.back1 = nn.ConvTranspose2d(2 * c, c, 2, 2), self._pair(2 * c, c)
        self.out = nn.Conv2d(c, 2, 1)

    @staticmethod
    def _pair(c: int, out: int) -> nn.Sequential:
        return nn.Sequential(_conv(c, out), _conv(out, out))

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        y = self.up2(self.three(F.max_pool2d(two, 2)))
        y = self.up1(self.back2(torch.cat((y, two), 1)))
        return self.out(self.back1(torch.cat((y, one), 1)))


def _head(c: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000)]


def resnet18() -> nn.Module:
    """[2, 2, 2, 2] basic blocks."""
    sizes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    blocks = [Basic(*s) for s in (*sizes, (512, 512, 1))]
    return nn.Sequential(_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, *_head(512))


def vgg16() -> nn.Module:
    """Thirteen convolutions, with one linear behind."""
    layers: list[nn.Module] = []
    c = 3
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(c, out, 3, padding=1), nn.ReLU()]
            c = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_head(c))


def squeezenet() -> nn.Module:
    """Version 1.1."""
    fires = [Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2), Fire(128, 32, 128), Fire(256, 32, 128)]
    fires += [nn.MaxPool2d(3, 2), Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)]
    head = [nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2), *fires, *head)


def mobilenet_v2() -> nn.Module:
    """Width 1."""
    layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
    c = 32
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, out, count, stride in plan:
        for i in range(count):
            layers.append(Inverted(c, out, 1 if i else stride, expand))
            c = out
    return nn.Sequential(*layers, _conv(c, 1280, 1), *_head(1280))


def densenet121() -> nn.Module:
    """Blocks of 6, 12, 24 and 16, growth 32."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    c = 64
    for i, count in enumerate((6, 12, 24, 16)):
        if i:
            layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2)]
            c //= 2
        layers += [Dense(c + 32 * n, 32) for n in range(count)]
        c += 32 * count
    return nn.Sequential(*layers, nn.BatchNorm2d(c), nn.ReLU(), *_head(c))


def convnext_tiny() -> nn.Module:
    """Depths 3, 3, 9, 3."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ImageNorm(96)]
    c = 96
    for i, count in enumerate((3, 3, 9, 3)):
        if i:
            layers += [ImageNorm(c), nn.Conv2d(c, 2 * c, 2, 2)]
            c *= 2
        layers += [Next(c) for _ in range(count)]
    return nn.Sequential(*layers, *_head(c))


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (resnet18, 224),
    "resnet50": (lambda: ResNet((3, 4, 6, 3), 64, 1000), 224),
    "vgg16": (vgg16, 224),
    "squeezenet": (squeezenet, 224),
    "mobilenet_v2": (mobilenet_v2, 224),
    "densenet121": (densenet121, 224),
    "unet": (lambda: UNet(32), 192),
    "convnext_tiny": (convnext_tiny, 224),
}


def _with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode, its batch norms with statistics and scales of their own."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.0)
    return model.eval()


def _make(name: str) -> Callable[[bool], tuple[nn.Module, tuple[Tensor, ...]]]:
    def make(quick: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        build, size = NETS[name]
        return _with_statistics(build()), (torch.randn(1 if quick else 2, 3, *2 * (64 if quick else size,)),)

    return make


ROWS: tuple[Row, ...] = tuple(Row(name, _make(name)) for name in NETS)
