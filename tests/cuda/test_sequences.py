"""Graphs on a GPU as native sequences (`config.sequences = "all"`): bits, streams, CUDA graphs, devices, memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from fuser import config
from fuser.frontends.dynamo import fuser_backend
from fuser.runtime import launcher

pytestmark = pytest.mark.cuda
SEQUENCES, PYTHON = ({"sequences": which} for which in ("all", "none"))


@pytest.fixture(autouse=True)
def native(programs):
    """The native launcher is ready, and what a test compiles is kept."""
    assert launcher.wait(60), launcher.reason()
    assert launcher.native().has_sequences()


def layers(x, w, b, scale):
    """Kernels, products of each kind, views of products, and results that share memory."""
    y = torch.addmm(b, x, w).relu() * scale
    z = torch.nn.functional.layer_norm(y, y.shape[-1:]).view(4, -1, y.shape[-1])
    pairs = torch.bmm(z, z.transpose(1, 2)).softmax(-1)
    out = torch.baddbmm(z, pairs, z, alpha=0.5) @ w.t()
    return out.sin() + 1, out[0], pairs


def inputs(device="cuda", dtype=torch.float32, gradients=False):
    generator = torch.Generator().manual_seed(0)
    made = [0.3 * torch.randn(n, generator=generator) for n in ((64, 32), (32, 48), (48,))]
    x, w, b = (t.to(device, dtype).requires_grad_(gradients) for t in made)
    return x, w, b, 1.5


def compiled(function=layers, options=SEQUENCES, **kwargs):
    return torch.compile(function, backend=fuser_backend, dynamic=False, options=options, **kwargs)


def ran(programs):
    """The sequences of these programs that ran natively."""
    with config.override(sequences="all"):
        made = [s for p in programs for boxed in (False, True) if (s := p._sequences.get(boxed)) is not None]
    return [s for s in made if s.runs]


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.device == b.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_the_generated_function(programs, dtype):
    args = inputs(dtype=dtype)
    with torch.no_grad():
        wanted = compiled(options=PYTHON)(*args)
        assert not ran(programs)
        torch._dynamo.reset()
        fused = compiled()
        for _ in range(3):
            same(fused(*args), wanted)
    (sequence,) = ran(programs)
    assert sequence.kinds.count("product") >= 3 and "launch" in sequence.kinds and "view" in sequence.kinds


def step(function, args):
    args = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    results = function(*args)
    sum(r.square().sum() for r in results).backward()
    return [r.detach() for r in results] + [a.grad for a in args if isinstance(a, torch.Tensor)]


def test_training(programs):
    fused = compiled()
    for _ in range(3):
        found = step(fused, inputs())
    assert len(ran(programs)) >= 2
    torch._dynamo.reset()
    same(found, step(compiled(options=PYTHON), inputs()))
    torch.testing.assert_close(found, step(layers, inputs()), rtol=1e-3, atol=1e-3)


def test_the_callers_stream(programs):
    args = inputs()
    fused = compiled()
    with torch.no_grad():
        wanted = fused(*args)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for _ in range(3):
            late = torch.zeros_like(args[0])
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # what another stream would not wait for
                late.copy_(args[0])
                found = fused(late, *args[1:])
                copies = [f.clone() for f in found]
            assert not stream.query()  # nothing has waited for the device
            stream.synchronize()
            same(copies, wanted)
    assert ran(programs)


def test_threads_with_streams_of_their_own(programs):
    args, failed = inputs(), []
    fused = compiled()
    with torch.no_grad():
        wanted = fused(*args)
        torch.cuda.synchronize()

    def work():
        try:
            stream = torch.cuda.Stream()
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(50):
                    found = fused(*args)
                stream.synchronize()
                same(found, wanted)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.parametrize("gradients", [False, True])
def test_recorded_as_cuda_graphs(gradients):
    run = step if gradients else lambda function, args: [r.clone() for r in function(*args)]
    fused = torch.compile(
        layers, backend=lambda gm, given: fuser_backend(gm, given, options=SEQUENCES, mode="reduce-overhead"),
        dynamic=False,
    )  # fmt: skip
    with torch.set_grad_enabled(gradients):
        for n in range(6):
            args = [a * (1 + n / 8) if isinstance(a, torch.Tensor) else a for a in map(_detached, inputs())]
            torch.testing.assert_close(run(fused, args), run(layers, args), rtol=1e-3, atol=1e-3)


def _detached(a):
    return a.detach() if isinstance(a, torch.Tensor) else a


def test_recorded_by_the_caller(programs):
    args = inputs()
    fused = compiled()
    with torch.no_grad():
        for _ in range(3):
            fused(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = fused(*args)
        args[0].mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        same([f.clone() for f in found], fused(*args))
    assert ran(programs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_device_that_is_not_the_current_one(programs, gradients):
    run = step if gradients else lambda function, args: list(function(*args))
    with torch.set_grad_enabled(gradients):
        wanted = run(compiled(), inputs("cuda:0"))
        for current in (0, 1):
            with torch.cuda.device(current):
                found = run(compiled(), inputs("cuda:1"))
                assert torch.cuda.current_device() == current
                assert all(f.device.index == 1 for f in found)
                same([f.to("cuda:0") for f in found], wanted)
    assert ran(programs)


def test_inputs_of_two_devices_are_errors_as_in_eager():
    x, w, b, scale = inputs()
    with torch.no_grad():
        fused = compiled()
        fused(x, w, b, scale)
        with pytest.raises(Exception, match="device"):
            fused(x, w.cpu(), b, scale)
        fused(x, w, b, scale)


@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_is_kept(gradients):
    fused, args = compiled(), inputs()
    run = step if gradients else lambda function, args: function(*args)
    with torch.set_grad_enabled(gradients):
        sizes = []
        for _ in range(6):
            run(fused, args)
            gc.collect()
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] == sizes[2], sizes
