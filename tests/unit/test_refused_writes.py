"""Writes that eager refuses for their dtypes: a compiled function raises, too, where functionalisation would cast."""

import itertools
import warnings

import pytest
import torch
from torch import fx

from fuser.frontends.dynamo import fuser_backend, last_compilation
from fuser.frontends.refused_writes import refused_write
from fuser.passes.calls import writers

DTYPES = (torch.bool, torch.int64, torch.float32, torch.complex64)
OPERANDS = (*DTYPES, torch.float16, 2, 1.5, 1j)
NOT_CAST = "can't be cast"
X, I, B, C = torch.randn(3), torch.arange(3), torch.ones(3, dtype=torch.bool), torch.randn(3, dtype=torch.complex64)

PROGRAMS = {
    "complex number": (lambda x: x.add_(1j), X),
    "complex number by an operator": (lambda x: operator_sub(x * 2), X),
    "complex tensor": (lambda x, c: x.mul_(c), X, C),
    "floats into integers": (lambda i, x: i.mul_(x), I, X),
    "floats into integers of its own": (lambda i, x: (i + 1).mul_(x), I, X),
    "number into integers": (lambda i: i.mul_(1.5), I),
    "integers into truth values": (lambda b, i: b.mul_(i), B, I),
    "product added": (lambda i, x: i.addcmul_(x, x), I, X),
    "into a view": (lambda i, x: i[1:].mul_(x[1:]) * 2, I, X),
    "list": (lambda i, x: torch._foreach_mul_([i], [x]), I, X),
    "list by a number": (lambda x: torch._foreach_add_([x], 1j), X),
    "mask of integers": (lambda x, i: (x * 2).masked_fill_(i, 1.0), X, I),
    "given result": (lambda i, x: torch.mul(x, x, out=i), I, X),
}  # fmt: skip


def takes_one(name):
    """Whether a method of tensors writes in place and takes one operand."""
    if not name.endswith("_") or name.startswith("_") or name in ("map_", "apply_"):
        return False
    try:
        getattr(torch.ones(1), name)(torch.ones(1))
    except Exception:
        return False
    return True


def operator_sub(y):
    y -= 1j
    return y


def error_of(name, x, other):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(x.clone(), name)(other)
    except Exception as raised:
        return raised
    return None


def written(name, dtype, operand):
    """Dynamo's graph of one write, with values, and what eager and torch's shape function raise."""
    graph = fx.Graph()
    x, other = torch.ones(1, dtype=dtype), operand
    nodes = [graph.placeholder("x")]
    nodes[0].meta["example_value"] = x
    if isinstance(operand, torch.dtype):
        other = torch.ones(1, dtype=operand)
        nodes.append(graph.placeholder("other"))
        nodes[1].meta["example_value"] = other
    else:
        nodes.append(operand)
    graph.output(graph.call_method(name, tuple(nodes)))
    meta = other.to("meta") if isinstance(other, torch.Tensor) else other
    return graph.nodes, error_of(name, x, other), error_of(name, x.to("meta"), meta)


def test_each_method_that_writes_one_operand_is_refused_where_eager_says_so():
    refused = 0
    every = itertools.product(filter(takes_one, dir(torch.Tensor)), DTYPES, OPERANDS)
    for name, dtype, operand in itertools.islice(every, 0, None, 3):
        nodes, error, known = written(name, dtype, operand)
        reason = refused_write(writers(nodes))
        if error is None:
            assert reason is None, (name, dtype, operand)
        elif NOT_CAST in str(error) and known is None:
            assert reason is not None and str(error) in reason, (name, dtype, operand)
            refused += 1
    assert refused > 5, refused


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_function_raises_as_eager_does(name):
    fn, *data = PROGRAMS[name]
    with pytest.raises(RuntimeError):
        fn(*(x.clone() for x in data))
    given = [x.clone() for x in data]
    with pytest.raises(RuntimeError):
        torch.compile(fn, backend=fuser_backend)(*given)
    assert all(map(torch.equal, given, data))


@pytest.mark.usefixtures("clean")
def test_writes_of_mixed_dtypes_that_eager_takes_are_fused():
    def fn(x, h, i, m):
        x.mul_(h).add_(i)
        x.masked_fill_(m, 2).index_add_(0, i, x * 1)
        return x.copy_(i * 2) + 1

    args = torch.randn(3), torch.randn(3).half(), torch.arange(3), torch.tensor([True, False, True])
    expected = fn(*(a.clone() for a in args))
    torch.testing.assert_close(torch.compile(fn, backend=fuser_backend)(*args), expected)
    assert last_compilation().route != "eager"


WRITES = {
    "kernel": lambda x: x.add_(1) * 2,
    "part": lambda x: (x[1:].mul_(2), x + 1),
    "one operator": lambda x: x.exp_(),
    "assignment": lambda x: x.__setitem__(0, 3.0),
}


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", WRITES)
def test_inference_tensors_are_written_in_inference_mode_alone(name):
    fn = WRITES[name]
    compiled = torch.compile(fn, backend=fuser_backend)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with torch.inference_mode():
            given, want = torch.ones(3), torch.ones(3)
        with mode():
            if mode is torch.inference_mode:
                torch.testing.assert_close(compiled(given), fn(want))
            else:
                for f, x in ((fn, want), (compiled, given)):
                    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                        f(x)
        torch.testing.assert_close(given, want)
