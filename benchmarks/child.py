"""Fresh processes with empty caches: `python -m benchmarks.child SUITE PARAMS` runs `child(params)` of that suite."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "@result "
CACHES = {
    "FUSER_CACHE_DIR": "fuser",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "xdg",
    "JAX_COMPILATION_CACHE_DIR": "jax",
}


def environment(cache: str) -> dict[str, str]:
    """This process's environment with every compiler cache below `cache` and this checkout on the path."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the bytecode of an installed package is there at its first import
    env.update({name: str(pathlib.Path(cache) / folder) for name, folder in CACHES.items()})
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    return env


def spawn(
    suite: str, params: dict[str, Any], cache: str, timeout: float = 900.0, inductor: str = ""
) -> dict[str, Any]:
    """What the suite's `child(params)` returns, run in a fresh process; {"error": sentence} if it failed.

    `inductor` is a folder for Inductor's caches that outlives `cache`.
    """
    command = [sys.executable, "-m", "benchmarks.child", suite, json.dumps(params)]
    env = environment(cache) | ({"TORCHINDUCTOR_CACHE_DIR": str(pathlib.Path(inductor).absolute())} if inductor else {})
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line[len(MARK) :])
            return result
    tail = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return {"error": f"exit status {done.returncode}: {tail[-1].strip() if tail else 'no output'}"}


def main() -> None:
    """Entry of the fresh process. Imports torch, and nothing else heavy, before the suite starts its clock."""
    import torch

    suite, params = sys.argv[1], json.loads(sys.argv[2])
    with torch.no_grad():
        result = importlib.import_module(f"benchmarks.suites.{suite}").child(params)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
