"""Both launchers, native and Python, on kernels written by hand."""

from __future__ import annotations

import copy
import gc
import io
import pathlib
import pickle
import random
import shutil
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from fuser.errors import BackendError
from fuser.ir.sizes import ADD, EQ, FLOORDIV, LE, LT, MAX, MIN, MOD, MUL, NE, PUSH, SLOT, run_program
from fuser.kernel_spec import Bind, Check, InputPattern, Step
from fuser.runtime import launcher, native_build, python_launcher, torch_abi
from fuser.runtime.encode import encode
from tests.unit import runtime_support as support


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return support.compile_library(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """A second copy of the native launcher, as a torch without the looked-up symbols and layouts would have it."""
    assert launcher.wait(60), launcher.reason()
    path = shutil.copy(launcher.native().__file__, tmp_path_factory.mktemp("bare"))
    module = native_build.load(pathlib.Path(path))
    missing = ("empty_strided", "delete_tensor", "data_ptr", "wrap", "impl_requires_grad", "c10_library")
    table = torch_abi.describe() | dict.fromkeys(missing) | {"impl_offset": -1, "keys_offset": -1, "encode": encode}
    module.setup(table)
    return module


@pytest.fixture(params=["native", "bare", "python"])
def new_handle(request):
    """Makes handles of one launcher."""
    if request.param == "python":
        return python_launcher.Handle
    if request.param == "bare":
        return request.getfixturevalue("bare").Handle
    assert launcher.wait(60), launcher.reason()
    return launcher.native().Handle


class Slow:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, int]] = []

    def __call__(self, args, status):
        self.calls.append((args, status))
        return "slow"


@pytest.fixture
def make(new_handle, library):
    def make(*programs):
        handle = new_handle(Slow())
        for p in programs:
            handle.add_kernel(p, library)
        return handle

    return make


def assert_slow(handle, *args) -> None:
    before = len(handle.slow.calls), handle.hits
    assert handle(*args) == "slow"
    assert (len(handle.slow.calls), handle.hits) == (before[0] + 1, before[1])
    seen, status = handle.slow.calls[-1]
    assert status == 0 and len(seen) == len(args) and all(a is b for a, b in zip(seen, args))


# -- binding -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, 1, 2, 16, 1000, 100_000])
def test_one_kernel_serves_every_size(make, n):
    handle = make(support.mul_add())
    x, y, z = torch.randint(-9, 9, (3, n)).float()
    out = handle(x, y, z)
    assert type(out) is torch.Tensor and torch.equal(out, x * y + z)
    assert (handle.hits, handle.misses, handle.kernel_hits, handle.kernel_count) == (1, 0, (1,), 1)


def test_nothing_added_is_slow(make):
    handle = make()
    assert_slow(handle, torch.ones(3))
    assert (handle.hits, handle.misses, handle.kernel_count, handle.kernel_hits) == (0, 1, 0, ())


def test_mismatches_are_slow(make):
    handle = make(support.mul_add())
    x = torch.ones(4)
    assert_slow(handle, x, x, torch.ones(5))  # a size that is checked
    assert_slow(handle, x, x, x.double())
    assert_slow(handle, x, x, torch.ones(4, 1))
    assert_slow(handle, x, x, torch.ones(8)[::2])  # a stride that is checked
    assert_slow(handle, x, x, 1.0)
    assert_slow(handle, x, x, None)
    assert_slow(handle, x, x, "x")
    assert_slow(handle, x, x)
    assert_slow(handle)
    assert_slow(handle, x, x, x, x)
    assert handle.misses == 10


def test_stride_of_a_single_element_is_not_checked(make):
    handle = make(support.mul_add())
    one = torch.ones(8)[:1].as_strided((1,), (7,))
    none = torch.ones(0).as_strided((0,), (5,))
    assert handle(one, one, one).tolist() == [2.0]
    assert handle(none, none, none).shape == (0,)
    assert handle.misses == 0


def test_stride_of_an_empty_tensor_is_not_checked(make):
    pattern = InputPattern("tensor", torch.float32, "cpu", (Bind(0), Bind(1)), (Check((SLOT, 1)), Check((PUSH, 1))))
    step = Step("add_one", (SLOT, 0), (PUSH, 0), (PUSH, 0))
    handle = make(support.program([pattern], 2, [support.output((SLOT, 0), (SLOT, 1))], [step]))
    assert handle(torch.ones(0, 3).as_strided((0, 3), (17, 5))).shape == (0, 3)
    assert_slow(handle, torch.ones(2, 3).t())


def test_strides_are_bound(make):
    handle = make(support.add_one())
    base = torch.arange(24.0).reshape(4, 6)
    for x in (base, base.t(), base[::2, 1::2], base[:, :1], base[1:1], torch.ones(3).expand(5, 3), torch.ones(1, 1)):
        out = handle(x)
        assert torch.equal(out, x + 1) and out.is_contiguous()
    assert handle.misses == 0


def test_zero_dimensions(make, library):
    pattern = InputPattern("tensor", torch.float32, "cpu", (), ())
    step = Step("mul_add", (PUSH, 1), (PUSH, 1), (PUSH, 0))
    handle = make(support.program([pattern] * 3, 0, [support.output()], [step]))
    out = handle(torch.tensor(3.0), torch.tensor(4.0), torch.tensor(5.0))
    assert out.shape == () and out.item() == 17
    assert_slow(handle, torch.ones(1), torch.ones(1), torch.ones(1))


def test_storage_offset(make):
    handle = make(support.mul_add())
    x = torch.arange(10.0)
    assert handle(x[3:6], x[1:4], x[7:]).tolist() == [3 * 1 + 7, 4 * 2 + 8, 5 * 3 + 9]


def test_scalars(make):
    handle = make(support.scalars())
    x = torch.arange(3, dtype=torch.float64)
    assert handle(x, 0.5, 7, True).tolist() == [1007, 1007.5, 1008]
    assert handle(x, 2, -7, False).tolist() == [-7, -5, -3]  # an int is taken for a float
    assert handle(x, float("inf"), 1 << 40, False)[1] == float("inf")
    assert_slow(handle, x, 0.5, 7.0, True)  # not the reverse
    assert_slow(handle, x, 0.5, True, True)  # nor a bool for an int or a float
    assert_slow(handle, x, True, 7, True)
    assert_slow(handle, x, 0.5, 7, 1)
    assert_slow(handle, x, 0.5, 1 << 63, True)  # beyond int64
    assert_slow(handle, x, torch.tensor(0.5), 7, True)
    assert handle(x, 0.5, -(1 << 63), False).shape == (3,)
    assert handle.hits == 4


def test_guards_choose_between_kernels(make):
    handle = make(support.mul_add(guards=(support.at_most(0, 10),)), support.mul_add(guards=((PUSH, 20, SLOT, 0, LE),)))
    for n, expected in ((5, (1, 0)), (50, (1, 1)), (10, (2, 1)), (20, (2, 2))):
        x = torch.ones(n)
        assert handle(x, x, x).sum() == 2 * n
        assert handle.kernel_hits == expected
    x = torch.ones(15)
    assert_slow(handle, x, x, x)
    assert handle.hits == 4


BINARY = [ADD, MUL, FLOORDIV, MOD, MIN, MAX, EQ, NE, LT, LE]


@pytest.mark.parametrize("op", BINARY)
def test_programs_compute_as_run_program_does(make, op):
    """Guards compare each operator's value with Python's, over signs and zero."""
    nothing = Step("nothing", (PUSH, 1), (PUSH, 1), (PUSH, 0))
    code = (SLOT, 0, SLOT, 1, op)
    inputs = [InputPattern("int", slot=i) for i in range(3)]
    out = support.output((PUSH, 1))
    handle = make(support.program(inputs, 3, [out], [nothing], guards=((*code, SLOT, 2, EQ),)))
    values = [-7, -3, -1, 0, 1, 2, 3, 7, 1 << 31]
    for a in values:
        for b in values:
            right = run_program(code, [a, b])
            assert isinstance(handle(a, b, right), torch.Tensor), (a, b, right)
            assert handle(a, b, right + 1) == "slow", (a, b, right)


def test_sizes_and_strides_are_computed(make):
    """A nested program decides an output's layout."""
    n = (SLOT, 0)
    half = (*n, PUSH, 1, ADD, PUSH, 2, FLOORDIV)
    out = support.output(half, (*n, PUSH, 3, MOD, PUSH, 1, ADD), strides=((PUSH, 1), half), dtype=torch.int16)
    handle = make(support.program([InputPattern("int", slot=0)], 1, [out], []))
    result = handle(7)
    assert (result.shape, result.stride(), result.dtype) == ((4, 2), (1, 4), torch.int16)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
    + [torch.uint8, torch.bool, torch.complex64, torch.complex128],
)
def test_dtypes_of_inputs_and_outputs(make, dtype):
    handle = make(support.program([support.vector(Bind(0), dtype)], 1, [support.output((SLOT, 0), dtype=dtype)], []))
    out = handle(torch.zeros(5, dtype=dtype))
    assert out.dtype == dtype and out.shape == (5,)
    other = torch.float32 if dtype != torch.float32 else torch.int32
    assert_slow(handle, torch.zeros(5, dtype=other))


def test_many_arguments(make):
    inputs = [support.vector(Bind(i)) for i in range(200)]
    handle = make(support.program(inputs, 200, [support.output((SLOT, 199))], []))
    assert handle(*[torch.ones(i) for i in range(200)]).shape == (199,)


# -- results -----------------------------------------------------------------------------------------------------------
def test_results_in_a_tuple(make):
    results = (("buffer", 0), ("input", 0), ("buffer", 1), ("buffer", 0))
    buffers = [support.output((SLOT, 0), (SLOT, 1)), support.output((SLOT, 1), dtype=torch.bool)]
    p = support.add_one()
    handle = make(support.program(p.inputs, 4, buffers, p.steps, results, single=False))
    x = torch.zeros(2, 3)
    a, same, b, again = handle(x)
    assert torch.equal(a, x + 1) and same is x and b.dtype == torch.bool and again is a


def test_single_input_result_and_one_tuple(make):
    x = torch.ones(2, 2)
    p = support.add_one()
    assert make(support.program(p.inputs, 4, [], [], (("input", 0),)))(x) is x
    out = make(support.add_one(single=False))(x)
    assert type(out) is tuple and len(out) == 1 and torch.equal(out[0], x + 1)


def test_outputs_are_ordinary_tensors(make):
    handle = make(support.mul_add())
    x = torch.ones(6)
    out = handle(x, x, x)
    assert torch.equal(pickle.loads(pickle.dumps(out)), out)
    assert torch.equal(copy.deepcopy(out), out)
    buffer = io.BytesIO()
    torch.save(out, buffer)
    out.requires_grad_()
    (out * out).sum().backward()
    assert torch.equal(out.grad, torch.full((6,), 4.0))
    fresh = handle(x, x, x)
    assert not fresh.requires_grad and fresh.is_leaf and fresh.data_ptr() % 64 == 0
    fresh.resize_(100_000)  # the storage is torch's own
    assert fresh.untyped_storage().nbytes() == 400_000
    fresh.untyped_storage().resize_(0)


def test_temporaries(make):
    handle = make(support.temporaries())
    for n in (0, 1, 1000, 100_000, 300_000):  # from the thread's arena, then from the pool
        x = torch.randint(-9, 9, (n,)).float()
        assert torch.equal(handle(x), 2 * x * x)


def test_steps_wait_for_each_other(make):
    torch.set_num_threads(3)
    handle = make(support.flipped_squares())
    for n in (0, 1, 1000, 100_000, 500_001):
        x = torch.arange(n) % 97.0
        for _ in range(5):
            assert torch.equal(handle(x), (x * x).flip(0))


def test_status_of_parallel_steps(make):
    torch.set_num_threads(3)
    handle = make(support.gather(steps=4))
    x, index = torch.arange(5.0), torch.arange(200_000) % 5
    assert torch.equal(handle(x, index), x[index])
    for bad_at in (0, 100_000, 199_999):
        bad = index.clone()
        bad[bad_at] = 5
        assert handle(x, bad) == "slow" and handle.slow.calls[-1][1] == 1
    assert torch.equal(handle(x, index), x[index])


def test_status_goes_to_slow(make):
    handle = make(support.gather())
    x = torch.arange(5.0)
    assert handle(x, torch.tensor([4, 0, 2])).tolist() == [4, 0, 2]
    bad = torch.tensor([1, 5])
    assert handle(x, bad) == "slow"
    args, status = handle.slow.calls[-1]
    assert status == 1 and args[1] is bad
    assert (handle.hits, handle.misses) == (1, 1)
    assert handle(x, torch.tensor([3])).tolist() == [3]


def test_error_of_slow_comes_through(new_handle, library):
    def slow(args, status):
        raise KeyError("no such thing")

    handle = new_handle(slow)
    with pytest.raises(KeyError, match="no such thing"):
        handle(torch.ones(1))
    with pytest.raises(TypeError):
        handle(x=torch.ones(1))


# -- tensors and contexts that are not plain ---------------------------------------------------------------------------
class Subclass(torch.Tensor):
    pass


def test_requires_grad_is_slow_where_grad_is_on(make):
    handle = make(support.mul_add())
    x = torch.ones(4)
    for leaf in (torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4))):
        assert_slow(handle, x, leaf, x)
        assert_slow(handle, x, x, leaf * 2)
        with torch.no_grad():
            assert handle(x, leaf, x).tolist() == [2.0] * 4
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    assert handle(frozen, x, x).tolist() == [2.0] * 4


def test_inference_mode(make):
    handle = make(support.mul_add())
    with torch.inference_mode():
        x = torch.ones(4)
        inside = handle(x, x, x)
        assert inside.is_inference()
    outside = handle(x, x, torch.ones(4))
    assert outside.tolist() == [2.0] * 4 and not outside.is_inference() and handle.misses == 0


def unusual_tensors():
    x = torch.ones(4)
    yield "subclass", x.as_subclass(Subclass)
    yield "neg bit", torch._neg_view(x)
    yield "neg bit of imag", torch.ones(4, dtype=torch.complex64).conj().imag
    yield "sparse", x.to_sparse()
    yield "meta", x.to("meta")
    yield "zero tensor", torch._efficientzerotensor(4)
    yield "mkldnn", x.to_mkldnn()
    yield "buffer of a wrapper", torch._to_functional_tensor(x)


@pytest.mark.parametrize("name", [name for name, _ in unusual_tensors()])
def test_unusual_tensors_are_slow(make, name):
    handle = make(support.mul_add())
    x, unusual = torch.ones(4), dict(unusual_tensors())[name]
    assert_slow(handle, x, unusual, x)


def test_conjugate_bit_is_slow(make):
    dtype = torch.complex64
    handle = make(support.program([support.vector(Bind(0), dtype)], 1, [support.output((SLOT, 0))], []))
    x = torch.ones(4, dtype=dtype)
    assert handle(x).shape == (4,)
    assert_slow(handle, x.conj())


def test_modes_are_slow(make):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    handle = make(support.mul_add())
    x = torch.ones(4)
    contexts = (TorchDispatchMode(), TorchFunctionMode(), torch.autocast("cpu", dtype=torch.bfloat16))
    for context in contexts:
        with context:
            assert_slow(handle, x, x, x)
        assert handle(x, x, x).tolist() == [2.0] * 4


def test_default_device_is_no_mode_to_fear(make):
    handle = make(support.mul_add())
    x = torch.ones(4)
    with torch.device("cpu"):
        assert handle(x, x, x).tolist() == [2.0] * 4
    assert handle.misses == 0


def test_transforms_are_slow(make):
    handle = make(support.mul_add())
    x = torch.ones(4)
    for transform in (torch.func.vmap, torch.func.grad):
        seen = []

        def body(t, seen=seen):
            seen.append(handle(t, x, x))
            return t.sum()

        transform(body)(torch.ones(3, 4) if transform is torch.func.vmap else x)
        assert seen == ["slow"]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        assert_slow(handle, dual, x, x)
    assert handle(x, x, x).tolist() == [2.0] * 4


def test_disabled_device(make, request):
    def set_enabled(device_type, on):
        launcher.set_enabled(device_type, on)
        request.getfixturevalue("bare").set_enabled(torch_abi.DEVICE_TYPES[device_type], on)

    handle = make(support.mul_add())
    x = torch.ones(4)
    set_enabled("cpu", False)
    try:
        assert_slow(handle, x, x, x)
        set_enabled("cuda", False)
    finally:
        set_enabled("cpu", True)
        set_enabled("cuda", True)
    assert handle(x, x, x).tolist() == [2.0] * 4
    with pytest.raises(BackendError, match="tpu"):
        set_enabled("tpu", True)


# -- threads -----------------------------------------------------------------------------------------------------------
def run_who(handle, n: int):
    return handle(torch.empty(n)).t().tolist()


def test_set_num_threads_is_followed(make):
    handle = make(support.who(work=1 << 20))
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        threads, _, begins = run_who(handle, 100)
        assert len(set(threads)) == n
        assert sorted(set(begins)) == sorted({0, *begins}) and len(set(begins)) == n
    torch.set_num_threads(4)
    assert len(set(run_who(handle, 3)[0])) == 3  # not more threads than units
    assert len(set(run_who(make(support.who(work=3 * 32768)), 100)[0])) == 3  # nor than the work is worth
    assert set(run_who(make(support.who(work=40_000)), 100)[0]) == {threading.get_native_id()}


def test_set_num_threads_is_followed_in_other_threads(make):
    handle = make(support.who(work=1 << 20))
    torch.set_num_threads(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(len(set(run_who(handle, 100)[0]))))
    thread.start()
    thread.join()
    assert found == [1]


@pytest.mark.parametrize("scratch", [1, 100, 4096, 1 << 20])
def test_scratch_is_private_and_aligned(make, scratch):
    torch.set_num_threads(3)
    threads, addresses, _ = run_who(make(support.who(1 << 20, scratch)), 1000)
    pairs = sorted(set(zip(addresses, threads)))
    assert len(pairs) == 3 == len({a for a, _ in pairs})
    assert all(a % 64 == 0 and a > 0 for a, _ in pairs)
    assert all(b - a >= scratch for (a, _), (b, _) in zip(pairs, pairs[1:]))


def test_calls_and_additions_from_many_threads(make, library):
    handle = make()
    programs = [support.mul_add(guards=((SLOT, 0, PUSH, n, EQ),)) for n in range(1, 9)]
    errors, rounds = [], 300
    start = threading.Barrier(8)

    def work(k: int) -> None:
        start.wait()
        x = torch.full((k,), float(k))
        for i in range(rounds):
            if i == 10 * k:
                handle.add_kernel(programs[k - 1], library)
            out = handle(x, x, x)
            expected = "slow" if i < 10 * k else [k * k + k] * k
            if (out if isinstance(out, str) else out.tolist()) != expected:
                errors.append((k, i, out))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and handle.kernel_count == 8
    assert sorted(handle.kernel_hits) == [rounds - 10 * k for k in range(8, 0, -1)]


def test_large_calls_let_other_threads_run(make):
    """Results are right when eight threads are in long launches at once, each with its own temporaries."""
    handle = make(support.temporaries())
    wrong = []

    def work(k: int) -> None:
        x = torch.full((70_000 * k,), float(k))
        for _ in range(10):
            if not bool((handle(x) == 2 * k * k).all()):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# -- memory ------------------------------------------------------------------------------------------------------------
def resident_kib() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4


def test_calls_leak_nothing(make):
    handle = make(support.mul_add(), support.gather())
    x, bad = torch.ones(64), torch.tensor([99])

    def calls(n: int) -> None:
        for _ in range(n):
            handle(x, x, x)
            handle(x, bad)
            handle(x, x)
            handle.slow.calls.clear()

    calls(500)
    gc.collect()
    before = resident_kib()
    calls(20_000)
    gc.collect()
    assert resident_kib() - before < 1024  # 60,000 calls: 20 bytes lost by each would show


def test_handles_are_collected(make, new_handle, library):
    handle = make(support.mul_add())
    handle.slow.back = handle  # a cycle, as a specification that owns its handle makes
    gone = weakref.ref(handle.slow)
    del handle
    gc.collect()
    assert gone() is None


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_missing_library_and_entry(make, library, tmp_path):
    handle = make()
    with pytest.raises(OSError, match="nowhere"):
        handle.add_kernel(support.mul_add(), str(tmp_path / "nowhere.so"))
    step = Step("no_such_entry", (PUSH, 1), (PUSH, 1), (PUSH, 0))
    with pytest.raises(OSError, match="no_such_entry"):
        handle.add_kernel(support.program([], 0, [support.output()], [step]), library)
    assert handle.kernel_count == 0


@pytest.mark.parametrize(
    "bad",
    [
        support.program([support.vector(Bind(1))], 1, [support.output()], []),
        support.program([], 1, [support.output((SLOT, 0))], []),
        support.program([support.vector(Bind(0))], 1, [support.output((SLOT, 0, ADD))], []),
        support.program([support.vector(Bind(0))], 1, [support.output((SLOT, 0, PUSH, 1))], []),
        support.program([InputPattern("float", slot=0)], 0, [support.output()], []),
        support.program([], 0, [support.output()], [], (("buffer", 1),)),
        support.program([], 0, [support.output(is_output=False)], []),
        support.program([], 0, [support.output()], [], (("buffer", 0), ("buffer", 0))),
        support.program(
            [replace(support.vector(Bind(n)), device_type=d) for n, d in enumerate(("cpu", "cuda"))], 2, [], []
        ),
    ],
)
def test_malformed_programs_are_refused(make, library, bad):
    with pytest.raises(BackendError, match="launch program"):
        make().add_kernel(bad, library)


def test_a_kernel_takes_calls_of_its_magnitudes_alone(new_handle, library):
    handle = new_handle(Slow())
    assert handle.add_kernel(support.mul_add(), library, 1 << 3 | 1 << 5) == 0
    a = {n: torch.arange(float(n)) for n in (0, 3, 4, 7, 8, 15, 16, 31, 32)}
    fits = {4, 7, 16, 31}
    for n, x in a.items():
        if n in fits:
            assert torch.equal(handle(x, x, x), x * x + x)
        else:
            assert_slow(handle, x, x, x)
    handle.widen(0, 1 | 1 << 6)
    assert torch.equal(handle(*[a[32]] * 3), a[32] * a[32] + a[32]) and handle(*[a[0]] * 3).shape == (0,)
    assert_slow(handle, *[a[8]] * 3)
    assert handle.add_kernel(support.mul_add(), library) == 1
    assert torch.equal(handle(*[a[8]] * 3), a[8] * a[8] + a[8])
    with pytest.raises(IndexError):
        handle.widen(2, 1)


@pytest.mark.parametrize("seed", range(20))
def test_equal_calls_are_answered_alike_whatever_comes_between_them(new_handle, library, seed):
    """Kernels whose sizes and magnitudes overlap are added and widened, forms are refused, in any order."""
    draw = random.Random(seed)
    handle = new_handle(Slow())
    native = not isinstance(handle, python_launcher.Handle)
    inputs = [torch.arange(float(n)) for n in range(12)] + [torch.arange(float(n))[1:] for n in range(2, 12)]
    answered = {}
    for _ in range(120):
        match draw.choice(["call"] * 6 + ["add", "widen", "refuse"]):
            case "add":
                lowest = (PUSH, draw.randint(0, 8), SLOT, 0, LE)
                form = support.mul_add(guards=(lowest, support.at_most(0, draw.randint(4, 12))))
                handle.add_kernel(form, library, draw.choice([0, 1 << 2, 1 << 3 | 1 << 4, (1 << 64) - 1]))
            case "widen" if handle.kernel_count:
                handle.widen(draw.randrange(handle.kernel_count), 1 << draw.randint(0, 4))
            case "refuse" if native:
                x, first = draw.choice(inputs), draw.random() < 0.3
                if not first or (x.numel(), x.stride()) not in answered:
                    handle.refuse(answer, f"reason {len(handle.refused)}", (x, x, x), first)
            case _:
                x, before = draw.choice(inputs), handle.kernel_hits
                got = handle(x, x, x)
                by = next((i for i, (m, n) in enumerate(zip(before, handle.kernel_hits)) if m != n), None)
                if by is not None or got != "slow":  # a call that nothing takes may be taken later
                    assert answered.setdefault((x.numel(), x.stride()), by) == by
    assert answered


# -- what is left to ATen ----------------------------------------------------------------------------------------------
@pytest.fixture(params=["native", "bare"])
def refusing(request):
    if request.param == "bare":
        return request.getfixturevalue("bare").Handle(Slow())
    assert launcher.wait(60), launcher.reason()
    return launcher.native().Handle(Slow())


def answer(*args):
    return "answer", args


def test_a_refused_form_goes_to_its_function_and_no_other(refusing):
    x = torch.ones(2, 3)
    assert refusing.refuse(answer, "a reason", (x, 2))
    assert not refusing.refuse(answer, "known already", (torch.zeros(2, 3), 3))
    for args in ((x, 2), (torch.zeros(2, 3), 5), (torch.nn.Parameter(x, False), 2)):
        got, seen = refusing(*args)
        assert got == "answer" and all(a is b for a, b in zip(seen, args))
    tensors = x.double(), x.t(), x[:1], x[None], x.view(3, 2)
    others = [*((t, 2) for t in tensors), (x, 2.0), (x, True), (x,), (x, 2, 2)]
    for args in others:
        assert_slow(refusing, *args)
    assert refusing.refused == (("a reason", 3),) and refusing.misses == 3 + len(others)


def test_a_later_kernel_takes_over_no_form_that_was_refused(refusing, library):
    x, y = torch.ones(5), torch.ones(6)
    assert refusing.refuse(answer, "a reason", (x, x, x)) and refusing.refuse(answer, "for now", (y, y, y))
    refusing.add_kernel(support.mul_add(), library)
    assert refusing(x, x, x)[0] == refusing(y, y, y)[0] == "answer"
    refusing.pardon("for now")
    assert torch.equal(refusing(y, y, y), y * y + y) and refusing(x, x, x)[0] == "answer"


def test_all_calls_can_be_refused_of_the_usual_kinds_of_arguments(refusing):
    x = torch.ones(2)
    assert refusing.refuse(answer, "blocked", 2) and not refusing.refuse(answer, "again", 2)
    for args in ((x, 2), (x[:1], 2.0), (x.double().requires_grad_(), True), (x, x)):
        assert refusing(*args)[0] == "answer"
    for args in ((x,), (x, None), ("x", x), (x, x, x)):
        assert_slow(refusing, *args)
    assert refusing.refused == (("blocked", 4),)


def test_a_function_that_raises_or_refuses_in_turn_is_harmless(refusing):
    x = torch.ones(2)

    def fails(t):
        for n in range(3, 40):
            refusing.refuse(answer, "more", (torch.ones(n),))
        raise ValueError("eager's own error")

    refusing.refuse(fails, "a reason", (x,))
    with pytest.raises(ValueError, match="eager's own error"):
        refusing(x)
    assert refusing(torch.ones(20))[0] == "answer" and len(refusing.refused) == 38
    many = [torch.ones(1, 1, 1, 1, 1)] * 40  # a form too long to be remembered
    assert not refusing.refuse(answer, "long", tuple(many))
    assert_slow(refusing, *many)


def test_a_handle_that_is_not_native_yet_hands_its_refusals_on():
    assert launcher.wait(60), launcher.reason()
    handle, x = launcher.Handle(Slow()), torch.ones(2)
    assert not handle.refuse(answer, "a form", (x,)) and handle(x) == "slow"
    assert handle.refuse(answer, "blocked", 1) and not handle.refuse(answer, "again", 1)
    assert handle(x) == ("answer", (x,)) and handle("x") == handle(x, x) == "slow"
    assert handle.refused == (("blocked", 1),)
    handle.upgrade(launcher.native())
    assert handle(x) == ("answer", (x,)) and dict(handle.refused) == {"blocked": 2}
    assert handle.misses == 5
    handle.pardon("another reason")
    assert handle(x) == ("answer", (x,))
    handle.pardon("blocked")
    assert handle(x) == "slow" and dict(handle.refused) == {"blocked": 3}


@pytest.mark.parametrize("make", [python_launcher.Handle, lambda slow: launcher.native().Handle(slow)])
def test_pardoned_calls_of_all_forms_ask_again(make):
    assert launcher.wait(60), launcher.reason()
    handle, x = make(Slow()), torch.ones(2)
    for _ in range(3):
        assert handle.refuse(answer, "missing", 1) and handle(x) == ("answer", (x,))
        handle.pardon("missing")
        assert handle(x) == "slow"
    assert sum(calls for _, calls in handle.refused) == 3
