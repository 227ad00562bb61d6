"""What a worker process of `python -m tests.peers` does."""

from __future__ import annotations

import os
import traceback
import warnings

Case = tuple[str, str, str]


def start(threads: int) -> None:
    """Prepare a worker."""
    os.environ.setdefault("FUSER_SLOWEST", "0")
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(threads)


def run(case: Case) -> tuple[Case, str, str]:
    """A case, "right", "wrong", "raised" or "left out", and why."""
    from tests.peers.run import DTYPES, PEERS, check, is_torchs_own

    name, dtype, mode = case
    try:
        found = check(PEERS[name], DTYPES[dtype], mode)
    except ValueError as error:
        return case, "left out", str(error)
    except Exception as error:
        why = traceback.format_exc(limit=-4)
        if is_torchs_own(PEERS[name], DTYPES[dtype], mode):
            return case, "left out", f"aot_eager raises, too: {type(error).__name__}"
        return case, "raised", why
    return (case, "right", "") if found is None else (case, "wrong", found)
