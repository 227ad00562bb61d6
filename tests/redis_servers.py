"""Redis servers for tests: Debian's own where it is installed, and one that can be made to misbehave."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator

REAL = shutil.which("redis-server")


@contextlib.contextmanager
def real(folder: pathlib.Path, *options: str) -> Iterator[str]:
    """The address of a Redis server on loopback that keeps nothing on disk, with its data in `folder`."""
    assert REAL is not None
    port = free_port()
    command = [REAL, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < end, "the server did not start"
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _well(server: Fake, out: socket.socket, answer: bytes) -> None:
    out.sendall(answer)


def _silent(server: Fake, out: socket.socket, answer: bytes) -> None:
    server.over.wait(20)


def _drips(server: Fake, out: socket.socket, answer: bytes) -> None:
    for byte in b"$1000000\r\n" + b"x" * 1000:
        out.sendall(bytes([byte]))
        if server.over.wait(0.05):
            return


def _endless(server: Fake, out: socket.socket, answer: bytes) -> None:
    out.sendall(b"$99999999999\r\n")
    while not server.over.is_set():
        out.sendall(b"x" * (1 << 20))
        server.sent += 1 << 20


def _closes(server: Fake, out: socket.socket, answer: bytes) -> None:
    out.sendall(b"$1000\r\nabc")
    out.shutdown(socket.SHUT_RDWR)


def _sends(*answers: bytes):
    def send(server: Fake, out: socket.socket, answer: bytes) -> None:
        for part in answers:
            out.sendall(part)

    return send


WAYS = {
    "well": _well,
    "silent": _silent,
    "drips": _drips,
    "endless": _endless,
    "closes": _closes,
    "rubbish": _sends(b"\x00\xff GET / HTTP/1.1\r\n\r\n"),
    "no lines": _sends(os.urandom(64).replace(b"\n", b"") * 1000),
    "a number": _sends(b":5\r\n"),
    "a list": _sends(b"*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
    "a deep list": _sends(b"*1\r\n" * 10000),
    "a long list": _sends(b"*1000000000\r\n", b":1\r\n" * 1000),
    "a negative length": _sends(b"$-7\r\n"),
    "out of memory": _sends(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
    "not allowed": _sends(b"-NOPERM this user has no permissions\r\n"),
    "loading": _sends(b"-LOADING Redis is loading the dataset in memory\r\n"),
    "asks to move": _sends(b"-MOVED 3999 127.0.0.1:1\r\n"),
    "empty": _sends(b"$0\r\n\r\n"),
    "another's value": _sends(b"$70\r\n" + b"y" * 70 + b"\r\n"),
    "a large value": _sends(b"$30000000\r\n", b"z" * 30000000, b"\r\n"),
}


class Fake(socketserver.ThreadingTCPServer):
    """A server that speaks enough of Redis, and answers requests in one of WAYS."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, way: str = "well") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.way, self.data, self.requests, self.sent = way, dict[bytes, bytes](), list[tuple[bytes, ...]](), 0
        self.over = threading.Event()
        self.connections = list[socket.socket]()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        return f"redis://user:hidden@127.0.0.1:{self.server_address[1]}/0"

    def asked(self, command: bytes) -> list[tuple[bytes, ...]]:
        return [r for r in self.requests if r[0] == command]

    def drop_connections(self) -> None:
        while self.connections:
            with contextlib.suppress(OSError):
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no error."""


class _Handler(socketserver.StreamRequestHandler):
    server: Fake

    def handle(self) -> None:
        self.server.connections.append(self.request)
        while (line := self.rfile.readline()).startswith(b"*"):
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            self.server.requests.append(tuple(words))
            command = words[0].upper()
            if command not in (b"GET", b"SET"):
                self.request.sendall(b"+OK\r\n")
                continue
            if command == b"SET" and self.server.way == "well":
                self.server.data[words[1]] = words[2]
            found = self.server.data.get(words[1])
            answer = b"+OK\r\n" if command == b"SET" else b"$-1\r\n"
            if command == b"GET" and found is not None:
                answer = b"$%d\r\n%s\r\n" % (len(found), found)
            WAYS[self.server.way](self.server, self.request, answer)


@contextlib.contextmanager
def fake(way: str = "well") -> Iterator[Fake]:
    """A server that answers in a way of WAYS."""
    with Fake(way) as server:
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            server.drop_connections()
