"""Ahead-of-time files: what they hold, that they run where there is nothing, and that bad ones are refused."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._higher_order_ops import scan, while_loop
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import fuser
from fuser import aot
from fuser.canonical.portable import name_of, target_of
from fuser.errors import AotError, ConfigError, GraphError, InputError
from fuser.runtime import archive, products, warm

KEY = b"between writer and reader"


class Model(torch.nn.Module):
    """Products, a norm, tied weights, a buffer that calls count up, constants, containers in and out."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.down.weight = self.up.weight
        self.norm = torch.nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(0.5, 2, 16), persistent=False)

    def forward(self, pair, *, shift=1.5, mask=None):
        self.calls.add_(1)
        h = self.norm(torch.nn.functional.gelu(self.up(pair["x"])) * self.scale + shift)
        z = torch.softmax(h, -1) + self.down(pair["y"][0]).tanh()
        return {"out": (z.sigmoid(), [h - torch.tensor([0.25]), pair["x"].shape[0]]), "none": mask}


def inputs(n):
    generator = torch.Generator().manual_seed(n)
    return {"x": torch.randn(n, 8, generator=generator), "y": [torch.randn(n, 8, generator=generator)]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """The path of a file of `Model` with a dynamic batch of at most 64."""
    path = tmp_path_factory.mktemp("aot") / "model.fuser"
    batch = Dim("batch", min=1, max=64)
    shapes = {"pair": {"x": {0: batch}, "y": [{0: batch}]}, "shift": None}
    with torch.no_grad():
        exported = export(model, (inputs(6),), {"shift": 1.5}, dynamic_shapes=shapes)
    assert aot.compile(exported, path, key=KEY) == str(path)
    return path


def test_results_are_eagers_at_every_size(model, written):
    program = aot.load(written)
    for n in (6, 1, 9, 12, 64, 33):
        got, want = program(inputs(n), shift=1.5), model(inputs(n), shift=1.5)
        torch.testing.assert_close(got["out"][0], want["out"][0])
        torch.testing.assert_close(got["out"][1][0], want["out"][1][0])
        assert got["out"][1][1] == n and got["none"] is None
    assert program.kernel_hits >= 6 and program.kernel_misses == 0


def test_buffers_are_the_programs_own_and_the_file_stays(model, written):
    before = written.read_bytes()
    one, other = aot.load(written), aot.load(written)
    start = int(one.state_dict()["calls"])
    for _ in range(3):
        one(inputs(4), shift=1.5)
    assert int(one.state_dict()["calls"]) == start + 3 and int(other.state_dict()["calls"]) == start
    assert one.state_dict()["up.weight"].data_ptr() == one.state_dict()["down.weight"].data_ptr()
    assert written.read_bytes() == before


def test_what_the_export_does_not_allow_is_said(written):
    program = aot.load(written)
    x, y = torch.ones(3, 8), [torch.ones(3, 8)]
    for pair, sentence in (
        (inputs(65), "dim 0 of input pair_x is 65: the export allows"),
        ({"x": x, "y": [torch.ones(4, 8)]}, "to be one number"),
        ({"x": torch.ones(3, 9), "y": y}, "dim 1 of input pair_x is 9: the export allows 8 alone"),
        ({"x": x.double(), "y": y}, "torch.float64 on cpu of 2 dims"),
        ({"x": 3, "y": y}, "of type int: expected a tensor"),
        ({"x": x, "y": y[0]}, "arguments of the form"),
    ):
        with pytest.raises(InputError, match=sentence):
            program(pair, shift=1.5)
    with pytest.raises(InputError, match="input shift is 2.5: the program was exported for 1.5 alone"):
        program({"x": x, "y": y}, shift=2.5)


def test_calls_that_no_kernel_takes_run_by_aten(model, written, tmp_path):
    rewrite(written, tmp_path / "bare", lambda program: [g.update(kernels=[]) for g in program["groups"]])
    for program in (aot.load(written), aot.load(tmp_path / "bare")):
        for pair in (inputs(7), {"x": torch.randn(8, 5).t(), "y": [torch.randn(5, 16)[:, ::2]]}):
            got, want = program(pair, shift=1.5), model(pair, shift=1.5)
            torch.testing.assert_close(got["out"][0], want["out"][0])
            torch.testing.assert_close(got["out"][1][0], want["out"][1][0])
    assert program.kernel_hits == 0 and program.kernel_misses > 0


_CLEAN = """
import os, pathlib, sys, torch
from fuser import aot
program = aot.load(sys.argv[1], key=sys.argv[2].encode())
x, y, want = torch.load(sys.argv[3])
got = program({"x": x, "y": [y]}, shift=1.5)
assert torch.allclose(got["out"][0], want, atol=1e-5)
assert program.kernel_hits and not program.kernel_misses
loaded = {name.partition(".")[0] for name in sys.modules} | {n for n in sys.modules if n.startswith("torch._")}
found = loaded & {"sympy", "triton", "torch._dynamo", "torch._inductor"}
assert not found, found
assert not any(name.startswith(("fuser.frontends", "fuser.lowering", "fuser.cpu.codegen")) for name in sys.modules)
assert not pathlib.Path(os.environ["FUSER_CACHE_DIR"]).exists()
"""


def test_a_process_without_compiler_and_cache_runs_it(model, written, tmp_path):
    pair = inputs(5)
    with torch.no_grad():
        want = model(pair, shift=1.5)["out"][0]
    torch.save((pair["x"], pair["y"][0], want), tmp_path / "case")
    environment = {"PATH": "", "FUSER_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CLEAN, str(written), KEY.decode(), str(tmp_path / "case")]
    subprocess.run(command, check=True, timeout=120, env=environment)


# -- files that are refused --------------------------------------------------------------------------------------------
def test_damage_is_found_wherever_it_is(written, tmp_path):
    whole = written.read_bytes()
    with archive.Archive(written) as file:
        members = list(file.members.values())
    places = [0, 20, len(whole) - 1, *(m.start + m.size // 2 for m in members), *(m.start for m in members)]
    bad = tmp_path / "bad"
    for place in places:
        bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if place == len(whole) - 1 and whole[-1] == 0:
            continue  # a zero after the last member, which nobody reads
        with pytest.raises(AotError, match="write it again"):
            pytest.fail(f"byte {place} of {len(whole)}: {aot.load(bad)}")
    for end in (0, 10, 100, members[0].start, len(whole) // 2, len(whole) - 64):
        bad.write_bytes(whole[:end])
        with pytest.raises(AotError, match="write it again"):
            aot.load(bad)


def test_only_files_of_the_key_are_taken(written, tmp_path, monkeypatch):
    assert aot.load(written, key=KEY) and aot.load(written)
    with pytest.raises(AotError, match="its signature is not one of the key"):
        aot.load(written, key=b"another")
    monkeypatch.setenv("FUSER_AOT_KEY", KEY.decode())
    assert aot.load(written)
    rewrite(written, tmp_path / "unsigned", lambda program: None)
    with pytest.raises(AotError, match="it is not signed, but a key was given"):
        aot.load(tmp_path / "unsigned")


def test_a_file_that_others_may_write_needs_a_key(written, tmp_path):
    (tmp_path / "open").write_bytes(written.read_bytes())
    (tmp_path / "open").chmod(0o666)
    with pytest.raises(AotError, match="can be written by other users"):
        aot.load(tmp_path / "open")
    assert aot.load(tmp_path / "open", key=KEY)


def rewrite(path, to, change):
    """The file with another program, whole and unsigned."""
    with archive.Archive(path) as file:
        members = {name: file.read(name) for name in file.members}
    program = json.loads(members["program.json"])
    change(program)
    archive.write(to, {**members, "program.json": json.dumps(program).encode()})


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("format", 99, "use the version of fuser that wrote it"),
        ("launch", -1, "use the version of fuser that wrote it"),
        ("torch", "1.0.0", "install that version of torch"),
        ("system", "plan9", "on this system"),
        ("processor", "m68k", "on such a processor"),
        ("instructions", ["avx1024"], "expected avx1024, which this processor lacks"),
    ],
)
def test_a_file_of_another_machine_names_the_field(written, tmp_path, field, value, cure):
    rewrite(written, tmp_path / "foreign", lambda program: program["machine"].update({field: value}))
    with pytest.raises(AotError, match=f"(?s)field '{field}'.*{cure}"):
        aot.load(tmp_path / "foreign")


def _first_call(program):
    return next(row for row in program["graph"]["rows"] if row[0] == "call")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: _first_call(p).__setitem__(1, "builtins:eval"),
        lambda p: _first_call(p).__setitem__(1, "aten::no_such_operator"),
        lambda p: _first_call(p).__setitem__(1, "aten::__class__"),
        lambda p: _first_call(p).__setitem__(1, "__class__::mro"),
        lambda p: _first_call(p).__setitem__(2, {"tuple": [{"ref": 9999}]}),
        lambda p: p["tensors"][0].__setitem__(3, 1 << 40),
        lambda p: p["tensors"][0].__setitem__(1, [1 << 40]),
        lambda p: p["tensors"][0].__setitem__(3, -64),
        lambda p: p["groups"][0]["kernels"][0]["program"].__setitem__(6, [["buffer", 99]]),
        lambda p: p["groups"][0]["kernels"][0].__setitem__("library", "no.so"),
        lambda p: p.pop("groups"),
        lambda p: p.update(takes='[1, {"type": "os.system"}]'),
        lambda p: p.update(held=[9999]),
        lambda p: p.update(guards=[["s0 > 1", ["s0"], [1, 7]]]),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(written, tmp_path, change):
    rewrite(written, tmp_path / "hostile", change)
    with pytest.raises(AotError, match="hostile cannot be used"):
        aot.load(tmp_path / "hostile")


def test_every_operator_of_torch_is_found_by_its_name():
    names = {s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    packets = [getattr(torch.ops.aten, name, None) for name in sorted(names)]
    packets = [p for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    assert len(operators) > 2000
    lost = []
    for operator in operators:
        try:
            found = target_of(name_of(operator)) is operator
        except GraphError:
            found = False
        lost += [] if found else [str(operator)]
    assert not lost


def test_operators_with_names_of_python(tmp_path):
    class Bits(torch.nn.Module):
        def forward(self, x, y):
            return x << 2, x >> 1, (x & 6) | y, x ^ 5, (x << y) + 1

    x, y = torch.arange(12), torch.arange(12) % 3
    aot.compile(export(Bits(), (x, y)), tmp_path / "bits")
    for result, expected in zip(aot.load(tmp_path / "bits")(x, y), Bits()(x, y), strict=True):
        torch.testing.assert_close(result, expected)


def test_what_a_file_cannot_hold_is_said(tmp_path, model):
    with pytest.raises(AotError, match="Model is no exported program"):
        aot.compile(model, tmp_path / "x")
    with pytest.raises(AotError, match="cannot be written"), torch.no_grad():
        exported = export(torch.nn.ReLU(), (torch.ones(3),))
        aot.compile(exported, tmp_path / "no" / "folder")
    with pytest.raises(OSError):
        aot.load(tmp_path / "nothing")


def test_examples_and_options_of_another_form_are_refused(tmp_path):
    exported = export(torch.nn.ReLU(), (torch.ones(3),))
    for examples in (3, [3], [(torch.ones(3),)], [((torch.ones(3),), None)], [(torch.ones(3), {})]):
        with pytest.raises(InputError, match=r"pairs? \(args, kwargs\)"):
            aot.compile(exported, tmp_path / "x", examples=examples)
    with pytest.raises(ConfigError, match=r"options=\[1\]: expected a dict of settings"):
        aot.compile(exported, tmp_path / "x", options=[1])


def test_large_products_of_fixed_sizes(tmp_path):
    head = torch.nn.Linear(16, 40_000, bias=False)
    x = torch.randn(256, 16)  # 40 MB of results: the pass large_products takes them
    with torch.no_grad():
        program = aot.load(aot.compile(export(head, (x,)), tmp_path / "head"))
        torch.testing.assert_close(program(x), head(x))


def test_large_products_of_open_sizes(tmp_path):
    """The head of a model: results of 32 MiB or more come into memory that an earlier call left, others do not."""
    head = torch.nn.Linear(64, 40_000, bias=False)
    batch = Dim("batch", min=1, max=1000)
    with torch.no_grad():
        exported = export(head, (torch.randn(256, 64),), dynamic_shapes=({0: batch},))
        program = aot.load(aot.compile(exported, tmp_path / "head"))
        warm.outputs.trim()
        for n in (256, 1, 300, 7, 2, 256):
            x = torch.randn(n, 64)
            torch.testing.assert_close(program(x), head(x))
        # oneDNN refuses such a call on processors without AVX-512.
        assert products._into() is None or warm.outputs.stats()["held"] == 2
        warm.outputs.trim()


class Even(torch.nn.Module):
    """Sizes that must be even, and related."""

    def forward(self, x, y):
        torch._check(x.shape[0] >= 2 * y.shape[0])
        return x.view(-1, 2).relu() * 2, y + x.shape[0]


def test_relations_between_sizes_are_checked_as_the_export_does(tmp_path):
    dynamic = ({0: Dim.AUTO}, {0: Dim.AUTO})
    exported = export(Even(), (torch.randn(8, 5), torch.randn(3)), dynamic_shapes=dynamic)
    program = aot.load(aot.compile(exported, tmp_path / "even"))
    for n, m in ((8, 3), (12, 6), (6, 1), (7, 3), (6, 5), (100, 2)):
        x, y = torch.randn(n, 5), torch.randn(m)
        if n % 2 or n < 2 * m:
            with pytest.raises(InputError, match="the export requires .* of its sizes: here s"):
                program(x, y)
        else:
            for got, want in zip(program(x, y), exported.module()(x, y), strict=True):
                torch.testing.assert_close(got, want)


class Loops(torch.nn.Module):
    """A branch inside of a loop, and a scan whose steps write rows; both read the module's state."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        def step(i, y):
            y = torch.cond(y.mean() > 0, lambda y: y.sin() - self.scale, lambda y: y.cos() * 2 + 1, (y,))
            return i + 1, y

        count, y = while_loop(lambda i, y: i < 3, step, (torch.zeros((), dtype=torch.int64), x.exp() - 1))
        carry, rows = scan(lambda c, r: ((c * 0.5 + r).tanh(), (c * r).exp() + self.scale), torch.zeros(8), y, dim=0)
        return count, carry, rows * 2


@pytest.mark.parametrize("sizes", [(5,), (5, 3, 9)], ids=["fixed", "varying"])
def test_operators_on_graphs_are_kept_with_their_kernels(tmp_path, sizes):
    module = Loops()
    dims = ({0: Dim("n", min=2, max=64)},) if len(sizes) > 1 else None
    with torch.no_grad():
        program = aot.load(aot.compile(export(module, (torch.ones(5, 8),), dynamic_shapes=dims), tmp_path / "x"))
        for n in sizes:
            for x in (torch.linspace(-2, 1, 8 * n).view(n, 8), torch.ones(n, 8)):
                torch.testing.assert_close(program(x), module(x))
    assert program.kernel_hits and not program.kernel_misses


def test_nameless_containers_are_refused(tmp_path):
    class Nameless(dict): ...

    class Named(torch.nn.Module):
        def forward(self, x):
            return Nameless(result=x.sin())

    pytree.register_pytree_node(
        Nameless, lambda d: (list(d.values()), list(d)), lambda v, k: Nameless(zip(k, v, strict=True))
    )
    with pytest.raises(AotError, match="containers have no name"), torch.no_grad():
        aot.compile(export(Named(), (torch.ones(3),)), tmp_path / "x")


class Shapes(torch.nn.Module):
    """Sizes in arithmetic, an integer input, an input that is written, random access."""

    def forward(self, x, index, n: int):
        index.add_(1)
        rows = x[index % x.shape[0]].relu() * n
        return torch.cat([rows, x * 2], 0).view(-1, 2, 4), rows.sum() / x.shape[0], x.shape[0] * 3


def test_arithmetic_on_sizes_and_inputs_that_are_written(tmp_path):
    half = Dim("half", min=2, max=40)
    x, index = torch.randn(6, 8), torch.tensor([0, 3, 5])
    exported = export(Shapes(), (x, index.clone(), 3), dynamic_shapes=({0: 2 * half}, None, None))
    program = aot.load(aot.compile(exported, tmp_path / "shapes"))
    for rows in (6, 4, 20):
        x = torch.randn(rows, 8)
        mine, theirs = index.clone(), index.clone()
        for got, want in zip(program(x, mine, 3), Shapes()(x, theirs, 3), strict=True):
            torch.testing.assert_close(got, want)
        assert torch.equal(mine, theirs)
    with pytest.raises(InputError, match=r"dim 0 of input x is 7: the export expects 2 \* "):
        program(torch.randn(7, 8), index.clone(), 3)


def test_random_numbers_are_drawn_anew_by_the_seed(tmp_path):
    exported = export(torch.nn.Dropout(0.5).train(), (torch.ones(4, 8),), dynamic_shapes=({0: Dim.AUTO},))
    program = aot.load(aot.compile(exported, tmp_path / "dropout"))
    torch.manual_seed(3)
    first, second = program(torch.ones(5, 8)), program(torch.ones(5, 8))
    torch.manual_seed(3)
    assert torch.equal(program(torch.ones(5, 8)), first) and not torch.equal(first, second)
    assert set(first.unique().tolist()) <= {0.0, 2.0}
    assert pathlib.Path(program.path).exists() and fuser.aot is aot
