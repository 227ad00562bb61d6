"""A process that compiles kernels for another one, which meanwhile runs ATen and later finds them in the cache.

Lowering and scheduling a kernel is Python: a thread would compete with the calling threads for the interpreter. A
request has a graph, settings and outlines of arguments; the result is kept in the cache, kernels as plans, with
refusals beside them.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from typing import Any

import torch

from fuser import compiler, config, examples, forks, notices, plans
from fuser.canonical import canonicalize, portable
from fuser.errors import CompileError, NotPrebuilt, Unsupported
from fuser.kernel_cache import KernelSpec
from fuser.kernel_store import reason_of
from fuser.reasons import as_json
from fuser.runtime import background, peer, process, workers

IDLE_SECONDS = 30.0  # without a request, after which the process ends
GLANCE_SECONDS = 0.5  # between looks at whether the parent lives
NICE = 5  # how far the process gives way to others


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a request: {"key": …} of the plan, {"refused": why}, {"failed": why}, or {"defect": why}."""
    settings = {k: v for k, v in request["settings"].items() if any(s.name == k for s in config.SETTINGS)}
    own = tuple((str(k), v) for k, v in request["config"])
    with config.override(**settings), config.override(**dict(own)):
        graph = portable.decode_graph(request["graph"], request["n_bound"])
        registered = canonicalize(graph, request["functional"], request["in_place"])
        spec = compiler.compile_upfront(registered, 0, own)
        args = tuple(map(examples.from_json, request["args"]))
        if spec.graph.text != request["text"]:
            return {"defect": "the graph came out as another one"}
        return _make(spec, args, request["refusals"])


def _make(spec: KernelSpec, args: tuple[Any, ...], refusals_only: bool) -> dict[str, Any]:
    found: dict[str, Any]
    try:
        if not refusals_only:
            compiler.compile_runtime(spec, args)
            backend = compiler.find_backend("cpu")
            machine = backend.machine() if isinstance(backend, compiler.KeepingBackend) else None
            return {"key": plans.key_of(spec, args, machine)}
        found = {"refused": None}
    except NotPrebuilt as e:
        return {"defect": e.reason}
    except Unsupported as e:
        found = {"refused": as_json(e.reason)}
    except CompileError as e:
        found = {"failed": str(e)}
    compiler.find_refused(spec, args, found.get("refused"))
    return found


def main(parent: int) -> None:
    """Answer requests until none comes for a while, or `parent` has ended."""
    os.nice(NICE)
    torch.set_num_threads(1)
    notices.mute(True)
    answers, lock = os.fdopen(os.dup(1), "w"), forks.lock()
    os.dup2(2, 1)  # other output is not an answer
    workers.start(lambda: peer.watch(parent, GLANCE_SECONDS), "fuser-watch")

    def work(request: dict[str, Any]) -> None:
        try:
            said = answer(request)
        except Exception as e:
            said = {"defect": reason_of(e)}
        with lock:
            answers.write(json.dumps({**said, "number": request["number"]}) + "\n")
            answers.flush()

    for line in _lines():
        background.COMPILERS.submit(work, json.loads(line))
    os._exit(0)


def _lines() -> Iterator[bytes]:
    """Lines from stdin, until it is closed, or none comes while there is nothing to do."""
    left = b""
    ready = select.poll()
    ready.register(0, select.POLLIN | select.POLLHUP)
    while True:
        if ready.poll(1000 * IDLE_SECONDS):
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, left = (left + data).split(b"\n")
            yield from lines
        elif not background.COMPILERS.busy and not process.has_hung():
            return
