"""The nested form of a graph's arguments and results, whose nodes have flat ones.

Equal forms are equal objects: they are part of what distinguishes two registrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from fuser.canonical.graph import is_constant
from fuser.errors import InputError
from fuser.lazy_dataclasses import dataclass

# For calls that return several tensors: the class of the result, and a node for each tensor.
Apart = dict[torch.fx.Node, tuple[type, list[torch.fx.Node]]]
Form = tuple[Any, ...]  # ("result", number), ("constant", type, value), or (kind, class or keys, forms of the items)


@dataclass(frozen=True)
class Results:
    """Builds a graph's return value from the tuple of its distinct results: nested containers, and constants."""

    form: Form

    def __call__(self, results: Sequence[Any]) -> Any:
        return _filled(self.form, results)


def form_of(value: Any, numbers: dict[torch.fx.Node, int], apart: Apart) -> Form | None:
    """The form of an output's argument, whose nodes are numbered; None if it holds an object that has no form here."""
    if isinstance(value, torch.fx.Node):
        if value in apart:
            cls, nodes = apart[value]
            return "items", cls, tuple(("result", numbers.setdefault(n, len(numbers))) for n in nodes)
        return "result", numbers.setdefault(value, len(numbers))
    if isinstance(value, dict):
        items = [form_of(v, numbers, apart) for v in value.values()]
        return None if None in items else ("dict", tuple(value), tuple(items))
    if isinstance(value, (tuple, list)):
        items = [form_of(v, numbers, apart) for v in value]
        cls = type(value) if hasattr(type(value), "_make") else list if isinstance(value, list) else tuple
        return None if None in items else ("items", cls, tuple(items))
    return ("constant", type(value), value) if is_constant(value) and not isinstance(value, slice) else None


def is_flat(form: Form) -> bool:
    """Whether a form is one result, or a tuple, list or named tuple of results."""
    return form[0] == "result" or (form[0] == "items" and all(item[0] == "result" for item in form[2]))


def _filled(form: Form, results: Sequence[Any]) -> Any:
    kind, what, *rest = form
    if kind == "result":
        return results[what]
    if kind == "constant":
        return rest[0]
    items = [_filled(item, results) for item in rest[0]]
    if kind == "dict":
        return dict(zip(what, items, strict=True))
    return what._make(items) if hasattr(what, "_make") else what(items)


# -- graphs with containers around flat inputs and results: from torch.export, or traced with containers ---------------
def _items(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The forms of a form's items."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


class _Spec:
    """A tree of containers, equal to trees of the same form."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(self.spec == other.spec)

    def __hash__(self) -> int:
        return hash(repr(self.spec))


class Unflattened(_Spec):
    """Builds the containers that the program returns from its graph's results."""

    def __init__(self, spec: pytree.TreeSpec, flat: Callable[[Any], Any] | None) -> None:
        super().__init__(spec)
        self.flat = flat

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.flat == other.flat  # type: ignore[attr-defined]

    __hash__ = _Spec.__hash__

    def __call__(self, results: Any) -> Any:
        flat = results if self.flat is None else self.flat(results)
        return pytree.tree_unflatten(list(flat) if isinstance(flat, (tuple, list)) else [flat], self.spec)


class Flattened(_Spec):
    """Flattens the arguments of an exported program to its graph's inputs."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs in order. InputError if the arguments have another form."""
        names: list[str] = list(_items(self.spec)[1].context)
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, given = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if given != self.spec:
            raise InputError(f"a graph was called with arguments of the form {given}: expected {self.spec}")
        return tuple(leaves)


def exported_forms(graph: torch.fx.Graph) -> tuple[pytree.TreeSpec, pytree.TreeSpec] | None:
    """The forms of the arguments, (positional, by name), and of the results of such a graph; None for other graphs."""
    codegen = graph._codegen
    info = codegen.pytree_info if type(codegen) is _PyTreeCodeGen else None
    if info is None or info.out_spec is None or info.in_spec.type is not tuple:
        return None
    if info.in_spec.num_leaves != sum(n.op == "placeholder" for n in graph.nodes):
        return None
    return (info.in_spec if _has_names(info.in_spec) else _without_names(info.in_spec)), info.out_spec


def _has_names(spec: pytree.TreeSpec) -> bool:
    """Whether a form is (positional arguments, arguments by name), by the test in torch's own generated code."""
    items = _items(spec)
    return len(items) == 2 and items[0].type is tuple and items[1].type is dict


def _without_names(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """The form of the same positional arguments, with no arguments by name."""
    return pytree.tree_structure((pytree.tree_unflatten([0] * spec.num_leaves, spec), {}))


def is_tuple_of_leaves(spec: pytree.TreeSpec) -> bool:
    """Whether this is the form of a tuple without nested containers."""
    return spec.type is tuple and all(item.is_leaf() for item in _items(spec))


def takes_of(spec: pytree.TreeSpec) -> Flattened | None:
    """The function that flattens arguments of this form; None if they are flat."""
    positional, named = _items(spec)
    return None if is_tuple_of_leaves(positional) and not named.num_children else Flattened(spec)


__all__ = [
    "Apart",
    "Flattened",
    "Results",
    "Unflattened",
    "exported_forms",
    "form_of",
    "is_flat",
    "is_tuple_of_leaves",
    "takes_of",
]
