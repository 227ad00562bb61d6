"""Calls that write a tensor and read other elements of it: eager's result, or its error; disjoint parts stay fused."""

import random

import pytest
import torch
import torch.nn.functional as F

from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.frontends.overlapping_operands import share_elements

pytestmark = pytest.mark.usefixtures("clean")

# Views of a matrix that is written in the first, and read in the second.
OVERLAPPING = {
    "shifted rows": (lambda x: x[1:], lambda x: x[:-1]),
    "shifted columns": (lambda x: x[:, 1:], lambda x: x[:, :-1]),
    "transposed": (lambda x: x, lambda x: x.t()),
    "row": (lambda x: x, lambda x: x[0]),
    "column": (lambda x: x, lambda x: x[:, :1]),
    "element": (lambda x: x, lambda x: x[1, 1]),
    "flipped blocks": (lambda x: x[:3, :3], lambda x: x[1:, 1:].t()),
    "second columns": (lambda x: x[:, ::2], lambda x: x[:, 1:3]),
}
APART = {
    "itself": (lambda x: x, lambda x: x),
    "rows": (lambda x: x[:2], lambda x: x[2:]),
    "columns": (lambda x: x[:, :2], lambda x: x[:, 2:]),
    "alternate columns": (lambda x: x[:, ::2], lambda x: x[:, 1::2]),
    "alternate rows by a row": (lambda x: x[::2], lambda x: x[1]),
    "blocks": (lambda x: x[:2, :2], lambda x: x[2:, 1:3].t()),
}
WRITES = {
    "method": lambda a, b: a.add_(b),
    "operator": lambda a, b: operator_mul(a, b),
    "assignment": lambda a, b: assigned(a, b),
    "given result": lambda a, b: torch.maximum(a, b, out=a),
    "list": lambda a, b: torch._foreach_add_([a], [b]),
}
# The written tensor itself is an operand, of which other elements are read.
CROSSING = {
    "product": lambda x: torch.mm(x, x, out=x),
    "product added": lambda x: x.addmm_(x, x),
    "rows added": lambda x: x.index_add_(0, torch.tensor([2, 0, 1, 3]), x),
    "rows put": lambda x: x.index_put_((torch.tensor([2, 0, 1, 3]),), x),
}
# Writes into views that have an element more than once.
REPEATED = {
    "grid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0].add_(1),
    "windows": lambda x: x.as_strided((3, 3), (1, 1)).mul_(2),
    "row of windows": lambda x: x.as_strided((3, 3), (1, 1))[1].mul_(2),
    "windows of its own": lambda x: x.copy_((x * 2).as_strided((4, 4), (2, 1), 1).add_(1)),
    "broadcast": lambda x: torch.broadcast_tensors(x[0], x)[0].mul_(2),
    "diagonal": lambda x: x[0].expand(4, 4).diagonal().mul_(2),
}

# Calls on lists: of views of a matrix, of which a later place reads or writes what an earlier one wrote.
LISTS = {
    "twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "with its transpose": lambda x: torch._foreach_mul_([x, x.t()], 2.0),
    "with a row": lambda x: torch._foreach_add_([x, x[1]], [1.0, 2.0]),
    "swapped": lambda x: torch._foreach_add_([x[0], x[1]], [x[1], x[0]]),
    "shifted": lambda x: torch._foreach_copy_([x[1], x[2], x[3]], [x[0], x[1], x[2]]),
    "unary": lambda x: torch._foreach_neg_([x, x[::2]]),
    "factor": lambda x: torch._foreach_mul_([x[0, 0], x[1]], x[0, 0]),
    "third list": lambda x: torch._foreach_addcmul_([x[0], x[1]], [x[2], x[3]], [x[3], x[0]]),
    "maximum": lambda x: torch._foreach_maximum_([x[:2], x[1:3]], 0.0) or torch._foreach_sub_([x[:2], x[1:3]], 0.5),
    "results": lambda x: torch.frexp(x[0] * 2, out=(x[1], torch.empty(0, dtype=torch.int32))),
}


def operator_mul(a, b):
    a *= b


def assigned(a, b):
    a[:] = b


def outcome(fn, x):
    """The tensor after the call, or what the call raises."""
    try:
        fn(x)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return x


def cases(views, spread):
    """Each pair of views with some of the writes, so that all of these occur."""
    return [(name, how) for i, name in enumerate(views) for how in list(WRITES)[i % 5 :: spread]]


def written(views, how, own):
    def fn(x):
        x = x * 2 if own else x
        WRITES[how](views[0](x), views[1](x))
        return x + 1

    return fn


@pytest.mark.sampled(7)
@pytest.mark.parametrize("own", [False, True], ids=["input", "own tensor"])
@pytest.mark.parametrize(("name", "how"), cases(OVERLAPPING, 3))
def test_a_call_that_reads_other_elements_of_what_it_writes_is_eagers(name, how, own):
    fn, x = written(OVERLAPPING[name], how, own), torch.randn(4, 4)
    got, want = (outcome(f, x.clone()) for f in (torch.compile(fn, backend=fuser_backend), fn))
    assert got == want if isinstance(want, str) else torch.equal(got, want)


@pytest.mark.parametrize("name", CROSSING)
def test_an_operand_of_which_other_elements_are_read_is_not_the_written_tensor(name):
    x = torch.randn(4, 4)
    got, want = (outcome(f, x.clone()) for f in (torch.compile(CROSSING[name], backend=fuser_backend), CROSSING[name]))
    assert got == want if isinstance(want, str) else torch.equal(got, want)


@pytest.mark.parametrize("dynamic", [False, True], ids=["sizes", "symbols"])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.sampled(4, also=("twice-sizes", "swapped-symbols"))
def test_lists_with_one_memory_at_several_places_are_eagers(name, dynamic):
    x = torch.randn(4, 4)
    compiled = torch.compile(LISTS[name], backend=fuser_backend, dynamic=dynamic)
    got, want = (outcome(f, x.clone()) for f in (compiled, LISTS[name]))
    assert got == want if isinstance(want, str) else torch.equal(got, want)


def test_lists_of_disjoint_rows_are_compiled():
    def fn(x):
        torch._foreach_add_(list(x[:3]), list(x[1:].flip(0)))
        torch._foreach_mul_([x[0], x[1]], [x[2], x[3]])
        return x + 1

    x = torch.randn(4, 4)
    want = x.clone()
    torch.testing.assert_close(torch.compile(fn, backend=fuser_backend)(x), fn(want))
    torch.testing.assert_close(x, want)
    assert last_compilation().route != "eager"


@pytest.mark.parametrize("name", REPEATED)
def test_a_write_into_a_view_with_repeated_elements_is_eagers(name):
    x = torch.randn(4, 4)
    got, want = (outcome(f, x.clone()) for f in (torch.compile(REPEATED[name], backend=fuser_backend), REPEATED[name]))
    assert got == want if isinstance(want, str) else torch.equal(got, want)


def test_views_without_repeated_elements_are_written_by_kernels():
    def fn(x):
        x.as_strided((2, 2), (8, 2), 1).mul_(2)
        x.t().diagonal().add_(1)
        x[:, None].expand(4, 1, 4)[1:, 0].mul_(3)
        return F.batch_norm(x[0].expand(4, 4) + 1, x[1].clone(), x[2] * x[2], training=True)

    x = torch.randn(4, 4)
    want = x.clone()
    expected = fn(want)
    torch.testing.assert_close(torch.compile(fn, backend=fuser_backend)(x), expected)
    torch.testing.assert_close(x, want)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "how"), cases(APART, 4))
def test_a_call_that_reads_disjoint_elements_is_compiled(name, how):
    fn, x = written(APART[name], how, False), torch.randn(4, 4)
    want = x.clone()
    expected = fn(want)
    compiled = torch.compile(fn, backend=fuser_backend, dynamic=how in ("operator", "list"))
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(x, want)
    assert last_compilation().route != "eager"


def _view(x, draws):
    for _ in range(draws.randint(1, 3)):
        if x.dim():
            d = draws.randrange(x.dim())
            start, stop, step = draws.randrange(x.shape[d]), x.shape[d], draws.randint(1, 3)
            part = x[(slice(None),) * d + (slice(start, draws.randint(start + 1, stop), step),)]
            x = draws.choice((part, part.transpose(d, 0), x.select(d, start), x.unfold(d, min(stop, 2), 1)))
    return x


def test_views_share_elements_where_a_comparison_of_all_elements_says_so():
    draws, found = random.Random(0), [0, 0]
    base = torch.arange(7 * 6 * 5).view(7, 6, 5)
    for _ in range(300):
        a, b = _view(base, draws), _view(base, draws)
        want = bool(torch.isin(a.flatten(), b.flatten()).any())
        assert share_elements(a, b) is want, (a.shape, a.stride(), b.shape, b.stride())
        found[want] += 1
    assert min(found) > 30
