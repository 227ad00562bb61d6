"""Signal processing: windows, filters, spectra, images as signals."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import f, i, p, peer, u


@peer(f("N", 32), halves=False)
def stft_power(x):
    z = torch.stft(x, 16, hop_length=8, window=torch.hann_window(16), return_complex=True)
    return z.abs().pow(2)


@peer(f("N", 32), halves=False)
def log_spectrum(x):
    return torch.log(torch.fft.rfft(x).abs() + 1e-3)


@peer(f("N", 32), f("N", 32), halves=False)
def fft_convolution(x, k):
    n = x.shape[-1] * 2
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k, n), n)[..., : x.shape[-1]]


@peer(f("N", 32))
def frames(x):
    w = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(8, dtype=x.dtype) / 8)
    return x.unfold(-1, 8, 4) * w


@peer(f("N", 8, 6))
def overlap_add(x):
    y = F.fold(x, output_size=(1, 18), kernel_size=(1, 8), stride=(1, 2))
    return y[:, 0, 0]


@peer(f("N", 32))
def pre_emphasis(x):
    return torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], dim=1)


@peer(f("N", 32))
def moving_average(x):
    c = F.pad(x, (4, 0)).cumsum(-1)
    return (c[:, 4:] - c[:, :-4]) / 4


@peer(f("N", 32))
def moving_average_pool(x):
    return F.avg_pool1d(x.unsqueeze(1), 5, 1, 2, count_include_pad=False).squeeze(1)


@peer(f("N", 32), f(5))
def fir(x, k):
    return F.conv1d(x[:, None], k[None, None], padding=2)[:, 0]


@peer(f("N", 12))
def exponential_smoothing(x):
    y = [x[:, 0]]
    for t in range(1, 12):
        y.append(0.3 * x[:, t] + 0.7 * y[-1])
    return torch.stack(y, 1)


@peer(f("N", 12), f(3))
def iir_biquad(x, a):
    a = a.tanh() * 0.4
    y1 = y2 = torch.zeros_like(x[:, 0])
    out = []
    for v in x.unbind(1):
        y = v - a[0] * y1 - a[1] * y2
        y1, y2 = y, y1
        out.append(y)
    return torch.stack(out, dim=-1)


@peer(f("N", 32))
def mu_law(x):
    x = x.clamp(-1, 1)
    return x.sign() * torch.log1p(255.0 * x.abs()) / math.log1p(255.0)


@peer(f("N", 32), grad=False)
def mu_law_codes(x):
    y = x.tanh().sign() * torch.log1p(255 * x.tanh().abs()) / math.log(256)
    return ((y + 1) / 2 * 255 + 0.5).to(torch.int64)


@peer(i(256, "N", 32), grad=False, halves=False)
def mu_law_decode(c):
    y = c.float() / 255 * 2 - 1
    return torch.sign(y) / 255 * ((1 + 255.0) ** y.abs() - 1)


@peer(p("N", 16))
def decibels(x):
    db = 10.0 * torch.log10(torch.clamp(x, min=1e-3))
    return torch.max(db, db.amax(dim=-1, keepdim=True) - 80.0)


@peer(p("N", 16), f(16, 8))
def mel(x, bank):
    return torch.log(torch.clamp(x @ bank.abs(), min=1e-3))


@peer(p("N", 6, 8))
def pcen(x):
    m = x[:, 0]
    out = []
    for t in range(6):
        m = 0.9 * m + 0.1 * x[:, t]
        out.append((x[:, t] / (1e-2 + m) ** 0.9 + 2.0) ** 0.5 - 2.0**0.5)
    return torch.stack(out, 1)


@peer(f("N", 16))
def haar(x):
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.cat([(a + b) * 2**-0.5, (a - b) * 2**-0.5], 1)


@peer(f("N", 8))
def dct_matrix(x):
    n = torch.arange(8, dtype=torch.float64)
    m = torch.cos(math.pi / 8 * (n[None] + 0.5) * n[:, None])
    return x @ m.to(x.dtype).T


@peer(f("N", 32))
def autocorrelation(x):
    x = x - x.mean(-1, keepdim=True)
    return torch.stack([(x[:, k:] * x[:, : 32 - k]).sum(-1) for k in range(5)], -1) / (x * x).sum(-1, keepdim=True)


@peer(f("N", 1, 8, 8))
def sobel(x):
    k = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]], dtype=x.dtype)
    gx, gy = F.conv2d(x, k[None, None], padding=1), F.conv2d(x, k.T[None, None], padding=1)
    return torch.sqrt(gx**2 + gy**2 + 1e-3)


@peer(f("N", 3, 8, 8))
def gaussian_blur(x):
    t = torch.arange(-2, 3, dtype=x.dtype)
    k = (-(t**2) / 2).exp()
    k = k / k.sum()
    x = F.pad(x, (2, 2, 2, 2), mode="reflect")
    x = F.conv2d(x, k.view(1, 1, 1, 5).repeat(3, 1, 1, 1), groups=3)
    return F.conv2d(x, k.view(1, 1, 5, 1).repeat(3, 1, 1, 1), groups=3)


@peer(u("N", 3, 4, 4))
def rgb_to_yuv(x):
    r, g, b = x.unbind(1)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    return torch.stack((y, 0.492 * (b - y), 0.877 * (r - y)), dim=1)


@peer(u("N", 3, 4, 4), grad=False)
def rgb_to_hue(x):
    mx, at = x.max(1)
    mn = x.min(1).values
    d = torch.where(mx == mn, torch.ones_like(mx), mx - mn)
    r, g, b = x[:, 0], x[:, 1], x[:, 2]
    h = torch.where(at == 0, (g - b) / d % 6, torch.where(at == 1, (b - r) / d + 2, (r - g) / d + 4))
    return torch.where(mx == mn, torch.zeros_like(h), h / 6)


@peer(u("N", 3, 4, 4))
def srgb(x):
    return torch.where(x <= 0.0031308, 12.92 * x, 1.055 * x.clamp(min=1e-3) ** (1 / 2.4) - 0.055)


@peer(u("N", 3, 6, 6), u("N", 3, 6, 6))
def ssim(x, y):
    mx, my = F.avg_pool2d(x, 3, 1), F.avg_pool2d(y, 3, 1)
    vx = F.avg_pool2d(x * x, 3, 1) - mx * mx
    vy = F.avg_pool2d(y * y, 3, 1) - my * my
    c = F.avg_pool2d(x * y, 3, 1) - mx * my
    s = ((2 * mx * my + 1e-2) * (2 * c + 3e-2)) / ((mx**2 + my**2 + 1e-2) * (vx + vy + 3e-2))
    return 1 - s.mean()


@peer(f("N", 32), grad=False)
def median_filter(x):
    return F.pad(x[:, None], (1, 1), mode="replicate")[:, 0].unfold(-1, 3, 1).median(-1).values


@peer(f("N", 32), f("N", 32))
def si_sdr(x, y):
    x, y = x - x.mean(-1, True), y - y.mean(-1, True)
    a = (x * y).sum(-1, True) / ((y * y).sum(-1, True) + 1e-3)
    e = a * y - x
    return 10 * torch.log10(((a * y) ** 2).sum(-1) / ((e * e).sum(-1) + 1e-3) + 1e-3).mean()


@peer(f("N", 32))
def differences_and_crossings(x):
    d = x.diff(dim=-1)
    cross = (torch.signbit(x[:, 1:]) != torch.signbit(x[:, :-1])).to(x.dtype)
    return d.abs().sum(-1) + cross.mean(-1)


@peer(f("N", 31))
def resample(x):
    return F.interpolate(x[:, None], size=20, mode="linear", align_corners=False)[:, 0]
