"""`fuse_script`: scripted and traced functions and modules that run in fused groups, with their control flow."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fuser import forks, notices
from fuser.errors import InputError, Unsupported
from fuser.frontends import script_autocast as autocast
from fuser.frontends.script_copies import copied, copy_python_side
from fuser.frontends.script_direct import Direct, direct_call
from fuser.frontends.script_fusion import Fused, Unfused, fused_graph, training_flags
from fuser.lazy_dataclasses import dataclass
from fuser.runtime import launcher, torch_abi

Script = Any  # torch.jit.ScriptFunction or torch.jit.ScriptModule
_C: Any = torch._C
_jit: Any = getattr(torch, "jit", None)
_NEEDED = (
    "Graph", "ScriptFunction", "ScriptModule", "ModuleDict", "ParameterDict", "ConcreteModuleType",
    "_create_function_from_graph", "_jit_pass_constant_propagation", "_jit_pass_dce", "_jit_pass_peephole",
    "_jit_pass_erase_shape_information", "_jit_pass_remove_mutation", "parse_schema",
)  # fmt: skip


def fuse_script(script: Script, *, example_inputs: Sequence[Any] | None = None) -> Script:
    """A copy of a scripted or traced function or module that runs in fused groups, inside branches and loops too.

    Unfused parts run as before, and `fuser.debug.graph_for(fused)` says why.

    Args:
        script: what `torch.jit.script` or `torch.jit.trace` returned, a function or a module with `forward`.
        example_inputs: positional arguments of one call, for which kernels are compiled now, by a call on copies of
            everything. None compiles at the first call.

    Returns:
        A function or module with the script's signature, attributes and hooks. A module's parameters share the
        original's memory. Saved, called by another script or traced, it is the original.

    Raises:
        InputError: `script` is not TorchScript or has no `forward`, or `example_inputs` is no list or tuple.
        Unsupported: this torch has no TorchScript.
        Exception: whatever the call on `example_inputs` raises.
    """
    if example_inputs is not None and not isinstance(example_inputs, (list, tuple)):
        given = type(example_inputs).__name__
        raise InputError(f"example_inputs is a {given}: expected a list or tuple of the inputs of one call")
    missing = [f"torch._C.{n}" for n in _NEEDED if not hasattr(_C, n)]
    missing += [f"torch.jit.{n}" for n in ("RecursiveScriptModule", "_recursive") if not hasattr(_jit, n)]
    if missing:
        raise Unsupported(f"fuse_script is unavailable: this version of torch has no {', '.join(missing)}")
    if isinstance(script, torch.jit.ScriptModule):
        if not script._c._has_method("forward"):
            raise InputError(f"{script.original_name} has no method forward: expected a module that can be called")
        made: Script = _fused_module(script)
    elif isinstance(script, torch.jit.ScriptFunction):
        made = _fused_function(script)
    else:
        raise InputError(
            f"{type(script).__name__} is not TorchScript: expected what torch.jit.script or torch.jit.trace returns"
        )
    if example_inputs is not None:
        _run_once(made, example_inputs)
    return made


def _run_once(fused: Script, example_inputs: Sequence[Any]) -> None:
    """Compile for these inputs, by a call on copies of everything."""
    again = copy.deepcopy(fused) if isinstance(fused, torch.jit.ScriptModule) else fused
    with torch.random.fork_rng(), torch.no_grad():
        again(*copy.deepcopy(tuple(example_inputs)))


def _fused(inlined: Any, evaluating: bool) -> Fused:
    """The fused graph; the original graph if a defect keeps it from being fused."""
    try:
        return fused_graph(inlined, evaluating)
    except Exception as e:  # a defect is a fallback, too
        reason = f"{type(e).__name__}: {(str(e).strip() or '.').splitlines()[0]}"
        notices.warn(f"a script stays as it is: {reason}")
        return Fused(inlined.copy(), unfused=[Unfused("graph", reason, "")])


# -- functions ---------------------------------------------------------------------------------------------------------
_Function: Any = getattr(_C, "ScriptFunction", object)
_call: Any = _Function.__call__  # `super()` takes 0.1 µs more
_autocast: Any = getattr(_C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_tracing: Any = getattr(_C, "_get_tracing_state", lambda: None)
_Module: Any = getattr(_jit, "RecursiveScriptModule", object)


class FusedFunction(_Function):  # type: ignore[misc]
    """A function that runs in fused groups; saved, called by another script or traced, it is the original."""

    __slots__ = ()
    original: Any
    run: Any  # the function of the fused graph
    fused: Fused
    signature: _Signature
    direct: Direct | None
    casting: dict[autocast.State | None, _Casting]

    @property
    def fusion(self) -> Fused:
        """The fusion for this thread's autocast state."""
        return self.cast().fusion if _autocast() else self.fused

    @property
    def schema(self) -> Any:
        """The original's signature."""
        return self.original.schema

    @property
    def graph(self) -> Any:
        """The fused graph."""
        return self.run.graph

    inlined_graph = graph

    def get_debug_state(self) -> Any:
        """TorchScript's execution state of the fused graph."""
        return self.run.get_debug_state()

    @torch_abi.untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _tracing() is not None:
            return self.original(*args, **kwargs)
        if _autocast():
            return self.under_autocast(args, kwargs)
        direct = self.direct
        if direct is not None and not kwargs and tuple(map(type, args)) in direct.kinds:
            try:
                return direct.handle(*(args if direct.chosen is None else direct.chosen(args)))
            except Exception:  # the script reports the error itself
                pass
        signature = self.signature
        if signature:  # a function made from a graph has none of its own
            args, kwargs = signature.fill(args, kwargs)
        return _call(self.run, *args, **kwargs)

    def cast(self) -> _Casting:
        """The fused form for this thread's autocast state."""
        now = autocast.state()
        return self.casting.get(now) or self.casting.setdefault(now, _casting(self.original, self.name))

    def under_autocast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results under this thread's autocast."""
        made = self.cast()
        if made.function is None:
            return self.original(*args, **kwargs)
        if self.signature:
            args, kwargs = self.signature.fill(args, kwargs)
        return autocast.without_autocast(made.function, *args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Save the original."""
        return self.original.save(*args, **kwargs)

    def save_to_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """The original as bytes."""
        return self.original.save_to_buffer(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> FusedFunction:
        return self


@dataclass(frozen=True)
class _Casting:
    """A graph with autocast's casts: its fusion, and the function that runs it, None for the script itself."""

    fusion: Fused
    function: Any


def _casting(script: Any, name: str, evaluating: bool = False) -> _Casting:
    """The form of a function's or method's graph for this thread's autocast state."""
    if autocast.state() is None:
        return _Casting(_left(script, "autocast of this device or version of torch is not fused"), None)
    graph = script.inlined_graph
    reason = autocast.asks(graph)
    if reason is None:
        graph = autocast.with_casts(graph)
        reason = autocast.why_not(graph)
    if reason is not None:
        return _Casting(_left(script, reason), None)
    with torch._C._DisableAutocast():
        fused = _fused(graph, evaluating)
        return _Casting(fused, _C._create_function_from_graph(name, fused.graph))


def _left(script: Any, reason: str) -> Fused:
    return Fused(script.inlined_graph.copy(), unfused=[Unfused("graph", reason, "")])


@functools.cache
def _native_class(native: Any) -> type:
    """FusedFunction whose usual calls the native launcher makes: positional arguments, no autocast, no modes."""
    call = native.script_call(_call, FusedFunction.__call__)
    return type("FusedFunction", (FusedFunction,), {"__slots__": (), "__call__": call, "__module__": __name__})


def _element(kind: Any) -> str:
    """The kind of the elements of a list type, or of an optional list type."""
    found = kind.getElementType()
    return str((found.getElementType() if found.kind() == "ListType" else found).kind())


_NUMBERS = {"IntType": int, "FloatType": float}


class _Signature:
    """What a signature has and a graph lacks: defaults, lists given as one number, keyword-only arguments."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.names = [a.name for a in arguments]
        self.named = [a.name for a in arguments if a.kwarg_only]
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self.lists = {a.name: (_NUMBERS.get(_element(a.type), ()), a.N) for a in arguments if a.N is not None}

    def __bool__(self) -> bool:
        return bool(self.defaults or self.lists or self.named)

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with defaults for missing ones, and numbers expanded to lists."""
        if len(args) > len(self.names) - len(self.named) and self.named:
            raise RuntimeError(f"{len(args)} positional arguments were given: expected {', '.join(self.named)} by name")
        if self.lists:
            args = (*map(self._whole, self.names, args), *args[len(self.names) :])
            kwargs = {name: self._whole(name, value) for name, value in kwargs.items()}
        left = {n: self.defaults[n] for n in self.names[len(args) :] if n in self.defaults and n not in kwargs}
        return (args, {**kwargs, **left}) if left else (args, kwargs)

    def _whole(self, name: str, value: Any) -> Any:
        number, size = self.lists.get(name, ((), 0))
        return [value] * size if isinstance(value, number) else value


def _fused_function(script: Any) -> Any:
    script = script.original if isinstance(script, FusedFunction) else script
    fused = _fused(script.inlined_graph, evaluating=False)
    made = _same_function(script)
    made.run = _C._create_function_from_graph(script.name, fused.graph)
    native: Any = launcher.native()
    made.__class__ = FusedFunction if native is None else _native_class(native)
    signature = _Signature(script.schema.arguments)
    made.original, made.fused, made.signature = script, fused, signature
    made.casting = {}
    direct = made.direct = direct_call(fused)
    quick = None
    if native is not None and direct is not None:
        quick = native.direct(direct.handle, direct.letters, direct.order)
    elif not signature:
        quick = made.run
    if quick is not None:
        made.quick = quick
    made.__doc__ = script.__doc__
    return made


def _same_function(script: Any) -> Any:
    """A second object of a script's function: the one that calling scripts have, which lives as long as torch."""
    found = torch.jit._state._python_cu.find_function(script.qualified_name)
    if found is not None and found.graph is script.graph:
        return found
    return _C._create_function_from_graph(script.name, script.graph)


# -- modules -----------------------------------------------------------------------------------------------------------
class FusedModule(_Module):  # type: ignore[misc]
    """A module whose `forward` and other exported methods run in fused groups. Saved, it is the original.

    Its C++ object has the original's type, which is not changed; so `forward` is a function of that object.
    """

    @torch_abi.untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's results."""
        return self.__dict__["_fusion"].call(self._c, args, kwargs)

    @property
    def fusion(self) -> Fused:
        """The fusion of `forward` in the module's present state: training or not."""
        found: Fused = self.__dict__["_fusion"].fused(self._c)
        return found

    @property
    def graph(self) -> Any:
        """The fused graph of `forward`."""
        return self.fusion.graph

    inlined_graph = graph

    @property
    def code(self) -> str:
        """The original's `forward` as text."""
        return str(self._c._get_method("forward").code)

    @property
    def code_with_constants(self) -> tuple[str, Any]:
        """The original's `forward` as text, and its constants by their names in it."""
        text, constants = self._c._get_method("forward").code_with_constants
        return text, _jit._script.ConstMap(constants)

    def __copy__(self) -> Any:
        return fuse_script(super().__copy__())

    def __deepcopy__(self, memo: Any) -> Any:
        return fuse_script(super().__deepcopy__(memo))


class _Fusion:
    """The fused forms of a module's method, made on demand: one for evaluation, and one for any state."""

    def __init__(self, cpp: Any, name: str = "forward") -> None:
        method = cpp._get_method(name)
        self.name = name
        self.inlined = method.inlined_graph
        self.signature = _Signature(method.schema.arguments[1:])
        self.trains = _asks_for_training(self.inlined)
        self.lock = forks.lock()
        self.made: dict[bool, tuple[Fused, Any]] = {}
        self.casts: dict[tuple[autocast.State | None, bool], _Casting] = {}
        self._make(self._is_evaluating(cpp))

    def call(self, cpp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The method's results for a module."""
        casting = self.casting(cpp) if _autocast() else None
        if casting is not None and casting.function is None or _tracing() is not None:
            return cpp._get_method(self.name)(*args, **kwargs)
        if self.signature:
            args, kwargs = self.signature.fill(args, kwargs)
        if casting is not None:
            return autocast.without_autocast(casting.function, cpp, *args, **kwargs)
        return self.function(cpp)(cpp, *args, **kwargs)

    def casting(self, cpp: Any) -> _Casting:
        """The form for this thread's autocast and the module's present state."""
        known = autocast.state(), self._is_evaluating(cpp)
        found = self.casts.get(known)
        if found is None:
            found = self.casts.setdefault(known, _casting(cpp._get_method(self.name), self.name, known[1]))
        return found

    def _is_evaluating(self, cpp: Any) -> bool:
        return self.trains is not None and not self.trains(cpp)

    def function(self, cpp: Any) -> Any:
        """The function for the module's present state."""
        evaluating = self.trains is not None and not self.trains(cpp)
        found = self.made.get(evaluating) or self._make(evaluating)
        return found[1]

    def fused(self, cpp: Any) -> Fused:
        """The fusion for the module's present state, and for autocast if it is on."""
        if _autocast():
            return self.casting(cpp).fusion
        evaluating = self._is_evaluating(cpp)
        return (self.made.get(evaluating) or self._make(evaluating))[0]

    def _make(self, evaluating: bool) -> tuple[Fused, Any]:
        with self.lock:
            if evaluating not in self.made:
                fused = _fused(self.inlined, evaluating)
                self.made[evaluating] = fused, _C._create_function_from_graph(self.name, fused.graph)
            return self.made[evaluating]


class FusedMethod:
    """An exported method of a fused module. It is fused on first use, and otherwise behaves as the method itself."""

    def __init__(self, cpp: Any, name: str) -> None:
        self._cpp, self._name = cpp, name
        self._lock = forks.lock()
        self._fusion: _Fusion | None = None

    def _fused(self) -> _Fusion:
        with self._lock:
            if self._fusion is None:
                self._fusion = _Fusion(self._cpp, self._name)
            return self._fusion

    @torch_abi.untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._fusion or self._fused()).call(self._cpp, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cpp._get_method(self._name), name)

    @property
    def fusion(self) -> Fused:
        """The fusion in the module's present state: training or not."""
        return self._fused().fused(self._cpp)

    @property
    def graph(self) -> Any:
        """The fused graph."""
        return self.fusion.graph

    inlined_graph = graph


def _asks_for_training(inlined: Any) -> Any:
    """A function that tells whether a module whose state a graph reads is in training; None if it reads none."""
    graph = _C.Graph()
    whole = next(inlined.inputs())
    copies = {whole: graph.addInput("self")}
    copies[whole].setType(whole.type())

    def copied(value: Any) -> Any:
        if value not in copies:
            node = value.node()
            if node.kind() != "prim::GetAttr":
                raise LookupError
            copied(node.input())
            clone = graph.insertNode(graph.createClone(node, copies.__getitem__))
            copies[value] = clone.output()
        return copies[value]

    found = None
    for node in training_flags(inlined):
        try:
            flag = copied(node.output())
        except LookupError:  # a module that is chosen at run time
            continue
        if found is None:
            found = flag
        elif flag is not found:
            found = graph.insertNode(graph.create("aten::__or__", [found, flag], 1)).output()
            found.setType(flag.type())
    if found is None:
        return None
    graph.registerOutput(found)
    return _C._create_function_from_graph("is_training", graph)


def _fused_module(script: Any) -> FusedModule:
    if isinstance(script, FusedModule):
        script = _jit._recursive.wrap_cpp_module(script._c)
    made: Any = _jit._recursive.wrap_cpp_module(copied(script._c))
    made.__class__ = FusedModule
    copy_python_side(script, made)
    made.__dict__["_fusion"] = _Fusion(made._c)
    for name in set(made._c._method_names()) - {"forward"}:
        if not name.startswith("__"):
            made.__dict__[name] = FusedMethod(made._c, name)
        elif isinstance(script.__dict__.get(name), _C.ScriptMethod):  # a name of Python's, such as `__len__`
            made.__dict__[name] = made._c._get_method(name)
    return made  # type: ignore[no-any-return]
