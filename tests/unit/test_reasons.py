"""Why an operator is in no kernel: the right reason of a closed list, at the right line."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pathlib
import pickle
import re

import pytest
import torch

import fuser
from fuser import errors
from fuser.frontends.records import forget_compilations
from fuser.kernel_store import reason_of
from fuser.reasons import BY_CODE, REASONS, as_json, because, code_of, from_json, table, told
from tests import versions


@torch.library.custom_op("fuser_test_reasons::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("fuser_test_reasons::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


def library(x, y):
    z = x + 1
    z = z @ y  # here
    return z + 2


def random(x, y):
    z = x + 1
    return torch.multinomial(z, 3) + 1  # here


def data_size(x, y):
    z = x + 1
    z = z.nonzero()  # here
    return z * 2


def data_repeats(x, y):
    return torch.repeat_interleave(x + 1, torch.ones(16, dtype=torch.int64), 0) + 1  # here


def no_lowering(x, y):
    z = x + 1
    return torch.cdist(z, y) + 1  # here


def own_operator(x, y):
    z = twice(x + 1)  # here
    return z + 1


def left_to_aten(x, y):
    z = (x + 1).sort(-1).values  # here
    return z + 1


def grid(x, y):
    z = (x + 1)[None, None]
    z = torch.nn.functional.grid_sample(z, torch.zeros(1, 4, 4, 2), align_corners=False)  # here
    return z + 1


def dtype(x, y):
    z = x + 1
    z = z.to(torch.complex64)  # here
    return torch.view_as_real(z) + 1  # here


def bits(x, y):
    z = (x + 1).view(torch.int16)  # here
    return z * 2


def bodies(x, y):
    z = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))  # here
    return z + 1


def python(x, y):
    z = x + 1
    bump(z)  # here
    return z * 2


def writes(x, y):
    x.index_add_(0, torch.tensor([1, 2]), y[:2] + 1)  # here
    return x * 2


def backend(x, y):
    z = torch.zeros(3, device="meta")  # here
    return x + 1, z


def from_numbers(x, y):
    z = torch.eye(3)  # here
    return x + 1, z


def arguments(x, y):
    z = (x + 1).half()
    z = torch.nextafter(z, y.half())  # here
    return z * 2


def quantized(x, y):
    z = torch.quantize_per_tensor(x + 1, 0.1, 0, torch.qint8).dequantize()  # here
    return z + 1


BLOCKERS = {
    library: "library", random: "random", data_size: "data_size", data_repeats: "data_size",
    no_lowering: "no_lowering", own_operator: "no_lowering", left_to_aten: "left_to_aten", grid: "left_to_aten",
    dtype: "dtype", bits: "dtype", python: "python", bodies: "bodies", writes: "writes", backend: "backend",
    from_numbers: "from_numbers", arguments: "arguments", quantized: "no_lowering",
}  # fmt: skip


if versions.IS_OLD:  # whose Dynamo breaks the graph there
    del BLOCKERS[quantized]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("function", BLOCKERS, ids=lambda f: f.__name__)
def test_blocker(function):
    torch._dynamo.reset()
    forget_compilations()
    settings = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), settings:
        explanation = fuser.explain(function, torch.rand(16, 16), torch.rand(16, 16))
    text, first = inspect.getsourcelines(function)
    here = {first + i for i, line in enumerate(text) if line.rstrip().endswith("# here")}
    found = [o for o in explanation.not_fused if o.op != "aten._assert_scalar"]
    assert {o.code for o in found} == {BLOCKERS[function]}, found
    assert {(o.source.file, o.source.line) for o in found} == {(__file__, line) for line in here}
    assert all(BY_CODE[o.code] and o.reason for o in found)


_SAYING = ("Unsupported", "refuse", "NotPrebuilt", "_run_eager")
_CODES = (
    "library's|random numbers|on data|not an? (ATen|tensor)|Python number|no tensor|several (devices|views)"
    "|left to ATen|writes|eager (raises|refuses)|do not broadcast|no fusion backend|switched off|compiler"
    "|dtype .* not|runs on ATen"
)


def _plain_sentences() -> dict[str, list[str]]:
    """By file the sentences of refusals that have no code; `7` stands for details."""
    root = pathlib.Path(fuser.__file__).parent
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in _SAYING:
                said = [t for t in map(_text, node.args) if t]
                if said:
                    found.setdefault(str(path.relative_to(root)), []).append(said[0])
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "7" for v in node.values)
    return ""


def test_the_list_is_closed():
    """A sentence without a code is the refusal of one operator's arguments, which only lowerings and generators say."""
    plain = _plain_sentences()
    assert sum(map(len, plain.values())) > 50
    said_of_arguments = (
        "lowering/", "ops/", "ir/", "scheduler/", "cuda/", "passes/layouts.py", "passes/example_sizes.py",
        "passes/flex_attention.py", "frontends/", "attention/",
    )  # fmt: skip
    said_to_a_user = ("debug/",)  # who asked for what there is not
    assert [f for f in plain if not f.startswith((*said_of_arguments, *said_to_a_user))] == []
    others = [t for f, texts in plain.items() if not f.startswith(said_to_a_user) for t in texts]
    assert [t for t in others if re.search(_CODES, t)] == [], "say these with their codes: reasons.because"
    assert len({r.code for r in REASONS}) == len(REASONS) and REASONS[-1].code == "arguments"


def test_a_reason_keeps_its_code():
    reason = because("random", "it draws random numbers")
    assert reason == "it draws random numbers" and code_of(reason) == "random" and code_of("x is 3") == "arguments"
    kept = from_json(json.loads(json.dumps(as_json(reason))))
    for other in (copy.copy(reason), pickle.loads(pickle.dumps(reason)), kept):
        assert other == reason and code_of(other) == "random"
    assert code_of(told(reason, f"input 3: {reason}")) == "random"
    assert code_of(errors.Unsupported(reason, "aten.rand").reason) == "random"
    with pytest.raises(ValueError, match="expected one of not_run"):
        because("no such code", "so")
    for wrong in ("a sentence", ["random", 3], ["no such code", "so"], None):
        with pytest.raises((TypeError, ValueError)):
            from_json(wrong)


def test_codes_of_what_was_raised():
    def raised(error):
        return code_of(reason_of(error))

    assert raised(errors.CompileError("g++ ended with exit code 1")) == "compiler"
    assert raised(MemoryError()) == "compiler" and raised(OSError(28, "no space")) == "compiler"
    assert raised(KeyError("x")) == raised(errors.VerifyError("a rule")) == "defect"
    assert raised(errors.Unsupported("x is 3")) == "arguments"


def test_every_row_is_in_the_documents():
    page = pathlib.Path(__file__).parents[2] / "docs" / "reasons.md"
    assert table() in page.read_text(), "docs/reasons.md: write the table of fuser.reasons.table() into it"
