"""Sequences of the native launcher, made by hand: steps, slots, lifetimes, errors, and what may not run natively."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuser.frontends.sequences import CONSTANT, LAUNCH, PRODUCT, PYTHON, VIEW
from fuser.runtime import launcher
from tests.unit import runtime_support as support
from tests.unit.test_runtime_launcher import bare, library, make  # noqa: F401  fixtures

pytestmark = pytest.mark.skipif(not launcher.wait() or not launcher.native().has_sequences(), reason="no launcher")
NO = ()


def slots(*numbers):
    return tuple((n,) for n in numbers)


def step(kind, call, arguments, outs, frees=NO, several=False, special=NO, names=None):
    return kind, call, arguments, names, outs, several, frees, special


def refuse(*args):
    raise AssertionError("it should run natively")


def sequence(inputs, count, steps, results, slow=refuse, boxed=False, unused=NO):
    return launcher.native().Sequence(slow, boxed, inputs, count, tuple(steps), results, unused)


def multiply(w_sizes=(4, 6), special=None):
    """x @ w.t() of w with these sizes: a view that is no tensor until the product asks for one."""
    n, k = w_sizes
    view = step(VIEW, torch.t, slots(1), (2,), NO, False, special or (1, (n, k, k, 1), (k, n, 1, k), 0))
    return [view, step(PRODUCT, torch.mm, slots(0, 2), (3,), (0, 1, 2), False, ("mm", 1.0, 1.0))]


@pytest.fixture
def handle(library):  # noqa: F811
    """mul_add by a kernel, and nothing else."""
    made = launcher.native().Handle(refuse)
    made.add_kernel(support.mul_add(), library)
    return made


def test_a_launch_feeds_a_launch(handle):
    x, y, z = torch.randn(3, 50)
    first = step(LAUNCH, handle, slots(0, 1, 2), (3,), (1,))
    q = sequence(3, 5, [first, step(LAUNCH, handle, slots(3, 3, 2), (4,), (3,))], (*slots(4, 0), (None, 7)))
    assert q.kinds == ("launch", "launch") and q.step_count == 2
    for _ in range(3):
        out, same, number = q(x, y, z)
        assert torch.equal(out, (x * y + z) * (x * y + z) + z) and same is x and number == 7
    assert (q.runs, handle.hits, handle.misses) == (3, 6, 0)


def test_a_product_of_a_view():
    x, w = torch.randn(3, 6), torch.randn(4, 6)
    q = sequence(2, 4, multiply(), slots(3))
    assert torch.equal(q(x, w)[0], x @ w.t())
    assert q.kinds == ("view", "product")


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products(name, dtype):
    batch = (2,) * ("b" in name[:2])
    shapes = [(5,)] * ("add" in name) + [(*batch, 3, 4), (*batch, 4, 5)]
    args = [torch.randn(s).to(dtype) for s in shapes]
    numbers = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    n = len(args)
    names = tuple(numbers) or None
    given = (*slots(*range(n)), *((None, v) for v in numbers.values()))
    special = name, numbers.get("beta", 1.0), numbers.get("alpha", 1.0)
    q = sequence(n, n + 1, [step(PRODUCT, getattr(torch, name), given, (n,), NO, False, special, names)], slots(n))
    want = getattr(torch, name)(*args, **numbers)
    (got,) = q(*args)
    assert torch.equal(got, want) and got.stride() == want.stride() and q.kinds == ("product",)


@pytest.mark.parametrize("sizes", [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((1, 4), (4, 1))])
def test_products_of_few(sizes):
    a, b = (torch.randn(s) for s in sizes)
    q = sequence(2, 3, [step(PRODUCT, torch.mm, slots(0, 1), (2,), NO, False, ("mm", 1.0, 1.0))], slots(2))
    assert torch.equal(q(a, b)[0], a @ b) and q(a, b)[0].stride() == (a @ b).stride()


def test_what_cannot_be_multiplied_is_eagers_error():
    q = sequence(2, 4, multiply(), slots(3))
    x, w = torch.randn(3, 5), torch.randn(4, 6)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            q(x, w)
    assert torch.equal(q(torch.ones(3, 6), w)[0], torch.ones(3, 6) @ w.t())


def test_other_strides_and_sizes_than_the_traced_ones():
    q = sequence(2, 4, multiply(), slots(3))
    x = torch.randn(3, 6)
    for w in (torch.randn(6, 4).t(), torch.randn(9, 6), torch.randn(8, 6)[::2], torch.randn(8, 12)[1::2, 3:9]):
        assert torch.equal(q(x, w)[0], x @ w.t())


def test_a_view_of_a_tensor_with_an_offset():
    x, w = torch.randn(3, 6), torch.randn(9, 6)[3:7]
    q = sequence(2, 4, multiply(), slots(3))
    assert torch.equal(q(x, w)[0], x @ w.t())
    part = multiply(special=(1, (4, 6, 6, 1), (6, 2, 1, 6), 12))  # of the last two rows
    part[0] = (*part[0][:1], lambda w: w[2:].t(), *part[0][2:])
    assert torch.equal(sequence(2, 4, part, slots(3))(x, w)[0], x @ w[2:].t())


def test_a_view_for_python_and_for_a_result():
    x, w = torch.randn(3, 6), torch.randn(4, 6)
    view = multiply()[0]
    q = sequence(2, 4, [view, step(PYTHON, torch.add, slots(2, 2), (3,))], slots(2, 3, 1))
    got, twice, same = q(x, w)
    assert torch.equal(got, w.t()) and torch.equal(twice, 2 * w.t()) and same is w
    assert got.data_ptr() == w.data_ptr() and got.stride() == w.t().stride()


def test_python_takes_lists_names_and_numbers():
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    cat = step(PYTHON, torch.cat, ((False, slots(0, 1)), (None, 1)), (2,), names=("dim",))
    minmax = step(PYTHON, torch.aminmax, slots(2), (3, -1), several=True)
    size = step(PYTHON, torch.Tensor.size, (*slots(2), (None, 1)), (4,))
    index = step(PYTHON, operator.getitem, (*slots(2), (True, ((None, 0), (None, slice(1, 3))))), (5,))
    text = step(CONSTANT, None, ((None, "text"),), (6,))
    q = sequence(2, 7, [cat, minmax, size, index, text], slots(2, 3, 4, 5, 6))
    together = torch.cat([x, y], 1)
    got = q(x, y)
    assert torch.equal(got[0], together) and torch.equal(got[1], together.min())
    assert got[2] == 6 and torch.equal(got[3], together[0, 1:3]) and got[4] == "text"


def test_inputs_of_a_list_end_with_their_last_reader(handle):
    seen = []

    def look(t):
        seen.append((first() is None, second() is None))
        return t

    def add(a, b):
        return a + b

    steps = [
        step(PYTHON, add, slots(0, 1), (3,), (0,)),
        step(PYTHON, look, slots(3), (4,), (3,)),
        step(PYTHON, add, slots(4, 1), (5,), (1, 4)),
        step(PYTHON, look, slots(5), (3,), (5,)),
    ]
    q = sequence(3, 6, steps, slots(3), boxed=True, unused=(2,))
    assert q._boxed_call
    tensors = [torch.randn(4), torch.randn(4), torch.randn(4)]
    first, second, third = map(weakref.ref, tensors)
    want = tensors[0] + tensors[1] + tensors[1]
    (out,) = q(tensors)
    assert tensors == [] and seen == [(True, False), (True, True)] and third() is None
    assert torch.equal(out, want)


def test_errors_leave_nothing_behind(handle):
    def fail(t):
        raise KeyError("no")

    q = sequence(3, 5, [step(LAUNCH, handle, slots(0, 1, 2), (3,)), step(PYTHON, fail, slots(3), (4,))], slots(4))
    tensors = [torch.randn(4) for _ in range(3)]
    for _ in range(3):
        with pytest.raises(KeyError, match="no"):
            q(*tensors)
    references = [weakref.ref(t) for t in tensors]
    tensors.clear()
    assert [r() for r in references] == [None] * 3


def test_a_kernel_that_does_not_take_the_call(library):  # noqa: F811
    calls = []

    def slow(args, status, named=None):
        calls.append(status)
        return args[0] * args[1] + args[2]

    handle = launcher.native().Handle(slow)
    q = sequence(3, 4, [step(LAUNCH, handle, slots(0, 1, 2), (3,))], slots(3))
    x, y, z = torch.randn(3, 8)
    assert torch.equal(q(x, y, z)[0], x * y + z) and calls == [0]
    handle.add_kernel(support.mul_add(), library)
    assert torch.equal(q(x, y, z)[0], x * y + z) and calls == [0]
    x, y, z = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(q(x, y, z)[0], x * y + z) and calls == [0, 0]


class Function(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        return f(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        return f(*args, **(kwargs or {}))


def test_what_may_not_run_natively():
    x, w = torch.randn(3, 6), torch.randn(4, 6)
    q = sequence(2, 4, multiply(), slots(3), slow=lambda *a, **named: "slow")
    for context in (Function, Dispatch, lambda: torch.autocast("cpu"), torch.profiler.profile):
        with context():
            assert q(x, w) == "slow"
    assert q(x, torch.nn.Parameter(w)) == "slow" and q(x) == "slow" and q(x=x, w=w) == "slow"
    assert q(x, w.to_sparse()) == "slow" and q([x, w]) == "slow"
    assert torch.func.vmap(lambda a: torch.ones(3) if q(a, w) == "slow" else a)(torch.randn(2, 3, 6)).shape == (2, 3)
    with torch.no_grad():
        assert torch.equal(q(x, torch.nn.Parameter(w))[0], x @ w.t())
    with torch.inference_mode():
        assert q(x, w)[0].is_inference()


@pytest.mark.parametrize(
    "steps",
    [
        [step(LAUNCH, torch.add, slots(0, 9), (1,))],
        [step(PYTHON, torch.add, slots(0), (5,))],
        [step(PYTHON, torch.add, ((0, 1, 2),), (1,))],
        [step(PYTHON, torch.add, slots(0), (1, 2))],
        [step(9, torch.add, slots(0), (1,))],
        [step(VIEW, torch.t, slots(0), (1,), special=(7, (1, 1), (1, 1), 0))],
        [step(PRODUCT, torch.mm, slots(0), (1,), special=("mm", 1.0, 1.0))],
        [step(PRODUCT, torch.mm, slots(0, 0), (1,), special=("sum", 1.0, 1.0))],
        [step(PYTHON, torch.add, [0], (1,))],
        [(PYTHON, torch.add)],
    ],
)
def test_steps_that_are_none(steps):
    with pytest.raises((TypeError, ValueError)):
        sequence(1, 2, steps, slots(1))


def _in_a_cycle():
    owner = []

    def call(t):
        return t if owner else None

    owner.append(sequence(1, 2, [step(PYTHON, call, slots(0), (1,))], slots(1)))
    owner[0](torch.ones(1))
    return weakref.ref(owner[0])


def test_it_is_collected_with_what_it_calls():
    gone = _in_a_cycle()
    gc.collect()
    assert gone() is None
