"""`python -m tests.fuzz.scripts N`: N random TorchScript programs, each fused by `fuse_script` and compared with it.

Programs call operators of torch's schema table on tensors of one size, under several names: views, lists, operators
that may give their very input; they write in place, branch, loop and stop. A group runs by ATen here, so that only the
rewriting of the graph is tried; one program of sixteen runs with kernels. A seed always gives the same program.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import fuser
from fuser import config

SIZE = (3, 4)
_UNFIT = (
    "_backward", "linalg_", "fft_", "rand", "bernoulli", "dropout", "normal_", "uniform_", "cauchy", "exponential_",
    "geometric_", "_foreach", "_fused", "quantize", "cudnn", "mkldnn", "miopen", "mps_", "xpu", "sparse", "_test",
    "to_", "requires_grad", "set_", "retain_grad", "_resize", "resize_", "rename", "_make_dep", "_assert", "pin_memory",
    "data_ptr", "empty", "lift", "_print", "polygamma", "_conj", "_neg_view", "_fw_primal", "_reshape_alias",
    "detach_", "record_stream", "share_memory", "special_airy", "special_bessel", "special_modified", "special_scaled",
    "argsort", "slice_inverse", "_compute_linear",
    "cholesky", "cross", "fbgemm", "lu_solve", "nuclear", "complex", "_weight", "rrelu",
)  # fmt: skip
# They may give their very input, and no schema says so.
_SILENT = ("{a}.type_as({b})", "{a}.float().double()", "torch.atleast_2d({a})", "{a}.sum_to_size([3, 4])",
           "torch.dropout({a}, 0.5, False)", "{a}.to({b})", "{a}.to(torch.float64)", "{a}.contiguous()",
           "{a}.expand_as({b})", "{a}.reshape([3, 4])", "{a}.double()")  # fmt: skip
_VIEWS = ("{a}.view([3, 4])", "{a}.t().t()", "{a}[:]", "{a}.unsqueeze(0)[0]", "{a}.view([12]).view([3, 4])",
          "torch.transpose({a}, 0, 1).transpose(0, 1)", "torch.cat([{a}[:1], {b}[1:]])",
          "{a}.chunk(2, 1)[0].repeat(1, 2)", "{a}.flatten().view([3, 4])",
          "torch.stack([{a}, {b}])[{i}]", "{a}.narrow(0, 0, 3)")  # fmt: skip
_PLAIN = ("{a} * {s} + {b}", "{a} - {b} * {s}", "torch.where({a} > {s}, {a}, {b})", "({a} * {b}).tanh()", "{a} + k",
          "{a} * float(n)", "torch.sigmoid({a}) * {b}", "{a} + {b}.sum(0)", "{a} / (1 + {b} * {b})", "{a}.exp().tanh()",
          "{a} - {b}.mean(1, keepdim=True)", "{a}.clamp(-1, 1) + x.size(0)", "torch.softmax({a}, -1)")  # fmt: skip
_WRITES = ("{a}.add_({b})", "{a}.mul_({s})", "{a}[1:].mul_({s})", "{a}[0] = {b}[1]", "{a}[:, 1:3].zero_()",
           "{a} += {b}", "{a}.copy_({b})", "{a}.t().add_({s})", "{a}.view([12])[2:7].neg_()", "{a}.relu_()",
           "{a}[{i}].sub_({b}[0])", "{a}.select(1, {i}).fill_({s})", "torch.add({a}, {b}, out={a})")  # fmt: skip


@functools.cache
def operators() -> dict[str, tuple[tuple[str, int], ...]]:
    """Operators of tensors alone that keep the size: (name, number of tensors), by "fresh", "view" and "write"."""
    found: dict[str, dict[tuple[str, int], None]] = {"fresh": {}, "view": {}, "write": {}}
    for schema in sorted(torch._C._jit_get_all_schemas(), key=str):
        name = schema.name.removeprefix("aten::")
        needed = [a for a in schema.arguments if a.default_value is None and not a.has_default_value()]
        kinds = [a.type.kind() for a in needed]
        if not schema.name.startswith("aten::") or any(part in name for part in _UNFIT) or not 1 <= len(needed) <= 3:
            continue
        if set(kinds) != {"TensorType"} or [r.type.kind() for r in schema.returns] != ["TensorType"]:
            continue
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        if any(written[1:]) or not _keeps_size(name, len(needed)):
            continue
        kind = "write" if written[0] else "view" if schema.returns[0].alias_info is not None else "fresh"
        found[kind][name, len(needed)] = None
    return {kind: tuple(sorted(names)) for kind, names in found.items()}


def _keeps_size(name: str, count: int) -> bool:
    given = [torch.full(SIZE, 0.25 + n, dtype=torch.float64) for n in range(count)]
    try:
        made = [getattr(torch.ops.aten, name)(*(t.clone() for t in given)) for _ in range(2)]
    except Exception:
        return False
    return all(isinstance(m, torch.Tensor) and m.shape == SIZE and m.dtype is torch.float64 for m in made) and bool(
        torch.equal(made[0], made[1])
    )


class Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.names = ["x", "y"]
        self.count = 0

    def program(self) -> str:
        """Its text."""
        self.block(self.rng.randint(5, 14), 1)
        results = self.rng.sample(self.names, min(len(self.names), 4))
        head = "def program(x: Tensor, y: Tensor, n: int, flag: bool):\n    k = x.size(0) * 2 + n\n"
        return head + "".join(self.lines) + f"    return ({', '.join([*results, 'x', 'y'])},)\n"

    def add(self, depth: int, line: str) -> None:
        self.lines.append(f"{'    ' * depth}{line}\n")

    def block(self, steps: int, depth: int) -> None:
        for _ in range(steps):
            self.step(depth)

    def new(self, depth: int, text: str) -> None:
        """Give a value a new name or, inside of branches and loops, an old one."""
        if depth > 1 or self.rng.random() < 0.2:
            name = self.rng.choice(self.names)
        else:
            self.count += 1
            name = f"v{self.count}"
        self.add(depth, f"{name} = {text}")
        if name not in self.names:
            self.names.append(name)

    def filled(self, text: str, items: str = "") -> str:
        number = self.rng.choice((0.5, -1.25, 2))
        return text.format(a=self.pick(), b=self.pick(), i=self.rng.randint(0, 1), s=number, l=items)

    def pick(self) -> str:
        return self.names[-1 - min(int(self.rng.expovariate(0.35)), len(self.names) - 1)]

    def called(self, kind: str) -> str:
        name, count = self.rng.choice(operators()[kind])
        return f"torch.ops.aten.{name}({', '.join(self.pick() for _ in range(count))})"

    def step(self, depth: int) -> None:
        kind = self.rng.random()
        if kind < 0.3:
            self.new(depth, self.filled(self.rng.choice(_PLAIN)))
        elif kind < 0.45:
            self.new(depth, self.called("fresh"))
        elif kind < 0.6:
            self.new(depth, self.filled(self.rng.choice((*_SILENT, *_VIEWS))))
        elif kind < 0.64:
            self.new(depth, self.called("view"))
        elif kind < 0.78:
            self.add(depth, self.filled(self.rng.choice(_WRITES)))
        elif kind < 0.84:
            self.add(depth, self.called("write"))
        elif kind < 0.9:
            self.listed(depth)
        elif depth < 3:
            self.nested(depth)

    def listed(self, depth: int) -> None:
        """A list of tensors, one of which is written or read again."""
        self.count += 1
        name = f"l{self.count}"
        self.add(depth, f"{name} = [{', '.join(self.pick() for _ in range(3))}]")
        actions = "{l}[{i}].add_({b})", "{l}[n % 3].mul_({s})", "{l}.append({a})", ""
        action = self.filled(self.rng.choice(actions), name)
        if action:
            self.add(depth, action)
        self.new(depth, self.rng.choice((f"{name}[n % 3]", f"{name}[-1] + 1", f"torch.stack({name}).sum(0)")))

    def nested(self, depth: int) -> None:
        """A branch, a loop, or a check."""
        kind = self.rng.choice(("if", "if", "else", "for", "while", "assert"))
        if kind == "assert":
            self.add(depth, "assert n < 9")
            return
        self.count += 1
        turns = f"c{self.count}"
        opening = {"for": "for j in range(n):", "while": f"while {turns} < {self.rng.randint(1, 3)}:"}
        test = self.rng.choice(("flag", "n > 1", f"bool({self.pick()}.sum() > 1)", "not flag"))
        if kind == "while":
            self.add(depth, f"{turns} = n")
        self.add(depth, opening.get(kind, f"if {test}:"))
        if kind == "while":
            self.add(depth + 1, f"{turns} = {turns} + 1")
        self.block(self.rng.randint(1, 4), depth + 1)
        self.add(depth + 1, "k = k + 1")
        if kind == "else":
            self.add(depth, "else:")
            self.block(self.rng.randint(1, 3), depth + 1)
            self.add(depth + 1, "k = k - 1")


def text_of(seed: int) -> str:
    """The program of a seed."""
    return Writer(seed).program()


# -- running -----------------------------------------------------------------------------------------------------------
def arguments(seed: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of four calls: new tensors, strides, and two dtypes."""
    chance = torch.Generator().manual_seed(seed)
    for n, flag, dtype in ((2, True, None), (0, False, None), (1, True, None), (2, False, torch.float32)):
        x, y = (torch.rand(SIZE, generator=chance, dtype=torch.float64) - 0.3 for _ in range(2))
        yield (x, x.t().contiguous().t() if n == 1 else y.to(dtype or y.dtype), n, flag)


def outcome(function: Any, args: tuple[Any, ...]) -> Any:
    """The results and what the arguments became; the kind of error where there is one."""
    given = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    try:
        results = function(*given)
    except Exception as e:
        return type(e).__name__
    memory: dict[int, int] = {}  # which results share memory
    shared = [memory.setdefault(t.untyped_storage().data_ptr(), len(memory)) for t in results]
    return [t.clone() for t in (*results, *given[:2])], shared


def differs(got: Any, want: Any, near: float = 1e-9) -> str:
    """What differs between two outcomes; "" if nothing does."""
    if isinstance(got, str) or isinstance(want, str):
        return "" if got == want else f"{_kind(got)}, where the script has {_kind(want)}"
    for n, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        near = near if a.dtype is torch.float64 else 1e-4
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.allclose(a, b, near, near, equal_nan=True):
            return f"value {n} differs"
    return "" if got[1] == want[1] else "other results share memory"


def problem(text: str, seed: int = 0, kernels: bool = False) -> str | None:
    """What the fused program does wrong; "" if nothing. None where the script itself is no use."""
    try:
        script = torch.jit.CompilationUnit(text).program
    except RuntimeError:
        return None
    names: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor}
    exec(text, names)
    with warnings.catch_warnings(), torch.no_grad(), config.override(enabled=kernels):
        warnings.simplefilter("ignore")
        fused = None
        for args in arguments(seed):
            want = outcome(script, args)
            if differs(want, outcome(names["program"], args)):  # TorchScript's own analysis missed an alias
                return None
            fused = fused or fuser.fuse_script(script)
            for turn in ("first", "second"):
                wrong = differs(outcome(fused, args), want, 1e-9 if args[1].dtype is torch.float64 else 1e-4)
                if wrong:
                    return f"{turn} call with n={args[2]}, flag={args[3]}: {wrong}"
        reasons = [u.reason for u in fused.fusion.unfused] if fused is not None else []
    return "".join(r for r in reasons if "Error" in r and "TorchScript" not in r and "refused" not in r)


def _kind(found: Any) -> str:
    return found if isinstance(found, str) else "results"


def smaller(text: str, seed: int, kernels: bool) -> str:
    """A program with fewer lines that goes wrong, too."""
    lines = text.splitlines(keepends=True)
    at = len(lines) - 2
    while at > 0:
        shorter = [*lines[:at], *lines[at + 1 :]]
        try:
            wrong = problem("".join(shorter), seed, kernels)
        except Exception:
            wrong = None
        lines, at = (shorter, min(at, len(shorter) - 1)) if wrong else (lines, at)
        at -= 1
    return "".join(lines)


def run(seeds: range) -> Iterator[tuple[int, str, str]]:
    """(seed, what is wrong or "-" for a program of no use, text) of each seed."""
    for seed in seeds:
        text = text_of(seed)
        found = problem(text, seed, seed % 16 == 15)
        yield seed, "-" if found is None else found, text


def main(argv: list[str]) -> int:
    """The number of programs that went wrong, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.scripts")
    parser.add_argument("n", type=int, nargs="?", default=200)
    parser.add_argument("--start", type=int, default=0)
    given = parser.parse_args(argv)
    wrong = useless = 0
    for seed, found, text in run(range(given.start, given.start + given.n)):
        useless += found == "-"
        if found not in ("", "-"):
            wrong += 1
            print(f"seed {seed}: {found}\n{smaller(text, seed, seed % 16 == 15)}", flush=True)
    print(f"{given.n} programs: {wrong} wrong, {useless} of no use (TorchScript refuses them, or is wrong itself)")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
