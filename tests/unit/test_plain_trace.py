"""Graphs for inference that are traced without AOTAutograd: node for node AOTAutograd's, and only where they may be."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table as torchs_decompositions
from torch._functorch.aot_autograd import aot_function, aot_module_simplified, make_boxed_func
from torch.testing._internal.common_methods_invocations import op_db

import fuser
from fuser import notices
from fuser.canonical.aliases import overloads_named
from fuser.frontends import dynamo, fakes, plain_trace
from fuser.frontends.dynamo import compilations, fuser_backend
from fuser.passes.decompositions import decomposition_of, decomposition_table


def outline(value):
    """All that a pass can see of a node's value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device, value.storage_offset()
    return [outline(v) for v in value] if isinstance(value, (tuple, list)) else value


def as_text(module):
    """Nodes with names, targets, arguments, values and the user's lines."""
    return [
        (n.op, n.name, n.target, str((n.args, n.kwargs)), outline(n.meta.get("val")),
         n.meta.get("stack_trace") if n.op == "call_function" else None)
        for n in module.graph.nodes if n.op != "output"
    ] + [str(tuple(module.graph.output_node().args[0]))]  # fmt: skip


class Beside:
    """A backend that traces each graph both ways. `own` and `aots` are the newest graph's texts, None without one."""

    def __init__(self):
        self.own = self.aots = self.left = None

    def __call__(self, gm, example_inputs):
        self.own = self.aots = self.left = None
        with dynamo.levels_kept(), dynamo.in_fast_forms(), plain_trace.tracing(gm, example_inputs) as found:
            if found is not None:
                self.own = as_text(found)
        if self.own is None:
            return gm.forward

        def inference(module, inputs):
            self.aots = as_text(module)
            context = torch._guards.TracingContext.try_get()
            self.left = dynamo._metadata_reason(context, len(example_inputs), ordered=True)
            return module.forward

        with dynamo.levels_kept(), fakes.corrected_traces(), dynamo.in_fast_forms():
            aot_module_simplified(
                gm, example_inputs, fw_compiler=inference, inference_compiler=inference,
                decompositions=decomposition_table(), keep_inference_input_mutations=True,
            )  # fmt: skip
        return gm.forward

    def is_same(self):
        """Whether the newest graph was traced, as AOTAutograd traces it, and nothing is left to do around it."""
        return self.own is not None and self.own == self.aots and self.left is None


@pytest.fixture
def beside(clean):
    made = Beside()
    fakes.follow_dynamo(made)
    return made


def written_and_read_before(x, y):
    z = x * y
    before = z + 1
    z += y
    return before * z, z.amax(-1)


PROGRAMS = {
    "chain": lambda x, y: torch.relu(x * y + 1).sigmoid(),
    "numbers": lambda x, y: torch.where(x > 0, 1.0, y) + 2 - 0.5,
    "norms": lambda x, y: F.layer_norm(x, (8,)).softmax(-1) @ y.t(),
    "views": lambda x, y: (x + y).t().reshape(2, 32)[:, 1::2],
    "detached": lambda x, y: (x.detach() * y).detach() + torch.ones(8).detach(),
    "data": lambda x, y: x.data * 2 + (x * y).data,
    "created": lambda x, y: x + torch.arange(8) * torch.full((8, 8), 2.5) @ torch.zeros_like(y) + x.new_ones(8),
    "created from tensors": lambda x, y: torch.linspace(x[0, 0].sum(), 3.0, 8) + y,
    "several": lambda x, y: (torch.var_mean(x, 0), *torch.topk(y, 2)),
    "chunks": lambda x, y: [c + 1 for c in (x * y).chunk(3, -1)],
    "casts": lambda x, y: x.to(torch.bfloat16).float() + y.double(),
    "converted to itself": lambda x, y: x.to(torch.float32).contiguous() * y,
    "indexed": lambda x, y: x[torch.arange(2)] + y[0],
    "masked fill": lambda x, y: x.masked_fill(y > 0, 0.5).logsumexp(-1),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
    "drawn": lambda x, y: x + torch.rand_like(y) * torch.randn(8),
    "dead code": lambda x, y: (torch.relu(y), x * y)[1],
    "convolution": lambda x, y: F.conv2d(x[None, None], y[None, None, :3, :3]),
    "dropout that drops nothing": lambda x, y: F.dropout(x * y, 0.5, False),
    "losses": lambda x, y: F.cross_entropy(x, y.argmax(-1)) + F.smooth_l1_loss(x, y),
    "pads and pools": lambda x, y: F.avg_pool2d(F.pad(x[None, None], (1, 1, 1, 1), "circular"), 2) + y[0, 0],
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "written intermediates": lambda x, y: (x + y).mul_(2).add_(y, alpha=3).clamp_(0.0, 1.0) @ x,
    "written and read before": written_and_read_before,
    "copied into": lambda x, y: (x * 2).copy_(y[0]) + 1,
    "written beside a result": lambda x, y: ((z := x * y), torch.relu(z) * 2, (x - y).sigmoid_()),
    "written by composites": lambda x, y: F.relu(x @ y, inplace=True) + F.silu(x * 2, inplace=True),
    "filled": lambda x, y: (x * 2).fill_(3.0) + (y * 2).zero_() + (x + y).masked_fill_(y > 0, 0.5),
    "written by indices": lambda x, y: (x * 2).index_add_(0, torch.arange(2), y[:2]).scatter_(1, y.argsort(), 1.0),
}  # fmt: skip


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(beside, name, mode):
    around = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}[mode]
    with around():
        torch.compile(PROGRAMS[name], backend=beside)(torch.randn(8, 8), torch.randn(8, 8))
    assert beside.is_same() or mode == "inference" and beside.own is None, (beside.own, beside.aots, beside.left)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(4))
def test_operators(beside, part):
    """The first sample of each of torch's operators; some have none that may be traced so."""
    found = 0
    for op in op_db[part::32]:
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
        if sample is None:
            continue
        torch._dynamo.reset()
        beside.own = None
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                compiled = torch.compile(lambda x, *args: op(x, *args, **sample.kwargs), backend=beside, dynamic=False)  # noqa: B023
                compiled(sample.input, *sample.args)
            except Exception:  # Dynamo does not take it
                continue
        if beside.own is not None:
            found += 1
            assert beside.is_same(), op.name
    assert found > 10


class Marked(torch.Tensor):
    """A subclass."""


@torch.library.custom_op("fuser_plain_trace::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


HELD = torch.randn(8)


def branch(x, y):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))


def without_gradients(x, y):
    with torch.no_grad():
        z = x * 2
    return z + y


def under_autocast(x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ y


LEFT = {
    "a written input": lambda x, y: x.add_(y),
    "a written intermediate that is wider": lambda x, y: (x.half() * 2).add_(y),
    "a write into a view of an input": lambda x, y: (x[0].mul_(2), x.sum(0) + y)[1],
    "a write into a view": lambda x, y: (x * 2)[0].zero_() + y,
    "a view of what is written": lambda x, y: ((z := x * 2).mul_(y), z.t() + 1)[1],
    "a view from before a write": lambda x, y: ((z := x * 2).t(), z.mul_(y))[0] + 1,
    "a write into a list": lambda x, y: (torch._foreach_add_([z := x * 2], 1), z + y)[1],
    "numbers drawn in place": lambda x, y: (x * 2).uniform_(3.0, 3.0) + y,
    "an argument for results": lambda x, y: torch.add(x, y, out=torch.empty(8, 8)),
    "a number of results that depends on data": lambda x, y: x.relu().masked_select(y > 0),
    "a mask as index": lambda x, y: x[y > 0],
    "an input": lambda x, y: (x, x * y),
    "a view of an input": lambda x, y: (x.t(), x * y),
    "an input through a cast to its own dtype": lambda x, y: (x.to(torch.float32), y + 1),
    "one result twice": lambda x, y: ((z := x * y), z.view(64)),
    "two views of one tensor": lambda x, y: (x * y).chunk(2),
    "other sizes in place": lambda x, y: (x * y).t_() + 1,
    "an operator of the user's": lambda x, y: torch.ops.fuser_plain_trace.twice(x) + y,
    "a branch": branch,
    "other grad mode": without_gradients,
    "autocast inside": under_autocast,
    "a transform": lambda x, y: torch.vmap(torch.dot)(x, y),
    "a derivative": lambda x, y: torch.func.grad(lambda t: (t * y).sum())(x),
    "a requirement of gradients": lambda x, y: (x * y).requires_grad_(),
    "complex numbers inside": lambda x, y: torch.view_as_real(torch.complex(x, y) * 2j),
}


# What Dynamo keeps out of its graphs, and what is traced since AOTAutograd would have nothing to do, either.
OUTSIDE = {
    "a number of results that depends on data", "a mask as index", "an input", "a requirement of gradients",
    "complex numbers inside",
}  # fmt: skip


def test_what_writes_one_tensor_has_an_operator_that_returns_it():
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    found = {n: c for n in names for o in overloads_named(n) if (c := plain_trace._computing(o))}
    assert len(found) > 150 and all(str(c._schema.arguments[0].type) == "Tensor" for c in found.values())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", LEFT)
def test_a_program_that_is_left_to_aot_autograd(clean, monkeypatch, name):
    """Or is as AOTAutograd traces it: results must be eager's, in memory of their own or not, and inputs as written."""
    asked = []
    plain = dynamo._GraphCompiler._trace
    monkeypatch.setattr(dynamo._GraphCompiler, "_trace", lambda self, steps: asked.append(name) or plain(self, steps))
    f, g = LEFT[name], torch.compile(LEFT[name], backend=fuser_backend)
    inputs = torch.randn(8, 8), torch.randn(8, 8)
    mine, others = ([t.clone() for t in inputs] for _ in range(2))
    got, want = g(*mine), f(*others)
    torch.testing.assert_close((got, mine), (want, others))

    def shared(results, given):
        tensors = [*torch.utils._pytree.tree_leaves(results), *given]
        places = [t.untyped_storage().data_ptr() for t in tensors]
        return [places.index(p) for p in places]

    assert shared(got, mine) == shared(want, others)
    assert asked or name in OUTSIDE


STATES = "gradients", "autocast", "a subclass", "symbolic sizes", "one input twice", "a mode"


@pytest.mark.parametrize("state", STATES)
def test_a_state_that_is_left_to_aot_autograd(clean, monkeypatch, state):
    asked = []
    plain = plain_trace._mode_of
    monkeypatch.setattr(plain_trace, "_mode_of", lambda *a: asked.append(plain(*a)) or asked[-1])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    if state == "gradients":
        x.requires_grad_()
    if state == "a subclass":
        x = x.as_subclass(Marked)
    if state == "one input twice":
        y = x

    def f(x, y):
        return torch.relu(x @ y + 1)

    dynamic = state == "symbolic sizes" or None
    with contextlib.ExitStack() as around:
        around.enter_context(torch.enable_grad() if state == "gradients" else torch.no_grad())
        if state == "autocast":
            around.enter_context(torch.autocast("cpu", torch.bfloat16))
        if state == "a mode":
            around.enter_context(torch.device("cpu"))
        torch.testing.assert_close(torch.compile(f, backend=fuser_backend, dynamic=dynamic)(x, y), f(x, y))
    assert not any(asked) or state in ("one input twice", "a mode")


def test_ops_have_the_decomposition_of_the_table():
    table = decomposition_table()
    for op in {*table, *(f for f in torchs_decompositions if isinstance(f, torch._ops.OpOverload))}:
        assert decomposition_of(op) == table.get(op), op


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_of_reflection_pads_are_whole_on_the_cpu(dims):
    """With three dims on other devices, too."""
    op = getattr(torch.ops.aten, f"reflection_pad{dims}d_backward").default
    x = torch.randn(2, 3, *[8] * dims, requires_grad=True)
    traced = []

    def keep(graph, args):
        traced.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph)

    compiled = aot_function(
        lambda x: torch.nn.functional.pad(x, [1] * 2 * dims, mode="reflect"), keep, decompositions=decomposition_table()
    )
    compiled(x).sum().backward()
    assert op in traced[-1]
    elsewhere = [torch.empty(2, 3, *[n] * dims, device="meta") for n in (10, 8)]
    apart = decomposition_of(op)
    assert apart is None if dims == 3 else apart(*elsewhere, [1] * 2 * dims) is not NotImplemented


def test_frozen_weights_are_those_that_aot_autograd_names(clean, monkeypatch):
    monkeypatch.setattr(plain_trace, "tracing", None)  # it is not asked
    model = torch.nn.Linear(8, 8).eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        got = torch.compile(model, backend=fuser_backend, options={"freeze": True})(x)
        torch.testing.assert_close(got, model(x))


def broken(*args):
    raise ZeroDivisionError("no such place")


@pytest.mark.parametrize("place", ["_mode_of_context", "_is_plain_call", "_creates", "_without_defaults", "_storage"])
def test_a_defect_is_loud(clean, monkeypatch, lenient, place):
    """Wherever it is: one warning, and AOTAutograd traces the graph; an error where `config.strict` is set."""
    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setattr(plain_trace, place, broken)
    x = torch.randn(8, 8)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match="no such place.*a defect of fuser") as seen:
            for size in (8, 4):  # two graphs
                compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=fuser_backend, dynamic=False)
                torch.testing.assert_close(compiled(x[:size]), torch.relu(x[:size]) + 1)
        assert sum("no such place" in str(w.message) for w in seen) == 1
        fuser.config.set(strict=True)
        with pytest.raises(Exception, match="no such place"):
            torch.compile(lambda x: torch.relu(x) + 2, backend=fuser_backend)(x)


def test_an_error_of_the_passes_is_raised(clean, monkeypatch):
    from fuser.errors import PassError

    def fail(*args, **kwargs):
        raise PassError("no")

    monkeypatch.setattr(dynamo, "compile_functional", fail)
    with torch.no_grad(), pytest.raises(Exception, match="no"):
        torch.compile(lambda x: torch.relu(x) + 1, backend=fuser_backend)(torch.randn(4))


def test_the_state_of_the_generator_is_left(clean):
    x = torch.randn(8)
    state = torch.get_rng_state()
    with torch.no_grad():
        torch.compile(lambda x: torch.relu(x) + 1, backend=fuser_backend)(x)
    assert torch.equal(state, torch.get_rng_state())


def test_a_graph_that_only_computes_is_traced_once(clean, monkeypatch):
    monkeypatch.setattr(dynamo._GraphCompiler, "_trace", None)  # AOTAutograd is not asked
    decomposition_table.cache_clear()
    f, x = PROGRAMS["norms"], torch.randn(8, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend=fuser_backend)(x, x + 1), f(x, x + 1))
    assert not decomposition_table.cache_info().currsize  # 5 ms
    assert [r.route for r in compilations()] == ["direct"]
