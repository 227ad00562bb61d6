"""Steps of simulations, geometry, and numerical methods."""

import math

import torch
import torch.nn.functional as F

from tests.peers.spec import f, i, p, peer, u


@peer(f("N", 8, 8))
def heat_step(x):
    lap = torch.roll(x, 1, 1) + torch.roll(x, -1, 1) + torch.roll(x, 1, 2) + torch.roll(x, -1, 2) - 4 * x
    return x + 0.1 * lap


@peer(f("N", 8, 8), f("N", 8, 8))
def wave_step(now, before):
    lap = now[:, :-2, 1:-1] + now[:, 2:, 1:-1] + now[:, 1:-1, :-2] + now[:, 1:-1, 2:] - 4 * now[:, 1:-1, 1:-1]
    return F.pad(2 * now[:, 1:-1, 1:-1] - before[:, 1:-1, 1:-1] + 0.2 * lap, (1, 1, 1, 1))


@peer(u("N", 8, 8), u("N", 8, 8))
def gray_scott(a, b):
    lap = lambda x: sum(torch.roll(x, s, d) for s in (1, -1) for d in (1, 2)) - 4 * x  # noqa: E731
    r = a * b * b
    return a + 0.16 * lap(a) - r + 0.035 * (1 - a), b + 0.08 * lap(b) + r - 0.095 * b


@peer(f("N", 3), f("N", 3), p("N"))
def n_body(x, v, m):
    d = x[None] - x[:, None]
    r3 = (d.square().sum(-1) + 0.1).pow(-1.5)
    a = (d * (m[None, :] * r3).unsqueeze(-1)).sum(1)
    v = v + 0.01 * a
    return x + 0.01 * v, v


@peer(f("N", 3))
def lorenz_rk4(s):
    def dot(s):
        x, y, z = s.unbind(-1)
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)

    k1 = dot(s)
    k2 = dot(s + 0.005 * k1)
    k3 = dot(s + 0.005 * k2)
    k4 = dot(s + 0.01 * k3)
    return s + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@peer(f("N", 2))
def pendulum(s):
    q, w = s[:, 0], s[:, 1]
    for _ in range(4):
        w = w - 0.05 * torch.sin(q)
        q = q + 0.05 * w
    return torch.stack((q, w), 1)


@peer(f("N", 3))
def lennard_jones(x):
    d = (x[:, None] - x[None]).pow(2).sum(-1) + torch.eye(x.shape[0], dtype=x.dtype) * 100 + 0.5
    s6 = d.reciprocal() ** 3
    return (4 * (s6 * s6 - s6)).triu(1).sum()


@peer(f("N", 4))
def quaternion_rotate(q):
    q = F.normalize(q, dim=-1)
    w, x, y, z = torch.unbind(q, -1)
    rows = (
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(rows, -1).reshape(q.shape[:-1] + (3, 3))


@peer(f("N", 4), f("N", 4))
def quaternion_multiply(a, b):
    aw, ax, ay, az = a.split(1, -1)
    bw, bx, by, bz = b.split(1, -1)
    return torch.cat((aw * bw - ax * bx - ay * by - az * bz, aw * bx + ax * bw + ay * bz - az * by,
                      aw * by - ax * bz + ay * bw + az * bx, aw * bz + ax * by - ay * bx + az * bw), -1)  # fmt: skip


@peer(f("N", 3))
def rodrigues(r):
    a = r.norm(dim=-1, keepdim=True).clamp(min=1e-2)
    k = r / a
    zero = torch.zeros_like(k[:, 0])
    m = torch.stack([zero, -k[:, 2], k[:, 1], k[:, 2], zero, -k[:, 0], -k[:, 1], k[:, 0], zero], 1).view(-1, 3, 3)
    s, c = a.sin()[..., None], a.cos()[..., None]
    return torch.eye(3, dtype=r.dtype) + s * m + (1 - c) * (m @ m)


@peer(f("N", 6))
def rotation_6d(x):
    a1, a2 = x[..., :3], x[..., 3:]
    b1 = F.normalize(a1, dim=-1)
    b2 = F.normalize(a2 - (b1 * a2).sum(-1, keepdim=True) * b1, dim=-1)
    return torch.stack((b1, b2, torch.cross(b1, b2, dim=-1)), dim=-2)


@peer(f("N", 3), f("N", 3), f("N", 3))
def triangle_normals(a, b, c):
    n = torch.linalg.cross(b - a, c - a)
    return n / (n.pow(2).sum(-1, keepdim=True).sqrt() + 1e-3)


@peer(f("N", 3), f("N", 3))
def ray_sphere(o, d):
    d = d / d.norm(dim=-1, keepdim=True)
    b = (o * d).sum(-1)
    disc = b * b - ((o * o).sum(-1) - 4.0)
    t = -b - disc.clamp(min=0).sqrt()
    return torch.where((disc > 0) & (t > 0), t, torch.full_like(t, 10.0))


@peer(f("N", 8), u("N", 8, 3))
def volume_rendering(sigma, colour):
    alpha = 1 - torch.exp(-F.relu(sigma) * 0.1)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-3], -1), -1)[:, :-1]
    w = alpha * trans
    return (w[..., None] * colour).sum(-2), w.sum(-1)


@peer(u("N", 3))
def fourier_features(x):
    freq = 2.0 ** torch.arange(4, dtype=x.dtype) * math.pi
    y = (x[..., None] * freq).flatten(-2)
    return torch.cat([x, y.sin(), y.cos()], -1)


@peer(u("N", 3), f(64, 2))
def hash_grid(x, table):
    low = torch.floor(x * 4).long()
    primes = torch.tensor([1, 2654435761, 805459861])
    h = low[:, 0] * primes[0] ^ low[:, 1] * primes[1] ^ low[:, 2] * primes[2]
    return table[h % 64] * (x * 4 - low).prod(-1, keepdim=True)


@peer(u("N", 2), f(5, 5))
def bilinear_lookup(x, grid):
    xy = x * 3.999
    lo = xy.floor().long()
    w = xy - lo
    a, b = lo[:, 0], lo[:, 1]
    top = grid[a, b] * (1 - w[:, 1]) + grid[a, b + 1] * w[:, 1]
    bottom = grid[a + 1, b] * (1 - w[:, 1]) + grid[a + 1, b + 1] * w[:, 1]
    return top * (1 - w[:, 0]) + bottom * w[:, 0]


@peer(f("N", 8))
def logistic_map(x):
    x = x.sigmoid()
    for _ in range(5):
        x = 3.7 * x * (1 - x)
    return x


@peer(p("N"))
def newton_sqrt(a):
    y = torch.ones_like(a)
    for _ in range(6):
        y = 0.5 * (y + a / y)
    return y


@peer(f("N", 5))
def horner(x):
    c = [0.3, -1.2, 0.7, 0.1, 2.0]
    y = torch.full_like(x, c[0])
    for k in c[1:]:
        y = y * x + k
    return y


@peer(f("N", 4, 4), f("N", 4))
def jacobi(a, b):
    a = a + 6 * torch.eye(4, dtype=a.dtype)
    d = a.diagonal(dim1=-2, dim2=-1)
    x = b / d
    for _ in range(3):
        x = (b - ((a - torch.diag_embed(d)) @ x.unsqueeze(-1)).squeeze(-1)) / d
    return x


@peer(f("N", 3, 3))
def cofactor_inverse(m):
    m = m + 3 * torch.eye(3, dtype=m.dtype)
    r0, r1, r2 = m[:, 0], m[:, 1], m[:, 2]
    c0, c1, c2 = torch.cross(r1, r2, dim=1), torch.cross(r2, r0, dim=1), torch.cross(r0, r1, dim=1)
    det = (r0 * c0).sum(-1)
    return torch.stack([c0, c1, c2], -1) / det[:, None, None]


@peer(f("N", 4, 4), f("N", 4, 2), halves=False)
def solve(a, b):
    return torch.linalg.solve(a + 5 * torch.eye(4), b) * 2 + 1


@peer(f("N", 5), f("N", 5))
def trapezoid(x, y):
    return torch.trapz(y, x) + torch.trapezoid(y * y, dx=0.3)


@peer(p("N", 4), p("N", 4))
def black_scholes(s, k):
    cdf = lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # noqa: E731
    d1 = (torch.log(s / k) + 0.06) / 0.35
    return s * cdf(d1) - k * math.exp(-0.02) * cdf(d1 - 0.35)


@peer(f("N", 7))
def spins(x):
    s = torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    field = s.roll(1, -1) + s.roll(-1, -1)
    return -(s * field).sum(-1) / 2 + x.sum(-1)


@peer(i(2, "N", 8, 8), grad=False, halves=False)
def game_of_life(x):
    n = sum(torch.roll(x, (a, b), (1, 2)) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b)
    return ((n == 3) | ((x == 1) & (n == 2))).to(x.dtype)


@peer(f("N", 6))
def cubic_spline_basis(x):
    t = x.sigmoid()
    b = torch.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3], -1) / 6
    return b @ torch.tensor([0.1, 0.9, -0.3, 0.4], dtype=x.dtype)


@peer(f("N", 5))
def rational_quadratic(x):
    y = x.tanh()
    return (2 * y**2 + 0.5 * y * (1 - y)) / (2 + (0.5 + 1.5 - 4) * y * (1 - y))


@peer(f("N", 8))
def radial_basis(x):
    centres = torch.linspace(-2, 2, 5, dtype=x.dtype)
    d = (x.unsqueeze(-1) - centres) / 0.5
    return torch.exp(-(d**2)) * (0.5 * (torch.cos(math.pi * d.clamp(-1, 1)) + 1))
