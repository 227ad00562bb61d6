"""TorchScript: scripted and traced functions and modules as FX graphs of ATen calls.

`fuser.register_fusion(to_fx(f))` registers what is fusible as a whole; `compile_script(f)` runs anything, in parts.
"""

from __future__ import annotations

import collections
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fuser.errors import GraphError, InputError
from fuser.frontends.torchscript_python import LISTS, MAY_BE_INTEGERS, MUTATING, PYTHON, STRUCTURAL, spell_abs

Scripted = Any  # torch.jit.ScriptFunction or torch.jit.ScriptModule

_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_SAME = {"prim::unchecked_cast", "prim::unchecked_unwrap_optional"}
_IMPLICIT = {"aten::IntImplicit", "aten::FloatImplicit", "aten::ScalarImplicit"}
# A trace's arithmetic on sizes, which are 0-dim tensors there.
_OF_SIZES: dict[str, Callable[..., Any]] = {
    **PYTHON, "aten::pow": operator.pow, "aten::floor_divide": operator.floordiv,
    **dict.fromkeys(_SAME | _IMPLICIT, lambda n: n),
}  # fmt: skip
# Overloads that Python's operators call. Dynamo keeps a float argument symbolic only in the operator's own form.
_SCALAR: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.add.Scalar: operator.add, torch.ops.aten.sub.Scalar: operator.sub,
    torch.ops.aten.mul.Scalar: operator.mul, torch.ops.aten.div.Scalar: operator.truediv,
    torch.ops.aten.pow.Tensor_Scalar: operator.pow, torch.ops.aten.rsub.Scalar: operator.sub,
}  # fmt: skip
_NUMBERS = {"BoolType": bool, "IntType": int, "FloatType": float}


def to_fx(scripted: Scripted) -> fx.GraphModule:
    """The same computation as an FX graph. A module's parameters and buffers are shared; its other attributes have
    their present values. InputError if `scripted` is not TorchScript; GraphError, with the source line, for loops and
    for branches that depend on inputs: trace the function then, or give the Python function to `torch.compile`.
    """
    if not isinstance(scripted, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        raise InputError(
            f"{type(scripted).__name__} is not TorchScript: expected what torch.jit.script or torch.jit.trace returns"
        )
    translator = Translator()
    inputs = translator.placeholders(scripted)
    translator.graph.output(translator.whole(scripted, inputs))
    if translator.tuples:
        translator.graph.set_codegen(_WithTypes(translator.tuples))
    translator.graph.eliminate_dead_code()
    translator.graph.lint()
    return fx.GraphModule(translator.root, translator.graph)


def compile_script(scripted: Scripted, **options: Any) -> Callable[..., Any]:
    """A callable that runs `scripted` in fused groups, the rest on ATen; `options` are those of `torch.compile`.

    It raises what `to_fx` raises.
    """
    from fuser.frontends.dynamo import fuser_backend  # it imports Dynamo's parts, so only for those who compile

    compiled: Callable[..., Any] = torch.compile(to_fx(scripted), backend=fuser_backend, **options)
    return compiled


class Translator:
    """Walks a TorchScript graph; `values` are FX nodes, or Python objects that are already known."""

    def __init__(self) -> None:
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.values: dict[Any, Any] = {}
        self.numbers: dict[Any, Any] = {}  # 0-dim tensors that represent these numbers
        self.sizes: set[fx.Node] = set()  # nodes that give a torch.Size where TorchScript has a list
        self.owned: dict[int, Any] = {}  # by id: the lists and dicts that the script made, and may change
        self.tuples: set[type] = set()  # the named tuples among results
        self.line = ""  # the last source line seen

    def placeholders(self, scripted: Scripted) -> tuple[fx.Node, ...]:
        """A placeholder for each argument, with its name and its default."""
        of_module = isinstance(scripted, torch.jit.ScriptModule)
        schema = scripted.forward.schema if of_module else scripted.schema
        made = []
        for argument in schema.arguments[1 if of_module else 0 :]:
            default = argument.default_value if argument.has_default_value() else inspect.Signature.empty
            made.append(self.graph.placeholder(argument.name, _NUMBERS.get(argument.type.kind()), default))
        return tuple(made)

    def whole(self, scripted: Scripted, inputs: tuple[Any, ...]) -> Any:
        """The results of a function, or of a module with its hooks."""
        if not isinstance(scripted, torch.jit.ScriptModule):
            return self.inlined(scripted.inlined_graph, inputs)
        hook: Any
        for hook in scripted._forward_pre_hooks.values():
            found = self.inlined(hook.inlined_graph, (scripted, inputs))
            if found is not None:
                inputs = found if isinstance(found, tuple) else (found,)
        result = self.inlined(scripted.inlined_graph, (scripted, *inputs))
        for hook in scripted._forward_hooks.values():
            found = self.inlined(hook.inlined_graph, (scripted, inputs, result))
            result = result if found is None else found
        return result

    def inlined(self, graph: Any, inputs: tuple[Any, ...]) -> Any:
        """The results of a graph for these inputs."""
        spell_abs(graph)
        torch._C._jit_pass_constant_propagation(graph)
        torch._C._jit_pass_dce(graph)
        self.values.update(zip(graph.inputs(), inputs, strict=True))
        self.block(graph)
        results = tuple(self.listed(self.value(v), v.type()) for v in graph.outputs())
        return results[0] if len(results) == 1 else results

    def value(self, v: Any) -> Any:
        """The FX node or Python object of a TorchScript value."""
        if v not in self.values:
            make, number = torch.ops.aten.scalar_tensor.default, self.numbers[v]
            like = {"dtype": v.type().dtype() or torch.int64}  # a trace records the dtype
            known = not isinstance(number, fx.Node)
            self.values[v] = make(number, **like) if known else self.graph.call_function(make, (number,), like)
        return self.values[v]

    def listed(self, value: Any, kind: Any) -> Any:
        """A result, converted to a list if its type is one."""
        if isinstance(value, fx.Node):
            return self.graph.call_function(list, (value,)) if value in self.sizes else value
        if isinstance(value, tuple) and kind.kind() == "TupleType":
            items = [self.listed(v, k) for v, k in zip(value, kind.elements(), strict=True)]
            if hasattr(value, "_fields"):
                self.tuples.add(type(value))
                return type(value)(*items)
            return tuple(items)
        return value

    def block(self, block: Any) -> None:
        """Translate every node of a graph or of a taken branch."""
        for node in block.nodes():
            self.step(node)

    def step(self, node: Any) -> None:
        """Translate one node, whose inputs are known."""
        self.line = line_of(node) or self.line
        if not self.arithmetic(node):
            self.values.update(zip(node.outputs(), self.outputs(node), strict=False))

    def input(self, name: str, value: Any) -> fx.Node:
        """A placeholder for an input of the graph."""
        self.values[value] = self.graph.placeholder(name, _NUMBERS.get(value.type().kind()))
        made: fx.Node = self.values[value]
        return made

    def outputs(self, node: Any) -> Sequence[Any]:
        """The values of a node's outputs; for a node without outputs, one value."""
        kind, n = node.kind(), node.outputsSize()
        if kind == "prim::If":
            return self.branch(node, self.value(node.input()))
        unpacks = kind in ("prim::ListUnpack", "prim::TupleUnpack")
        made = self.value(node.input()) if unpacks else self.node(node)
        if not unpacks and n < 2:
            return [made]
        if isinstance(made, (list, tuple)) and len(made) != n:
            raise self.refusal(f"a list of {len(made)} is unpacked into {n}")
        return [self.call(operator.getitem, (made, i)) for i in range(n)]

    def arithmetic(self, node: Any) -> bool:
        """Whether a node computes only with sizes; its result is then also known as a number."""
        kind, inputs = node.kind(), list(node.inputs())
        out: Any = next(node.outputs(), None)
        if kind == "prim::Constant":
            held = node.output().toIValue()
            if isinstance(held, torch.Tensor) and held.dim() == 0:
                self.numbers[out] = held.item()
            return False
        if kind == "prim::NumToTensor":
            self.numbers[out] = self.values[inputs[0]]
            return True
        tensors = [v for v in inputs if isinstance(v.type(), torch._C.TensorType)]
        if kind not in _OF_SIZES or not tensors or any(v not in self.numbers for v in tensors):
            return False
        args = [self.numbers.get(v, self.values.get(v)) for v in inputs]
        scaled = kind in ("aten::add", "aten::sub") and len(args) == 3  # a + b * alpha
        if scaled and args.pop() != 1:
            return False
        made = self.call(_OF_SIZES[kind], tuple(args))
        (self.numbers if isinstance(out.type(), torch._C.TensorType) else self.values)[out] = made
        return True

    def node(self, node: Any) -> Any:
        """The result of a node other than a branch or an unpacking."""
        kind, args = node.kind(), [self.value(v) for v in node.inputs()]
        match kind:
            case "prim::Constant":
                return self.constant(node.output().toIValue())
            case "prim::GetAttr":
                return self.constant(getattr(args[0], node.s("name")))
            case "prim::ListConstruct":
                return self.own(args)
            case "prim::DictConstruct" if not _has_nodes(args[::2]):
                return self.own(dict(zip(args[::2], args[1::2], strict=True)))
            case "prim::TupleConstruct":
                return self.tuple_of(node.output().type(), args)
            case "prim::Uninitialized":
                return None  # nothing on the taken path reads it
            case "aten::size":
                made = self.graph.call_method("size", tuple(args))
                self.sizes.update([made] if len(args) == 1 else [])
                return made
            case "aten::tensor" | "aten::as_tensor":
                return self.new_tensor(node, args)
            case "prim::dtype" | "prim::device" | "prim::layout":
                return self.call(getattr, (args[0], kind.removeprefix("prim::")))
            case "aten::_unwrap_optional":
                if args[0] is None:
                    raise self.refusal("aten::_unwrap_optional is given None")
                return args[0]
        if kind in _SAME:
            return args[0]
        if kind in _IMPLICIT:
            return self.graph.call_method("item", (args[0],)) if _takes_tensors(node) else args[0]
        if any(v.type().kind() in ("ListType", "DictType") for v in [*node.inputs()][:1]):
            if kind in LISTS:
                return self.container(node, args)
        elif kind in PYTHON and not _takes_tensors(node):
            made = self.call(self.function(node), tuple(args))
            is_float = node.output().type().kind() == "FloatType"
            return self.call(float, (made,)) if is_float and kind in MAY_BE_INTEGERS else made
        if kind.startswith("prim::") or node.schema() == "(no schema)":
            raise self.refusal(f"TorchScript's {kind} cannot be translated: expected operators only")
        if not any(map(_has_tensors, (*node.inputs(), *node.outputs()))):
            raise self.refusal(f"TorchScript's {kind} cannot be translated: it neither takes nor gives tensors")
        return self.operator_call(node, args)

    def function(self, node: Any) -> Callable[..., Any]:
        """The Python function of a node over numbers. An integer's power is an integer only if its type says so."""
        is_whole = node.kind() == "aten::pow" and node.output().type().kind() == "IntType"
        return operator.pow if is_whole else PYTHON[node.kind()]

    def refusal(self, why: str) -> GraphError:
        """The error for a script without a graph, with the cure and the source line."""
        place = f" ({self.line})" if self.line else ""
        return GraphError(f"{why}; trace the function, or give the Python function to torch.compile{place}")

    def own(self, made: Any) -> Any:
        """`made`, a list or dict made by the script, which may therefore change it."""
        self.owned[id(made)] = made
        return made

    def container(self, node: Any, args: list[Any]) -> Any:
        """The result of an operator on a list or dict, which is executed during translation."""
        kind, items = node.kind(), args[0]
        if kind in MUTATING and id(items) not in self.owned:
            raise self.refusal(f"{kind} changes a list or dict that the script did not make itself")
        if kind in ("aten::add", "aten::slice", "aten::len", "aten::__getitem__") and _has_nodes(args):
            return self.of_unknown_list(kind, args)
        places = args[1:] if kind not in ("aten::append", "aten::extend", "aten::add_") else []
        places = places[:1] if kind in ("aten::_set_item", "aten::insert") else places
        open_items = kind not in STRUCTURAL and not isinstance(items, dict) and _has_nodes(items)
        unknown = isinstance(items, fx.Node) or _has_nodes(places) or open_items
        if unknown or (kind in ("aten::extend", "aten::add_") and isinstance(args[1], fx.Node)):
            raise self.refusal(f"{kind} works on a list or an index that is known at run time only")
        try:
            made = LISTS[kind](*args)
        except (LookupError, ValueError, TypeError) as e:
            raise self.refusal(f"{kind} raises {type(e).__name__}: {e}") from None
        return self.own(made) if type(made) in (list, dict) else made

    def of_unknown_list(self, kind: str, args: list[Any]) -> Any:
        """The sum, slice, length or item of lists that may be known only at run time."""
        if kind == "aten::add":
            if not any(isinstance(a, fx.Node) for a in args):
                return self.own(args[0] + args[1])
            are_sizes = all(not isinstance(a, fx.Node) or a in self.sizes for a in args)
            given = [a if are_sizes and isinstance(a, fx.Node) else self.call(tuple, (a,)) for a in args]
            made = self.graph.call_function(operator.add, tuple(given))
            self.sizes.add(made)
            return made
        if kind == "aten::slice":
            if not isinstance(args[0], fx.Node) and not _has_nodes(args[1:]):
                return self.own(args[0][slice(*args[1:])])
            if _has_nodes(args[1:]):
                raise self.refusal("a part of a list whose bounds are known at run time only")
            made = self.graph.call_function(operator.getitem, (args[0], slice(*args[1:])))
            self.sizes.update([made] if args[0] in self.sizes else [])
            return made
        return self.call(LISTS[kind], tuple(args))

    def new_tensor(self, node: Any, args: list[Any]) -> Any:
        """`torch.tensor(data, dtype=, device=)`."""
        if _takes_tensors(node):
            return self.operator_call(node, args)
        names = ("dtype", "device", "requires_grad")
        named = {n: a for n, a in zip(names, args[1:]) if a is not None and a is not False}
        if "dtype" in named:
            named["dtype"] = enumerated("ScalarType", named["dtype"])
        return self.graph.call_function(torch.tensor, (args[0],), named)

    def tuple_of(self, kind: Any, items: list[Any]) -> tuple[Any, ...]:
        """A tuple; a named tuple if its type has a name."""
        if not kind.annotation_str.startswith("__torch__."):
            return tuple(items)
        fields, rest = [], kind.str().removeprefix("NamedTuple(")
        for element in kind.elements():
            name, _, rest = rest.partition(" : ")
            fields.append(name)
            if not rest.startswith(element.str()):
                raise self.refusal(f"the fields of {kind.str()} are not understood")
            rest = rest[len(element.str()) + 2 :]
        made: tuple[Any, ...] = _named_tuple(kind.annotation_str.rpartition(".")[2], tuple(fields))(*items)
        return made

    def constant(self, value: Any) -> Any:
        """A Python object unchanged; a tensor as an attribute of the new module."""
        if isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, list, tuple)) for v in value):
            items = [self.constant(v) for v in value]
            return items if isinstance(value, list) else tuple(items)
        if not isinstance(value, torch.Tensor):
            return value
        for name, held in {**dict(self.root.named_parameters()), **dict(self.root.named_buffers())}.items():
            if held is value:
                return self.graph.get_attr(name)
        name = f"tensor_{len(dict(self.root.named_parameters())) + len(dict(self.root.named_buffers()))}"
        if isinstance(value, torch.nn.Parameter):
            self.root.register_parameter(name, value)
        else:
            self.root.register_buffer(name, value)
        return self.graph.get_attr(name)

    def branch(self, node: Any, condition: Any) -> list[Any]:
        """The results of the branch that a known condition takes."""
        if isinstance(condition, fx.Node):
            raise self.refusal("a branch depends on what is known at run time only")
        taken = list(node.blocks())[0 if condition else 1]
        self.block(taken)
        return [self.value(v) for v in taken.outputs()]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The function's result if all arguments are known, else a call."""
        if not any(isinstance(a, fx.Node) for a in torch.utils._pytree.tree_leaves(args)):
            try:
                return function(*args)
            except (ArithmeticError, ValueError, TypeError, LookupError) as e:
                raise self.refusal(f"the script raises {type(e).__name__}: {e}") from None
        if function is operator.getitem and isinstance(args[0], (list, tuple)) and isinstance(args[1], int):
            return args[0][args[1]]
        if function is len and isinstance(args[0], (list, tuple)):
            return len(args[0])
        return self.graph.call_function(function, args)

    def operator_call(self, node: Any, args: list[Any]) -> fx.Node:
        """A call of an operator, with keyword-only arguments by name, and without defaults."""
        schema = torch._C.parse_schema(node.schema())
        space, name = schema.name.split("::")
        try:
            packet = getattr(getattr(torch.ops, space), name)
            target = getattr(packet, schema.overload_name or "default")
        except AttributeError:
            raise self.refusal(f"torch has no operator {schema.name}.{schema.overload_name}") from None
        positional, named = [], {}
        for argument, value in zip(schema.arguments, args, strict=True):
            value = enumerated(str(argument.real_type), value)
            if not argument.kwarg_only:
                positional.append(value)
            elif not (argument.has_default_value() and _same(value, argument.default_value)):
                named[argument.name] = value
        return self.scalar_call(target, positional) or self.graph.call_function(target, tuple(positional), named)

    def scalar_call(self, target: Any, args: list[Any]) -> fx.Node | None:
        """A call with a number known at run time, as Python's operators make it; None for other calls."""
        function = _SCALAR.get(target)
        if function is None or not isinstance(args[1], fx.Node) or any(a != 1 for a in args[2:]):
            return None
        x, number = args[:2]
        given = (number, x) if target is torch.ops.aten.rsub.Scalar else (x, number)
        return self.graph.call_function(function, given)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, bool, str)) and a == b)


def _has_tensors(value: Any) -> bool:
    return isinstance(value.type(), torch._C.TensorType) or "Tensor" in value.type().str()


def _takes_tensors(node: Any) -> bool:
    return any(isinstance(v.type(), torch._C.TensorType) for v in node.inputs())


def _has_nodes(value: Any) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in torch.utils._pytree.tree_leaves(value))


class _WithTypes(fx.graph.CodeGen):
    """Python code in which types are known by their names: torch 2.11 writes named tuples among results so."""

    def __init__(self, types: set[type]) -> None:
        super().__init__()
        self.types = sorted(types, key=lambda t: t.__name__)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [*super().additional_globals(), *((t.__name__, t) for t in self.types)]


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


@functools.cache
def _dtype(number: int) -> torch.dtype:
    made = torch.ops.aten.empty.memory_format([0], dtype=number)
    return made.dtype  # type: ignore[no-any-return]


def enumerated(kind: str, value: Any) -> Any:
    """The torch object for a dtype, layout or memory format, which TorchScript stores as a number."""
    if type(value) is not int:
        return value
    if "ScalarType" in kind:
        return _dtype(value)
    if "MemoryFormat" in kind:
        return _MEMORY_FORMATS[value]
    if "Layout" in kind:
        return torch.strided if value == 0 else torch.sparse_coo
    return value


def line_of(node: Any) -> str:
    """The first line of the source of a script's node; "" if there is none."""
    where = node.sourceRange().strip().splitlines()
    return where[0].strip() if where else ""
