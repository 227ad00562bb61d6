"""The command line, as a record that every suite takes."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """`rows` selects rows by a search in their names; `rivals` are the contestants beside fuser.

    `threads` are the numbers of threads that `kernels` and `frozen` run with; none: as many as torch has.
    `caches` is a folder that keeps Inductor's compiler caches between runs of `kernels` and `optimizers`.
    """

    device: str = "cpu"
    rows: str = ""
    quick: bool = False
    full: bool = False
    mode: str = "infer"
    rivals: tuple[str, ...] = ("eager", "inductor", "xla")
    caches: str = ""
    threads: tuple[int, ...] = ()

    def wants(self, name: str) -> bool:
        """Is this row selected?"""
        return re.search(self.rows, name) is not None

    def has(self, rival: str) -> bool:
        """Does this rival run?"""
        return rival in self.rivals
