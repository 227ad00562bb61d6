"""Starting the ranks of a job on this machine, as torchrun does; on the CPU as forks of one process."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


SKEW = 1.0  # seconds between the first and the last rank that has its first result


def run(ranks: int, folder: pathlib.Path, device: str, names: list[str], timeout: float = 600) -> list[dict[str, Any]]:
    """What each rank says of the cases `names`; its error output if it ends otherwise. They share an empty cache."""
    env = os.environ | {
        "FUSER_CACHE_DIR": str(folder / "cache"), "FUSER_CHECK_IR": "0", "FUSER_CHECK_PASSES": "0",
        "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    arguments = [str(ranks), str(folder / "store"), device, *names]
    command = [sys.executable, "-m", "tests.distributed.programs"]
    outputs = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(ranks)]
    processes = []
    if device == "cpu":
        processes.append(subprocess.Popen([*command, "all", *arguments], env=env, cwd=ROOT, start_new_session=True))
    for rank, (out, err) in enumerate(outputs if device != "cpu" else ()):
        with out.open("w") as o, err.open("w") as e:
            started = [*command, str(rank), *arguments]
            processes.append(
                subprocess.Popen(started, env=env, stdout=o, stderr=e, cwd=ROOT, start_new_session=True)
            )  # fmt: skip
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = []
    for rank, (out, err) in enumerate(outputs):
        lines = [line for line in out.read_text().splitlines() if line.startswith("{")]  # NCCL may write there, too
        assert lines, f"rank {rank} ended: {err.read_text()[-6000:]}"
        found.append(json.loads(lines[-1]))
    return found


def check_case(said: list[dict[str, Any]], name: str) -> None:
    """Every rank has run the case `name` as in eager."""
    for rank, one in enumerate(said):
        assert name in one["failed"], f"rank {rank} did not come so far"
        assert one["failed"][name] is None, f"rank {rank}: {one['failed'][name]}"


def check_compiled_once(said: list[dict[str, Any]], binaries: list[pathlib.Path]) -> None:
    """The ranks together have made each of the cache's binaries once."""
    made = [one["stats"]["binaries_made"] for one in said]
    assert binaries and sum(made) == len(binaries), (made, sorted(path.name for path in binaries))
    assert all(one["stats"]["failures"] == 0 for one in said)


def check_skew(said: list[dict[str, Any]]) -> None:
    """The ranks have their first results within `SKEW` seconds."""
    began, ended = (sorted(one[when] for one in said) for when in ("began", "ended"))
    print(f"{len(ended)} ranks: {ended[-1] - began[0]:.2f} s, skew {ended[-1] - ended[0]:.2f} s")
    assert ended[-1] - ended[0] <= SKEW
