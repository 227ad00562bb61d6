"""Whether every operator is told: `python tools/operators_told.py [--zoo] [--random 200]`.

Compiles the benchmark's models (inference and a training step), on request the zoo's and random programs, and counts
the nodes of the final graphs: in a group, with a reason, or free (views, items, sizes), and those with a source line.
Exits 1 if one has neither group nor reason, or no line although Dynamo's graph had lines.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import fuser
from fuser.frontends import functional
from fuser.passes import sources
from fuser.passes.classify import Kind, is_size_arithmetic

COUNTS: Counter[str] = Counter()
UNTOLD: list[str] = []


def count(graph: torch.fx.Graph, grouping: Any) -> None:
    """Add the nodes of one final graph."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    known = any(sources.source_of(n) is not None for n in nodes)
    COUNTS["graphs"] += 1
    for n in nodes:
        kind = grouping.kinds[n]
        if n in grouping.group_of:
            COUNTS["in a group"] += 1
        elif kind in (Kind.FREE, Kind.ITEM, Kind.INPUT) or is_size_arithmetic(n):
            COUNTS["free"] += 1
        elif n.name in grouping.reasons:
            COUNTS["with a reason"] += 1
        else:
            UNTOLD.append(f"{n.name} {n.target}: no group and no reason")
        if sources.source_of(n) is not None:
            COUNTS["with a line"] += 1
        elif known and n.op != "get_attr":
            UNTOLD.append(f"{n.name} {n.target}: no line")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Count every graph that is grouped in this block."""
    plain = functional.group_nodes

    def group_nodes(graph: torch.fx.Graph) -> Any:
        found = plain(graph)
        count(graph, found)
        return found

    functional.group_nodes = group_nodes
    try:
        yield
    finally:
        functional.group_nodes = plain


def one(name: str, function: Callable[..., Any], args: Any, kwargs: Any = None) -> None:
    """Compile and call one model or function; say what it adds."""
    before, untold = Counter(COUNTS), len(UNTOLD)
    torch._dynamo.reset()
    try:
        fuser.explain(function, *args, **(kwargs or {}))
    except Exception as e:
        print(f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
    added = COUNTS - before
    print(f"{name}: {dict(added)}{''.join(f', {u}' for u in UNTOLD[untold : untold + 3])}", flush=True)


def benchmark_models() -> None:
    """The benchmark's models, at their small sizes."""
    from benchmarks import models

    for name in ("gpt2", "bert", "llama", "t5", "resnet50"):
        built = models.build(name, True, "cpu")
        model, args = built[0], built[1]
        with torch.no_grad():
            one(f"{name} inference", model, args)
        one(f"{name} training", model.train(), args)


def zoo() -> None:
    """One forward of each architecture of the zoo."""
    from tests.zoo.libraries import prepare

    prepare()
    from tests.zoo import architectures

    for architecture in architectures.ZOO.values():
        with torch.no_grad(), torch.random.fork_rng():
            one(architecture.name, architecture.build().eval(), (), architecture.inputs(2))


def random_programs(number: int) -> None:
    """Random programs of the fuzzer."""
    from tests.fuzz import check
    from tests.fuzz.judge import make_inputs
    from tests.fuzz.program import graph_of

    for seed in range(number):
        program = check.program_of(seed, "compile")
        with torch.no_grad():
            one(f"random {seed}", torch.fx.GraphModule(torch.nn.Module(), graph_of(program)), make_inputs(program))


def main() -> int:
    """Count, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--random", type=int, default=0)
    asked = parser.parse_args()
    with watched():
        if asked.models:
            benchmark_models()
        if asked.zoo:
            zoo()
        if asked.random:
            random_programs(asked.random)
    print(f"all: {dict(COUNTS)}; untold: {len(UNTOLD)}")
    print("\n".join(UNTOLD[:20]))
    return int(bool(UNTOLD))


if __name__ == "__main__":
    sys.exit(main())
