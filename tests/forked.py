"""Processes of their own for tests, without an import of torch each, which takes more than a second.

`run` is `subprocess.run([sys.executable, *command], capture_output=True, text=True)`. The process is forked from one
that has imported torch, and neither this package nor anything else; its variables, folder, path and output are its own.
Options `-W` hold from where `command` begins. What is decided while Python or torch start, as other options of the
interpreter or other variables than `OWN`, has a process that starts from nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

OWN = (
    "FUSER_", "CXX", "HOME", "PATH", "PYTEST_CURRENT_TEST", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_ALWAYS_COMPILE",  # which torch sets in this process meanwhile
)  # fmt: skip

# What runs in the process that forks. A fork leaves the loop, and does what was asked as the main program. It ends by
# what runs at exit, without taking apart torch's modules: that would copy half of the memory that it shares.
_SERVER = """
import atexit, gc, importlib, json, os, runpy, socket, struct, sys, threading, types, warnings
path = sys.path[1:]
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()
connection = socket.socket(fileno=int(sys.argv[1]))

def fork():
    while True:
        text, files, _, _ = socket.recv_fds(connection, 1 << 24, 2)
        if not text:
            os._exit(0)
        child = os.fork()
        if not child:
            connection.close()
            return json.loads(text), files
        for file in files:
            os.close(file)
        connection.send(struct.pack("q", child))
        connection.send(struct.pack("q", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))

def prepare(asked, files):
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["cwd"])
    for name in {*os.environ} - {*asked["env"]}:
        del os.environ[name]
    os.environ.update(asked["env"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    kind, what, *arguments = asked["command"]
    first = {"-c": "", "-m": os.getcwd(), "": os.path.dirname(os.path.abspath(what))}[kind]
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    sys.warnoptions += asked["warnings"]
    warnings._processoptions(asked["warnings"])
    sys.argv[:] = [kind or what, *arguments]
    return kind, what

def run(kind, what):
    if kind == "-m":
        return runpy.run_module(what, run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if not kind:
        main.__file__ = what
    exec(compile(what if kind else open(what).read(), "<string>" if kind else what, "exec"), vars(main))

def end(function, *arguments):
    code = 0
    try:
        function(*arguments)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if code and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)

end(run, *prepare(*fork()))
"""


def _read(env: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The variables that what is imported may have read."""
    return frozenset((name, value) for name, value in env.items() if not name.startswith(OWN))


class _Server:
    """A process that has imported `modules` and forks one at a time."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _SERVER, str(theirs.fileno()), *modules]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()

    def close(self) -> None:
        self.connection.close()
        self.process.wait(10)

    def number(self) -> int:
        said = self.connection.recv(8)
        assert said, "the process that forks has ended"
        return int.from_bytes(said, sys.byteorder, signed=True)


@functools.cache
def _server(modules: tuple[str, ...], variables: frozenset[tuple[str, str]]) -> _Server:
    """For `variables` as they are now: a library that is imported meanwhile may set some for its processes."""
    made = _Server(modules)
    atexit.register(made.close)
    return made


def _ask(
    server: _Server, command: list[str], filters: list[str], env: Mapping[str, str], cwd: str, timeout: float
) -> tuple[int, bytes, bytes]:  # fmt: skip
    pipes = [os.pipe(), os.pipe()]
    text = json.dumps({"command": command, "warnings": filters, "env": dict(env), "cwd": cwd}).encode()
    socket.send_fds(server.connection, [text], [w for _, w in pipes])
    for _, w in pipes:
        os.close(w)
    child, until = server.number(), time.monotonic() + timeout
    said: dict[int, list[bytes]] = {r: [] for r, _ in pipes}
    open_ = set(said)
    ended = None
    try:
        while open_ or ended is None:
            left = until - time.monotonic()
            waited = [*open_, *([server.connection.fileno()] if ended is None else [])]
            ready = select.select(waited, [], [], max(left, 0))[0]
            if not ready:
                raise subprocess.TimeoutExpired(command, timeout)
            for file in ready:
                if file not in said:
                    ended = server.number()
                elif part := os.read(file, 1 << 16):
                    said[file].append(part)
                else:
                    open_.discard(file)
    finally:
        if ended is None:
            os.kill(child, 9)
            server.number()
        for r, _ in pipes:
            os.close(r)
    out, err = (b"".join(parts) for parts in said.values())
    return ended, out, err


def run(
    command: list[str], env: Mapping[str, str] | None = None, cwd: Any = None, timeout: float = 300,
    dynamo: bool = False, check: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """A Python process with `command`: "-c" and code, "-m" and a module, or a file, then arguments, all behind options
    "-W". `dynamo`: it has imported Dynamo, too."""
    env = os.environ if env is None else env
    cwd = os.getcwd() if cwd is None else str(cwd)
    asked, filters = command, []
    while asked[0] == "-W":
        filters, asked = [*filters, asked[1]], asked[2:]
    asked = asked if asked[0][:1] == "-" else ["", *asked]
    if asked[0] not in ("-c", "-m", "") or _read(env) != _read(os.environ):
        command = [sys.executable, *command]
        return subprocess.run(
            command, capture_output=True, text=True, env=dict(env), cwd=cwd, timeout=timeout, check=check
        )  # fmt: skip
    server = _server(("torch._dynamo",) if dynamo else ("torch",), _read(os.environ))
    code, out, err = _ask(server, asked, filters, env, cwd, timeout)
    done = subprocess.CompletedProcess([sys.executable, *command], code, out.decode(), err.decode())
    if check:
        done.check_returncode()
    return done
