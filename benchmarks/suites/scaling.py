"""How compile time grows with the graph: random graphs of 250 to 2,000 pointwise operations and reductions."""

from __future__ import annotations

import random
import tempfile
import time
from typing import Any

import torch

from benchmarks import account, checks, contestants
from benchmarks.child import spawn
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Bars, Claim, Report, Table, ratio, seconds

NODES = (250, 500, 1000, 2000)
INDUCTOR_MOST = 500
GROWTH = 2.3
SHAPE = (32, 128)
WINDOW = 6  # how many values back an operation's second operand may lie
KEEP = 100  # every so many nodes, a value that the graph also returns
NAMES = ("fuser handle", "fuser", "aot_eager", "inductor")
UNARY = (torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu)
BINARY = (torch.maximum, torch.minimum)
SUMS = (torch.add, torch.sub)


def random_graph(nodes: int, seed: int) -> torch.fx.GraphModule:
    """A graph of `nodes` calls in which no part repeats another and every value is used.

    No step moves two values further apart than they were, so rounding errors do not grow along the chain.
    """
    draw = random.Random(seed)
    graph = torch.fx.Graph()
    recent = [graph.placeholder("x"), graph.placeholder("y")]
    kept, made = [], 0

    def call(fn: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        nonlocal made
        made += 1
        return graph.call_function(fn, args, kwargs)

    while made < nodes:
        value, other = recent[-1], draw.choice(recent[-WINDOW:])
        kind = draw.random()
        if kind < 0.4 or nodes - made < 3:
            value = call(draw.choice(UNARY), value)
        elif kind < 0.6:
            value = call(draw.choice(BINARY), value, other)
        elif kind < 0.9:
            value = call(torch.mul, call(draw.choice(SUMS), value, other), 0.5)
        else:
            centre = call(draw.choice((torch.mean, torch.amax)), value, -1, keepdim=True)
            value = call(torch.mul, call(torch.sub, value, centre), 0.5)
        recent.append(value)
        if made // KEEP > len(kept):
            kept.append(value)
    graph.output((*kept, recent[-1]))
    graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def child(params: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: a first small graph, so that start-up does not count, then each number of nodes in turn."""
    generator = torch.Generator().manual_seed(0)
    args = tuple(torch.randn(SHAPE, generator=generator).to(params["device"]) for _ in range(2))
    times, problems = {}, []
    for nodes in (20, *params["nodes"]):
        module = random_graph(nodes, seed=nodes)
        start = time.perf_counter()
        out = contestants.compile_for(params["contestant"], module)(*args)
        if params["device"] == "cuda":
            torch.cuda.synchronize()
        times[nodes] = time.perf_counter() - start
        problem = checks.judge(
            checks.tensors(out), checks.tensors(module(*args)), checks.tensors(module(*checks.to_float64(args)))
        ).problem
        if problem:
            problems.append(f"{nodes} nodes: {problem}")
    fallbacks = account.fallbacks() if params["contestant"].startswith("fuser") else {}
    return {"seconds": {n: times[n] for n in params["nodes"]}, "problems": problems, "fallbacks": fallbacks}


def growth(times: dict[int, float]) -> dict[int, float]:
    """T(2N)/T(N) by 2N, wherever both were measured."""
    return {n: t / times[n // 2] for n, t in times.items() if n // 2 in times}


def _claims(times: dict[str, dict[int, float]]) -> list[Claim]:
    claims = []
    for name in ("fuser handle", "fuser"):
        steps = growth(times.get(name, {}))
        reached = ", ".join(f"{n // 2}→{n}: {g:.2f}" for n, g in steps.items()) or "not measured"
        what = f"T(2N)/T(N), {'registered' if name == 'fuser handle' else 'through torch.compile'}"
        claims.append(Claim(what, f"≤ {GROWTH}", reached, max(steps.values()) <= GROWTH if steps else None))
    return claims


def _report(times: dict[str, dict[int, float]], fell_back: dict[str, dict[str, int]], report: Report) -> Report:
    rows = []
    for name, by_nodes in times.items():
        steps = growth(by_nodes)
        rows.append((name, *(seconds(by_nodes.get(n)) for n in NODES), *(ratio(steps.get(n)) for n in NODES[1:])))
        report.records.append({"contestant": name, "seconds": by_nodes})
    columns = ("contestant", *(f"{n} nodes" for n in NODES), *(f"T({n})/T({n // 2})" for n in NODES[1:]))
    title = (
        "scaling: seconds from the graph to the first result, empty caches, process already warmed up by a small graph"
    )
    report.tables = [Table(title, columns, rows)]
    report.claims = _claims({n: t for n, t in times.items() if not fell_back[n]})
    groups = {f"{n} nodes": {name: t[n] for name, t in times.items() if n in t} for n in NODES}
    report.bars = [Bars("scaling", "seconds", groups)]
    return report


def run(options: Options) -> Report:
    """Each contestant in a fresh process; Inductor up to 500 nodes unless --full."""
    report = Report("scaling")
    wanted = [n for n in NAMES if n.startswith("fuser") or n == "aot_eager" or options.has(n)]
    names = [n for n in contestants.present(wanted, report.notes) if options.wants(n)]
    nodes = NODES[:2] if options.quick else NODES
    times: dict[str, dict[int, float]] = {}
    fell_back: dict[str, dict[str, int]] = {}
    with progress("scaling", len(names)) as bar:
        for name in names:
            bar.step(name)
            mine = [n for n in nodes if name != "inductor" or options.full or n <= INDUCTOR_MOST]
            with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
                params = {"contestant": name, "device": options.device, "nodes": mine}
                result = spawn("scaling", params, cache, timeout=3600.0)
            target = report.wrong if name.startswith("fuser") else report.notes
            target.extend(f"{name}: {p}" for p in [*result.get("problems", ()), *filter(None, [result.get("error")])])
            report.notes.extend(
                f"{name}: {n} groups fell back: {why}" for why, n in result.get("fallbacks", {}).items()
            )
            if "seconds" in result:
                times[name] = {int(n): t for n, t in result["seconds"].items()}
                fell_back[name] = result["fallbacks"]
    if "inductor" in names and not options.full and not options.quick:
        report.notes.append(f"inductor: up to {INDUCTOR_MOST} nodes; --full for all")
    return _report(times, fell_back, report)
