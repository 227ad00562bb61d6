"""The package extended from outside: the examples run, and misuse is said."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import runpy
import time

import pytest
import torch

import fuser
from fuser import errors, extensions, passes, plans
from fuser.ops import FLOATS, OPS, REDUCTIONS, OpRow, ReductionRow, triton_folder
from fuser.passes import extending
from fuser.testing import check_op, check_reduction

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "extending"
ROW = OpRow("twice", 1, lambda x: x + x, "({0} + {0})", "({0} + {0})", dtypes=(torch.float32, torch.int64))

FOLD = ReductionRow(
    "widest", eval=lambda x, dims, keepdim: x.amax(dims, keepdim), identity=lambda dtype: float("-inf"),
    combine="({0} > {1}) | ({0} != {0}) ? {0} : {1}", accumulate=lambda dtype: dtype, dtypes=FLOATS,
    triton="tl.maximum({0}, {1})", idempotent=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def taken_away():
    yield
    for name in [n for n in OPS if not extensions.without([f"op {n}"])]:
        fuser.unregister_op(name)
    for name in [n for n in REDUCTIONS if not extensions.without([f"reduction {n}"])]:
        fuser.unregister_reduction(name)
    for name in [n for n in extending.registry.LOWERINGS if not extensions.without([n])]:
        fuser.unregister_lowering(name)
    for operator in list(extending.decompositions.FROM_OUTSIDE):
        fuser.unregister_decomposition(operator)
    with contextlib.suppress(errors.ConfigError):
        passes.unregister("powers_to_products")
    assert not extensions.any_known()


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_the_examples_run(name, capsys):
    start = time.perf_counter()
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out and time.perf_counter() - start < 60


def test_kept_kernels_are_of_the_functions_that_made_them():
    before = extensions.mark()
    fuser.register_op(ROW)
    first = extensions.mark()
    fuser.unregister_op("twice")
    fuser.register_op(dataclasses.replace(ROW, cpp="(2 * {0})"))
    marks = before, first, extensions.mark()
    assert before == "" and len(set(marks)) == 3 and None not in marks
    held = object()
    fuser.register_lowering("examples.held", lambda ctx, x: held)
    assert extensions.mark() is None and plans.question_key("is there a key?") is None


def test_names_of_operators_from_outside_are_not_kept_for_others():
    fuser.register_lowering("examples.own", lambda ctx, x: x)
    assert extensions.without(["aten.add", "examples.own"]) == ["aten.add"]


def test_an_op_that_is_wrong_is_named_with_its_arguments():
    fuser.register_op(ROW)
    check_op("twice")
    fuser.unregister_op("twice")
    fuser.register_op(dataclasses.replace(ROW, cpp="({0} + 1)"))
    with pytest.raises(errors.VerifyError, match=r"op 'twice' in torch.float32 on cpu: twice\(0.0\) is 1.0"):
        check_op("twice")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("twice", "was given a str"),
        (dataclasses.replace(ROW, name="add"), "is in the table"),
        (dataclasses.replace(ROW, name="load"), "no kind of row"),
        (dataclasses.replace(ROW, name="a b"), "an identifier"),
        (dataclasses.replace(ROW, cpp="({0} + {1})"), r"cannot be filled in .* places are \{0\}"),
        (dataclasses.replace(ROW, dtypes=(torch.complex64,)), "is said to take torch.complex64"),
        (dataclasses.replace(ROW, dtypes=torch.float32), "dtypes=torch.float32: expected a tuple of dtypes"),
        (dataclasses.replace(ROW, name=3), "op 3: expected a name that is an identifier"),
        (dataclasses.replace(ROW, arity="one"), "arity='one': expected its number of arguments"),
        (dataclasses.replace(ROW, eval=3), "eval=3: expected a function of tensors"),
        (dataclasses.replace(ROW, cpp=3), "cannot be filled in .AttributeError"),
        (dataclasses.replace(ROW, cpp=lambda dtype: 1 // 0), "cannot be filled in .ZeroDivisionError"),
    ],
)
def test_rows_that_cannot_be_are_refused(row, said):
    with pytest.raises(errors.ConfigError, match=said):
        fuser.register_op(row)
    assert "twice" not in OPS


def test_a_row_without_a_cell_for_a_dtype_is_refused():
    with pytest.raises(errors.Unsupported, match="twice has no C.. cell for torch.float32"):
        fuser.register_op(dataclasses.replace(ROW, cpp=None))
    assert "twice" not in OPS


def test_other_misuse_is_said():
    with pytest.raises(errors.ConfigError, match=r"decisive=0: expected arguments' numbers, as in \(0,\)"):
        fuser.register_lowering("examples.other", lambda ctx, x: x, decisive=0)
    with pytest.raises(errors.ConfigError, match="aten.add has a lowering"):
        fuser.register_lowering(torch.ops.aten.add, lambda ctx, x, y: x)
    with pytest.raises(errors.ConfigError, match="is no operator"):
        fuser.register_lowering(torch.add, lambda ctx, x, y: x)
    with pytest.raises(errors.ConfigError, match="expected a function"):
        fuser.register_lowering("examples.other", 3)
    with pytest.raises(errors.ConfigError, match="expected an overload"):
        fuser.register_decomposition(torch.ops.aten.add, lambda x, y: x)
    with pytest.raises(errors.ConfigError, match="no lowering from outside"):
        fuser.unregister_lowering(torch.ops.aten.add)
    with pytest.raises(errors.ConfigError, match="no op"):
        check_op("there_is_none")


def test_a_reduction_from_outside():
    fuser.register_reduction(FOLD)
    check_reduction("widest")
    fuser.unregister_reduction("widest")
    fuser.register_reduction(dataclasses.replace(FOLD, dtypes=FLOATS[:1], combine="{0} + {1}"))
    with pytest.raises(errors.VerifyError, match=r"reduction 'widest' in torch.float32 on cpu, dims \[1\] of"):
        check_reduction("widest")


@pytest.mark.parametrize(
    ("register", "row"), [(fuser.register_op, ROW), (fuser.register_reduction, FOLD)], ids=["op", "reduction"]
)
def test_a_row_with_an_operator_leaves_a_mark_and_a_refused_one_leaves_nothing(register, row):
    register(row, operator="examples.lowered")
    with_operator = extensions.mark()
    assert with_operator and plans.question_key("is there a key?") is not None
    taken_away_again = fuser.unregister_op if register is fuser.register_op else fuser.unregister_reduction
    taken_away_again(row.name)
    assert not extensions.any_known() and "examples.lowered" not in extending.registry.LOWERINGS
    with pytest.raises(errors.ConfigError, match="aten.add has a lowering"):
        register(row, operator=torch.ops.aten.add)
    assert not extensions.any_known() and row.name not in {*OPS, *REDUCTIONS}


def test_a_reduction_without_a_triton_function_is_refused_on_a_gpu():
    fuser.register_reduction(FOLD)
    with pytest.raises(errors.Unsupported, match="no Triton function that joins"):
        triton_folder("widest")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW, "was given a OpRow"),
        (dataclasses.replace(FOLD, name="sum"), "is in the table"),
        (dataclasses.replace(FOLD, name="a b"), "an identifier"),
        (dataclasses.replace(FOLD, index=True), "positions"),
        (dataclasses.replace(FOLD, combine="{2}"), r"cannot be filled in .* places are \{0\}"),
        (dataclasses.replace(FOLD, dtypes=(torch.complex64,)), "is said to take torch.complex64"),
        (dataclasses.replace(FOLD, name=3), "reduction 3: expected a name that is an identifier"),
        (dataclasses.replace(FOLD, accumulate=3), "cannot be filled in .TypeError"),
    ],
)
def test_reductions_that_cannot_be_are_refused(row, said):
    with pytest.raises(errors.ConfigError, match=said):
        fuser.register_reduction(row)
    assert "widest" not in REDUCTIONS


def test_other_misuse_of_reductions_is_said():
    with pytest.raises(errors.ConfigError, match="none from outside"):
        fuser.unregister_reduction("sum")
    with pytest.raises(errors.ConfigError, match="no reduction"):
        check_reduction("there_is_none")
