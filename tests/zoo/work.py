"""What a worker process of `python -m tests.zoo` does."""

from __future__ import annotations

import traceback

from tests.zoo.libraries import prepare
from tests.zoo.modes import Verdict, check

Case = tuple[str, str, bool, bool]


def start(threads: int) -> None:
    """Prepare a worker."""
    import torch

    prepare()
    torch.set_num_threads(threads)


def run(case: Case) -> Verdict:
    """The verdict on one architecture in one mode."""
    from tests.zoo.architectures import ZOO

    name, mode, rival, timed = case
    try:
        return check(ZOO[name], mode, rival, timed)
    except Exception:
        return Verdict(name, mode, "raised", traceback.format_exc(limit=-6))
