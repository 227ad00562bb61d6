"""Contests between libraries: the faster wins and stays so, what fails or errs is left out, and bits never change."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import fuser
from fuser import config
from fuser.contests import race, records
from fuser.contests.deciding import Decisions
from fuser.contests.race import Contestant
from fuser.passes import providers
from fuser.passes.providers import ATEN, Product, Provider
from tests import forked

needs_onednn = pytest.mark.skipif(providers.linear_op() is None, reason="this torch has no oneDNN")
PRODUCT = Product(96, 320, 448, torch.float32)


@pytest.fixture(autouse=True)
def alone(monkeypatch, fresh_cache_dir):
    """No choices of earlier tests, and contests instead of the fixed library of other tests."""
    forget(monkeypatch)
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.0)  # tests run where others do
    monkeypatch.setattr(race.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with config.override(linear_backend="measured"):
        yield


def forget(monkeypatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(records, "_made", {})
    monkeypatch.setattr(providers, "_products", Decisions("product"))


def waiting(seconds: float):
    """A provider whose calls take `seconds` and no processor."""

    def made(product, operands):
        result = operands.x @ operands.weights[0]  # before it is timed: on a busy machine a product may take long

        def call():
            time.sleep(seconds)
            return result

        return call

    return made


slow = waiting(0.002)


def quick(product, operands):
    made = operands.x @ operands.weights[0]
    return lambda: made


def wrong(product, operands):
    return lambda: operands.x @ operands.weights[0] * 1.01


def raising(product, operands):
    raise RuntimeError("no primitive for this machine")


def out_of_memory(product, operands):
    def call():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate much")

    return call


def entered(monkeypatch, **calls) -> None:
    rows = tuple(Provider(name, lambda p: True, call) for name, call in calls.items())
    monkeypatch.setattr(providers, "PROVIDERS", rows)


@pytest.mark.parametrize("order", [("quick", "slow"), ("slow", "quick")])
def test_the_faster_one_wins(monkeypatch, order):
    entered(monkeypatch, **{name: globals()[name] for name in order})
    assert providers.choose(PRODUCT) == "quick"
    (found,) = fuser.debug.choices()
    assert found.winner == "quick" and found.times[0][0] == "quick" and "96×320×448" in str(found)


def test_the_choice_is_kept_for_other_processes(monkeypatch, fresh_cache_dir):
    entered(monkeypatch, slow=slow, quick=quick)
    monkeypatch.setattr(race, "_BUSY", 1e9)
    assert providers.choose(PRODUCT) == "quick"
    forget(monkeypatch)
    entered(monkeypatch, slow=quick, quick=slow)  # another contest would end otherwise
    assert providers.choose(Product(80, 320, 448, torch.float32)) == "quick"  # of the same class
    assert providers.choose(Product(800, 320, 448, torch.float32)) == "slow"
    script = "\n".join(
        (
            "import torch; torch.set_num_threads(2)",
            "from fuser.passes import providers as p",
            "rows = tuple(p.Provider(n, lambda q: True, None) for n in ('slow', 'quick'))",
            "p.PROVIDERS = rows",
            "print(p.choose(p.Product(96, 320, 448, torch.float32)))",
        )
    )
    done = forked.run(["-c", script])
    assert done.stdout.split() == ["quick"], done.stderr


@pytest.mark.parametrize("old", range(1, 5))
def test_outcomes_of_earlier_formats_are_missed(monkeypatch, old):
    """Those before 5 were timed under Dynamo's dispatcher: a contest is held anew, and its outcome kept beside them."""
    held = []

    def race_for(winner):
        held.append(winner)
        return records.Choice(winner, "raced", ((winner, 1.0),)), True

    def choose(winner):
        forget(monkeypatch)
        monkeypatch.setattr(race, "race", lambda *args, **named: race_for(winner))
        return providers.choose(PRODUCT)

    entered(monkeypatch, slow=slow, quick=quick)
    now = records.FORMAT
    monkeypatch.setattr(records, "FORMAT", old)
    assert choose("slow") == choose("quick") == "slow" and held == ["slow"]
    monkeypatch.setattr(records, "FORMAT", now)
    assert choose("quick") == choose("slow") == "quick" and held == ["slow", "quick"]
    assert len(list(records.cpu_folder().glob("*.choice.json"))) == 2


def test_a_busy_machine_keeps_nothing(monkeypatch):
    entered(monkeypatch, slow=slow, quick=quick)
    monkeypatch.setattr(race, "_BUSY", 0.0)
    assert providers.choose(PRODUCT) == "quick" == providers.choose(PRODUCT)
    assert "busy" in fuser.debug.choices()[0].reason
    forget(monkeypatch)
    entered(monkeypatch, slow=quick, quick=slow)
    assert providers.choose(PRODUCT) == "slow"


def test_a_loaded_machine_keeps_nothing(monkeypatch):
    """Teams of threads that take turns on too few processors are slow all the time, so that samples are steady."""
    entered(monkeypatch, slow=slow, quick=quick)
    monkeypatch.setattr(race, "_BUSY", 1e9)
    monkeypatch.setattr(race.os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    assert providers.choose(PRODUCT) == "quick" == providers.choose(PRODUCT)
    assert "busy" in fuser.debug.choices()[0].reason
    assert not list(records.cpu_folder().glob("*.choice.json"))


def test_threads_are_part_of_the_class(monkeypatch):
    entered(monkeypatch, slow=slow, quick=quick)
    assert providers.choose(PRODUCT) == "quick"
    entered(monkeypatch, slow=quick, quick=slow)
    torch.set_num_threads(1)
    assert providers.choose(PRODUCT) == "slow"


@pytest.mark.parametrize(("bad", "reason"), [(wrong, "differs by up to"), (raising, "no primitive for this machine")])
def test_what_fails_or_gives_another_result_is_left_out(monkeypatch, bad, reason):
    entered(monkeypatch, slow=slow, bad=bad)
    assert providers.choose(PRODUCT) == "slow"
    (found,) = fuser.debug.choices()
    assert "bad left out" in found.reason and reason in found.reason
    assert [name for name, _ in found.times] == ["slow"]


@pytest.mark.parametrize("error", [MemoryError("much"), None])
def test_lack_of_memory_ends_the_contest_only(monkeypatch, error):
    def gone(*args):
        raise error

    entered(monkeypatch, slow=slow, bad=out_of_memory if error is None else lambda p, o: gone, quick=quick)
    assert providers.choose(PRODUCT) == "slow"
    assert "too little memory" in fuser.debug.choices()[0].reason
    forget(monkeypatch)  # and nothing was kept
    entered(monkeypatch, slow=slow, bad=raising, quick=quick)
    assert providers.choose(PRODUCT) == "quick"


def test_operands_that_do_not_fit_into_memory(monkeypatch):
    monkeypatch.setattr(providers, "operands_of", lambda p: out_of_memory(p, None)())
    assert providers.choose(PRODUCT) == ATEN


def test_stalled_calls_decide_nothing(monkeypatch):
    """Contestants that wait for others instead of computing: nobody knows which is faster."""
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.6)
    monkeypatch.setattr(race, "_PAUSES", (0.0,))
    entered(monkeypatch, slow=waiting(0.03), faster=waiting(0.001))  # far apart: other processes run, too
    assert providers.choose(PRODUCT) == "slow"
    (found,) = fuser.debug.choices()
    assert "waited for processors" in found.reason and not found.times
    forget(monkeypatch)  # and nothing was kept
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.0)
    assert providers.choose(PRODUCT) == "faster"


def computing(seconds: float, waits: float, calls: list[float]):
    """A contestant whose calls compute for `seconds` and wait for `waits`, as for a processor."""

    def call():
        calls.append(seconds)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        time.sleep(waits)
        return torch.ones(1)

    return Contestant(call)


def test_one_thread_that_waits_for_a_processor_is_timed_by_what_it_computes(monkeypatch):
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.6)
    torch.set_num_threads(1)
    calls = []
    rivals = {"slow": computing(0.003, 0.001, calls), "quick": computing(0.001, 0.008, calls)}
    found, _ = race.race(rivals, "slow")
    assert found.winner == "quick" and dict(found.times)["quick"] < 2500
    assert len(calls) <= 2 * (race._FEWEST + 1 + 2)  # the check, and not again because of the load


def test_long_calls_are_made_twice():
    """The call whose result is compared is one of them."""
    torch.set_num_threads(1)
    calls = []
    rivals = {name: computing(s, 0.0, calls) for name, s in {"a": 0.02, "b": 0.03, "c": 0.01}.items()}
    found, _ = race.race(rivals, "a")
    assert found.winner == "c" and len(calls) <= 7  # one more where another process disturbed


def test_only_stalled_calls_are_timed_again(monkeypatch):
    """On a machine that stays busy the next contest does not wait for it."""
    monkeypatch.setattr(race, "_LEAST_SHARE", 0.6)
    monkeypatch.setattr(race, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(race, "_stalled_to_the_end", False)
    timed = []

    def time_(samples, now):
        timed.append("".join(samples))
        for name, one in samples.items():
            one.seconds.append(0.01)
            one.share = 1.0 if name == "o" else shares.pop(0)

    monkeypatch.setattr(race, "_time", time_)

    def contest():
        timed.clear()
        rivals = {name: Contestant(lambda: torch.ones(1)) for name in "on"}
        try:
            race.race(rivals, "o", now=time.perf_counter)
        except race.Unfinished:
            return timed, True
        return timed, False

    shares = [0.1, 0.7]
    assert contest() == (["on", "n"], False)
    shares = [0.1] * 4
    assert contest() == (["on", "n", "n"], True)
    assert contest() == (["on"], True)
    shares = [0.7, 0.1, 0.7]
    assert contest() == (["on"], False) and contest() == (["on", "n"], False)


@pytest.mark.parametrize("own", ["quick", "wrong"])
def test_few_rows_stay_with_the_package_where_nobody_can_tell(monkeypatch, own):
    """Its kernel takes norms and residuals around it, too. One that errs is left out in any case."""
    monkeypatch.setattr(race, "_LEAST_SHARE", 2.0)
    monkeypatch.setattr(race, "_PAUSES", ())
    few = Product(1, 320, 448, torch.float32)
    entered(monkeypatch, aten=quick, **{providers.OWN: globals()[own]})
    assert providers.choose(few) == (providers.OWN if own == "quick" else "aten")
    (found,) = fuser.debug.choices()
    assert "waited for processors" in found.reason


def test_the_favoured_one_stays_unless_another_is_clearly_faster():
    now = [0.0]

    def work(seconds):
        def call():
            now[0] += seconds
            return torch.ones(1)

        return Contestant(call)

    for library, winner in ((1.0, "own"), (0.98, "own"), (0.9, "library")):
        rivals = {"aten": work(1.5), "library": work(library), "own": work(1.0)}
        found, _ = race.race(rivals, "aten", now=lambda: now[0], favoured="own")
        assert found.winner == winner


def test_a_contest_waits_for_compilers(monkeypatch):
    left = [True] * 3
    monkeypatch.setattr(race.process, "are_running", lambda: bool(left) and left.pop())
    entered(monkeypatch, slow=slow, quick=quick)
    assert providers.choose(PRODUCT) == "quick" and not left


def test_noise_does_not_replace_the_incumbent():
    """A rival whose best moment is better, and which usually is slower."""
    now = [0.0]
    spent = iter([3.0, 1.0, 3.0, 3.0] * 100)

    def work(seconds):
        def call():
            now[0] += next(seconds)
            return torch.ones(1)

        return call

    rivals = {"old": Contestant(work(iter([2.0] * 400))), "new": Contestant(work(spent))}
    found, lasting = race.race(rivals, "old", now=lambda: now[0])
    assert found.winner == "old" and "too noisy" in found.reason and not lasting


@needs_onednn
@pytest.mark.parametrize("settings", [{"numerics": "eager"}, {"deterministic": "yes"}, {"linear_backend": "onednn"}])
def test_settings_without_a_contest(monkeypatch, clean, settings):
    monkeypatch.setattr(race, "race", lambda *a: pytest.fail("a contest"))
    x, w = torch.randn(96, 320), torch.randn(320, 448)
    with config.override(**settings):
        got = torch.compile(lambda x, w: x @ w, backend="fuser")(x, w)
    exact = x.double() @ w.double()
    mine, its = ((t.double() - exact).abs().max() for t in (got, x @ w))
    assert mine <= 2 * its + 2 * torch.finfo(x.dtype).eps * exact.abs().max()


class Feed(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512, dtype=dtype), torch.nn.Linear(512, 256, dtype=dtype)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh")) + x


def near(got, model, x, want):
    """No further from float64 than a few times eager's own distance."""
    wide = Feed(torch.float64)
    wide.load_state_dict(model.state_dict())
    exact = wide(x.double())
    assert got.dtype == want.dtype and got.stride() == want.stride()
    assert (got - exact).abs().max() <= 3 * (want - exact).abs().max() + 1e-7


@needs_onednn
@pytest.mark.parametrize("winner", [p.name for p in providers.PROVIDERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_provider_in_a_program(monkeypatch, clean, winner, dtype):
    if not providers.takes_dtype(dtype):
        pytest.skip("oneDNN has no products of this dtype here")
    asked = []
    monkeypatch.setattr(providers, "choose", lambda p: asked.append(p) or (winner if providers_take(p) else ATEN))

    def providers_take(p):
        return next(row for row in providers.PROVIDERS if row.name == winner).takes(p)

    torch.manual_seed(1)
    model, x = Feed(dtype).eval(), torch.randn(128, 256, dtype=dtype)
    compiled = torch.compile(model, backend="fuser", options={"freeze": True})
    with torch.no_grad():
        got, want = compiled(x), model(x)
        near(got, model, x, want)
        assert all(compiled(x).equal(got) for _ in range(2))
    assert all(p.frozen and p.bias for p in asked) and [p.epilogue for p in asked] == [("gelu", "tanh"), None]


@needs_onednn
def test_frozen_weights_are_packed_again_once_they_changed(monkeypatch, clean):
    monkeypatch.setattr(providers, "choose", lambda p: providers.PACKED if p.frozen else ATEN)
    packed = []
    pack = providers.pack_op()
    monkeypatch.setattr(providers, "pack_op", lambda: type("Op", (), {"_op": lambda w: packed.append(1) or pack(w)}))
    model, x = Feed(torch.float32).eval(), torch.randn(128, 256)
    compiled = torch.compile(model, backend="fuser", options={"freeze": True})
    other = Feed(torch.float32)
    changes = (
        lambda: None,
        lambda: model.up.weight.mul_(2),
        lambda: model.load_state_dict(other.state_dict()),
        lambda: setattr(model.up.weight, "data", torch.randn(512, 256)),
        lambda: setattr(model.down, "weight", torch.nn.Parameter(torch.randn(256, 512))),
    )
    counts = []
    with torch.no_grad():
        for change in changes:
            change()
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
            counts.append(len(packed))
    assert counts[0] == 2 and counts[1] == 3 and counts[2] == 5 and counts[3] == 6
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)  # a graph with gradients packs nothing
    compiled(x).sum().backward()


@needs_onednn
def test_without_the_option_nothing_is_frozen(monkeypatch, clean):
    asked = []
    monkeypatch.setattr(providers, "choose", lambda p: asked.append(p) or ATEN)
    model = Feed(torch.float32).eval()
    with torch.no_grad():
        torch.compile(model, backend="fuser")(torch.randn(128, 256))
    assert asked and not any(p.frozen for p in asked)


def test_a_contest_draws_no_random_numbers_and_sees_no_modes():
    before = torch.random.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert providers.choose(PRODUCT)
    assert torch.random.get_rng_state().equal(before)
    (found,) = fuser.debug.choices()
    assert len(found.times) >= 1 and "failed" not in found.reason and "left out" not in found.reason
