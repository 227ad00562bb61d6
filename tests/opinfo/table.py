"""The table of operators for the documentation, from the records of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.opinfo import database

HEAD = """\
# Operators

What becomes of each operator of torch's own test database (`torch.testing._internal.common_methods_invocations`) on
the CPU. `make opinfo` runs every operator with its dtypes and samples, compares values, dtypes, sizes, strides,
aliasing and changes to the inputs with eager, and writes this page.

*native*: every sample was fused. *partly*: some were. *ATen*: none; the reason is that of most samples. Complex tensors
always run by ATen and are not counted.
"""
ROUTES = {
    "call": "registered as a call of its own, by kernels",
    "aten": "registered as traced by make_fx, by kernels",
    "copies": "traced, with copies allowed for views, by kernels",
    "plans": "traced, with copies allowed for views, lowered and scheduled, the plans run by the interpreter",
    "compile": "through torch.compile",
}
FAMILIES = ("pointwise", "reduction", "view", "indexing", "creation", "")
_TITLES = {"": "Others", "view": "Views and shapes", "creation": "Creation and joining"}


def table(records: list[dict[str, Any]]) -> str:
    """The page."""
    families = {database.full_name(op): database.family_of(op) for op in database.operators()}
    verdicts = {name: verdict(rs) for name, rs in _by_operator(records).items()}
    lines = [HEAD, *_summary(families, verdicts, records)]
    for family in FAMILIES:
        names = sorted(n for n in verdicts if families.get(n, "") == family)
        if names:
            lines += ["", f"## {_TITLES.get(family, family.capitalize())}", ""]
            lines += ["| operator | fused | why not |", "|---|---|---|"]
            lines += [f"| `{n}` | {verdicts[n][0]} | {_cell(verdicts[n][1])} |" for n in names]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:140]


def _by_operator(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in records:
        out[r["op"]].append(r)
    return out


def verdict(records: list[dict[str, Any]]) -> tuple[str, str]:
    """ "native", "partly" or "ATen", and the most common reason for what is not native."""
    best: dict[tuple[Any, Any], dict[str, Any]] = {}
    for r in records:
        counted = "sample" in r and r["status"] in ("native", "partly", "aten") and "complex" not in r["dtype"]
        if not counted or r["reason"] == "eager raises":
            continue
        at = r["dtype"], r["sample"]
        if at not in best or r["status"] == "native":
            best[at] = r
    native = sum(r["status"] == "native" for r in best.values())
    reasons = Counter(r["reason"] for r in best.values() if r["status"] != "native")
    why = reasons.most_common(1)[0][0] if reasons else ""
    if not best:
        return "–", next((r["reason"] for r in records if r["status"] != "native"), "") or "only complex samples"
    return ("native" if native == len(best) else "partly" if native else "ATen"), why


def _summary(
    families: dict[str, str], verdicts: dict[str, tuple[str, str]], records: list[dict[str, Any]]
) -> list[str]:  # fmt: skip
    lines = ["| family | operators | native | partly | ATen |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        kinds = Counter(v for n, (v, _) in verdicts.items() if families.get(n, "") == family and v != "–")
        total = sum(kinds.values())
        if total:
            cells = " | ".join(f"{kinds[k]} ({100 * kinds[k] // total} %)" for k in ("native", "partly", "ATen"))
            lines.append(f"| {family or 'others'} | {total} | {cells} |")
    counts = Counter(r["status"] for r in records)
    runs = sum(counts[k] for k in ("native", "partly", "aten", "refused", "wrong", "crashed"))
    lines += ["", f"{runs} runs of samples: {counts['wrong']} wrong, {counts['crashed']} crashed. How they ran:", ""]
    routes = Counter(r["route"] for r in records if "route" in r)
    lines += [f"- {n}: {ROUTES[route]}" for route, n in routes.most_common()]
    dtypes = Counter(r["dtype"] for r in records if "route" in r)
    return [*lines, "", f"dtypes: {', '.join(dtypes)}."]
