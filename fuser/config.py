"""Settings: one table that all modules read.

`fuser.config.pool_limit_bytes` reads, `fuser.config.set(pool_limit_bytes=...)` or an assignment writes, `with
config.override(...)` holds for a block, the environment variable `FUSER_POOL_LIMIT_BYTES` gives the start value.
Settings marked `key` change the code of a kernel and are part of its identity.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fuser import logs, machines, notices
from fuser.errors import ConfigError
from fuser.lazy_dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One row: its default, its meaning, whether it changes generated code, and the values that it accepts."""

    name: str
    default: Any
    doc: str
    key: bool = False
    choices: tuple[Any, ...] = ()
    least: float | None = None
    read: Callable[[Any], Any] | None = None  # converts other forms of a value; its ValueError says what was expected


def _calls(value: Any) -> Any:
    """A number of calls: 3, "3" or "first_3"."""
    if isinstance(value, str):
        digits = value.removeprefix("first_")
        value = int(digits) if digits.isdecimal() else -1
    if type(value) is int and value < 0:
        raise ValueError("expected a number of calls, such as 3 or 'first_3'; 0 is none")
    return value


def _share(value: Any) -> Any:
    """A number from 0 to 1."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number <= 1:
        raise ValueError("expected a number from 0 to 1")
    return number


def _ratio(value: Any) -> Any:
    """A ratio of times, 0 or at least 1."""
    if isinstance(value, str):
        value = float(value) if value.replace(".", "", 1).isdecimal() else -1.0
    if isinstance(value, (int, float)) and value and not value >= 1:
        raise ValueError("expected 0, or a ratio of times of at least 1, such as 1.05")
    return value


MANY = 1 << 30  # kernels: no limit


def _kernels(value: Any) -> Any:
    """True for any number of kernels, or the most kernels of a graph."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() else _WORDS.get(value.lower(), value)
    if isinstance(value, bool):
        return MANY if value else 0
    if type(value) is not int or value < 0:
        raise ValueError("expected True, False, or the most kernels that a graph may take, such as 1")
    return value


def _place(value: Any) -> Any:
    """The absolute path of a folder, so that a process that changes its working directory keeps its folders."""
    try:
        return os.path.abspath(value) if isinstance(value, str) and value else value
    except OSError:  # the working directory is gone
        return value


def _places(value: Any) -> Any:
    """The absolute paths of several folders."""
    return os.pathsep.join(map(_place, value.split(os.pathsep))) if isinstance(value, str) else value


def _default_cache_dir() -> str:
    """A folder in the user's cache; "" without a home: kernels never come from the working directory."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(base):  # the XDG specification says to ignore it then
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return str(pathlib.Path(base) / "fuser") if os.path.isabs(base) else ""


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "cache_dir", _default_cache_dir(), "folder of compiled kernels; '' keeps none between processes", read=_place,
    ),
    Setting(
        "remote_cache", "", "a Redis server whose entries a fleet shares, as redis://host:6379/0; '' for none",
    ),
    Setting(
        "remote_cache_key", "",
        "the fleet's secret, of at least 16 characters: entries of the remote cache are used only if made with it",
    ),
    Setting(
        "remote_cache_seconds", 0.25, "the remote cache is waited for so long and no longer, at each local miss",
        least=1e-3,
    ),
    Setting(
        "prebuilt_cache", "",
        f"folders of kernels made elsewhere, with {os.pathsep!r} between, which are only read (docs/caching.md)",
        read=_places,
    ),
    Setting(
        "cache_limit_bytes", 4 << 30,
        "most bytes of the cache folder: entries that were used longest ago are removed; 0 is no limit", least=0,
    ),
    Setting("pool_limit_bytes", 256 << 20, "most bytes that the buffer pool keeps warm", least=0),
    Setting(
        "output_limit_bytes", 256 << 20,
        "most bytes of large outputs kept warm for later ones; a training step keeps those that its options ask for",
        least=0,
    ),
    Setting(
        "product_limit_bytes", 256 << 20,
        "most bytes of large products that are kept warm for later ones, in training steps too", least=0,
    ),
    Setting("pool_idle_seconds", 5.0, "an idle block goes back to the system after this long", least=0),
    Setting(
        "library_limit", 4096,
        "most libraries of CPU kernels loaded at a time: others are loaded again when they are called; each takes five "
        "of a process's 65,530 maps",
        least=1,
    ),
    Setting(
        "memo_limit", 4096, "most answers, warnings and reasons of each kind that are remembered", least=1,
    ),
    Setting(
        "sequences", "all",
        "graphs that run as native sequences of steps: 'all'; 'cpu': those whose inputs are all on the CPU; 'none'. "
        "Other graphs run as a generated Python function, with the same results",
        choices=("all", "cpu", "none"),
    ),
    Setting("compile_timeout_seconds", 60.0, "a compiler that runs longer is killed; the group falls back", least=1e-3),
    Setting("compile_workers", 0, "compilers run at the same time; 0 means one for each core", least=0),
    Setting(
        "compile_mode", "wait",
        "'wait': the first call of a class waits for its kernel; 'background': calls run ATen until the kernel takes "
        "over, when the last bits of equal calls' results may change, once; torch.use_deterministic_algorithms waits",
        choices=("wait", "background"),
    ),
    Setting("max_body_rows", 256, "most rows of one fused loop; exp and its kin count for several", key=True, least=1),
    Setting("numerics", "fast", "'fast' rounds once, 'eager' after every op", key=True, choices=("fast", "eager")),
    Setting(
        "deterministic", "torch", "'yes': no sums by atomics; 'torch': as torch asks when a graph is registered",
        key=True, choices=("torch", "yes", "no"),
    ),
    Setting("verify", 0, "run the first n calls of each kernel beside the fallback: 3 or 'first_3'", read=_calls),
    Setting(
        "slowest", 1.05,
        "CPU: calls for which a kernel takes more than this times ATen's time go to ATen, those of a single operator "
        "where it takes more than 0.97 times; 0 measures none",
        read=_ratio,
    ),
    Setting(
        "random",
        "philox",
        "'philox': drawn in kernels, of seeds from torch's generator; 'eager': the very numbers eager draws",
        choices=("philox", "eager"),
    ),
    Setting(
        "check_bounds", False,
        "CPU: kernels check each offset into memory, and one outside is an error that names kernel, buffer and offset; "
        "their loops are plain ones, without vectors",
        key=True, choices=(True, False),
    ),
    Setting(
        "isa", "",
        "CPU: the machine that kernels are made for, such as 'avx2' or 'avx512+vnni' (docs/machines.md); '' is what "
        "this machine has",
        key=True, read=machines.check,
    ),
    Setting(
        "log", "",
        "what is written to stderr, as in TORCH_LOGS: 'fuser', '+fuser', 'fuser_why', 'fuser_code', 'fuser_perf', with "
        "commas between",
        read=logs.check,
    ),
    Setting("check_ir", False, "check the rules of the IR at each step of a compilation", choices=(True, False)),
    Setting("disable_passes", "", "names of passes that do not run, with commas between"),
    Setting("pass_limit", -1, "passes with a higher number, over all stages, do not run; -1 runs all", least=-1),
    Setting("check_passes", False, "check the graph and its shapes after each pass", choices=(True, False)),
    Setting("dump_passes", "", "'log', or a folder for what each pass changes"),
    Setting("on_pass_error", "raise", "a failing pass is an error, or is left out", choices=("raise", "skip")),
    Setting("strict", False, "a defect of fuser is an error, not a group that ATen runs", choices=(True, False)),
    Setting(
        "require_fused", 0,
        "True: a graph with an operator on ATen, up to calls of libraries, is an error; a number: so is one that takes "
        "more kernels than that",
        read=_kernels,
    ),
    Setting("enabled", True, "False runs every group by its fallback", choices=(True, False)),
    Setting(
        "convolution_layout", "measured",
        "2-d convolutions on the CPU: 'measured' has contests on this machine decide between the usual order of memory "
        "and channels-last (a rule under torch.use_deterministic_algorithms); 'channels_last' goes by the rule alone; "
        "'eager' leaves all as it is",
        choices=("measured", "channels_last", "eager"),
    ),
    Setting(
        "freeze", False,
        "CPU, inference by torch.compile: weights are packed once where that is faster, which takes their "
        "memory twice. The user promises not to change parameters and buffers in ways that no version counter shows, "
        "such as p.data.copy_(); in-place operators, new data and load_state_dict are seen",
        choices=(True, False),
    ),
    Setting(
        "memory", 1.0,
        "training by torch.compile: the share of what the fastest backward would read of the forward's results that is "
        "kept; the rest is computed again. 1 keeps all of it, 0 the inputs and random numbers alone",
        least=0.0, read=_share,
    ),
    Setting(
        "ranges", "", "'nvtx' or 'itt': a range of that profiler around each call of a kernel; '' makes none",
        choices=("", "nvtx", "itt"),
    ),
    Setting("max_autotune", False, "CUDA: races decide about tiles and matmuls", key=True, choices=(True, False)),
    Setting(
        "linear_backend", "measured",
        "matmuls on the CPU: 'measured' has a contest on this machine decide for each class of sizes, once (ATen under "
        "torch.use_deterministic_algorithms); 'onednn' and 'aten' are always the same library",
        choices=("measured", "onednn", "aten"),
    ),
)  # fmt: skip
_BY_NAME = {s.name: s for s in SETTINGS}
_WORDS = {word: on for on, words in ((True, "1 true yes on"), (False, "0 false no off")) for word in words.split()}
PREFIX = "FUSER_"
_OTHERS = ("FUSER_TEST_ALL", "FUSER_TEST_DEVICE", "FUSER_STRESS")  # variables of the tests


def _from_environment(setting: Setting) -> Any:
    """The value of a setting from the environment, else its default. ConfigError names the variable."""
    variable = PREFIX + setting.name.upper()
    text = os.environ.get(variable)
    if text is None:
        return setting.default
    kind = type(setting.default)
    try:
        value = _WORDS[text.lower()] if kind is bool else text if setting.read is not None else kind(text)
        return check(setting.name, value)
    except ConfigError as e:
        raise ConfigError(f"environment variable {variable}: {e}") from None
    except (KeyError, ValueError):
        wanted = f"one of {', '.join(_WORDS)}" if kind is bool else f"{kind.__name__}, such as {setting.default!r}"
        raise ConfigError(f"environment variable {variable}={text!r}: expected {wanted}") from None


def _warn_of_unknown() -> None:
    """Warn of variables that look like settings but are none."""
    known = {PREFIX + s.name.upper() for s in SETTINGS}.union(_OTHERS)
    for name in sorted(n for n in os.environ if n.startswith(PREFIX) and n not in known):
        near = _nearest(name.removeprefix(PREFIX).lower())
        hint = f"did you mean {PREFIX}{near.upper()}?" if near else f"settings are listed in {__name__}.SETTINGS"
        notices.warn(f"the environment variable {name} is no setting and is not read; {hint}")


def _nearest(name: str) -> str | None:
    """The setting whose name is closest to `name`; None if none is close."""
    found = difflib.get_close_matches(name.lower(), _BY_NAME, 1)
    parts = [known for known in sorted(_BY_NAME) if name.lower() in known.split("_") or known.startswith(name.lower())]
    return found[0] if found else parts[0] if parts and len(name) > 2 else None


def _unknown(name: str) -> str:
    near = _nearest(name)
    hint = f"did you mean {near!r}?" if near else f"expected one of {', '.join(sorted(_BY_NAME))}"
    return f"unknown setting {name!r}: {hint}"


def check(name: str, value: Any) -> Any:
    """`value` if `name` is a setting that accepts it; raises ConfigError otherwise."""
    setting = _BY_NAME.get(name)
    if setting is None:
        raise ConfigError(_unknown(str(name)))
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, setting.choices))}")
    try:
        value = setting.read(value) if setting.read is not None else value
    except ValueError as e:
        raise ConfigError(f"{name}={value!r}: {e}") from None
    kind = type(setting.default)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name}={value!r}: expected {kind.__name__}, such as {setting.default!r}")
    if setting.least is not None and not value >= setting.least:
        raise ConfigError(f"{name}={value!r}: expected {kind.__name__} of at least {setting.least}")
    return value


class Config(types.ModuleType):
    """The module itself: settings are attributes, which `override` changes for a thread."""

    def _start(self) -> None:
        self.__dict__["_values"] = {s.name: _from_environment(s) for s in SETTINGS}
        self.__dict__["_local"] = threading.local()
        self.__dict__["_watchers"] = {}
        _warn_of_unknown()

    def __getattr__(self, name: str) -> Any:
        if getattr(self._local, "layers", None):
            here = self.overridden(name)
            if here is not None:
                return here
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(_unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """`config.numerics = "eager"` is `config.set(numerics="eager")`."""
        if name.startswith("_") or name in self.__dict__:  # the module's own names
            super().__setattr__(name, value)
        else:
            self.set(**{name: value})

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_BY_NAME})

    def overridden(self, name: str) -> Any:
        """The value of a setting that holds in this thread only; None if there is none."""
        for layer in reversed(getattr(self._local, "layers", ())):
            if name in layer:
                return layer[name]
        return None

    def watch(self, name: str, changed: Callable[[], None]) -> None:
        """Let `changed` be called after each change of the setting, in the thread that changed it."""
        self._watchers[name] = changed

    def _tell(self, names: Iterable[str]) -> None:
        for name in self._watchers.keys() & names:
            self._watchers[name]()

    def set(self, **values: Any) -> None:
        """Change settings for the process. ConfigError for an unknown name or value."""
        self._values.update({k: check(k, v) for k, v in values.items()})
        self._tell(values)

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Change settings of this thread in the block."""
        layer = {k: check(k, v) for k, v in values.items()}
        layers = self._local.__dict__.setdefault("layers", [])
        layers.append(layer)
        self._tell(values)
        try:
            yield
        finally:
            layers[:] = [other for other in layers if other is not layer]  # not an equal one further out
            self._tell(values)

    def prepared(self, **values: Any) -> Prepared:
        """Like `override`, for a block that is entered often: values are checked once. It may be nested."""
        return Prepared(self, {k: check(k, v) for k, v in values.items()})

    def snapshot(self) -> dict[str, Any]:
        """All settings of this thread, for `override` in another."""
        found = dict(self._values)
        for layer in getattr(self._local, "layers", ()):
            found.update(layer)
        return found

    def key(self) -> tuple[tuple[str, Any], ...]:
        """The settings that change generated code, as part of a kernel's identity."""
        found = {s.name: getattr(self, s.name) for s in SETTINGS if s.key}
        found["isa"] = machines.find(self.isa).name
        found["deterministic"] = "yes" if self.is_deterministic() else "no"
        return tuple(found.items())

    def is_deterministic(self) -> bool:
        """Whether results must not depend on the order of threads."""
        asks = sys.modules["torch"].are_deterministic_algorithms_enabled() if "torch" in sys.modules else False
        return self.deterministic == "yes" or self.deterministic == "torch" and asks


class Prepared:
    """Settings of a thread for a block that is entered repeatedly: see `Config.prepared`."""

    __slots__ = ("_config", "_layer")

    def __init__(self, config: Config, layer: dict[str, Any]) -> None:
        self._config, self._layer = config, layer

    def __enter__(self) -> None:
        self._config._local.__dict__.setdefault("layers", []).append(self._layer)
        self._config._tell(self._layer)

    def __exit__(self, *error: object) -> None:
        layers = self._config._local.layers
        last = len(layers) - 1
        del layers[next(i for i in range(last, -1, -1) if layers[i] is self._layer)]
        self._config._tell(self._layer)


if TYPE_CHECKING:  # the table's names are known only at run time

    def __getattr__(name: str) -> Any: ...


_module = sys.modules[__name__]
_module.__class__ = Config
_module._start()
