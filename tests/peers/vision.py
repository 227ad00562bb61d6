"""Blocks of convolutional networks, poolings, and rearrangements of images."""

import torch
import torch.nn.functional as F

from tests.peers.spec import f, i, p, peer, u


@peer(f("N", 4, 6, 6), f(8, 4, 3, 3), f(8), p(8, grad=False), f(8, grad=False))
def conv_bn_relu(x, w, b, var, mean):
    y = F.conv2d(x, w, padding=1)
    return F.relu(F.batch_norm(y, mean, var, b, b))


@peer(f("N", 4, 6, 6), f(4, 4, 3, 3), f(4, 4, 3, 3))
def residual(x, a, b):
    return F.relu(x + F.conv2d(F.relu(F.conv2d(x, a, padding=1)), b, padding=1))


@peer(f("N", 8, 6, 6), f(8, 1, 3, 3), f(4, 8, 1, 1))
def depthwise_separable(x, d, w):
    return F.conv2d(F.hardswish(F.conv2d(x, d, padding=1, groups=8)), w)


@peer(f("N", 8, 6, 6), f(2, 8), f(8, 2))
def squeeze_excite(x, a, b):
    s = x.mean((2, 3))
    s = torch.sigmoid(F.linear(F.relu(F.linear(s, a)), b))
    return x * s[:, :, None, None]


@peer(f("N", 8, 6, 6))
def channel_shuffle(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


@peer(f("N", 8, 6, 6))
def channel_shuffle_channels_last(x):
    y = F.channel_shuffle(x.to(memory_format=torch.channels_last), 2)
    return y.permute(0, 2, 3, 1).reshape(x.shape[0], -1) * 2


@peer(f("N", 8, 3, 3))
def pixel_shuffle(x):
    return F.pixel_shuffle(x, 2).clamp(-1, 1)


@peer(f("N", 8, 3, 3))
def pixel_shuffle_channels_last(x):
    return F.pixel_shuffle(x.contiguous(memory_format=torch.channels_last), 2) + 1


@peer(f("N", 2, 6, 6))
def pixel_unshuffle(x):
    return F.pixel_unshuffle(x, 2) * 2


@peer(f("N", 8, 4, 4))
def depth_to_space(x):
    n, c, h, w = x.shape
    return x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, h * 2, w * 2)


@peer(f("N", 3, 8, 8))
def patchify(x):
    y = x.unfold(2, 4, 4).unfold(3, 4, 4)
    return y.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)


@peer(f("N", 3, 8, 8))
def patchify_unfold(x):
    return F.unfold(x, 4, stride=4).transpose(1, 2)


@peer(f("N", 4, 16))
def unpatchify(x):
    x = x.view(x.shape[0], 2, 2, 4, 4, 1)
    return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], 1, 8, 8)


@peer(f("N", 4, 6, 6))
def pools_together(x):
    return torch.cat([F.max_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 3, 1, 1), x], 1)


@peer(f("N", 4, 6, 6))
def spatial_pyramid(x):
    a = F.max_pool2d(x, 5, 1, 2)
    b = F.max_pool2d(a, 5, 1, 2)
    return torch.cat((x, a, b, F.max_pool2d(b, 5, 1, 2)), 1)


@peer(f("N", 4, 6, 6))
def adaptive_pools(x):
    return F.adaptive_avg_pool2d(x, (4, 4)).flatten(1), F.adaptive_max_pool2d(x, 3)


@peer(f("N", 4, 5, 7))
def pyramid_pooling(x):
    out = [x]
    for s in (1, 2, 3):
        out.append(F.interpolate(F.adaptive_avg_pool2d(x, s), x.shape[-2:], mode="bilinear", align_corners=False))
    return torch.cat(out, 1)


@peer(p("N", 4, 6, 6))
def generalized_mean(x):
    return F.avg_pool2d(x.clamp(min=1e-2).pow(3), (6, 6)).pow(1 / 3).flatten(1)


@peer(f("N", 4, 6, 6))
def log_sum_exp_pool(x):
    return torch.logsumexp(x.flatten(2) * 2, -1) / 2


@peer(f("N", 4, 6, 6))
def blur_pool(x):
    k = torch.tensor([1.0, 2, 1], dtype=x.dtype)
    k = (k[:, None] * k)[None, None].expand(4, 1, 3, 3) / 16
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), k, stride=2, groups=4)


@peer(f("N", 4, 4, 4))
def upsample_and_skip(x):
    y = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    return y + F.interpolate(x, size=(8, 8))


@peer(f("N", 3, 4, 4))
def bicubic(x):
    return F.interpolate(x, size=(7, 6), mode="bicubic", align_corners=False)


@peer(f("N", 4, 6, 6), f(4, 4, 2, 2))
def transposed_conv(x, w):
    return F.gelu(F.conv_transpose2d(x, w, stride=2))


@peer(f("N", 2, 4, 4, 4), f(3, 2, 3, 3, 3))
def conv3d_norm(x, w):
    y = F.conv3d(x, w, padding=1)
    return F.leaky_relu(F.instance_norm(y), 0.01)


@peer(f("N", 2, 6, 6, 6))
def pool3d(x):
    return F.max_pool3d(x, 2), F.avg_pool3d(x, 3, 2, 1)


@peer(f("N", 8, 6, 6), f(1, 2, 7, 7))
def spatial_attention(x, w):
    s = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
    return x * torch.sigmoid(F.conv2d(s, w, padding=3))


@peer(f("N", 6, 4, 4))
def coordinate_channels(x):
    ys = torch.linspace(-1, 1, 4, dtype=x.dtype).view(1, 1, 4, 1).expand(x.shape[0], 1, 4, 4)
    return torch.cat([x, ys, ys.transpose(2, 3)], dim=1)


@peer(f("N", 8, 4, 4), f(8, 8, 1, 1))
def coordinate_attention(x, w):
    h, v = x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)
    y = F.conv2d(torch.cat([h, v], dim=2), w)
    h, v = torch.split(y, [4, 4], dim=2)
    return x * h.sigmoid() * v.permute(0, 1, 3, 2).sigmoid()


@peer(f("N", 4, 6, 6), f("N", 4, 6, 6))
def correlation(x, y):
    y = F.pad(y, (1, 1, 1, 1))
    return torch.stack([(x * y[:, :, a : a + 6, c : c + 6]).mean(1) for a in range(3) for c in range(3)], 1)


@peer(f("N", 4, 6, 6))
def gram(x):
    y = x.flatten(2)
    return y @ y.transpose(1, 2) / (4 * 36)


@peer(i(256, "N", 3, 4, 4), grad=False, halves=False)
def image_to_float(x):
    x = x.to(torch.uint8).float() / 255
    m = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    return ((x - m) / 0.225).contiguous(memory_format=torch.channels_last)


@peer(u("N", 3, 4, 4), grad=False)
def float_to_image(x):
    return (x * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


@peer(f("N", 4, 6, 6), f(4), f(4))
def layer_scale_nhwc(x, g, b):
    y = x.permute(0, 2, 3, 1)
    y = F.layer_norm(y, (4,)) * g + b
    return x + F.gelu(y).permute(0, 3, 1, 2)


@peer(f("N", 4, 6, 6))
def flips_and_rotations(x):
    return (x + x.flip(-1) + x.rot90(1, (2, 3)) + x.transpose(2, 3).flip(2)) / 4


@peer(f("N", 6, 6))
def toeplitz_and_diagonals(x):
    return x.tril(-1) + x.triu(2).mT, torch.diagonal(x, 1, 1, 2), x.diagonal(dim1=1, dim2=2).sum(-1)


@peer(f("N", 4, 6))
def reflect_and_circular(x):
    return F.pad(x, (2, 1), mode="reflect"), F.pad(x, (1, 2), mode="circular"), F.pad(x, (3, 0), mode="replicate")
