"""The C++ compiler: finding and probing it, running it with a time limit, and keeping its libraries on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shlex
from collections.abc import Sequence

from fuser import config, forks, machines
from fuser.cpu.complaints import gist, is_full, refused
from fuser.errors import CompileError
from fuser.machines import Machine
from fuser.runtime import background, compilers, eviction, files, prebuilt, process, remote, workers
from fuser.runtime import machine as this_machine
from fuser.runtime.counting import COUNTS
from fuser.runtime.libraries import Library, is_cut
from fuser.runtime.spans import span


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler. CompileError if there is none."""
    return compilers.find()[0]


def why_not() -> str | None:
    """None if kernels can be compiled or found prebuilt, else the reason; asked at calls."""
    unfit = _why_not_run(machines.find(config.isa))
    return unfit or (None if prebuilt.for_cpu() else why_no_compiler())


def _why_not_run(machine: Machine) -> str | None:
    """None if kernels for `machine` run here, else why not."""
    why = machines.why_not(machine)
    return f"config.isa is {machine.name!r}, but {why}" if why is not None else None


def why_no_compiler() -> str | None:
    """None if there is a C++ compiler that is not known to fail, else the reason."""
    why = compilers.why_none()
    if why is not None:
        return why
    compiler = find_compiler()
    isa = machines.find(config.isa).name
    if (compiler, isa) in _unfit:
        return str(_unfit[compiler, isa])
    return process.why_not(compiler[0], config.compile_timeout_seconds)


_unfit: dict[tuple[tuple[str, ...], str], CompileError] = {}  # of compilers that fail on the smallest source
_probing = forks.lock()


def warm_up() -> None:
    """Probe the compiler in the background, if the first kernel would otherwise wait for the probe."""

    def probe() -> None:
        with contextlib.suppress(CompileError, OSError):  # the first kernel will report it
            compiler = find_compiler()
            if not _is_usual(compiler):
                flags_for(compiler)

    workers.start(background.as_here(probe), "fuser-toolchain")


def flags_for(
    compiler: tuple[str, ...], machine: Machine | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:  # fmt: skip
    """(compile flags, libraries) that this compiler accepts for kernels of `machine`, by default `config.isa`'s.

    CompileError if it accepts none; further calls are answered without running it again.
    """
    machine = machine or machines.find(config.isa)
    with _probing:
        _asked.add((compiler, machine.name))
        if (compiler, machine.name) in _unfit:
            raise _unfit[compiler, machine.name]
        try:
            return _probe(compiler, machine.name)
        except CompileError as e:
            _unfit[compiler, machine.name] = e
            raise


# Compilers whose kind is known without a probe, on systems that have libmvec with all functions (glibc 2.35).
_USUAL = r"(?:.*-)?g\+\+(?:-[\d.]+)?"
_asked: set[tuple[tuple[str, ...], str]] = set()  # compilers and machines that were probed, even if the probe failed


@functools.lru_cache(maxsize=8)
def _is_usual(compiler: tuple[str, ...]) -> bool:
    name = os.path.basename(os.path.realpath(compiler[0]))
    return len(compiler) == 1 and re.fullmatch(_USUAL, name) is not None and this_machine.has("x86_64", "glibc 2.35")


def _flags_now(compiler: tuple[str, ...], machine: Machine) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """(compile flags, libraries, whether a probe found them).

    A usual compiler is assumed to be the first of `compilers.KINDS` until a kernel fails, so the first kernel waits
    for no probe.
    """
    key = compiler, machine.name
    if key in _asked or not _is_usual(compiler) or _has_memory(*key, str(_cache_folder())):
        return (*flags_for(compiler, machine), True)
    _, flags, libraries = _choices(machine)[0]
    return flags, libraries, False


_PROBE = """\
#if !(TEST)
#error another kind of compiler
#endif
#if defined(FUSER_SIMD_MATH)
#define VECTOR __attribute__((simd("notinbranch"), const))
#else
#define VECTOR
#endif
extern "C" VECTOR float expf(float);
extern "C" VECTOR float erfcf(float);
extern "C" void probe(float* x, long n) {
#pragma omp simd
for (long i = 0; i < n; ++i) x[i] = expf(x[i]) + erfcf(x[i]); }
"""


def _first_taken(
    compiler: tuple[str, ...], choices: Sequence[Choice], parent: pathlib.Path
) -> tuple[int | None, str]:
    """The number of the first of `choices` that makes a small library in `parent`, or None; the compiler's output."""
    log = ""
    with files.scratch_folder(parent) as folder:
        path = folder / "probe.cpp"
        for number, (test, flags, libraries) in enumerate(choices):
            path.write_text(_PROBE.replace("TEST", test))
            command = [*compiler, *flags, str(path), "-o", f"{folder}/probe.so", *libraries]
            with process.temporaries_in(str(folder)):
                code, log = process.run(command, config.compile_timeout_seconds)
            if code == 0 and (compilers.whole(libraries) == libraries or _problem(folder / "probe.so") is None):
                return number, log
    return None, log


Choice = tuple[str, tuple[str, ...], tuple[str, ...]]  # the test of its kind, flags, libraries


def _choices(machine: Machine) -> list[Choice]:
    return [
        (kind.test, kind.flags_for(machine), libraries)
        for kind in compilers.KINDS
        for libraries in dict.fromkeys((kind.lean or kind.libraries, kind.libraries))
    ]


def _memory_of(compiler: tuple[str, ...], choices: list[Choice]) -> pathlib.Path:
    identity = hashlib.sha256(f"{compiler}{choices}{_stamp(compiler[0])}{_cpu()}".encode()).hexdigest()[:16]
    return _cache_folder() / f"toolchain-{identity}"


def _remembered(compiler: tuple[str, ...], isa: str) -> int | None:
    """The number of the choice that an earlier process found, or None. No flags are read from a file."""
    choices = _choices(machines.find(isa))
    found = remote.read(_memory_of(compiler, choices))
    return int(found) if found is not None and found.isdigit() and int(found) < len(choices) else None


@functools.lru_cache(maxsize=32)
def _has_memory(compiler: tuple[str, ...], isa: str, folder: str) -> bool:
    """Whether the cache `folder` has an earlier process's probe, asked once."""
    return _remembered(compiler, isa) is not None


@functools.lru_cache(maxsize=32)
def _probe(compiler: tuple[str, ...], isa: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    machine = machines.find(isa)
    choices = _choices(machine)
    known = _memory_of(compiler, choices)
    remembered = _remembered(compiler, isa)
    if remembered is not None:
        return choices[remembered][1:]
    number, log = _first_taken(compiler, choices, known.parent)
    if number is None and is_full(log):
        number, log = _first_taken(compiler, choices, files.private_folder())
    if number is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next process probes again
            files.write(known, str(number).encode())
            remote.offer(known, str(number).encode())
        return choices[number][1:]
    raise CompileError(
        f"{shlex.join(compiler)} does not compile a small loop for {machine.name} ({gist(log)}); "
        "is it a C++17 compiler?",
        log,
    )


def _stamp(path: str) -> str:
    info = os.stat(os.path.realpath(path))
    return f"{os.path.realpath(path)}:{info.st_size}:{info.st_mtime_ns}"


@functools.lru_cache(maxsize=1)
def _cpu() -> str:
    found = machines.cpu_text()
    if not found:
        import platform

        return platform.processor() + platform.machine()
    return found


def _cache_folder() -> pathlib.Path:
    """The folder of kernels for later processes; this process's own folder if there is none."""
    if not config.cache_dir:
        return files.private_folder()
    try:
        return files.folder(config.cache_dir, "cpu")
    except OSError as e:
        return _instead_of(pathlib.Path(config.cache_dir) / "cpu", str(e))


def _folder_for(library: pathlib.Path) -> pathlib.Path:
    """The folder to write a new library to: its own folder, unless that is read-only."""
    if os.access(library.parent, os.W_OK):
        return library.parent
    return _instead_of(library.parent, "it cannot be written")


def _instead_of(folder: pathlib.Path, why: str) -> pathlib.Path:
    """This process's own folder in place of `folder`, with one warning."""
    files.say_once(
        folder,
        f"kernels are not kept in {folder}, so that each process compiles them again: {why}; "
        "set FUSER_CACHE_DIR to a folder that can be written, or to '' for none",
    )
    return files.private_folder()


def compile_library(parts: tuple[str, ...], machine: Machine | None = None, entries: Sequence[str] = ()) -> str:
    """The path of a shared library made from the sources `parts`; from disk if it was made before. Raises CompileError.

    It is for `machine`, by default `config.isa`'s, which has to run here; a new library has to define `entries`.
    Several parts are compiled in parallel, then linked. If another process is making the same library, it waits for
    that one.
    """
    machine = machine or machines.find(config.isa)
    why = _why_not_run(machine)
    if why is not None:
        raise CompileError(why)
    try:
        return _library_of(parts, machine, entries)
    except OSError as e:  # not even a temporary folder
        why = refused(str(e)) or f"{e.strerror} ({e.filename}): set TMPDIR to a folder that can be written"
        raise CompileError(f"no kernel can be written: {why}") from None


def _library_of(parts: tuple[str, ...], machine: Machine, entries: Sequence[str]) -> str:
    compiler = find_compiler()
    flags, libraries, is_sure = _flags_now(compiler, machine)
    hung = process.times_hung(compiler[0])
    try:
        return _found_or_made(parts, entries, flags, libraries)
    except CompileError:
        if is_sure or process.times_hung(compiler[0]) > hung or flags_for(compiler, machine) == (flags, libraries):
            raise
    return _found_or_made(parts, entries, *flags_for(compiler, machine))


def _found_or_made(
    parts: tuple[str, ...], entries: Sequence[str], flags: tuple[str, ...], libraries: tuple[str, ...]
) -> str:  # fmt: skip
    compiler = find_compiler()
    identity = "\n".join((*parts, *compiler, *flags, *libraries, _stamp(compiler[0]), _cpu()))
    library = _cache_folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"
    kept = _kept(library)
    if kept is None:
        folder = _folder_for(library)
        with files.claim(folder / library.name, config.compile_timeout_seconds):
            kept = _kept(folder / library.name) or _fetched(folder / library.name)
            if kept is None:
                made = _make(folder / library.name, parts, flags, libraries, entries)
                COUNTS.add("binaries_made")
                return str(made)
    COUNTS.add("binaries_found")
    return str(kept)


def machine() -> str | None:
    """Text of all that determines a library beside its source: compiler and processor; None if none is kept."""
    if not config.cache_dir or compilers.why_none() is not None:
        return None
    compiler = find_compiler()
    return _machine(compiler)


@functools.lru_cache(maxsize=8)
def _machine(compiler: tuple[str, ...]) -> str:
    return hashlib.sha256(f"{compiler}{_stamp(compiler[0])}{_cpu()}".encode()).hexdigest()


def machine_facts() -> dict[str, str]:
    """The compiler and the processor by name, for people."""
    compiler, _, name = find_compiler(), *(_cpu().partition("model name")[1:])
    return {"compiler": f"{shlex.join(compiler)} ({_stamp(compiler[0])})", "processor": _model(name)}


def _model(text: str) -> str:
    name = text.partition(":")[2].partition("\n")[0].strip()
    return f"{name or os.uname().machine} ({hashlib.sha256(_cpu().encode()).hexdigest()[:8]})"


def describe(library: str) -> dict[str, str] | None:
    """A library as plans record it; None if it is in this process's own folder."""
    path = pathlib.Path(library)
    own = not config.cache_dir or path.parent.parent != pathlib.Path(config.cache_dir)
    return None if own else {"library": path.name}


def kept_library(name: str, folder: pathlib.Path | None = None) -> str | None:
    """The path from which the library `name` loads: from the cache, or from `folder` if that is given.

    None if it is truncated or does not load.
    """
    if pathlib.PurePath(name).name != name:
        return None
    if folder is not None:
        kept = _kept(folder / name)
    else:
        library = _cache_folder() / name
        kept = _kept(library) or _fetched(library)
    return str(kept) if kept is not None else None


def _kept(library: pathlib.Path) -> pathlib.Path | None:
    """The path from which an existing library loads; None if there is none, or it is truncated or does not load."""
    data = files.read(library)
    try:
        if data is None or is_cut(library):
            return None
    except OSError:  # removed by another process
        return None
    problem = _loads(library)
    if problem is None:
        return library
    return _elsewhere(library, data, problem) if os.path.lexists(library) else None  # another process may remove it


def _fetched(library: pathlib.Path) -> pathlib.Path | None:
    """The path from which a library of the remote store loads; None if there is none that loads."""
    data = remote.fetch(library)
    if data is None:
        return None
    library = _folder_for(library) / library.name
    with contextlib.suppress(OSError):
        files.write(library, data)
    return _kept(library)


def _elsewhere(
    library: pathlib.Path, data: bytes, problem: str, entries: Sequence[str] = ()
) -> pathlib.Path | None:  # fmt: skip
    """A copy of a whole library in this process's own folder, if that loads: its folder may be mounted with noexec."""
    own = files.private_folder()
    if own == library.parent:
        return None
    with contextlib.suppress(OSError):
        files.write(own / library.name, data)
        if _loads(own / library.name, entries) is None:
            return _instead_of(library.parent, f"no library loads from there: {problem}") / library.name
    return None


def _make(
    library: pathlib.Path, parts: tuple[str, ...], flags: tuple[str, ...], libraries: tuple[str, ...],
    entries: Sequence[str],
) -> pathlib.Path:  # fmt: skip
    """Compile and link a library. CompileError if the compiler fails, or its library cannot be loaded."""
    compiler = find_compiler()
    try:
        with files.working_folder(library.parent) as work:
            if len(parts) == 1:
                inputs = [_source_file(work, 0, parts[0])]
            else:
                inputs = workers.run_all(lambda at: _object_file(work, at, parts[at], flags), range(len(parts)))
            made = work / library.name
            command = [*compiler, *flags, *map(str, inputs), "-o", str(made)]
            run_compiler([*command, *libraries])
            problem = _problem(made, entries)
            if problem is not None and compilers.whole(libraries) != libraries and _lacks_symbols(made):
                run_compiler([*command, *compilers.whole(libraries)])
                problem = _problem(made, entries)
            found: pathlib.Path | None = None
            if made.exists():
                data = made.read_bytes()
                found = library if problem is None else _elsewhere(library, data, problem, entries)
            if found is None:
                raise CompileError(f"{compiler[0]} ended without an error, but {problem}")
            files.put(made, library)
            remote.offer(library, data)
            eviction.note(len(data))
    except (OSError, CompileError) as e:
        text = e.log if isinstance(e, CompileError) else str(e)
        if str(library.parent) == str(files.private_folder()) or (isinstance(e, CompileError) and not is_full(text)):
            raise
        # or it reports that there is no space at all
        elsewhere = _make(files.private_folder() / library.name, parts, flags, libraries, entries)
        _instead_of(library.parent, refused(text) or getattr(e, "strerror", None) or str(e))
        return elsewhere
    with contextlib.suppress(OSError):  # read-only
        files.write(library.with_suffix(".cpp"), "\n".join(parts).encode(), sealed=False)
    return found


def _loads(library: pathlib.Path, entries: Sequence[str] = ()) -> str | None:
    """None if the library loads and has all `entries`, else the reason."""
    try:
        loaded = Library(str(library))  # and unloaded: the launcher loads it while it has a kernel of it
        for entry in entries:
            loaded.address(entry)
    except OSError as e:
        return f"what it wrote cannot be loaded: {str(e).removeprefix(f'{library}: ')}"
    return None


def _problem(made: pathlib.Path, entries: Sequence[str] = ()) -> str | None:
    """The reason why the compiler's output is no library with `entries`; None if it is one."""
    if not made.exists():
        return "it wrote no library"
    return "what it wrote is cut" if is_cut(made) else _loads(made, entries)


def _lacks_symbols(made: pathlib.Path) -> bool:
    """Whether a library does not load because it was linked without a symbol."""
    return "symbol" in (_problem(made) or "")


def _source_file(work: pathlib.Path, at: int, text: str) -> pathlib.Path:
    path = work / f"{at}.cpp"
    path.write_text(text)
    return path


def _object_file(work: pathlib.Path, at: int, text: str, flags: Sequence[str]) -> pathlib.Path:
    compiler = find_compiler()
    source = _source_file(work, at, text)
    made = source.with_suffix(".o")
    run_compiler([*compiler, *(f for f in flags if f != "-shared"), "-c", str(source), "-o", str(made)])
    return made


# Tried in turn if the compiler itself crashes, as g++ 12 does at -O2 on indices of 16-bit extremes over a middle dim.
_OTHER_LEVELS = ("-O3", "-O1")


def run_compiler(command: list[str]) -> None:
    """Run one compiler command, at other optimisation levels if the compiler crashes. CompileError with its output."""
    place = os.path.dirname(command[command.index("-o") + 1]) if "-o" in command else None
    temporaries = process.temporaries_in(place) if place else contextlib.nullcontext()
    with span("compiler", command=command[0]), temporaries:
        code, log = process.run(command, config.compile_timeout_seconds)
        for level in _OTHER_LEVELS:
            if code == 0 or "internal compiler error" not in log:
                break
            code, log = process.run([*command, level], config.compile_timeout_seconds)
    if code != 0 and (why := refused(log)) is not None:
        raise CompileError(f"{command[0]} cannot work: {why}", log)
    if code != 0:
        raise CompileError(f"{command[0]} failed with exit code {code}: {gist(log)}", log)
