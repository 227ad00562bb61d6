"""Which tiles are good: rows of `benchmarks.h200` with other tiles, on one GPU: `python -m benchmarks.h200_sweep`."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.h200 import ROWS, checks, copy_time, kernel_of, timed
from fuser.cuda import tiles
from fuser.cuda.tiles import Tile
from fuser.runtime import launcher


def persistent(length: int, elements: int, warps: int) -> dict[str, Any]:
    """The table with one other row."""
    return {"PERSISTENT": tuple((n, elements, warps) if n == length else (n, e, w) for n, e, w in tiles.PERSISTENT)}


def columns(length: int, results: int, warps: int) -> dict[str, Any]:
    """The same for columns."""
    return {
        "PERSISTENT_COLUMNS": {
            size: tuple((n, results, warps) if n == length else (n, r, w) for n, r, w in table)
            for size, table in tiles.PERSISTENT_COLUMNS.items()
        }
    }


def candidates(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other values of the tables for a row."""
    if re.search("gelu|swiglu|add_relu|mixed|adam", name):
        for elements in (512, 1024, 2048, 4096):
            for warps in (4, 8):
                table = dict.fromkeys((1, 2, 4, 8), elements)
                yield f"{elements} by {warps}", {"POINTWISE_ELEMENTS": table, "POINTWISE_WARPS": warps}
    elif "transposed" in name:
        for a, b, warps in ((64, 64, 8), (64, 64, 4), (32, 64, 4), (32, 128, 8), (128, 64, 8), (32, 32, 4)):
            yield f"{a}x{b} by {warps}", {"TRANSPOSED": Tile(a, b, warps)}
    elif re.search("16k", name):
        for warps in (8, 16, 32):
            yield f"{warps} warps", persistent(16384, 16384, warps)
    elif re.search("131k|cross", name):
        for n, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32)):
            yield f"{n} by {warps}", {"LOOPED_ROW": Tile(1, n, warps), "LOOPED_ROW_AGAIN": Tile(1, n, warps)}
    elif "mid" in name:
        for results, warps in ((16, 4), (16, 8), (32, 4), (32, 8), (32, 16), (64, 8), (64, 16)):
            yield f"{results} by {warps}", columns(256, results, warps)
    elif re.search("column|full", name):
        shapes = ((64, 64, 8), (64, 32, 4), (128, 32, 8), (128, 64, 8), (128, 16, 4), (32, 128, 8), (256, 16, 8))
        for a, b, warps in shapes:
            for programs in (512, 1056, 2112):
                new: dict[str, Any] = {
                    "LOOPED_COLUMNS": dict.fromkeys((1, 2, 4, 8), Tile(a, b, warps)),
                    "SPLIT_COLUMNS": dict.fromkeys((1, 2, 4, 8), Tile(a, b, warps)),
                    "SPLIT_PROGRAMS": dict.fromkeys((1, 2, 4, 8), programs),
                    "COLUMN_PROGRAMS": dict.fromkeys((1, 2, 4, 8), programs),
                }
                if "full" in name:
                    new["LOOPED_ROW"] = Tile(1, a * b, warps)
                yield f"{a}x{b} by {warps}, {programs}", new
    else:
        words = {1024: "1k", 8192: "8k|norm bf16", 4096: ""}
        length = 4096 if "rms" in name else next(n for n, word in words.items() if re.search(word, name))
        for elements in (length, 2 * length):
            for warps in (4, 8, 16):
                yield f"{elements} by {warps}", persistent(length, elements, warps)


def main() -> None:
    """All rows, or those that match the command line."""
    launcher.wait(60)
    for row in ROWS:
        if not re.search(sys.argv[1] if len(sys.argv) > 1 else "", row.name):
            continue
        torch.manual_seed(0)
        args = row.make()
        moved = sum(t.nbytes for t in (*checks.tensors(args), *checks.tensors(row.fn(*args))))
        copy = copy_time(moved)
        found = []
        for label, tables in [("as it is", {}), *candidates(row.name)]:
            try:
                handle = kernel_of(dataclasses.replace(row, tables=tables), args)
                found.append((copy / timed(functools.partial(handle, *args), 10), label))
            except Exception as e:  # a tile that does not fit
                print(row.name, label, type(e).__name__, str(e)[:100])
        own = next((s for s, label in found if label == "as it is"), 0.0)
        best = sorted(found, reverse=True)[:4]
        texts = [f"{label} {100 * s:.1f}%" for s, label in best]
        print(f"{row.name:20} {100 * own:4.0f}%  best: {'; '.join(texts)}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
