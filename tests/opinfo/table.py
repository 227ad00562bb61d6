"""The table of operators for the documentation, from the records of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.opinfo import database

HEAD = """\
# Operators

What becomes of each operator of torch's own test database (`torch.testing._internal.common_methods_invocations`) on
the CPU. `make opinfo` runs operators with their dtypes and samples, compares values, dtypes, sizes, strides,
aliasing and changes to the inputs with eager, and writes this page.

How it is counted. A sample counts if eager takes it, if no complex tensor goes in or comes out, and if there is
something to do: where eager returns its argument, nothing is. An operator that only views computes nothing either, and
alone it shares eager's memory; it is counted with copies allowed, by which a kernel has to read through it. A sample is
native if every ATen operator of its functional trace (as AOTAutograd makes it) ran in a kernel. An
operator is *native* if every sample that counts is, *partly* native if some are; else it runs by *ATen*, and the reason
is that of most of its samples. Operators without a sample that counts are listed with a dash, and in no percentage.
The database of torch 2.13 has about 124,600 samples of all dtypes: hours of work, so the page is of a part of them,
spread over each operator and dtype, as many as it says below. `ARGS="--routes batch --results FOLDER"` sends all of
them through torch.compile, many in one graph, a few samples of each operator and dtype first; a run that was stopped
goes on. With samples of complex dtypes in its graph, what ran by kernels is counted as partly fused there.
"""
ROUTES = {
    "call": "registered as a call of its own, by kernels",
    "aten": "registered as traced by make_fx, by kernels",
    "copies": "traced, with copies allowed for views, by kernels",
    "functional": "registered as its functional trace, by kernels",
    "plans": "its functional trace, views as copies, lowered and scheduled, the plans run by the interpreter",
    "compile": "through torch.compile, alone",
    "batch": "through torch.compile, with others in one graph",
}
COUNTED = ("functional", "plans")  # routes by which samples are counted
FAMILIES = ("pointwise", "reduction", "view", "indexing", "creation", "")
_TITLES = {"": "Others", "view": "Views and shapes", "creation": "Creation and joining"}
NOTHING = "the graph has no operations"
_STATUSES = ("native", "partly", "aten", "refused", "wrong", "crashed")


def table(records: list[dict[str, Any]]) -> str:
    """The page."""
    families = {database.full_name(op): database.family_of(op) for op in database.operators()}
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in records:
        grouped[r["op"]].append(r)
    verdicts = {name: verdict(rs) for name, rs in grouped.items()}
    lines = [HEAD, *_summary(families, verdicts, records)]
    for family in FAMILIES:
        names = sorted(n for n in verdicts if families.get(n, "") == family)
        if names:
            lines += ["", f"## {_TITLES.get(family, family.capitalize())}", ""]
            lines += ["| operator | fused | samples | why not |", "|---|---|---|---|"]
            lines += [f"| `{n}` | {verdicts[n][0]} | {verdicts[n][1]} | {_cell(verdicts[n][2])} |" for n in names]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:140]


def counts(record: dict[str, Any]) -> bool:
    """Whether a record is of a sample that counts (see `HEAD`)."""
    return (
        record.get("route") in COUNTED
        and "sample" in record
        and record["status"] in _STATUSES
        and "complex" not in record["dtype"]
        and record["reason"] not in ("eager raises", NOTHING)
        and not record["reason"].startswith("an output is a view")
        and "complex" not in record["reason"]
    )


def verdict(records: list[dict[str, Any]]) -> tuple[str, str, str]:
    """("native", "partly", "ATen" or a dash; native samples of those that count; the commonest reason why not)."""
    counted = [r for r in records if counts(r)]
    native = sum(r["status"] == "native" for r in counted)
    reasons = Counter(r["reason"] for r in counted if r["status"] != "native")
    why = reasons.most_common(1)[0][0] if reasons else ""
    if not counted:
        other = Counter(r["reason"] for r in records if r["reason"])
        return "–", "", other.most_common(1)[0][0] if other else "only complex samples"
    kind = "native" if native == len(counted) else "partly" if native else "ATen"
    return kind, f"{native} / {len(counted)}", why


def _summary(
    families: dict[str, str], verdicts: dict[str, tuple[str, str, str]], records: list[dict[str, Any]]
) -> list[str]:  # fmt: skip
    heads = ("family", "operators", "native", "partly", "ATen", "samples that count", "native")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|---|"]
    samples: dict[str, Counter[bool]] = defaultdict(Counter)
    for r in filter(counts, records):
        samples[families.get(r["op"], "")][r["status"] == "native"] += 1
    for family in FAMILIES:
        kinds = Counter(v[0] for n, v in verdicts.items() if families.get(n, "") == family and v[0] != "–")
        total = sum(kinds.values())
        if total:
            cells = " | ".join(f"{kinds[k]} ({100 * kinds[k] // total} %)" for k in ("native", "partly", "ATen"))
            found = samples[family]
            share = f"{found.total()} | {found[True]} ({100 * found[True] // max(found.total(), 1)} %)"
            lines.append(f"| {family or 'others'} | {total} | {cells} | {share} |")
    by_status = Counter(r["status"] for r in records)
    runs = sum(by_status[k] for k in _STATUSES)
    bad = f"{by_status['wrong']} wrong, {by_status['crashed']} crashed"
    lines += ["", f"{runs} runs of samples: {bad}. How they ran:", ""]
    routes = Counter(r["route"] for r in records if "sample" in r and r["status"] in _STATUSES)
    lines += [f"- {n}: {ROUTES[route]}" for route, n in routes.most_common()]
    dtypes = Counter(r["dtype"] for r in records if "sample" in r)
    through = [r for r in records if r["route"] in ("compile", "batch") and "sample" in r]
    lines += ["", f"{len({r['op'] for r in through})} of {len(families)} operators went through torch.compile,"]
    lines += [f"in {len({(r['op'], r['dtype']) for r in through})} pairs of operator and dtype."]
    return [*lines, "", f"dtypes: {', '.join(dtypes)}."]
