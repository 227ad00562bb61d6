"""Kernel replay: the sources of a recorded set of kernels, before and after a change.

    python tools/replay.py record CASES tests/backend        what the tests ask kernels for (nothing is compiled)
    python tools/replay.py programs CASES 0 2500             random programs of the fuzzer, by their seeds, in seconds
    python tools/replay.py write CASES BEFORE.json           the C++ and the Triton text of every case
    python tools/replay.py write CASES BEFORE.json cpu:avx2 cpu:scalar       the C++ for these machines' rows
    python tools/replay.py compare BEFORE.json AFTER.json    prints each text that differs; exit status 1 if any does

A recorded test ends with its first kernel; random programs reach more of the generators.
A case is a canonical graph, the layouts of its arguments and the settings that decide code. It needs neither a
compiler nor a GPU. Cases are pickled, so they are read by the version of the package that wrote them, or a near one.
"""

from __future__ import annotations

import difflib
import json
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch

SETTINGS = ("numerics", "max_body_rows", "check_bounds")


def outline(value: Any) -> Any:
    """An argument without its data."""
    if not isinstance(value, torch.Tensor):
        return value
    aligned = type(value) not in (torch.Tensor, torch.nn.Parameter) or value.data_ptr() % 16 == 0
    return (tuple(value.shape), tuple(value.stride()), value.dtype, aligned)


def argument(kept: Any, device: str) -> Any:
    """An argument like the recorded one."""
    if not isinstance(kept, tuple):
        return kept
    size, stride, dtype, aligned = kept
    length = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if 0 not in size else 0
    base = torch.empty(length + 1, dtype=dtype, device=device)
    return base.as_strided(size, stride, 0 if aligned else 1)


def record(path: str, pytest_args: list[str]) -> int:
    """Run tests, each kernel of which is refused once it is written down."""
    os.environ.setdefault("FUSER_STRICT", "0")
    import pytest

    from fuser import pipeline
    from fuser.errors import Unsupported

    found: dict[str, Any] = {}

    def refuse(graph: Any, args: Any, backend: Any) -> Any:
        keep(found, graph, args)
        raise Unsupported("kernels are recorded, and none is made")

    pipeline.generate = refuse
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=no", *pytest_args])
    return save(found, path)


def programs(path: str, first: int, end: int) -> int:
    """The graphs of random programs, every seventh of them with eager's roundings."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from fuser import config
    from tests.fuzz.check import canonicalize, graph_of, make_inputs, program_of

    found: dict[str, Any] = {}
    with torch.no_grad():
        for seed in range(first, end):
            program = program_of(seed, "plans")
            registered = canonicalize(graph_of(program), True)
            if not registered.blocked:
                with config.override(numerics="eager" if seed % 7 == 0 else "fast"):
                    keep(found, registered.graph, (*registered.bound, *make_inputs(program)))
    return save(found, path)


def keep(found: dict[str, Any], graph: Any, args: Sequence[Any]) -> None:
    """Add a case, unless its arguments have no memory to speak of, or its graph holds what no file can."""
    from fuser import config

    try:
        case = (graph, [outline(a) for a in args], {name: getattr(config, name) for name in SETTINGS})
        found.setdefault(graph.text + repr(case[1:]), pickle.dumps(case))
    except (TypeError, AttributeError, pickle.PicklingError, NotImplementedError):
        pass


def save(found: dict[str, Any], path: str) -> int:
    """Write the cases."""
    with open(path, "wb") as f:
        pickle.dump(found, f)
    print(f"{len(found)} cases")
    return 0


def source(case: Any, device: str) -> str:
    """The text of a case's kernel, with the plan of its launch; or why there is none. `device`: "cuda", "cpu:avx2"."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fuser import compiler, config, pipeline

    graph, kept, settings = case
    device, _, settings["isa"] = device.partition(":")
    backend = compiler.find_backend(device)
    try:
        with FakeTensorMode():
            args = [argument(a, device) for a in kept]
        with config.override(**settings):
            made: Any = pipeline.generate(graph, args, backend)  # type: ignore[arg-type]
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return f"{made.text}\n{made.program}"


def write(cases: str, out: str, devices: Sequence[str]) -> int:
    """The sources of all cases."""
    with open(cases, "rb") as f:
        found = pickle.load(f)
    texts = {}
    for n, (name, case) in enumerate(found.items()):
        loaded = pickle.loads(case)
        for device in devices:
            texts[f"{n} on {device}\n{name}"] = source(loaded, device)
    with open(out, "w") as f:
        json.dump(texts, f)
    made = sum("LaunchProgram(" in t for t in texts.values())
    print(f"{len(texts)} texts, {made} of them kernels")
    return 0


def compare(before: str, after: str) -> int:
    """Print what differs."""
    with open(before) as f:
        a = json.load(f)
    with open(after) as f:
        b = json.load(f)
    differing = [name for name in a if a[name] != b.get(name)]
    for name in differing[:10]:
        print(name)
        lines = difflib.unified_diff(a[name].splitlines(), (b.get(name) or "").splitlines(), lineterm="", n=1)
        print("\n".join(list(lines)[:30]))
    print(f"{len(differing)} of {len(a)} texts differ")
    return int(bool(differing))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", path, *rest]:
            sys.exit(record(path, rest))
        case ["programs", path, first, end]:
            sys.exit(programs(path, int(first), int(end)))
        case ["write", cases, out, *devices]:
            sys.exit(write(cases, out, devices or ("cpu", "cuda")))
        case ["compare", before, after]:
            sys.exit(compare(before, after))
        case _:
            sys.exit(__doc__)
