"""Gradients of programs that write their inputs behind the reads: the backward must not read what was written."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

import fuser

pytestmark = pytest.mark.usefixtures("clean")

# Of an input with 4 rows of 6 and a factor that needs gradients, too.
READS = {
    "scaled": lambda x, c: x * 3 * c,
    "sigmoid": lambda x, c: (x * 2).sigmoid() * c,
    "tanh": lambda x, c: x.tanh() + c,
    "exp": lambda x, c: (x.float() * 0.1).exp().sum(0) * c.sum(0),
    "relu": lambda x, c: (x - 1).relu() * c,
    "where": lambda x, c: torch.where(x > 0, c, c * 2),
    "mask": lambda x, c: c.masked_fill(x.bool(), 0.5),
    "sum": lambda x, c: x.sum(1, keepdim=True) * c,
    "softmax": lambda x, c: (x.float() + 0.5).softmax(1) * c,
    "views": lambda x, c: x.t().reshape(3, 8).unsqueeze(0).float() * c.reshape(3, 8),
    "slices": lambda x, c: (x[1:, ::2] + 1) * c[1:, ::2],
    "halves": lambda x, c: x.to(torch.bfloat16) * c,
    "product": lambda x, c: (x.float() * 2) @ c.t(),
    "clone": lambda x, c: x.clone() * c,
    "places": lambda x, c: c.gather(1, x.abs().long() % 6),
    "lookup": lambda x, c: F.embedding(x[:, 0].abs().long() % 4, c),
    "extreme": lambda x, c: (x * 2).amax(1, keepdim=True) * c,
    "scan": lambda x, c: x.cumsum(1) * c,
    "norm": lambda x, c: F.layer_norm(x.float() * 2, (6,), c[0]),
    "pool": lambda x, c: F.max_pool1d(x.float() * 2 + c, 2),
}
WRITES = {
    "add": lambda x: x.add_(1),
    "zero": lambda x: x.zero_(),
    "copied": lambda x: x.copy_(x * 2 + 1),
    "row": lambda x: x[0].fill_(3),
    "transposed": lambda x: x.t()[1:4].neg_(),
    "untracked": lambda x: x.detach().mul_(-1),
}


def inputs(of_integers: bool):
    g = torch.Generator().manual_seed(1)
    drawn = torch.randint(-4, 5, (4, 6), generator=g)
    x = drawn if of_integers else (drawn + torch.rand((4, 6), generator=g)).requires_grad_()
    return x, torch.randn(4, 6, generator=g).requires_grad_()


def gradients(program, pairs):
    """The results of a program over pairs, with the gradients and the contents of all inputs afterwards."""
    xs, cs = zip(*pairs)
    own = [x * 1 if x.requires_grad else x.clone() for x in xs]  # a leaf that needs gradients cannot be written
    results = program(own, list(cs))
    sum(r.float().square().sum() for r in results).backward()
    leaves = [t for t in (*xs, *cs) if t.requires_grad]
    return [*results, *(t.detach() for t in own), *(t.grad for t in leaves)]


def eager_allows(read, write, of_integers: bool) -> bool:
    """Whether eager has gradients: it refuses where it saved what was written."""
    try:
        gradients(lambda xs, cs: [(READS[read](xs[0], cs[0]), WRITES[write](xs[0]))[0]], [inputs(of_integers)])
    except RuntimeError as e:
        assert "modified by an inplace operation" in str(e), e
        return False
    return True


@pytest.mark.sampled(7, also=("transposed-integers",))
@pytest.mark.parametrize("of_integers", [True, False], ids=["integers", "floats"])
@pytest.mark.parametrize("write", WRITES)
def test_the_backward_reads_nothing_written(write, of_integers):
    turn = [*WRITES].index(write) // 2 % 2  # half of the reads; the others behind another write
    read = [*READS] if os.environ.get("FUSER_TEST_ALL") else [*READS][turn::2]
    names = [n for n in read if eager_allows(n, write, of_integers)]
    assert len(names) >= 4

    def program(xs, cs):
        results = [READS[n](x, c) for n, x, c in zip(names, xs, cs)]
        for x in xs:
            WRITES[write](x)
        return results

    want = gradients(program, [inputs(of_integers) for _ in names])
    got = gradients(torch.compile(program, backend="fuser"), [inputs(of_integers) for _ in names])
    assert fuser.num_compiled_kernels()
    for w, g in zip(want, got):
        if w is None:
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, w, rtol=1e-2 if w.dtype is torch.bfloat16 else 2e-5, atol=1e-5)
