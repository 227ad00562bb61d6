"""Tokens per second of a decoder that is given one token at a time, beside the time that its weights take to copy."""

from __future__ import annotations

import copy

import torch

from benchmarks import checks, contestants, decoder
from benchmarks.options import Options
from benchmarks.progress import progress
from benchmarks.report import Claim, Report, Table, at_least, spread
from benchmarks.runner import Budget, Call, Timing, copy_call, geomean, interleave

ROWS = tuple((rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 4, 8))
MOST = 1.18  # times the time of a copy that moves as many bytes as the weights have
COPY = "copy of the weights' bytes"
TOLERANCE_SCALE = 10.0


def _measure(rows: int, dtype: torch.dtype, names: list[str], options: Options, report: Report) -> dict[str, Timing]:
    model, args = decoder.build(rows, dtype, options.quick)
    model, args = model.to(options.device), tuple(a.to(options.device) for a in args)
    what = f"{rows} rows {str(dtype)[6:]}"
    calls: dict[str, Call] = {}
    with torch.no_grad():
        eager = checks.tensors(model(*args))
        exact = checks.tensors(copy.deepcopy(model).double()(*checks.to_float64(args)))
        for name in names:
            torch._dynamo.reset()
            step = model if name == "eager" else contestants.compile_for(name, copy.deepcopy(model))
            try:
                verdict = checks.judge(checks.tensors(step(*args)), eager, exact, TOLERANCE_SCALE)
            except Exception as error:  # a contestant that fails must not end the run of the others
                report.notes.append(f"{what}, {name}: {type(error).__name__}: {str(error).strip()[:200]}")
                continue
            if verdict.problem:
                problems = report.wrong if name.startswith("fuser") else report.notes
                problems.append(f"{what}, {name}: {verdict.problem}")
            else:
                calls[name] = Call(step, args)
        calls[COPY] = copy_call(model.bytes_read(), options.device)
        return interleave(calls, Budget.of(options.quick), options.device)


def run(options: Options) -> Report:
    """Steps of 1, 4 and 8 sequences in float32 and bfloat16."""
    report = Report("decode")
    wanted = [r for r in ("eager", "inductor", *contestants.FROZEN) if options.has(r)]
    names = contestants.present([*wanted, "fuser", "fuser-frozen"], report.notes)
    table, shares, over = [], [], []
    chosen = [(n, d) for n, d in ROWS if options.wants(f"{n} rows {str(d)[6:]}")]
    with progress("decode", len(chosen)) as bar:
        for rows, dtype in chosen:
            what = f"{rows} rows {str(dtype)[6:]}"
            bar.step(what)
            timings = _measure(rows, dtype, names, options, report)
            each = {n: t.median for n, t in timings.items()}
            best = min((t for n, t in each.items() if n.startswith("fuser")), default=None)
            tokens = f"{rows / best:.0f}" if best else "–"
            table.append((what, *(spread(timings[n]) if n in timings else "failed" for n in (*names, COPY)), tokens))
            report.records.append({"row": what, "seconds": {n: t.record() for n, t in timings.items()}})
            if best:
                shares.append((what, best / each[COPY]))
                over += [each["inductor"] / best] if "inductor" in each else []
    columns = ("step", *names, COPY, "tokens a second")
    report.tables = [Table("decode: median [p10–p90] of a step", columns, table)]
    slow = [f"{what} {share:.2f}" for what, share in shares if share > MOST]
    said = "; ".join(f"{what} {share:.2f}" for what, share in shares)
    report.claims = [
        Claim(f"at most {MOST} of the copy's time", f"≤ {MOST}", said or "–", not slow if shares else None),
        at_least("over inductor (geometric mean)", geomean(over) if over else None, 1.0),
    ]
    return report
