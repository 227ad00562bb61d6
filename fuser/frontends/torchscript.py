"""TorchScript: scripted and traced functions and modules as FX graphs of ATen calls.

`fuser.register_fusion(to_fx(f))` registers what is fusible as a whole; `compile_script(f)` runs anything, in parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuser.errors import GraphError, InputError

Scripted = Any  # torch.jit.ScriptFunction or torch.jit.ScriptModule

_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
# Operators over Python's numbers, booleans and lists. What is known while translating is computed at once.
_PYTHON: dict[str, Callable[..., Any]] = {
    **{f"aten::{n}": getattr(operator, n) for n in ("add", "sub", "mul", "floordiv", "neg", "lt", "le", "gt", "ge")},
    **{f"aten::{n}": getattr(operator, n) for n in ("eq", "ne")},
    "aten::div": operator.truediv, "aten::remainder": operator.mod, "aten::pow": operator.pow,
    "aten::__getitem__": operator.getitem, "prim::TupleIndex": operator.getitem, "aten::len": len,
    "aten::__not__": operator.not_, "aten::__is__": operator.is_, "aten::__isnot__": operator.is_not,
    "aten::__and__": operator.and_, "aten::__or__": operator.or_,
    "aten::Int": int, "aten::Float": float, "aten::Bool": bool, "prim::min": min, "prim::max": max,
}  # fmt: skip
_SAME = {"prim::unchecked_cast", "aten::IntImplicit", "aten::FloatImplicit", "aten::ScalarImplicit"}
# What a trace does with sizes, as tensors without dimensions.
_OF_SIZES: dict[str, Callable[..., Any]] = {
    **_PYTHON, "aten::floor_divide": operator.floordiv, **dict.fromkeys(_SAME, lambda n: n),
}  # fmt: skip


def to_fx(scripted: Scripted) -> fx.GraphModule:
    """The same computation as an FX graph; a module's parameters and buffers are shared, its other attributes are
    taken as they are now. InputError for what is not TorchScript; GraphError, with the source line, for loops and for
    branches that hang on inputs: trace the function then, or give the Python function to `torch.compile`.
    """
    if not isinstance(scripted, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        raise InputError(
            f"{type(scripted).__name__} is not TorchScript: expected what torch.jit.script or torch.jit.trace returns"
        )
    graph: Any = scripted.inlined_graph
    torch._C._jit_pass_constant_propagation(graph)
    torch._C._jit_pass_dce(graph)
    translator = _Translator()
    inputs = list(graph.inputs())
    if isinstance(scripted, torch.jit.ScriptModule):
        translator.values[inputs.pop(0)] = scripted
    for at, value in enumerate(inputs):
        translator.values[value] = translator.graph.placeholder(value.debugName().split(".")[0] or f"input_{at}")
    translator.block(graph)
    results = tuple(translator.value(v) for v in graph.outputs())
    translator.graph.output(results[0] if len(results) == 1 else results)
    translator.graph.eliminate_dead_code()
    translator.graph.lint()
    return fx.GraphModule(translator.root, translator.graph)


def compile_script(scripted: Scripted, **options: Any) -> Callable[..., Any]:
    """A callable that runs `scripted` in fused groups, the rest by ATen; `options` as `torch.compile` takes them.

    Raises as `to_fx` does.
    """
    from fuser.frontends.dynamo import fuser_backend  # imports Dynamo's parts: only for those who compile

    compiled: Callable[..., Any] = torch.compile(to_fx(scripted), backend=fuser_backend, **options)
    return compiled


class _Translator:
    """Walks a TorchScript graph; `values` are FX nodes, or Python objects that are known already."""

    def __init__(self) -> None:
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.values: dict[Any, Any] = {}
        self.numbers: dict[Any, Any] = {}  # tensors without dimensions that stand for these numbers

    def value(self, v: Any) -> Any:
        """What stands for a TorchScript value."""
        if v not in self.values:
            self.values[v] = self.call(torch.ops.aten.scalar_tensor.default, (self.numbers[v],))
        return self.values[v]

    def block(self, block: Any) -> None:
        """Every node of a graph or of the branch that is taken."""
        for node in block.nodes():
            outputs = list(node.outputs())
            if self.arithmetic(node):
                continue
            made = self.node(node)
            if len(outputs) == 1:
                self.values[outputs[0]] = made
            else:
                self.values.update(zip(outputs, made, strict=True))

    def arithmetic(self, node: Any) -> bool:
        """Whether a node computes with sizes, and only with those; then its result is known as a number, too."""
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
        """What a node gives: one value, or a sequence for several."""
        kind, args = node.kind(), [self.value(v) for v in node.inputs()]
        match kind:
            case "prim::Constant":
                return self.constant(node.output().toIValue())
            case "prim::GetAttr":
                return self.constant(getattr(args[0], node.s("name")))
            case "prim::ListConstruct":
                return args
            case "prim::TupleConstruct":
                return tuple(args)
            case "prim::ListUnpack" | "prim::TupleUnpack":
                return [self.call(operator.getitem, (args[0], i)) for i in range(node.outputsSize())]
            case "prim::If":
                return self.branch(node, args[0])
            case "aten::size":
                return self.graph.call_method("size", tuple(args))
            case "prim::dtype" | "prim::device" | "prim::layout":
                return self.call(getattr, (args[0], kind.removeprefix("prim::")))
        if kind in _SAME:
            return args[0]
        if kind in _PYTHON and not _takes_tensors(node):
            return self.call(_PYTHON[kind], tuple(args))
        if kind.startswith("prim::") or node.schema() == "(no schema)":
            raise GraphError(f"TorchScript's {kind} cannot be translated: expected operators only; {_cure(node)}")
        return self.operator_call(node, args)

    def constant(self, value: Any) -> Any:
        """A Python object as it is, a tensor as an attribute of the module that is made."""
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

    def branch(self, node: Any, condition: Any) -> Any:
        """The branch that a known condition takes."""
        if isinstance(condition, fx.Node):
            raise GraphError(f"a branch hangs on what is known at run time only; {_cure(node)}")
        taken = list(node.blocks())[0 if condition else 1]
        self.block(taken)
        results = [self.value(v) for v in taken.outputs()]
        return results[0] if node.outputsSize() == 1 else results

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The function's result if everything is known, else a call."""
        if not any(isinstance(a, fx.Node) for a in torch.utils._pytree.tree_leaves(args)):
            return function(*args)
        if function is operator.getitem and isinstance(args[0], (list, tuple)) and isinstance(args[1], int):
            return args[0][args[1]]
        if function is len and isinstance(args[0], (list, tuple)):
            return len(args[0])
        return self.graph.call_function(function, args)

    def operator_call(self, node: Any, args: list[Any]) -> fx.Node:
        """A call of an operator, its keyword-only arguments by name, the defaults left out."""
        schema = torch._C.parse_schema(node.schema())
        space, name = schema.name.split("::")
        try:
            packet = getattr(getattr(torch.ops, space), name)
            target = getattr(packet, schema.overload_name or "default")
        except AttributeError:
            raise GraphError(f"torch has no operator {schema.name}.{schema.overload_name}; {_cure(node)}") from None
        positional, named = [], {}
        for argument, value in zip(schema.arguments, args, strict=True):
            value = _enumerated(str(argument.real_type), value)
            if not argument.kwarg_only:
                positional.append(value)
            elif not (argument.has_default_value() and _same(value, argument.default_value)):
                named[argument.name] = value
        return self.graph.call_function(target, tuple(positional), named)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, bool, str)) and a == b)


def _takes_tensors(node: Any) -> bool:
    return any(isinstance(v.type(), torch._C.TensorType) for v in node.inputs())


@functools.cache
def _dtype(number: int) -> torch.dtype:
    made = torch.ops.aten.empty.memory_format([0], dtype=number)
    return made.dtype  # type: ignore[no-any-return]


def _enumerated(kind: str, value: Any) -> Any:
    """TorchScript keeps dtypes and the like as numbers."""
    if type(value) is not int:
        return value
    if "ScalarType" in kind:
        return _dtype(value)
    if "MemoryFormat" in kind:
        return _MEMORY_FORMATS[value]
    if "Layout" in kind:
        return torch.strided if value == 0 else torch.sparse_coo
    return value


def _cure(node: Any) -> str:
    where = node.sourceRange().strip().splitlines()
    place = f" ({where[0].strip()})" if where else ""
    return f"trace the function, or give the Python function to torch.compile{place}"
