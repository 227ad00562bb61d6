"""Every sixth program once, with the mode and dtype that its position gives; `make peers` runs all, in all of them.

Families of programs lie side by side, so most are here. Of sixteen neighbours one goes through Dynamo. The
kernels of the others are compiled together, as a compiler's start costs more than most of them, and of four programs
one is optimised as for users.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.batch import BatchBackend
from tests.peers.run import DTYPES, PEERS, check, checks_of, registered
from tests.peers.spec import Peer

CHUNK = 20
OPTIMISED = 4  # of so many programs one
SHARE = 1 if os.environ.get("FUSER_TEST_ALL") else 6


def _chunks() -> list[list[tuple[int, Peer]]]:
    """Some programs each, with their positions."""
    peers = [(k, peer) for k, peer in enumerate(PEERS.values()) if k % SHARE == SHARE - 1]
    return [peers[k : k + CHUNK] for k in range(0, len(peers), CHUNK)]


def _turn(place: int, peer: Peer) -> tuple[str, str]:
    """A dtype and a mode; most programs are registered, which takes a fraction of Dynamo's time."""
    dynamo = place % 16 == 1
    checks = [c for c in checks_of(peer) if (c[1] == "registered") is not dynamo]
    return checks[place // (16 if dynamo else 8) % len(checks)]


def _registered(turns: dict[str, tuple[str, str]]) -> dict[str, Callable[..., Any]]:
    """By name, what is behind a handle, with its kernels; without what eager has not, and what has no graph."""
    made, names = {}, [name for name, (_, mode) in turns.items() if mode == "registered"]
    backend = BatchBackend()
    with backend.installed():
        for backend.level, some in (("-O2", names[::OPTIMISED]), ("-O0", names)):
            with backend.collecting():
                for name in some:
                    if name not in made:
                        with contextlib.suppress(ValueError):
                            made[name], call = registered(PEERS[name], DTYPES[turns[name][0]])
                            backend.rehearse(call)
    assert backend.compiled > 0.6 * len(made)
    return made


@pytest.mark.parametrize("number", range(len(_chunks())))
def test_programs(number):
    turns = {peer.name: _turn(k, peer) for k, peer in _chunks()[number]}
    made, found = _registered(turns), []
    for name, (dtype, mode) in turns.items():
        if mode == "registered" and name not in made:
            continue
        try:
            problem = check(PEERS[name], DTYPES[dtype], mode, made.get(name))
        except ValueError:
            continue
        if problem is not None:
            found.append(f"{name} {dtype} {mode}: {problem}")
    assert not found, "\n".join(found)


def test_there_are_many():
    assert len(PEERS) >= 300
