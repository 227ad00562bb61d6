"""torch's addresses and layouts for the native launcher, looked up and checked at run time, never assumed.

The launcher is built without torch's headers. Everything here is found by name in the libraries that are already
loaded, and compared on real tensors with torch's Python API before it is used. Whatever is missing or does not agree
is left out, and the launcher calls `plain_tensor`, `plain_context` or `torch.empty_strided` instead: slower, with the
same results.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from fuser.runtime import files, warm, workers

# DLPack's numbers: type codes with bits, and device types.
DTYPE_WORDS: dict[torch.dtype, int] = {
    dtype: code | bits << 8 | 1 << 16
    for dtype, code, bits in (
        (torch.int8, 0, 8), (torch.int16, 0, 16), (torch.int32, 0, 32), (torch.int64, 0, 64),
        (torch.uint8, 1, 8), (torch.uint16, 1, 16), (torch.uint32, 1, 32), (torch.uint64, 1, 64),
        (torch.float16, 2, 16), (torch.float32, 2, 32), (torch.float64, 2, 64), (torch.bfloat16, 4, 16),
        (torch.complex64, 5, 64), (torch.complex128, 5, 128), (torch.bool, 6, 8),
        (torch.float8_e4m3fn, 10, 8), (torch.float8_e5m2, 12, 8),
    )
}  # fmt: skip
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # of ATen; a Sequence calls them through the shim
DEVICE_TYPES = {"cpu": 1, "cuda": 2}

_C: Any = torch._C
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_INSPECTION = "_AnalyzeCustomOpInputOutputMode"
_TENSOR_WORDS = 32  # a TensorImpl is about this many words; its dispatch keys are in the first few


def plain_tensor(t: torch.Tensor) -> bool:
    """Whether `t` is an ordinary strided tensor: no negative or conjugate bit, no subclass, no other layout."""
    try:
        return type(t) in _TENSORS and _keys(t) in plain_keys()
    except workers.NoThread:
        return False


def plain_context() -> bool:
    """Whether no mode, transform, autocast or forward-mode AD is active in this thread."""
    included, excluded = _thread_keys()
    try:
        masks = _context_masks()
    except workers.NoThread:
        return False
    if (included ^ masks["default_included"]) & ~masks["harmless_included"]:
        return False
    if (excluded ^ masks["default_excluded"]) & masks["harmful_excluded"]:
        return False
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return False
    return _function_modes_harmless()


def is_inspected() -> bool:
    """Whether the only active mode is the one that AOTAutograd puts around the first call of a graph.

    It looks for custom operators that return an input without declaring it, and changes no result.
    """
    return _C._len_torch_dispatch_stack() == 1 and type(_C._get_dispatch_stack_at(0)).__name__ == _INSPECTION


def _function_modes_harmless() -> bool:
    """Whether all function modes are those of `torch.set_default_device`, which do not matter if devices are known."""
    n: int = _C._len_torch_function_stack()
    if not n:
        return True
    return all(type(_C._get_function_stack_at(i)) is DeviceContext for i in range(n))


def _keys(t: torch.Tensor) -> int:
    raw: int = _C._dispatch_keys(t).raw_repr()
    return raw


_R = TypeVar("_R")


def in_fresh_thread(fn: Callable[[], _R]) -> _R:
    """`fn()` in a thread without this thread's modes: while Dynamo compiles, every new tensor here is a fake one."""
    found: Future[_R] = Future()

    def run() -> None:
        try:
            found.set_result(fn())
        except BaseException as error:
            found.set_exception(error)

    thread = workers.start(run, "fuser-torch-abi")
    if thread is not None:
        thread.join()
    elif _is_like_fresh():
        run()
    else:
        raise workers.NoThread("no thread can be started to ask torch what ordinary tensors are like")
    return found.result()


def _is_like_fresh() -> bool:
    """Whether no mode or transform is active in this thread, as in a fresh one."""
    stacks = _C._len_torch_dispatch_stack() or _C._len_torch_function_stack() or _C._is_any_autocast_enabled()
    return not stacks and _C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


@functools.cache
def plain_keys() -> tuple[int, ...]:
    """The dispatch keys of ordinary tensors, made inside and outside inference mode."""
    return in_fresh_thread(_plain_keys)


def _plain_keys() -> tuple[int, ...]:
    keys = [_keys(torch.empty(1, device="cpu"))]
    with torch.inference_mode():
        keys.append(_keys(torch.empty(1, device="cpu")))
    return *keys, *map(_on_cuda, keys)


def _on_cuda(keys: int) -> int:
    """The keys of a CUDA tensor that otherwise equals a CPU tensor with `keys`; no CUDA device is used."""

    def raw(key: str) -> int:
        bits: int = _C.DispatchKeySet(getattr(_C.DispatchKey, key)).raw_repr()
        return bits

    for cpu, cuda in (("CPU", "CUDA"), ("AutocastCPU", "AutocastCUDA")):
        own, other = raw(cpu) & ~raw(cuda), raw(cuda) & ~raw(cpu)
        keys = keys & ~own | other if keys & own else keys
    return keys


def _thread_keys() -> tuple[int, int]:
    """The dispatch keys that this thread includes and excludes for every operator."""
    return _C._dispatch_tls_local_include_set().raw_repr(), _C._dispatch_tls_local_exclude_set().raw_repr()


@functools.cache
def _context_masks() -> dict[str, int]:
    """The keys that a fresh thread includes and excludes, and the differences from these that matter.

    A key included beyond the default means a mode or a transform; only that of inference mode is harmless. Exactly the
    autocast keys are excluded by default: one that is not excluded means autocast.
    """
    included, excluded = in_fresh_thread(_thread_keys)
    inplace_or_view = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView).raw_repr()
    return {
        "default_included": included,
        "default_excluded": excluded,
        "harmless_included": inplace_or_view,
        "harmful_excluded": excluded,
    }


# -- libraries and symbols ---------------------------------------------------------------------------------------------
@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """A library of torch that is already loaded, such as "libtorch_cpu.so"; None if it is not."""
    path = os.path.join(os.path.dirname(torch.__file__), "lib", name)
    try:
        return ctypes.CDLL(path, mode=ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
    except (OSError, AttributeError):
        return None


def symbol(library_name: str, *names: str) -> int | None:
    """The address of the first of `names` that the library, or one it depends on, exports; None if there is none."""
    lib = library(library_name)
    for name in names if lib is not None else ():
        try:
            return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None


# name in the launcher's table -> library and symbols to try. The first block is the documented C shim.
_SYMBOLS: dict[str, tuple[str, ...]] = {
    "empty_strided": ("libtorch_cpu.so", "aoti_torch_empty_strided"),
    "delete_tensor": ("libtorch_cpu.so", "aoti_torch_delete_tensor_object"),
    "data_ptr": ("libtorch_cpu.so", "aoti_torch_get_data_ptr"),
    "sizes": ("libtorch_cpu.so", "aoti_torch_get_sizes"),
    "strides": ("libtorch_cpu.so", "aoti_torch_get_strides"),
    "dim": ("libtorch_cpu.so", "aoti_torch_get_dim"),
    "dtype": ("libtorch_cpu.so", "aoti_torch_get_dtype"),
    "device_type": ("libtorch_cpu.so", "aoti_torch_get_device_type"),
    "device_index": ("libtorch_cpu.so", "aoti_torch_get_device_index"),
    "reinterpret": ("libtorch_cpu.so", "aoti_torch__reinterpret_tensor"),
    "storage_size": ("libtorch_cpu.so", "aoti_torch_get_storage_size"),
    "another": ("libtorch_cpu.so", "aoti_torch_new_tensor_handle"),
    "grad_enabled": ("libtorch_cpu.so", "aoti_torch_grad_mode_is_enabled"),
    "fail": ("libc10.so", "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"),
    "wrap": ("libtorch_python.so", "_Z16THPVariable_WrapRKN2at10TensorBaseE"),
    "function_mode": ("libtorch_cpu.so", "_ZN2at4impl27torch_function_mode_enabledEv"),
    **{f"{on}_{op}": (f"libtorch_{on}.so", f"aoti_torch_{on}_{op}_out") for on in ("cpu", "cuda") for op in PRODUCTS},
    "cpu_attention": ("libtorch_cpu.so", "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu"),
    "thread_observers": ("libtorch_cpu.so", "_ZN2at24get_record_function_tls_Ev"),
    "process_observers": ("libtorch_cpu.so", "_ZN2at18hasGlobalCallbacksEv"),
    "record_start": ("libtorch_cpu.so", "aoti_record_function_start"),
    "record_end": ("libtorch_cpu.so", "aoti_record_function_end"),
    "num_threads": ("libtorch_cpu.so", "_ZN2at15get_num_threadsEv", "omp_get_max_threads"),
    "gomp_parallel": ("libtorch_cpu.so", "GOMP_parallel"),
    "gomp_barrier": ("libtorch_cpu.so", "GOMP_barrier"),
    "omp_thread_num": ("libtorch_cpu.so", "omp_get_thread_num"),
    "omp_num_threads": ("libtorch_cpu.so", "omp_get_num_threads"),
    "omp_in_parallel": ("libtorch_cpu.so", "omp_in_parallel"),
}
OBSERVERS = ("thread_observers", "process_observers", "record_start", "record_end")
# The symbols of a group are used only together.
_GROUPS = (
    ("empty_strided", "delete_tensor", "data_ptr", "wrap"),
    ("sizes", "strides", "dim", "dtype", "device_type", "device_index", "reinterpret", "another", "fail"),
    OBSERVERS,
    ("num_threads", "gomp_parallel", "gomp_barrier", "omp_thread_num", "omp_num_threads", "omp_in_parallel"),
)
# Of CUDA builds; the launcher declares it as ATen/cuda/EmptyTensor.h does.
_EMPTY_STRIDED_CUDA = (
    "libtorch_cuda.so",
    "_ZN2at6detail18empty_strided_cudaEN3c108ArrayRefIlEES3_NS1_10ScalarTypeESt8optionalINS1_6DeviceEE",
)
_DISPATCH_TLS = "_ZN3c104impl26raw_local_dispatch_key_setE"


@functools.cache
def scalar_type(dtype: torch.dtype) -> int:
    """torch's own number of `dtype`, as the C shim takes it; -1 if the shim has none."""
    address = symbol("libtorch_cpu.so", "aoti_torch_dtype_" + str(dtype).removeprefix("torch."))
    if address is None:
        return -1
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def _dtype_words() -> tuple[int, ...]:
    """The DLPack words of dtypes, indexed by torch's own numbers; 0 where there is none."""
    words = {scalar_type(dtype): word for dtype, word in DTYPE_WORDS.items()}
    return tuple(words.get(n, 0) for n in range(64))


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _impl(t: torch.Tensor) -> int:
    pointer: int = _C.TensorBase._cdata.__get__(t)
    return pointer


def _samples() -> list[torch.Tensor]:
    with torch.no_grad():
        flat = torch.empty(4, device="cpu")
        tensors = [flat, torch.empty(2, 2, device="cpu").t(), torch._neg_view(flat), torch.empty(2, device="meta")]
        tensors.append(torch.nn.Parameter(torch.empty(3, device="cpu")))
        tensors.append(torch.empty(2, dtype=torch.complex64, device="cpu").conj())
    with torch.inference_mode():
        tensors.append(torch.empty(1, device="cpu"))
    return tensors


def _only_offset(words: int, agrees: Any) -> int:
    offsets = [8 * i for i in range(words) if agrees(8 * i)]
    return offsets[0] if len(offsets) == 1 else -1


def tensor_layout() -> tuple[int, int]:
    """Offsets of the TensorImpl pointer in a tensor object and of the dispatch keys in a TensorImpl; -1 if unclear.

    A few tensors of every kind are read word by word and compared with torch's Python API.
    """
    samples = _samples()
    try:
        words = torch.Tensor.__basicsize__ // 8
        impl = _only_offset(words, lambda at: all(_word(id(t) + at) == _impl(t) for t in samples))
        if impl < 0:
            return -1, -1
        # Words before the keys are read for all samples; the search ends at the first that agrees with all of them.
        for at in range(8, 8 * _TENSOR_WORDS, 8):
            if all(_word(_impl(t) + at) == _keys(t) for t in samples):
                return impl, at
    except (AttributeError, TypeError):
        pass
    return -1, -1


def _storage_count_offset() -> int:
    """The offset of a StorageImpl's reference count, behind its vtable pointer; -1 if the count there disagrees."""
    tensor = torch.empty(4, device="cpu")
    storage = tensor.untyped_storage()
    held = [tensor]
    for _ in range(3):
        count = ctypes.c_uint32.from_address(storage._cdata + 8).value
        if count != _C._storage_Use_Count(storage._cdata):
            return -1
        held.append(held[-1].view(-1))
    return 8


def _impl_requires_grad() -> int | None:
    """The address of `c10::TensorImpl::requires_grad`, if it agrees with `Tensor.requires_grad`; else None."""
    address = symbol("libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv")
    if address is None:
        return None
    ask = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(address)
    with torch.enable_grad():
        leaf = torch.ones(2, device="cpu", requires_grad=True)
        samples = [leaf, leaf * 2, leaf.detach(), leaf[:1], *_samples()]
    return address if all(ask(_impl(t)) == t.requires_grad for t in samples) else None


def _dispatch_tls_agrees() -> bool:
    """Whether torch's thread-local pair of dispatch keys is where and as the launcher expects it."""
    address, masks = symbol("libc10.so", _DISPATCH_TLS), _context_masks()
    if address is None:
        return False

    def agrees() -> bool:
        included, excluded = _thread_keys()
        differences = included ^ masks["default_included"], excluded ^ masks["default_excluded"]
        return (_word(address), _word(address + 8)) == differences

    answers = [agrees()]
    with torch.inference_mode():
        answers.append(agrees())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answers.append(agrees() and bool(_word(address + 8) & masks["harmful_excluded"]))
    return all(answers)


def _observers_are_a_vector(address: int) -> bool:
    """Whether torch's record of a thread's observers begins with two pointers that are equal without observers."""
    record = ctypes.CFUNCTYPE(ctypes.c_void_p)(address)()
    return bool(record) and _word(record) == _word(record + 8)


def describe() -> dict[str, Any]:
    """The launcher's table: see `module_setup` in launcher.cpp. Missing addresses are None."""
    return in_fresh_thread(_describe)


def _describe() -> dict[str, Any]:
    table: dict[str, Any] = {name: symbol(*where) for name, where in _SYMBOLS.items()}
    for group in _GROUPS:
        if any(table[name] is None for name in group):
            table.update(dict.fromkeys(group))
    if table["thread_observers"] is not None and not _observers_are_a_vector(table["thread_observers"]):
        table.update(dict.fromkeys(OBSERVERS))
    table["empty_strided_cuda"] = symbol(*_EMPTY_STRIDED_CUDA) if table["empty_strided"] is not None else None
    impl, keys = tensor_layout()
    table["impl_requires_grad"] = _impl_requires_grad() if keys >= 0 else None
    c10 = library("libc10.so") if _dispatch_tls_agrees() else None
    masks = _context_masks()
    table.update(
        tensor=torch.Tensor, parameter=torch.nn.Parameter, plain_keys=plain_keys(), impl_offset=impl, keys_offset=keys,
        c10_library=c10._handle if c10 is not None else None, harmless_included=masks["harmless_included"],
        harmful_excluded=masks["harmful_excluded"], plain_tensor=plain_tensor, plain_context=plain_context,
        forward_ad=forward_ad.__dict__, level_name="_current_level", py_empty_strided=_empty_strided,
        py_warm=warm.empty_strided, py_scratch=warm.scratch, is_whole=files.is_whole,
        storage_count_offset=_storage_count_offset(), in_inference=torch.is_inference_mode_enabled,
        **warm.outputs.for_launcher(),
        requires_grad=_C.TensorBase.requires_grad, version=_C.TensorBase._version, dtype_words=_dtype_words(),
        dlpack=getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    )  # fmt: skip
    return table


def _empty_strided(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int = -1
) -> torch.Tensor:
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    return torch.empty_strided(sizes, strides, dtype=dtype, device=where)


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """`function`, marked so that after a graph break Dynamo traces neither it nor its callees."""
    frames: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
