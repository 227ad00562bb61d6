"""The benchmarks' own machinery: a wrong result must be seen, and what is compared must be comparable."""

from __future__ import annotations

import argparse
import json
import math
import re

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    account,
    attention_rows,
    checks,
    contestants,
    contraction_rows,
    convnet_models,
    markdown,
    memory,
    models,
    problems,
    public,
    public_models,
    recorded,
    runner,
    training,
    update_rows,
)
from benchmarks.child import spawn
from benchmarks.kernel_rows import ROWS, SIZES, moved_bytes, seeded
from benchmarks.options import Options
from benchmarks.papers import PAPERS
from benchmarks.report import Claim, Report, Table, at_least, at_most, seconds
from benchmarks.singles_rows import ROWS as ROWS_OF_SINGLES
from benchmarks.singles_rows import SIZES as SIZES_OF_SINGLES
from benchmarks.suites import contractions, frozen, kernels, optimizers, overhead, scaling, shapes, singles


def test_quantiles_interpolate_between_samples():
    timing = runner.Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert timing.median == 3.0
    assert timing.quantile(0.0) == 1.0
    assert timing.quantile(1.0) == 5.0
    assert timing.quantile(0.1) == pytest.approx(1.4)


def test_rounds_alternate_between_contestants():
    seen = []
    calls = {name: runner.Call(seen.append, (name,)) for name in "ab"}
    budget = runner.Budget(row_seconds=0.0, sample_seconds=0.0, min_rounds=3, max_rounds=3)
    timings = runner.interleave(calls, budget)
    assert seen[-6:] == ["a", "b", "a", "b", "a", "b"]
    assert [len(t.samples) for t in timings.values()] == [3, 3]


def test_copy_call_moves_half_in_and_half_out():
    call = runner.copy_call(1000, "cpu")
    target = call.fn(*call.args)
    assert call.args[0].nbytes + target.nbytes == 1000
    assert target.eq(1).all()


X = torch.linspace(-3, 3, 1000)


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (X + 1e-3, "is off eager's by up to"),
        (X.double(), "expected the same dtype and sizes"),
        (X[:-1], "expected the same dtype and sizes"),
        (torch.where(X > 2.9, torch.nan, X), "is off eager's by up to"),
    ],
)
def test_a_wrong_result_is_named(out, expected):
    assert expected in (checks.judge([out], [X]).problem or "")


def test_integers_and_booleans_must_be_equal():
    eager = torch.arange(10)
    assert checks.judge([eager.clone()], [eager]).problem is None
    off = eager.clone()
    off[3] += 1
    assert "1 of 10 elements" in (checks.judge([off], [eager]).problem or "")


def test_a_result_less_exact_than_eager_is_named_though_within_tolerance():
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    eager = exact.float()
    coarse = eager * (1 + 2e-6)
    assert checks.judge([coarse], [eager]).problem is None
    assert "against float64" in (checks.judge([coarse], [eager], [exact]).problem or "")
    assert checks.judge([eager.clone()], [eager], [exact]).problem is None


def test_missing_results_are_named():
    assert "1 results: expected 2" in (checks.judge([X], [X, X]).problem or "")


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_eager_passes_the_check_of_every_row(row):
    args = row.make(seeded(row.name, "small", "cpu"), row.sizes[0])
    before = checks.clones(args)
    eager = checks.run_on_clones(row.fn, args, row.mutates)
    exact = checks.run_on_clones(row.fn, checks.to_float64(args), row.mutates)
    assert checks.judge(eager, eager, exact).problem is None
    assert all(torch.equal(a, b) for a, b in zip(args, before)), "the inputs must survive a checked run"
    assert all(e.isfinite().all() for e in eager)
    assert len(row.sizes) == len(SIZES)
    assert moved_bytes(row, args, eager) > 0


def test_rows_are_seeded_by_name_and_size():
    row = ROWS[0]
    a, b = (row.make(seeded(row.name, "small", "cpu"), row.sizes[0])[0] for _ in range(2))
    other = row.make(seeded(row.name, "medium", "cpu"), row.sizes[0])[0]
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert len({r.name for r in ROWS}) == len(ROWS) >= 24


def test_rows_of_papers_have_sources_and_names_of_their_own():
    assert len({r.name for r in PAPERS} | {r.name for r in ROWS}) == len(PAPERS) + len(ROWS)
    assert len(PAPERS) >= 60
    assert all(r.source and len(r.sizes) == 1 for r in PAPERS)


@pytest.mark.parametrize("row", [r for r in PAPERS if math.prod(r.sizes[0]) <= 1 << 19], ids=lambda r: r.name)
def test_small_rows_of_papers_pass_their_check_in_eager(row):
    args = row.make(seeded(row.name, "papers", "cpu"), row.sizes[0])
    before = checks.clones(args)
    eager = checks.run_on_clones(row.fn, args, row.mutates)
    exact = checks.run_on_clones(row.fn, checks.to_float64(args), row.mutates)
    assert checks.judge(eager, eager, exact).problem is None
    assert all(torch.equal(a, b) for a, b in zip(args, before)), "the inputs must survive a checked run"


@pytest.fixture
def stand_in(monkeypatch):
    """Lets a plain function stand in for fuser, and keeps the run to eager and it."""

    def install(change):
        monkeypatch.setattr(contestants, "why_absent", lambda name: None)
        monkeypatch.setitem(contestants.COMPILE, "fuser", lambda fn, dynamic=False: lambda *args: change(fn(*args)))

    return install


COMMAND = ["kernels", "--quick", "--rivals", "eager", "--rows", "^relu_mul_add/small"]


def test_a_wrong_row_makes_the_exit_status_non_zero(stand_in, capsys, tmp_path):
    stand_in(lambda out: out + 0.01)
    path = tmp_path / "out.json"
    assert command.main([*COMMAND, "--json", str(path)]) == 1
    assert "WRONG" in capsys.readouterr().out
    suite = json.loads(path.read_text())["suites"][0]
    assert suite["wrong"]
    assert "fuser" in suite["records"][0]["problems"]


def test_a_failing_contestant_is_reported_and_counts_as_wrong(stand_in, capsys):
    def fail(out):
        raise RuntimeError("no such kernel")

    stand_in(fail)
    assert command.main(COMMAND) == 1
    assert "no such kernel" in capsys.readouterr().out


def test_right_rows_exit_with_zero_and_state_the_targets(stand_in, capsys, tmp_path):
    stand_in(lambda out: out)
    path = tmp_path / "out.json"
    assert command.main([*COMMAND, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert set(data["suites"][0]["records"][0]["seconds"]) == {"eager", "fuser", "copy"}


def test_rows_of_papers_run_with_each_number_of_threads(stand_in, capsys, tmp_path):
    stand_in(lambda out: out)
    path = tmp_path / "out.json"
    line = ["kernels", "--quick", "--rivals", "eager", "--rows", "^gan_hinge/", "--threads", "2,1", "--json", str(path)]
    before = torch.get_num_threads()
    assert command.main(line) == 0
    assert torch.get_num_threads() == before
    out = capsys.readouterr().out
    assert "papers rows, 1 thread: none below eager" in out
    records = json.loads(path.read_text())["suites"][0]["records"]
    assert [(r["row"], r["threads"]) for r in records] == [("gan_hinge/papers", n) for n in (2, 1)]


BAD_LINES = "nothing", "", "kernels --rivals numpy", "kernels --rows (", "kernels --threads 0", "models --mode play"


@pytest.mark.parametrize("argv", [line.split() for line in BAD_LINES])
def test_a_bad_command_line_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert re.search("error: ", capsys.readouterr().err)


def test_a_failing_child_process_is_a_sentence(tmp_path):
    result = spawn("coldstart", {"contestant": "nobody", "device": "cpu"}, str(tmp_path))
    assert "exit status 1" in result["error"]
    assert "nobody" in result["error"]


@pytest.mark.parametrize("nodes", [20, 250])
def test_random_graphs_have_their_size_and_use_every_value(nodes):
    module = scaling.random_graph(nodes, seed=nodes)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert len(calls) == nodes
    assert all(n.users for n in calls)
    again = scaling.random_graph(nodes, seed=nodes)
    assert [n.target for n in again.graph.nodes] == [n.target for n in module.graph.nodes]


def test_growth_needs_both_sizes():
    assert scaling.growth({250: 1.0, 500: 3.0, 2000: 9.0}) == {500: 3.0}


def test_sizes_are_distinct_and_hold_the_edges():
    found = shapes.sizes(100)
    assert len(set(found)) == 100
    assert {(0, 5), (1, 5), (5, 0), (5, 1), (0, 0), (1, 1)} <= set(found)


def test_distinct_graphs_differ():
    codes = {overhead.distinct_graph(n).code for n in range(1, 200)}
    assert len(codes) == 199


@pytest.mark.parametrize("name", models.MODELS)
def test_small_models_agree_with_float64(name):
    model, inputs = models.build(name, quick=True, device="cpu")
    with torch.no_grad():
        out = model(*inputs)
        exact = model.double()(*checks.to_float64(inputs))
    assert out.isfinite().all()
    assert out.std() > 0
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", training.LOSSES)
def test_a_training_step_gives_every_parameter_a_gradient(name):
    model, inputs = training.build(name, quick=True, device="cpu")
    step = training.train_step("eager", model, name)
    with torch.no_grad():
        first, again = (training.results(step, model, inputs) for _ in range(2))
    assert len(first) == 1 + len(list(model.parameters()))
    assert all(g.isfinite().all() for g in first) and first[0] > 0
    torch.testing.assert_close(first, again)


def test_gradients_are_judged_as_one_vector():
    exact = [torch.ones(100, dtype=torch.float64), torch.full((100,), 1e-12, dtype=torch.float64)]
    eager = [torch.ones(100), torch.full((100,), 1e-11)]
    found = [torch.ones(100), torch.full((100,), 1e-10)]
    assert "result 1" in (checks.judge(found, eager, exact).problem or "")
    assert checks.judge(found, eager, exact, together=True).problem is None
    found[0][0] += 1e-5
    assert "result 0" in (checks.judge(found, eager, exact, together=True).problem or "")


def test_peak_of_tensors_counts_what_lives_at_once():
    def call():
        kept = torch.ones(1 << 18)
        for _ in range(3):
            kept = kept + 1

    assert memory.peak_tensor_mib(call) - memory.peak_tensor_mib(lambda: None) == pytest.approx(2, abs=0.01)


def test_a_table_is_aligned():
    lines = Table("t", ("row", "ms"), [("a", "1"), ("long", "10")]).text().splitlines()
    assert lines == ["t", "row   ms", "----  --", "a      1", "long  10"]


def test_claims_say_met_missed_or_open():
    assert at_most("x", 2.0, 1.0).text().startswith("MISSED  x: target ≤ 1 s, reached 2 s")
    assert at_least("x", 2.0, 1.0).met is True
    assert at_most("x", None, 1.0).met is None
    assert Report("s", claims=[Claim("x", "1", "2", None)]).text().splitlines()[1].startswith("open")


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.2 µs"), (5e-8, "50 ns")])
def test_seconds_choose_a_unit(value, text):
    assert seconds(value) == text


def test_tables_go_between_the_marks_of_a_document_and_survive_the_json(stand_in, tmp_path):
    stand_in(lambda out: out)
    data, document = tmp_path / "out.json", tmp_path / "page.md"
    document.write_text(f"# Page\n\n{markdown.BEGIN}\nold\n{markdown.END}\n\nAfter.\n")
    line = [*COMMAND[:-1], "^relu_mul_add/small|^gan_hinge", "--threads", "1"]
    assert command.main([*line, "--json", str(data), "--md", str(document)]) == 0
    first = document.read_text()
    assert first.startswith("# Page\n\n" + markdown.BEGIN) and first.endswith(markdown.END + "\n\nAfter.\n")
    words = "--rows '^relu_mul_add/small|^gan_hinge' --rivals eager --threads 1"
    assert f"`python -m benchmarks kernels --quick {words}`" in first
    assert "old" not in first and "| relu_mul_add | 64×64 |" in first
    assert "| papers rows, 1 thread: none below inductor | ≥ 1 × | not measured | open |" in first
    sections = [markdown.section(*entry) for entry in markdown.load(str(data))]
    assert all(s in first for s in sections) and len(sections) == 1


def test_a_document_without_marks_gets_them_at_its_end(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# Page\n")
    for text in ("one", "two"):
        markdown.write(str(document), [text])
    assert document.read_text() == f"# Page\n\n{markdown.BEGIN}\n\ntwo\n\n{markdown.END}\n"


def test_what_a_row_is_short_of():
    def times(**seconds):
        return {name: runner.Timing((s,)) for name, s in seconds.items()}

    def short(timings, fused=None):
        result = kernels.Result(ROWS[0], "large", (), 0, timings, {}, {}, fused)
        return kernels._short_of(result, "fuser")

    assert short(times(fuser=1.0, eager=1.5, inductor=1.2, copy=0.7)) == ""
    assert short(times(fuser=1.0, eager=0.9, inductor=0.8, copy=0.5)) == "inductor, eager, copy"
    assert short(times(fuser=1.0), account.Account(1, 1, 3, {"no lowering": 1})) == "fusion"


def test_a_wrong_optimizer_step_is_named():
    row = next(r for r in optimizers.ROWS if r.name == "adam, 500 small")
    problem = optimizers.Problem(row, Options(quick=True))
    problem.restart()
    problem.optimizer({"foreach": True}, problem.state).step()
    assert problem.judge() is None
    problem.restart()
    wrong = problem.optimizer({"foreach": False}, problem.state)
    wrong.param_groups[0]["lr"] *= 2
    wrong.step()
    assert "is off eager's by up to" in (problem.judge() or "")


@pytest.mark.parametrize("slow", [True, False])
def test_a_rival_that_compiles_too_long_is_left_out_of_a_row(monkeypatch, slow):
    asked = []

    def spawn(suite, params, cache, timeout, inductor):
        asked.append((params["contestants"], params.get("only_first", False), inductor))
        if params.get("only_first"):
            return {"error": f"no result within {timeout:.0f} s"} if slow else {"first": {"inductor": 9.0}}
        names = [*params["contestants"], "copy"]
        return {"first": dict.fromkeys(params["contestants"], 1.0), "samples": dict.fromkeys(names, [1.0]), "bytes": 8}

    monkeypatch.setattr(optimizers, "spawn", spawn)
    report = Report("optimizers")
    result = optimizers.measure(optimizers.ROWS[0], ["inductor", "fuser"], Options(caches="kept"), report)
    assert asked == [(["inductor"], True, "kept"), (["fuser"] if slow else ["inductor", "fuser"], False, "kept")]
    assert ("inductor" in result.timings) is not slow and "fuser" in result.timings
    assert result.first.get("inductor") == (None if slow else 9.0)
    assert [n for n in report.notes if "left out: no result within 420 s" in n] == report.notes[: int(slow)]


def test_singles_are_checked_and_measured(monkeypatch):
    def here(suite, params, cache, timeout):
        with torch.no_grad():
            return json.loads(json.dumps(singles.child(params)))

    monkeypatch.setattr(singles, "spawn", here)
    report = singles.run(Options(rows="^sum_rows$", quick=True))
    assert not report.wrong and len(report.records) == 2 * len(singles.thread_counts())
    for record in report.records:
        assert record["problem"] is None and set(record["share"]) == {"eager", "dynamo"}
    assert {c.target for c in report.claims} == {"≥ 1 ×", "≥ 0.97 ×"} and "singles, 1 MB" in report.text()


def test_rows_of_singles_run_in_eager():
    for row in ROWS_OF_SINGLES:
        args = row.make(seeded(row.name, "64 KB", "cpu"), SIZES_OF_SINGLES["64 KB"])
        assert max(t.nbytes for t in args if isinstance(t, torch.Tensor)) >= 1 << 15
        assert checks.tensors(row.fn(*args))


@pytest.mark.parametrize("equal", [False, True])
def test_samples_may_have_equal_numbers_of_calls(equal):
    one, ten = [], []
    calls = {"one": runner.Call(one.append, (0,)), "ten": runner.Call(ten.append, (0,))}
    budget = runner.Budget(row_seconds=0.0, sample_seconds=100.0, min_rounds=1, max_rounds=1)
    runner.interleave(calls, budget, clock=lambda: len(one) + 10 * len(ten), equal=equal)
    untimed = 6 if equal else 5  # they warm up and calibrate
    assert (len(one) - untimed, len(ten) - untimed) == (100, 100 if equal else 10)


@pytest.mark.parametrize("row", contraction_rows.ROWS[::3], ids=lambda r: r.name)
def test_contractions_run_in_eager(row):
    module, inputs = row.make(True)
    out = module(*inputs)
    assert out.isfinite().all() and not module.training


def test_rows_of_contractions_and_networks():
    assert len({r.name for r in contraction_rows.ROWS}) == len(contraction_rows.ROWS) == 60
    assert set(convnet_models.NETS) == {r.name for r in convnet_models.ROWS}
    module, inputs = next(r for r in convnet_models.ROWS if r.name == "unet").make(True)
    assert module(*inputs).shape == (1, 2, 64, 64)


@pytest.mark.parametrize("row", attention_rows.ROWS[::3], ids=lambda r: r.name)
def test_attention_runs_in_eager(row):
    module, inputs = row.make(True)
    with torch.no_grad():
        out = module(*inputs)
    assert out.isfinite().all() and out.shape[:3] == inputs[0].shape[:3]


def test_a_contraction_beside_a_rival_that_is_wrong_and_one_that_fails(monkeypatch):
    def failing(fn, dynamic=False):
        raise RuntimeError("no such layer")

    monkeypatch.setitem(contestants.COMPILE, "fuser", lambda fn, dynamic=False: lambda *args: fn(*args) + 1)
    monkeypatch.setitem(contestants.COMPILE, "openvino", failing)
    result = contractions.measure(contraction_rows.ROWS[0], ["eager", "openvino", "fuser"], Options(quick=True))
    assert set(result.timings) == {"eager"} and "no such layer" in result.problems["openvino"]
    report = contractions.report_of("contractions", [result], ["eager", "openvino", "fuser"], [])
    assert "is off eager's" in report.wrong[0] and "openvino" in report.notes[0]


PROBLEM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(n)
    def forward(self, x):
        return self.norm(x).relu()
n = 96
def get_inputs():
    return [torch.rand(64, n)]
def get_init_inputs():
    return [n]
"""


def test_problems_of_other_projects(tmp_path, capsys, monkeypatch):
    """A file in KernelBench's form is run and compared; one that fails says why."""
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_norm.py").write_text(PROBLEM)
    (tmp_path / "level1" / "2_broken.py").write_text(PROBLEM.replace("[n]", "[n, 'no', 1, 2, 3, 4, 5, 6, 7]"))
    (tmp_path / "notes.py").write_text("")
    model, args = problems.load(tmp_path / "level1" / "1_norm.py", "cpu", 4)
    assert model.norm.num_features == 24 and args[0].shape == (64, 24)
    monkeypatch.setattr("sys.argv", ["problems", str(tmp_path), "--smaller", "4", "--backends", "aot_eager"])
    assert problems.main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("1_norm") and "aot_eager" in rows[0] and "NOT" not in rows[0]
    assert rows[1].startswith("2_broken") and "Error" in rows[1] and rows[2].startswith("1 problems")
    assert problems.distance(torch.ones(2), torch.tensor([1.0, 2.0])) == 0.5
    assert problems.distance(torch.ones(2), torch.ones(2, 1)) == float("inf")
    assert problems.distance(torch.tensor([1.0, math.nan]), torch.ones(2)) == float("inf")
    assert problems.distance(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])) == 0


CALLS = """Operator: aten.add.Tensor
cnt: 3, ((T([2, 3], f16), T([2, 3], f16, stride=(1, 2))), {'alpha': 2})
cnt: 1, ((T([2, 3], f16), T([2, 3], f16, stride=(1, 2))), {'alpha': 2})
Operator: aten.embedding.default
cnt: 1, ((T([5, 4], f32), T([2, 3], i64)), {})
Operator: aten.add_.Tensor
cnt: 1, ((T([4], f32), 1), {})
Operator: aten.mm.default
cnt: 1, ((T([2, 3], f32), T([2, 3], f32)), {})
cnt: 1, ((T([4000, 4000], f32), T([4000, 4000], f32)), {})
Operator: aten._cudnn_rnn.default
cnt: 1, ((T([2, 3], f32),), {})
"""


def test_recorded_calls_of_models(tmp_path, capsys, monkeypatch):
    """Each different call runs once. Calls that eager refuses and large ones are left out; wrong ones are printed."""
    (tmp_path / "some_model.txt").write_text(CALLS)
    calls = recorded.read(tmp_path)
    assert [c.operator.split(".")[1] for c in calls] == ["add", "embedding", "add_", "mm", "mm"]
    _, (a, b) = recorded.program(calls[0], torch.bfloat16, 1 << 20)
    assert a.dtype is b.dtype is torch.bfloat16 and b.stride() == (1, 2)
    _, (weight, places) = recorded.program(calls[1], torch.float32, 1 << 20)
    assert places.max() < len(weight)
    monkeypatch.setattr("sys.argv", ["recorded", str(tmp_path), "--untimed", "--most", "1000000"])
    assert recorded.main() == 0
    assert capsys.readouterr().out.startswith("3 calls, 0 wrong")
    monkeypatch.setattr(contestants, "compile_for", lambda name, function, dynamic: lambda *a: function(*a) + 1)
    assert recorded.main() == 1
    assert capsys.readouterr().out.count("WRONG") == 3


def test_a_problem_whose_backend_is_wrong_or_fails_is_said(tmp_path, capsys, monkeypatch):
    def shifted(graph, inputs):
        return lambda *args: [x + 1 for x in graph(*args)]

    def failing(graph, inputs):
        raise RuntimeError("no kernel")

    (tmp_path / "1_norm.py").write_text(PROBLEM)
    for backend, said in ((shifted, "NOT EAGER'S RESULT"), (failing, "no kernel")):
        name = f"problems_{backend.__name__}"
        torch._dynamo.register_backend(backend, name)
        monkeypatch.setattr("sys.argv", ["problems", str(tmp_path), "--backends", name])
        assert problems.main() == 1
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("row", update_rows.ROWS, ids=lambda row: row.name)
def test_updates_write_what_they_say(row):
    """The arguments named in `mutates` are written, or moved by nothing, and no others."""
    args = row.make(seeded(row.name, "papers", "cpu"), ())
    before = checks.clones(args)
    row.fn(*args)
    changed = {i for i, (a, b) in enumerate(zip(args, before)) if not torch.equal(a, b)}
    assert changed and changed <= set(row.mutates) and row.source


def test_frozen_rows_and_what_is_promised_of_them(monkeypatch):
    """Each model in both dtypes; with each number of threads a table and a claim of its own."""
    assert {r.name for r in frozen.ROWS} == {f"{m}, {d}" for m in frozen.MODELS for d in ("float32", "bfloat16")}
    timings = {"eager": runner.Timing((2.0,)), "fuser-frozen": runner.Timing((1.0,)), "zentorch": runner.Timing((0.9,))}
    monkeypatch.setattr(
        frozen.contractions, "measure", lambda row, names, options: contractions.Result(row.name, timings, {})
    )
    report = frozen.run(Options(rows="gpt2", threads=(1, 2)))
    assert [t.title.split(":")[0] for t in report.tables] == ["frozen, 1 thread", "frozen, 2 threads"]
    assert [c.met for c in report.claims] == [False, False] and "0.90" in report.claims[0].reached


def test_a_public_row_is_timed_and_compared_on_the_cpu(monkeypatch, tmp_path):
    def make(small):
        return torch.nn.Linear(4, 4), {"input": torch.ones(2 if small else 1 << 20, 4)}

    monkeypatch.setattr(public, "ROWS", (public_models.Row("line", make),))
    monkeypatch.setattr(public, "prepare", lambda: None)  # it silences logs, in a process of its own
    options = argparse.Namespace(folder=tmp_path, device="cpu", dtype="", who="eager,aot_eager", lock=None)
    record = public.measure("line", "training", options)
    for name in ("eager", "aot_eager"):
        assert len(record[name]["rounds"]) == public.ROUNDS and record[name]["distance"] < 1e-6
        assert 0 < record[name]["ms"] and record[name]["peak"] < 1 and record[name]["top"]
