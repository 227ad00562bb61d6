"""Runs the passes of a stage: switched by name, up to a limit, timed, checked, dumped. Errors name the pass.

A pass rewrites a graph module in place. `registry` lists the passes of each stage; this module only runs them.
"""

from __future__ import annotations

import difflib
import functools
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fuser import config, notices
from fuser.errors import ConfigError, PassError
from fuser.lazy_dataclasses import dataclass
from fuser.passes import checking, sources
from fuser.passes.calls import called
from fuser.passes.classify import tensors_of
from fuser.startup import import_at_rest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """A rewrite of a graph module in place; `function` returns the number of changes.

    A user's function may also return a bool, None (perhaps changed), another graph module or a PassResult. `line`
    describes the pass. `built_in` passes are not checked if `config.check_passes` is off; users' passes always are.
    `calls`: names (see `calls.called`), separated by spaces, of which a graph has to call one for the pass to change
    anything; a last `*` matches any ending. `setting`: a setting of `fuser.config` that has to be on. `device`: a type
    of device that the graph must have a tensor on. The pass is skipped otherwise, unless `config.check_passes` checks
    that it changes nothing. `rounds`: some results may be rounded otherwise than in eager; with `config.numerics =
    "eager"` the pass never runs.
    """

    name: str
    function: Callable[[fx.GraphModule], Any]
    line: str = ""
    built_in: bool = True
    calls: str = ""
    setting: str = ""
    device: str = ""
    rounds: bool = False

    @property
    def doc(self) -> str:
        """The pass in one line: `line`, or the first line of the function's docstring."""
        function = self.function.loaded if isinstance(self.function, later) else self.function
        return self.line or (function.__doc__ or "").strip().split("\n")[0]

    def may_change(self, graph: fx.Graph, present: frozenset[str]) -> bool:
        """Whether the pass may change a graph that calls the names in `present`, under the settings in force."""
        if self.setting and not getattr(config, self.setting):
            return False
        calls_one = not self.calls or any(
            name in present or name.endswith("*") and any(p.startswith(name[:-1]) for p in present)
            for name in self.calls.split()
        )
        return calls_one and (not self.device or has_device(graph, self.device))


class later:
    """The function `name` of a module in this folder. The module is imported when a graph first needs the pass."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = f"{__package__}.{module}", name

    @property
    def loaded(self) -> Callable[[fx.GraphModule], Any]:
        """The function itself."""
        import_at_rest(self.module)
        function: Callable[[fx.GraphModule], Any] = getattr(sys.modules[self.module], self.name)
        return function

    def __call__(self, module: fx.GraphModule) -> Any:
        return self.loaded(module)


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass: number of changes, seconds, and the error if it was skipped because of that."""

    name: str
    changed: int
    seconds: float
    stage: str = ""
    error: str = ""


@dataclass(frozen=True)
class Numbered:
    """A pass with its stage, and its number over all stages, from 1."""

    number: int
    stage: str
    item: Pass


@functools.lru_cache(maxsize=16)
def names_of(text: str) -> frozenset[str]:
    """The names in a setting such as "merge_equal, drop_dead"."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def check_names(known: Iterable[str]) -> frozenset[str]:
    """The names in `config.disable_passes`; ConfigError for an unknown name."""
    wanted = names_of(config.disable_passes)
    unknown = wanted.difference(known) if wanted else ()
    if unknown:
        raise ConfigError(
            f"disable_passes names {', '.join(map(repr, sorted(unknown)))}: expected names from {', '.join(known)}"
        )
    return wanted


def is_enabled(p: Numbered, disabled: frozenset[str]) -> bool:
    """Whether a pass runs under the settings in force."""
    limit: int = config.pass_limit
    return p.item.name not in disabled and (limit < 0 or p.number <= limit)


def run_passes(module: fx.GraphModule, passes: Iterable[Numbered], disabled: frozenset[str]) -> tuple[PassRecord, ...]:
    """Run the enabled passes in order. PassError names pass and node, unless `config.on_pass_error` is "skip".

    A pass that needs the value of a data-dependent size is skipped.
    """
    unknown = _has_unknown_sizes(module)
    records: list[PassRecord] = []
    present = called(module.graph)
    with sources.kept(module):
        for p in passes:
            if not is_enabled(p, disabled):
                continue
            if p.item.rounds and config.numerics == "eager":
                records.append(PassRecord(p.item.name, 0, 0.0, p.stage))
                continue
            if not p.item.may_change(module.graph, present):
                records.append(_left_out(module, p, unknown))
                continue
            records.append(_run(module, p, unknown))
            if records[-1].changed or not p.item.built_in:
                present = called(module.graph)
    return tuple(records)


def _left_out(module: fx.GraphModule, p: Numbered, unknown: bool) -> PassRecord:
    """The record of a skipped pass. With `config.check_passes`, PassError if the pass would change the graph."""
    if not config.check_passes:
        return PassRecord(p.item.name, 0, 0.0, p.stage)
    record = _run(module, p, unknown)
    if record.changed:
        wanted = " ".join(filter(None, (p.item.calls, p.item.setting and f"config.{p.item.setting}", p.item.device)))
        raise PassError(f"pass {p.item.name!r} changed a graph without what it is said to need: {wanted}")
    return record


def has_device(graph: fx.Graph, device_type: str) -> bool:
    """Whether a node of a graph has a tensor on a device of this type."""
    return any(t.device.type == device_type for node in graph.nodes for t in tensors_of(node.meta.get("val")))


def _has_unknown_sizes(module: fx.GraphModule) -> bool:
    """Whether the graph was traced with data-dependent sizes."""
    for node in module.graph.nodes:
        for key in ("val", "example_value"):
            mode = getattr(node.meta.get(key), "fake_mode", None)
            if mode is not None:
                return mode.shape_env is not None and mode.shape_env.counter["create_unbacked_symbol"] > 0
    return False


def _run(module: fx.GraphModule, p: Numbered, unknown: bool) -> PassRecord:
    start = time.perf_counter()
    checked = config.check_passes or not p.item.built_in
    before = checking.Snapshot(module, p.stage) if checked else None
    saved = checking.copied(module.graph) if unknown or config.on_pass_error == "skip" else None
    text = str(module.graph) if config.dump_passes else ""
    try:
        changed = _changed(module, p.item.function(module))
        if changed and before is not None:
            before.check(module)
    except Exception as error:
        failure = _failure(p, error)
        undecided = unknown and _is_undecided(error)
        if saved is None or not undecided and config.on_pass_error != "skip":
            raise failure from error
        module.graph = saved
        if not undecided:
            notices.warn(f"{failure}; the graph stays as it was before")
        return PassRecord(p.item.name, 0, time.perf_counter() - start, p.stage, str(failure))
    if text and changed:
        _dump(p, text, str(module.graph))
    return PassRecord(p.item.name, changed, time.perf_counter() - start, p.stage)


def _is_undecided(error: BaseException | None) -> bool:
    """Whether an error came from a question about a data-dependent size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    while error is not None and not isinstance(error, GuardOnDataDependentSymNode):
        error = error.__cause__
    return error is not None


def _changed(module: fx.GraphModule, result: Any) -> int:
    """The number of changes, from what a pass returned; `module` gets the graph of another returned module."""
    if result is None:
        return 1
    if isinstance(result, (bool, int)):
        return int(result)
    if hasattr(result, "graph_module"):
        if not result.modified:
            return 0
        result = result.graph_module
    if not isinstance(result, fx.GraphModule):
        raise TypeError(f"it returned a {type(result).__name__}: expected a number, a bool, None or a GraphModule")
    if result is not module:
        for name, value in (*result.named_parameters(), *result.named_buffers()):
            if "." not in name and not hasattr(module, name):
                setattr(module, name, value)
        module.graph = result.graph
    return 1


def _failure(p: Numbered, error: Exception) -> PassError:
    node = getattr(error, "node", None) or checking.node_at_fault(error)
    where = f" at node {node!r}" if node else ""
    said = error.reason if isinstance(error, checking.BrokenGraph) else f"{type(error).__name__}: {error}"
    return PassError(
        f"pass {p.item.name!r} (number {p.number}, {p.stage}) failed{where}: {said}; "
        f"FUSER_DISABLE_PASSES={p.item.name} runs without it"
    )


def _dump(p: Numbered, before: str, after: str) -> None:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"before {p.item.name}", f"after {p.item.name}", lineterm="", n=1
    )
    text = "\n".join(lines) + "\n"
    if config.dump_passes == "log":
        _log.warning("%s", text)
        return
    folder = pathlib.Path(config.dump_passes)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{p.number:02d}_{p.stage}_{p.item.name}.diff").open("a") as out:
        out.write(text)
