"""Each program once, with the mode and dtype that its position gives; `make peers` runs all modes and dtypes.

Of sixteen neighbours one goes through Dynamo: families of programs lie side by side, so most have one that does.
"""

from __future__ import annotations

import pytest

from tests.peers.run import DTYPES, PEERS, check, checks_of
from tests.peers.spec import Peer

CHUNK = 10


def _chunks() -> list[list[Peer]]:
    peers = list(PEERS.values())
    return [peers[k : k + CHUNK] for k in range(0, len(peers), CHUNK)]


def _turn(place: int, peer: Peer) -> tuple[str, str]:
    """A dtype and a mode; most programs are registered, which takes a fraction of Dynamo's time."""
    dynamo = place % 16 == 1
    checks = [c for c in checks_of(peer) if (c[1] == "registered") is not dynamo]
    return checks[place // (16 if dynamo else 8) % len(checks)]


@pytest.mark.parametrize("number", range(len(_chunks())))
def test_programs(number):
    found = []
    for k, peer in enumerate(_chunks()[number]):
        dtype, mode = _turn(number * CHUNK + k, peer)
        try:
            problem = check(peer, DTYPES[dtype], mode)
        except ValueError:  # eager has it not, or it has no graph
            continue
        if problem is not None:
            found.append(f"{peer.name} {dtype} {mode}: {problem}")
    assert not found, "\n".join(found)


def test_there_are_many():
    assert len(PEERS) >= 300
