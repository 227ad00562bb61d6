"""`python -m benchmarks SUITE ...`: run suites, print their tables and targets, exit 1 if a result was wrong."""

from __future__ import annotations

import argparse
import importlib
import re
import sys

import torch

from benchmarks import report
from benchmarks.contestants import RIVALS
from benchmarks.options import Options

SUITES = {
    "coldstart": "seconds from a fresh process to the first result, with empty and with warm caches",
    "overhead": "microseconds of a call on 16 elements, with 1 to 10,000 registered specifications",
    "kernels": "about thirty kernels in three sizes beside eager, the rivals, and a copy of the same bytes",
    "models": "compile seconds, steady milliseconds and memory of five models",
    "shapes": "compilations and seconds for 100 sizes of one function, 0 and 1 included",
    "scaling": "compile seconds of graphs of 250 to 2,000 nodes",
}


def _rivals(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    unknown = [n for n in names if n not in RIVALS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no rival: expected some of {','.join(RIVALS)}")
    return names


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def parser() -> argparse.ArgumentParser:
    """The command line."""
    listing = "\n".join(f"  {name:<10} {what}" for name, what in SUITES.items())
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"fuser beside its rivals.\n\nsuites:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("suite", nargs="+", choices=[*SUITES, "all"], metavar="SUITE")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    p.add_argument("--plot", metavar="FILE.png", help="draw bar charts (needs matplotlib)")
    p.add_argument("--rows", type=_regex, default="", metavar="REGEX", help="only rows whose name matches")
    p.add_argument("--quick", action="store_true", help="small sizes and few rounds: does everything run?")
    p.add_argument("--full", action="store_true", help="also what takes minutes, such as Inductor on 2,000 nodes")
    p.add_argument("--rivals", type=_rivals, default=RIVALS, metavar="LIST", help=f"some of {','.join(RIVALS)}")
    p.add_argument("--mode", choices=("infer", "train"), default="infer", help="of the models suite")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the suites; 0 if every result was right, 1 if one was wrong, 2 for a bad command line."""
    p = parser()
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    if args.mode == "train":
        p.error("--mode train: training steps are not benchmarked yet; use --mode infer")
    options = Options(args.device, args.rows, args.quick, args.full, args.mode, args.rivals)
    names = list(SUITES) if "all" in args.suite else list(dict.fromkeys(args.suite))
    info = report.machine(args.device)
    print(report.heading(info), flush=True)
    reports = []
    for name in names:
        with torch.no_grad():
            result = importlib.import_module(f"benchmarks.suites.{name}").run(options)
        print("\n" + result.text(), flush=True)
        reports.append(result)
    if args.json:
        report.write_json(args.json, reports, info)
    if args.plot:
        problem = report.plot(args.plot, reports, info)
        if problem:
            print(f"note: {problem}")
    return 1 if any(r.wrong for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
