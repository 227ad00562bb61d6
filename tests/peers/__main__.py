"""`python -m tests.peers [--only REGEX] [--modes …] [--dtypes …] [--workers N] [--device cuda]`: programs in all modes.

Prints a line for each wrong result, then a table by family. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter

from tests.device import use_device
from tests.peers.work import run, start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that a program's name matches")
    parser.add_argument("--modes", default="inference,training,dynamic,few,registered")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", help="cuda instead of the CPU")
    options = parser.parse_args()
    use_device(options.device)
    os.environ.setdefault("FUSER_CACHE_DIR", tempfile.mkdtemp(prefix="fuser-peers-"))
    from tests.peers.run import PEERS, checks_of

    modes, dtypes = options.modes.split(","), options.dtypes.split(",")
    cases = [
        (name, d, m)
        for name, peer in PEERS.items() if re.search(options.only, name)
        for d, m in checks_of(peer) if d in dtypes and m in modes
    ]  # fmt: skip
    count: dict[str, Counter[str]] = {}
    with multiprocessing.get_context("spawn").Pool(options.workers, start, (1,), maxtasksperchild=200) as pool:
        for (name, d, m), verdict, why in pool.imap_unordered(run, cases, chunksize=4):
            count.setdefault(name.partition("/")[0], Counter())[verdict] += 1
            if verdict != "right":
                print(f"{verdict}: {name} {d} {m}: {why}", flush=True)
    total: Counter[str] = sum(count.values(), Counter())
    for family, found in sorted(count.items()):
        print(f"{family:14}", *(f"{v} {found[v]:5}" for v in ("right", "wrong", "raised", "left out")), sep="  ")
    print(f"{len({n for n, _, _ in cases})} programs, {total.total()} runs:", dict(total))
    return int(total["wrong"] + total["raised"] > 0)


if __name__ == "__main__":
    sys.exit(main())
