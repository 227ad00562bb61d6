"""An exported program to a file: passes and groups as for `torch.compile`, kernels for classes of sizes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from fuser import compiler, config, interface, plans
from fuser.aot import machine, tensors
from fuser.aot.loading import PROGRAM, SUMS, TENSORS, key_bytes
from fuser.aot.own import name_in_file
from fuser.aot.sizes import Sizes, guards_of
from fuser.canonical import Ref, portable
from fuser.canonical.structure import Flattened, is_tuple_of_leaves
from fuser.cuda import driver
from fuser.errors import AotError, ConfigError, FuserError, GraphError, InputError
from fuser.frontends.bodies import all_of
from fuser.frontends.functional import Compiled, compile_functional
from fuser.frontends.program import Listing
from fuser.kernel_cache import REGISTRY
from fuser.passes.classify import all_nodes, graphs_of
from fuser.passes.decompositions import decomposition_table
from fuser.passes.dispatched import in_fast_forms
from fuser.runtime import archive
from fuser.runtime.loops import LOOPS, Form

Example = tuple[tuple[Any, ...], dict[str, Any]]
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# Passes that insert calls whose kernels a file does not contain.
_NOT_IN_FILES = ("attention_by_parts", "attention_by_blocks", "slices_by_parts", "long_windows_to_products")


def compile_program(
    exported: Any, path: str | os.PathLike[str], examples: Sequence[Example], key: bytes | str | None, options: Any
) -> str:
    """See `fuser.aot.compile`."""
    if not isinstance(exported, torch.export.ExportedProgram):
        raise AotError(f"{type(exported).__name__} is no exported program: expected what torch.export.export returns")
    for device in _devices(exported):
        missing = compiler.why_not(device) if device in tensors.DEVICES else f"files hold no programs of {device}"
        if missing is not None:
            raise AotError(f"kernels cannot be compiled here: {missing}")
    if not isinstance(options, dict):
        raise ConfigError(f"options={options!r}: expected a dict of settings, such as {{'numerics': 'eager'}}")
    _check_examples(examples)
    settings = {name: config.check(name, value) for name, value in options.items()}
    # All kernels are kept, whatever a race on this machine decides; nobody waits for them later.
    with config.override(**{"compile_mode": "wait", "slowest": 0.0, "verify": 0, **settings}), torch.no_grad():
        try:
            program = _Program(exported)
            program.make_kernels(examples)
            members = program.members()
        except GraphError as e:
            raise AotError(f"this program cannot be kept in a file: {e}") from None
    try:
        archive.write(os.fspath(path), members, key_bytes(key))
    except (OSError, archive.ArchiveError) as e:
        raise AotError(f"{os.fspath(path)} cannot be written: {e}") from None
    return os.fspath(path)


def _check_examples(examples: Any) -> None:
    """InputError unless all examples are pairs of positional and keyword arguments."""
    if not isinstance(examples, (list, tuple)):
        raise InputError(f"examples is a {type(examples).__name__}: expected a list of pairs (args, kwargs)")
    for n, example in enumerate(examples):
        pair = example if isinstance(example, (list, tuple)) and len(example) == 2 else (None, None)
        if not isinstance(pair[0], (list, tuple)) or not isinstance(pair[1], dict):
            raise InputError(f"examples[{n}] is no pair (args, kwargs): expected one of a tuple and a dict")


class _Program:
    """One exported program, traced to ATen and with its groups registered."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        guards = guards_of(exported)
        self.exported = _decomposed(exported)
        signature = self.exported.graph_signature
        for node in all_nodes(self.exported.graph_module):
            if isinstance(node.target, torch._ops.HigherOrderOperator) and str(node.target) not in LOOPS:
                raise AotError(f"this program calls {node.target}, an operator on graphs that files do not hold")
        with config.override(disable_passes=",".join(filter(None, (config.disable_passes, *_NOT_IN_FILES)))):
            self.compiled: Compiled = compile_functional(self.exported.graph_module, ("joint_graph", "post_grad"))
        self.parts = [self.compiled, *(b.compiled for b in all_of(self.compiled.bodies))]
        for part in self.parts:
            if part.program is None:
                raise AotError(f"this program cannot be kept in a file: {part.reason}")
        self.placeholders = [n for n in self.exported.graph_module.graph.nodes if n.op == "placeholder"]
        self.specs = list(signature.input_specs)
        self.held = [_held(self.exported, s) for s in self.specs if s.kind in _HELD]
        others = {s.kind for s in self.specs} - {*_HELD, InputKind.USER_INPUT}
        if others:
            raise AotError(f"inputs of the kind {', '.join(sorted(k.name for k in others))} cannot be kept in a file")
        self.sizes = Sizes(self.exported, self.placeholders[len(self.held) :], guards)

    # Kernels.

    def make_kernels(self, examples: Sequence[Example]) -> None:
        """Run the program once for each class of sizes, so that every group has its kernels."""
        flattened = Flattened(self.exported.call_spec.in_spec)
        given = [list(flattened(args, kwargs)) for args, kwargs in examples]
        if self.exported.example_inputs is not None:
            args, kwargs = self.exported.example_inputs
            leaves = list(pytree.tree_leaves((args, kwargs)))
            given = [leaves, *self.sizes.variants(leaves), *given]
        if not given:
            raise AotError("the exported program has no example inputs: pass some as examples=[(args, kwargs)]")
        for n, leaves in enumerate(given):
            try:
                self._run(leaves)
            except (RuntimeError, FuserError, IndexError, ValueError):
                if n == 0:
                    raise  # eager's own error for the example itself; for other sizes it means that none is allowed
        for part in self.parts:
            if any(not interface.kernel_spec(key).store.kernels for key in part.keys):
                self._visit(part)

    def _visit(self, part: Compiled) -> None:
        """Run a graph that no example ran, such as a branch, on zeros of its traced sizes."""
        values = [n.meta.get("val") for n in part.module.graph.find_nodes(op="placeholder")]
        if part.program is None or not all(isinstance(v, torch.Tensor) and _is_fixed(v) for v in values):
            return
        with contextlib.suppress(RuntimeError, FuserError, IndexError, ValueError):
            zeros = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).zero_() for v in values]
            part.program.function(*zeros)

    def _run(self, leaves: list[Any]) -> None:
        assert self.compiled.program is not None
        fixed = [s.kind is InputKind.PARAMETER for s in self.specs if s.kind in _HELD]
        held = [t if stays else t.clone() for stays, (_, t) in zip(fixed, self.held, strict=True)]
        self.compiled.program.function(*held, *(v.clone() if isinstance(v, torch.Tensor) else v for v in leaves))

    # Data.

    def members(self) -> dict[str, Any]:
        """The members of the file."""
        writer = tensors.Writer()
        held = [writer.add(t, name) for name, t in self.held]
        libraries: dict[str, bytes] = {}
        graph, groups = self._graph(libraries)
        data = writer.data()
        spec = self.exported.call_spec
        takes, makes = spec.in_spec, spec.out_spec
        positional, named = takes.children() if hasattr(takes, "children") else takes.children_specs
        program = {
            "machine": machine.describe(),
            "graph": graph,
            "groups": groups,
            "tensors": writer.rows,
            "held": held,
            "state": {name: n for n, (name, _) in enumerate(self.held)},
            "inputs": self.sizes.leaves,
            "ranges": self.sizes.ranges,
            "guards": self.sizes.guards,
            "takes": _containers(takes),
            "makes": _containers(makes),
            "flat": is_tuple_of_leaves(positional) and not named.num_children,
            "capability": driver.capability(0) if any("parts" in k for g in groups for k in g["kernels"]) else None,
            **self._writes(),
        }
        text = json.dumps(program, allow_nan=False, separators=(",", ":")).encode()
        return {PROGRAM: text, TENSORS: data.numpy().data, SUMS: tensors.sums(data).numpy().tobytes(), **libraries}

    def _writes(self) -> dict[str, Any]:
        """The results written into held tensors or inputs, and the number of results before the program's own."""
        targets = {s.target: n for n, s in enumerate(s for s in self.specs if s.kind in _HELD)}
        names = [n.name for n in self.placeholders[len(self.held) :]]
        writes = []
        outputs = self.exported.graph_signature.output_specs
        for n, out in enumerate(outputs):
            if out.kind in (OutputKind.BUFFER_MUTATION, getattr(OutputKind, "PARAMETER_MUTATION", None)):
                writes.append([n, True, targets[out.target]])
            elif out.kind is OutputKind.USER_INPUT_MUTATION:
                writes.append([n, False, names.index(str(out.target))])
            elif out.kind is not OutputKind.USER_OUTPUT:
                raise AotError(f"results of the kind {out.kind.name} cannot be kept in a file")
        skipped = sum(out.kind is not OutputKind.USER_OUTPUT for out in outputs)
        return {"writes": writes, "skipped": skipped}

    def _graph(self, libraries: dict[str, bytes]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The outer program as rows, and the groups that it calls."""
        keys = list(dict.fromkeys(k for part in self.parts for k in part.keys))
        numbers = {key: n for n, key in enumerate(keys)}
        return _rows(self.compiled, numbers).graph(), [_group(key, libraries) for key in keys]


def _is_fixed(value: torch.Tensor) -> bool:
    return all(type(n) is int for n in (*value.shape, *value.stride()))


def _containers(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError:
        raise AotError(
            f"the program takes or returns {spec}, whose containers have no name for other processes: return a tuple, "
            "or register them with a serialized_type_name"
        ) from None


def _decomposed(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in the operators of our own table, with composites decomposed as in AOTAutograd."""
    from torch._export.utils import _collect_all_valid_cia_ops

    composite = set(_collect_all_valid_cia_ops())
    core: Any = torch.export.default_decompositions()
    table = {op: f for op, f in core.items() if op in composite}
    with in_fast_forms():
        found: torch.export.ExportedProgram = exported.run_decompositions({**table, **decomposition_table()})
    return found


def _devices(exported: torch.export.ExportedProgram) -> set[str]:
    found: set[str] = set()
    for node in exported.graph_module.graph.nodes:
        value = node.meta.get("val")
        for v in value if isinstance(value, (tuple, list)) else (value,):
            found.update([v.device.type] if isinstance(v, torch.Tensor) else [])
    return found


def _held(exported: torch.export.ExportedProgram, spec: Any) -> tuple[str, torch.Tensor]:
    """The name and value of a parameter, buffer or constant."""
    found = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
    if not isinstance(found, torch.Tensor):
        raise AotError(f"{spec.target} has no value in the exported program: expected a tensor")
    return str(spec.target), found


class _Numbered:
    """Stands for a group's handle: the group's number, and the numbers bound before its arguments."""

    def __init__(self, number: int, bound: tuple[Any, ...]) -> None:
        self.number, self.bound = number, bound


def _rows(compiled: Compiled, numbers: Mapping[int, int]) -> _Rows:
    """The outer program of a compiled graph; `numbers` maps keys of groups to their numbers in the file."""
    functions = [(f"group{numbers[k]}", _Numbered(numbers[k], REGISTRY.find(k).bound)) for k in compiled.keys]
    rows = _Rows(compiled.module, compiled.plan, functions)
    rows.bodies = {b.name: (_rows(b.compiled, numbers), b.forms) for b in compiled.bodies}
    return rows


def _forms(forms: Sequence[Form] | None) -> Any:
    return forms and [[*map(portable.encode_value, (f.dtype, f.device)), f.sizes] for f in forms]


class _Rows(Listing):
    """The outer program as the rows of canonical/portable.py. `bodies`: those of operators on graphs, by name."""

    bodies: dict[str, tuple[_Rows, Sequence[Form] | None]]

    def graph(self) -> dict[str, Any]:
        rows: list[list[Any]] = []
        place: dict[fx.Node, int] = {}
        for node in self.placeholders:
            place[node] = len(rows)
            rows.append(["input", node.name, 0, []])

        def value(given: Any) -> Any:
            found = fx.node.map_aggregate(given, _not_symbolic)
            return portable.encode_value(_placed(found, place))

        for defined, call in self.in_order():
            if isinstance(call, tuple):
                function, inputs = call
                rows.append(["group", function.number, value((*function.bound, *inputs)), {"dict": []}])
                several = self.several(defined)
                place.update({} if several else {defined[0]: len(rows) - 1})
                for n, node in enumerate(defined if several else ()):
                    place[node] = len(rows)
                    made = {"tuple": [{"ref": len(rows) - 1 - n}, n]}
                    rows.append(["call", "operator:getitem", made, {"dict": []}])
                continue
            node = call
            if node.op == "get_attr" and node.target in self.bodies:
                continue
            place[node] = len(rows)
            if graphs := graphs_of(node):
                numbers = [list(self.bodies).index(str(g.target)) for g in graphs]
                args = tuple(a for a in node.args if a not in graphs)
                rows.append(["loop", str(node.target), value(args), value(dict(node.kwargs)), numbers])
                continue
            if node.op == "get_attr":
                raise GraphError(f"{node.name} reads {node.target!r} of the module, which is no tensor of its state")
            target = self.target_of(node)
            rows.append(["call", name_in_file(target), value(tuple(node.args)), value(dict(node.kwargs))])
        (result,) = self.module.graph.output_node().args
        bodies = [{"graph": body.graph(), "forms": _forms(forms)} for body, forms in self.bodies.values()]
        found = {"rows": rows, "output": value(tuple(result))}  # type: ignore[arg-type]
        return found | {"bodies": bodies} if bodies else found


def _not_symbolic(value: Any) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise GraphError(f"a symbolic number {value} that is no node of the graph")
    return value


def _placed(value: Any, place: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return Ref(place[value])
    if isinstance(value, (tuple, list)):
        items = [_placed(v, place) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {k: _placed(v, place) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_placed(v, place) for v in (value.start, value.stop, value.step)))
    return value


def _group(key: int, libraries: dict[str, bytes]) -> dict[str, Any]:
    """A group with its kernels; their libraries are added to `libraries`."""
    spec = interface.kernel_spec(key)
    r = spec.registered
    kernels = [_kernel(kernel, libraries) for kernel in spec.store.kernels]
    return {"name": spec.hash[:12], "bound": len(r.bound), "graph": portable.encode_graph(r), "kernels": kernels}


def _kernel(kernel: Any, libraries: dict[str, bytes]) -> dict[str, Any]:
    found = {"name": kernel.name, "program": plans.encode_program(kernel.program)}
    if isinstance(kernel.library, (str, os.PathLike)):
        return found | {"library": _member(pathlib.Path(kernel.library).read_bytes(), "so", libraries)}
    if not isinstance(kernel.library, driver.Library):
        raise AotError(f"kernel {kernel.name} is of a backend whose kernels files do not hold")
    parts = [
        {"name": p.name, "cubin": _member(p.cubin, "cubin", libraries), "shared": p.shared, "threads": p.threads,
         "extra": p.extra}
        for p in kernel.library.parts
    ]  # fmt: skip
    return found | {"parts": parts}


def _member(data: bytes, suffix: str, libraries: dict[str, bytes]) -> str:
    name = f"kernels/{archive.digest(data)[:32]}.{suffix}"
    libraries[name] = data
    return name


__all__ = ["compile_program"]
