"""Rivals on the CPU that take weights as constants: TorchInductor with freezing, zentorch, OpenVINO, ONNX Runtime.

OpenVINO and ONNX Runtime convert the program at the first call, for the sizes of its arguments, and use as many threads
as torch. OpenVINO is given a program in bfloat16 as one in float32, told to compute in bfloat16, and its results are
cast back. ONNX Runtime has no kernels for bfloat16.
"""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Fn = Callable[..., Any]


class _Module(nn.Module):
    """A function as a module, for converters that take nothing else."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def _as_module(fn: Fn) -> nn.Module:
    return fn if isinstance(fn, nn.Module) else _Module(fn)


def _at_first_call(convert: Callable[[nn.Module, tuple[Tensor, ...]], Fn], fn: Fn) -> Fn:
    """A function that is converted for the arguments of its first call."""
    made: list[Fn] = []

    def call(*args: Any) -> Any:
        if not made:
            made.append(convert(_as_module(fn), args))
        return made[0](*args)

    return call


def _like(results: Sequence[Tensor], tree: Any) -> Any:
    """Results in the containers that the program returns."""
    return pytree.tree_unflatten(list(results), tree)


def _openvino(module: nn.Module, args: tuple[Tensor, ...]) -> Fn:
    ov = importlib.import_module("openvino")
    leaves, tree = pytree.tree_flatten(module(*args))
    dtypes = [leaf.dtype for leaf in leaves]
    half = torch.bfloat16 in dtypes
    wide = tuple(map(_wide, args))
    model = ov.convert_model(
        copy.deepcopy(module).float() if half else module, example_input=wide, input=[list(a.shape) for a in args]
    )
    settings = {"INFERENCE_NUM_THREADS": str(torch.get_num_threads()), "PERFORMANCE_HINT": "LATENCY"}
    settings["INFERENCE_PRECISION_HINT"] = "bf16" if half else "f32"
    request = ov.compile_model(model, "CPU", settings).create_infer_request()

    def call(*args: Tensor) -> Any:
        found = request.infer([_wide(a).numpy() for a in args], share_inputs=True)
        return _like([torch.from_numpy(found[i].copy()).to(d) for i, d in enumerate(dtypes)], tree)

    return call


def _wide(t: Tensor) -> Tensor:
    """bfloat16, which NumPy does not know, as float32."""
    return t.float() if t.dtype is torch.bfloat16 else t


def _onnxruntime(module: nn.Module, args: tuple[Tensor, ...]) -> Fn:
    runtime = importlib.import_module("onnxruntime")
    tree = pytree.tree_flatten(module(*args))[1]
    file = io.BytesIO()
    torch.onnx.export(module, args, file, dynamo=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def call(*args: Tensor) -> Any:
        found = session.run(None, {n: a.numpy() for n, a in zip(names, args)})
        return _like(list(map(torch.from_numpy, found)), tree)

    return call


def _inductor(fn: Fn, dynamic: bool | None) -> Fn:
    return torch.compile(fn, backend="inductor", dynamic=dynamic, options={"freezing": True})


def _zentorch(fn: Fn, dynamic: bool | None) -> Fn:
    importlib.import_module("zentorch")
    config: Any = importlib.import_module("torch._inductor.config")
    with config.patch(freezing=True):
        compiled = torch.compile(fn, backend="zentorch", dynamic=dynamic)

    def call(*args: Any) -> Any:
        with config.patch(freezing=True):
            return compiled(*args)

    return call


COMPILE: dict[str, Callable[..., Fn]] = {
    "inductor-freezing": _inductor,
    "zentorch": _zentorch,
    "openvino": lambda fn, dynamic=None: _at_first_call(_openvino, fn),
    "onnxruntime": lambda fn, dynamic=None: _at_first_call(_onnxruntime, fn),
}
NEEDED = {"zentorch": ("zentorch",), "openvino": ("openvino",), "onnxruntime": ("onnxruntime", "onnx")}
