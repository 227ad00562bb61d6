"""`python -m benchmarks SUITE ...`: run suites, print their tables and targets, exit 1 if a result was wrong."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from typing import Any

import torch

from benchmarks import markdown, report
from benchmarks.contestants import FROZEN, RIVALS
from benchmarks.options import Options

SUITES = {
    "coldstart": "seconds from a fresh process to the first result, with empty and with warm caches",
    "overhead": "microseconds of a call on 16 elements, with 1 to 10,000 registered specifications",
    "kernels": "ninety rows of papers, and thirty functions in three sizes, beside eager, the rivals and a copy",
    "models": "compile seconds, steady milliseconds and memory of five models; --mode train: of training steps",
    "contractions": "convolutions and products with what follows, in several layouts and dtypes",
    "attention": "flex_attention with the modifications and masks of public models; on a GPU with gradients, too",
    "components": "points, colours, boxes, rotated pairs and complex numbers, whose last dim is short",
    "decode": "tokens per second of a 100 million parameter decoder, one token at a time",
    "convnets": "small public convolutional architectures, inference",
    "frozen": "four models with weights that do not change, beside all rivals that take these as constants",
    "steps": "small networks at batch 1, where the host decides; --mode train: with gradients",
    "shapes": "compilations and seconds for 100 sizes of one function, 0 and 1 included",
    "scaling": "compile seconds of graphs of 250 to 2,000 nodes",
    "optimizers": "an optimiser's step over the parameters of GPT-2, and over 500 small ones",
    "singles": "some ninety single operators at 64 KB to 64 MB beside eager, with one thread and with all",
    "torchscript": "scripts with loops and branches beside their fused copies; the first call; memory over many calls",
    "aot": "an ahead-of-time file of GPT-2: the first result of a fresh process, and steady calls beside torch.compile",
    "background": "microseconds of calls while a compiler hangs in the background; seconds to exit",
    "updates": "states that public models write in place: caches, queues, moving averages, optimisers",
    "pairs": "each activation before each operator that reads neighbours, beside eager, with trials off",
    "numerics": "what eager's very bits (numerics='eager') cost over numerics='fast', on chains of simple operators",
}


def _rivals(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    known = (*RIVALS, *FROZEN)
    unknown = [n for n in names if n not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no rival: expected some of {','.join(known)}")
    return names


def _threads(text: str) -> tuple[int, ...]:
    words = text.split(",")
    wrong = [w for w in words if not w.isdecimal() or int(w) < 1]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no number of threads: expected numbers from 1, as in 1,2,16")
    return tuple(dict.fromkeys(map(int, words)))


def _suite(text: str) -> str:
    if text not in SUITES and text != "all":
        raise argparse.ArgumentTypeError(f"{text!r} is no suite: expected one of {', '.join([*SUITES, 'all'])}")
    return text


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
    p.add_argument("suite", nargs="*", type=_suite, metavar="SUITE")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    p.add_argument("--plot", metavar="FILE.png", help="draw bar charts (needs matplotlib)")
    p.add_argument("--md", metavar="FILE.md", help="write the tables between the marks of a document")
    p.add_argument("--from", dest="sources", nargs="+", default=[], metavar="FILE", help="JSON files of earlier runs")
    p.add_argument("--caches", default="", metavar="DIR", help="keep Inductor's caches here (kernels, optimizers)")
    p.add_argument("--rows", type=_regex, default="", metavar="REGEX", help="only rows whose name matches")
    p.add_argument("--quick", action="store_true", help="small sizes and few rounds: does everything run?")
    p.add_argument("--full", action="store_true", help="also what takes minutes, such as Inductor on 2,000 nodes")
    rivals = f"some of {','.join((*RIVALS, *FROZEN))}"
    p.add_argument("--rivals", type=_rivals, default=RIVALS, metavar="LIST", help=rivals)
    threads = "of kernels and frozen: run with each, as in 1,2,16"
    p.add_argument("--threads", type=_threads, default=(), metavar="LIST", help=threads)
    p.add_argument("--mode", choices=("infer", "train"), default="infer", help="of models: forward or training step")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the suites; 0 if every result was right, 1 if one was wrong, 2 for a bad command line."""
    p = parser()
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda: torch sees no CUDA device here; use --device cpu")
    if not args.suite and not args.sources:
        p.error("expected a suite to run, or --from a file of an earlier run")
    options = Options(args.device, args.rows, args.quick, args.full, args.mode, args.rivals, args.caches, args.threads)
    names = list(SUITES) if "all" in args.suite else list(dict.fromkeys(args.suite))
    info = report.machine(args.device)
    command = _command(names, args)
    reports = _run(names, options, info)
    if args.json:
        report.write_json(args.json, reports, info, command)
    if args.plot:
        problem = report.plot(args.plot, reports, info)
        if problem:
            print(f"note: {problem}")
    if args.md:
        found = [entry for path in args.sources for entry in markdown.load(path)]
        found += [(r, info, command) for r in reports]
        markdown.write(args.md, [markdown.section(*entry) for entry in found])
    return 1 if any(r.wrong for r in reports) else 0


def _command(names: list[str], args: argparse.Namespace) -> str:
    """What to type to measure the same again, wherever its results then go."""
    words = ["python", "-m", "benchmarks", *names]
    words += [f"--{flag}" for flag in ("quick", "full") if getattr(args, flag)]
    words += ["--mode", args.mode] if args.mode != "infer" else []
    words += ["--rows", args.rows] if args.rows else []
    words += ["--device", args.device] if args.device != "cpu" else []
    words += ["--rivals", ",".join(args.rivals)] if args.rivals != RIVALS else []
    words += ["--threads", ",".join(map(str, args.threads))] if args.threads else []
    return shlex.join(words)


def _run(names: list[str], options: Options, info: dict[str, Any]) -> list[report.Report]:
    """The suites one after the other, each printed as soon as it is there."""
    if options.caches:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(options.caches)
    if names:
        print(report.heading(info), flush=True)
    reports = []
    for name in names:
        with torch.no_grad():
            result = importlib.import_module(f"benchmarks.suites.{name}").run(options)
        print("\n" + result.text(), flush=True)
        reports.append(result)
    return reports


if __name__ == "__main__":
    sys.exit(main())
