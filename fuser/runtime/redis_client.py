"""A Redis client on top of the package `redis`, with limits on time and size that no server can exceed."""

from __future__ import annotations

import importlib
import time
from collections import deque
from typing import Any

_IDLE = 4  # most connections kept open


class Unusable(ValueError):
    """There can be no client: the reason, and the cure."""

    def __init__(self, why: str, cure: str) -> None:
        super().__init__(f"{why}; {cure}")
        self.why, self.cure = why, cure


class Rubbish(Exception):
    """The server sent something that no Redis server sends for such a request, or too much of it."""


class _Bounded:
    """A socket that returns at most `most` bytes, and waits until `deadline` at most, however slowly bytes arrive."""

    def __init__(self, inner: Any, deadline: float, most: int) -> None:
        self._inner, self.deadline, self.most = inner, deadline, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settimeout(self, _: float | None) -> None:
        """Ignored: the deadline decides."""

    def _wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._inner.settimeout(left)

    def _count(self, number: int) -> None:
        self.most -= number
        if self.most < 0:
            raise Rubbish("it sends more bytes than an entry has")

    def recv(self, *args: Any) -> bytes:
        self._wait()
        data: bytes = self._inner.recv(*args)
        self._count(len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        self._wait()
        number: int = self._inner.recv_into(*args)
        self._count(number)
        return number

    def sendall(self, data: Any) -> None:
        self._wait()
        self._inner.sendall(data)


class Client:
    """Requests to the server at `url`. Unusable if the package `redis` is missing, or `url` is not a Redis address.

    Several threads may make requests at once. Each request raises the package's errors, OSError, or Rubbish.
    """

    def __init__(self, url: str) -> None:
        try:
            self._package: Any = importlib.import_module("redis")
            importlib.import_module("redis.connection")
        except ImportError as e:
            raise Unusable(f"the package redis is missing ({e})", "pip install fuser[redis]") from None
        try:
            given = self._package.connection.parse_url(url)
        except ValueError as e:
            raise Unusable(f"its address is wrong: {e}", "set FUSER_REMOTE_CACHE to redis://host:6379/0") from None
        base = given.pop("connection_class", self._package.connection.Connection)

        def connect(connection: Any) -> Any:
            connection.bounded = _Bounded(base._connect(connection), connection.deadline, connection.most)
            return connection.bounded

        self._made = type("BoundedConnection", (base,), {"_connect": connect})
        # Redis 6 and later have further kinds of answers, and the package's own timeouts and retries would add up.
        self._given = given | {"protocol": 2, "retry_on_timeout": False}
        self._idle: deque[Any] = deque(maxlen=_IDLE)
        self.where = self._where(given)

    @staticmethod
    def _where(given: dict[str, Any]) -> str:
        """The address without its password."""
        if "path" in given:
            return f"unix://{given['path']}"
        return f"redis://{given.get('host', 'localhost')}:{given.get('port', 6379)}/{given.get('db', 0)}"

    def get(self, name: str, deadline: float, most: int) -> bytes | None:
        """The value under `name`, of at most `most` bytes; None if there is none."""
        value = self._ask(deadline, most + 64, "GET", name)
        if value is not None and not isinstance(value, bytes):
            raise Rubbish(f"its answer to a read is no value but {type(value).__name__}")
        return value

    def set(self, name: str, value: bytes, deadline: float, seconds: int) -> None:
        """Store `value` under `name` for `seconds`."""
        if self._ask(deadline, 4096, "SET", name, value, "EX", seconds) not in (b"OK", "OK"):
            raise Rubbish("it does not confirm a write")

    def _ask(self, deadline: float, most: int, *command: Any) -> Any:
        while True:
            try:
                connection, reused = self._idle.pop(), True
                connection.bounded.deadline, connection.bounded.most = deadline, most
            except IndexError:
                connection, reused = self._new(deadline, most), False
            try:
                if not reused:
                    connection.connect()
                    if connection.bounded is None:
                        raise Unusable("this version of the package redis makes sockets of its own", "update it")
                    connection.bounded.most = most
                connection.send_command(*command)
                answer = connection.read_response()
            except BaseException as e:
                connection.disconnect()
                closed = self._package.exceptions.ConnectionError
                if reused and isinstance(e, closed) and not isinstance(e, self._package.exceptions.TimeoutError):
                    continue  # the server has closed it: the next one is tried, finally a new one
                raise
            self._idle.append(connection)
            return answer

    def _new(self, deadline: float, most: int) -> Any:
        left = max(deadline - time.monotonic(), 1e-3)
        made = self._made(**self._given | {"socket_timeout": left, "socket_connect_timeout": left})
        made.deadline, made.most, made.bounded = deadline, 1 << 16, None
        return made

    def after_fork(self) -> None:
        """Drop the connections in a child; its parent's stay open there."""
        self._idle.clear()


__all__ = ["Client", "Rubbish", "Unusable"]
