"""A process that runs Triton's compiler, one kernel after another: a request and its answer are each a line of JSON.

`pool.py` starts it as a script: it imports neither the package nor torch. It ends when no request comes for a while,
when its memory has grown, or when the process that started it ends in any way.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import linecache
import os
import re
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

IDLE_SECONDS = 60.0
MOST_BYTES = 2 << 30  # of memory, from which a new process takes over


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """The binary of a kernel, or the error. `toolchain.Request` describes a request."""
    try:
        return _answer(request, _triton_compile(request))
    except Exception as e:
        lines = str(e).strip().splitlines()
        return {"error": f"{type(e).__name__}: {lines[-1] if lines else ''}", "log": str(e)}


def _triton_compile(r: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,unused-ignore]
    from triton.compiler import ASTSource, compile  # type: ignore[import-not-found,unused-ignore]

    attrs = {(i,): [["tt.divisibility", n]] for i, n in r["divisors"]}
    names = load_source(r["text"], r["path"], r["capability"])
    source = ASTSource(names[r["name"]], dict(r["types"]), {}, attrs)
    options = {
        "num_warps": r["warps"], "enable_fp_fusion": r["fused_multiply_add"], "debug": r["checked"],
        "sanitize_overflow": False,
    }  # fmt: skip
    if r["stages"]:
        options["num_stages"] = r["stages"]
    if r["registers"]:
        options["maxnreg"] = r["registers"]
    with _pairs_added_apart() as always:
        target = GPUTarget("cuda", r["capability"], 32)
        made = compile(source, target=target, options=options)
        if _PAIR.search(made.asm["ptx"]):  # from Triton's own cache: compiled without the rewriting
            always()
            made = compile(source, target=target, options=options)
    if _PAIR.search(made.asm["ptx"]):
        raise RuntimeError("this Triton cannot be kept from adding pairs of 16-bit integers, which ptxas gets wrong")
    return made


_PAIR = re.compile(r"add\.s16x2\s+(%\w+),\s*(%\w+),\s*(%\w+);")
_APART = (
    "{{ .reg .b16 %fuser<4>; mov.b32 {{%fuser0, %fuser1}}, {1}; mov.b32 {{%fuser2, %fuser3}}, {2}; "
    "add.s16 %fuser0, %fuser0, %fuser2; add.s16 %fuser1, %fuser1, %fuser3; mov.b32 {0}, {{%fuser0, %fuser1}}; }}"
)


def add_pairs_apart(ptx: str) -> str:
    """PTX in which additions of two packed 16-bit integers are two scalar additions.

    ptxas 12.8 and 12.9 lose the constant of `add.s16x2` on sm_90 if only the lower half of the sum is read: they
    encode `VIADD.16x2 R, R, 0x0` for any constant. LLVM emits such pairs for index arithmetic in small ranges.
    """
    return _PAIR.sub(lambda m: _APART.format(*m.groups()), ptx)


@contextlib.contextmanager
def _pairs_added_apart() -> Iterator[Callable[[], None]]:
    """Rewrite Triton's PTX by `add_pairs_apart` in this block; the yielded function bypasses Triton's own cache."""
    from triton import knobs  # type: ignore[import-not-found,unused-ignore]

    runtime, compilation = knobs.runtime, knobs.compilation
    hook, always = getattr(runtime, "add_stages_inspection_hook", None), compilation.always_compile

    def rewrite(*asked: Any) -> Any:
        found = hook(*asked) if hook is not None else None
        if not asked:  # later Tritons ask how the stages change the keys of their cache
            key, digest = found or ("", "")
            return f"{key} pairs apart", f"{digest} pairs apart"
        stages = asked[1]
        make = stages["ptx"]
        stages["ptx"] = lambda source, metadata: add_pairs_apart(make(source, metadata))

    runtime.add_stages_inspection_hook = rewrite
    try:
        yield lambda: setattr(compilation, "always_compile", True)
    finally:
        runtime.add_stages_inspection_hook, compilation.always_compile = hook, always


@functools.lru_cache(maxsize=64)
def load_source(text: str, path: str, capability: int = 0) -> dict[str, Any]:
    """The functions of a source, for devices of `capability`. Triton reads their text through `linecache`."""
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    names: dict[str, Any] = {"__name__": "fuser_kernels"}
    exec(compile(text, path, "exec"), names)
    if "FUSER_CAPABILITY" in names:
        names["FUSER_CAPABILITY"] = names["tl"].constexpr(capability)
    return names


def _answer(r: dict[str, Any], compiled: Any) -> dict[str, Any]:
    metadata = compiled.metadata
    if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
        return {"error": "it needs scratch memory from Triton's own launcher", "log": ""}
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", compiled.asm["ptx"], re.S)
    if entry is None:
        return {"error": "Triton's code has no entry", "log": ""}
    return {
        "name": entry.group(1), "cubin": base64.b64encode(compiled.asm["cubin"]).decode(), "shared": metadata.shared,
        "threads": 32 * metadata.num_warps, "extra": entry.group(2).count(".param") - len(r["types"]),
    }  # fmt: skip


# -- the process -------------------------------------------------------------------------------------------------------
def _watch(parent: int) -> None:
    """End with the parent, together with the processes that the compiler started."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer requests until none comes for a while."""
    sys.path.pop(0)  # this folder, whose files are not top-level modules
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the compiler prints to stderr, not into the answers
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        answers.write(json.dumps(compile_one(json.loads(line))) + "\n")
        answers.flush()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES:
            return


if __name__ == "__main__":
    main()
