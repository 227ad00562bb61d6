"""A headless Chromium, driven over a pipe by its DevTools protocol: pages opened, scripts run, errors collected."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The browser's path; None where there is none. `CHROMIUM` names another."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page. `errors` are its console errors, uncaught exceptions and requests of the network."""

    def __init__(self, width: int = 1400, height: int = 900) -> None:
        path = find()
        assert path is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, their_write), (their_read, write) = os.pipe(), os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}",
            "--disable-background-networking", "--disable-extensions", "about:blank",
        ]  # fmt: skip

        def place() -> None:
            """The browser reads from 3 and writes to 4."""
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (their_read, their_write)]
            for fd, at in zip(moved, (3, 4)):
                os.dup2(fd, at)

        self._process = subprocess.Popen(
            [path, *flags], pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(their_read)
        os.close(their_write)
        self._read, self._write = read, write
        self._text, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of one call of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _next(self, seconds: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._text += part
        first, _, self._text = self._text.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"])[:600])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.errors.append(f"a request of {params['request']['url']}")

    def open(self, path: pathlib.Path) -> None:
        """Go to a file."""
        self.call("Page.navigate", url=path.resolve().as_uri())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; what it raises is an AssertionError."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> float:
        """Wait until an expression is true; the seconds that this took."""
        began = time.monotonic()
        while not self.run(script):
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {script}"
            time.sleep(0.02)
        return time.monotonic() - began

    def click(self, x: float, y: float) -> None:
        """A click of the mouse at a place in the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def dark(self, on: bool) -> None:
        """The system's colours."""
        value = "dark" if on else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def picture(self, path: pathlib.Path) -> None:
        """Write what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()
