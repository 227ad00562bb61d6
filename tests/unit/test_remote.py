"""The cache of a fleet: entries come from a Redis server, are trusted by their MAC alone, and never cost much time."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import fx

import fuser
from fuser import compiler, config, interface, kernel_cache, notices
from fuser.cpu import toolchain
from fuser.debug import doctor
from fuser.runtime import redis_client, remote
from fuser.runtime.counting import COUNTS
from tests import forked, redis_servers

pytest.importorskip("redis", reason="the package redis is not installed")
pytestmark = pytest.mark.skipif(not fuser.can_fuse_on_cpu(), reason="needs a C++ compiler")
ROOT = pathlib.Path(__file__).resolve().parents[2]
KEY = "a secret of the fleet, long enough"
ARGS = (torch.randn(5, 3), torch.randn(3))
SECONDS = 0.25  # what is waited for a server that answers late or never
PATIENT = 10.0  # the same for one that is well, on a machine that may be busy


SLACK = 0.15 if os.path.exists("/proc/self/schedstat") else 1.0


def own_seconds():
    """The time, without what this thread has waited for a core that other processes have: Linux counts that."""
    try:
        waited = int(pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1])
    except OSError:
        waited = 0
    return time.monotonic() - waited / 1e9


def scaled(x, y):
    return torch.relu(x * y + 1) - y


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """No store, probe or warning of an earlier test."""
    monkeypatch.setattr(notices, "_said", {})
    remote._made.cache_clear()
    toolchain._probe.cache_clear()
    yield
    remote._made.cache_clear()
    toolchain._probe.cache_clear()


@pytest.fixture(params=["real", "fake"])
def address(request, tmp_path):
    """The address of a server that works."""
    if request.param == "real" and redis_servers.REAL is None:
        pytest.skip("redis-server is not installed")
    with redis_servers.real(tmp_path) if request.param == "real" else redis_servers.fake() as server:
        yield server if isinstance(server, str) else server.address


class Machine:
    """A machine of the fleet: an empty cache and a new process's registry. `made` are the kernels it generated."""

    def __init__(self, monkeypatch, folder, address, key=KEY, seconds=PATIENT):
        self.monkeypatch, self.made, self.said = monkeypatch, [], []
        remote._made.cache_clear()
        self.settings = {
            "cache_dir": str(folder), "check_ir": False, "remote_cache": address, "remote_cache_key": key,
            "remote_cache_seconds": seconds,
        }  # fmt: skip

    def run(self, function=scaled, args=ARGS):
        """The result, by a kernel; the time that the call took is in `seconds`."""
        generate = compiler.__dict__["generate"]
        counted = {n: COUNTS[n] for n in ("binaries_made", "remote_hits")}
        with self.monkeypatch.context() as m, config.override(**self.settings):
            m.setattr(compiler, "generate", lambda *a: (self.made.append(a), generate(*a))[1])
            m.setattr(interface, "REGISTRY", kernel_cache.Registry())
            handle = interface.fusion_handle(interface.register_fusion(fx.symbolic_trace(function)))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                began = time.monotonic()
                result = handle(*args)
                self.seconds = time.monotonic() - began
                assert remote.wait(10)
            assert handle.hits == 1, handle.misses
        self.said += [str(w.message) for w in said]
        self.compiled, self.hits = (COUNTS[n] - before for n, before in counted.items())
        torch.testing.assert_close(result, function(*args))
        return result


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def make(address, key=KEY, seconds=PATIENT):
        made.append(Machine(monkeypatch, tmp_path / f"machine{len(made)}", address, key, seconds))
        return made[-1]

    made: list[Machine] = []
    return make


# -- it serves ---------------------------------------------------------------------------------------------------------
def test_one_machine_compiles_and_the_others_take(machine, address):
    first, second = machine(address), machine(address)
    a, b = first.run(), second.run()
    assert torch.equal(a, b)
    assert (len(first.made), first.compiled) == (1, 1) and first.hits == 0
    assert (len(second.made), second.compiled) == (0, 0) and second.hits >= 2  # plan and library
    assert not first.said and not second.said


def test_a_local_hit_asks_nobody(machine):
    with redis_servers.fake() as server:
        one = machine(server.address)
        one.run()
        before = len(server.requests)
        one.run()
        assert len(server.requests) == before and len(one.made) == 1


def test_a_process_that_ends_writes_before(tmp_path):
    code = (
        "import torch, fuser; from torch import fx\n"
        "h = fuser.fusion_handle(fuser.register_fusion(fx.symbolic_trace(lambda x: torch.relu(x * 3) + 1)))\n"
        "h(torch.ones(4)); print(h.hits)"
    )
    with redis_servers.fake() as server:
        env = os.environ | {
            "FUSER_CACHE_DIR": str(tmp_path), "FUSER_REMOTE_CACHE": server.address, "FUSER_REMOTE_CACHE_KEY": KEY,
            "PYTHONPATH": str(ROOT), "FUSER_CHECK_IR": "0", "FUSER_REMOTE_CACHE_SECONDS": "2",
        }  # fmt: skip
        done = forked.run(["-c", code], env=env, timeout=120)
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1"], "")
        assert {b".so", b".plan"} <= {k[k.rfind(b".") :] for k in server.data}


def test_a_closed_connection_is_opened_again(machine):
    with redis_servers.fake() as server:
        one = machine(server.address)
        one.run()
        server.drop_connections()
        one.run(lambda x, y: torch.tanh(x * y) + y)
        assert len(one.made) == 2 and not one.said
        assert len([k for k in server.data if b".so" in k]) == 2


def test_a_child_has_connections_of_its_own(machine, address):
    machine(address).run()
    other = machine(address)
    child = os.fork()
    if child == 0:
        try:
            other.run()
            code = len(other.made)
        except BaseException:
            code = 99
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(redis_servers.REAL is None, reason="redis-server is not installed")
def test_passwords_are_used_and_never_said(machine, tmp_path):
    with redis_servers.real(tmp_path, "--requirepass", "open sesame") as address:
        right = address.replace("redis://", "redis://:open%20sesame@")
        machine(right).run()
        one = machine(right)
        one.run()
        assert not one.made and not one.said
        wrong = machine(address.replace("redis://", "redis://:close%20sesame@"))
        wrong.run()
        assert len(wrong.made) == 1 and len(wrong.said) == 1 and "sesame" not in wrong.said[0], wrong.said


# -- it is not trusted -------------------------------------------------------------------------------------------------
def swapped(data):
    names = sorted(k for k in data if k.endswith(b".so"))
    data[names[0]], data[names[1]] = data[names[1]], data[names[0]]


def changed(change):
    def every(data):
        data.update({k: change(v) for k, v in data.items()})

    return every


TAMPERED = {
    "a bit": changed(lambda v: v[:100] + bytes([v[100] ^ 1]) + v[101:] if len(v) > 100 else b"?" + v[1:]),
    "another MAC": changed(lambda v: bytes(32) + v[32:]),
    "cut": changed(lambda v: v[:-1]),
    "longer": changed(lambda v: v + b"\0"),
    "only a MAC": changed(lambda v: v[:32]),
    "empty": changed(lambda v: b""),
    "swapped": swapped,
}


@pytest.mark.parametrize("how", TAMPERED)
def test_entries_that_others_wrote_are_not_read(how, machine):
    with redis_servers.fake() as server, config.override(**machine(server.address).settings):
        kept = {pathlib.Path(f"{n}.so"): bytes([n]) * 200 for n in (1, 2)}
        for path, data in kept.items():
            remote.offer(path, data)
        assert remote.wait(10) and {p: remote.fetch(p) for p in kept} == kept
        TAMPERED[how](server.data)
        with pytest.warns(RuntimeWarning, match="not made with this key") as said:
            assert [remote.fetch(p) for p in kept] == [None, None]
        assert len(said) == 1


def test_what_is_not_read_is_compiled_and_written_again(machine):
    with redis_servers.fake() as server:
        machine(server.address).run()
        before = dict(server.data)
        TAMPERED["a bit"](server.data)
        one = machine(server.address)
        one.run()
        assert one.compiled == 1 and len(one.said) == 1 and "not made with this key" in one.said[0], one.said
        assert {k: v for k, v in server.data.items() if k.endswith(b".so")}.items() <= before.items()
        other = machine(server.address)
        other.run()
        assert not other.made and not other.said


def test_another_key_is_another_store(machine, address):
    machine(address).run()
    other = machine(address, "the secret of some other fleet")
    other.run()
    assert len(other.made) == 1 and not other.said
    one = machine(address)
    one.run()
    assert not one.made


@pytest.mark.parametrize("key", ["", "short"])
def test_no_key_no_entries(machine, key):
    with redis_servers.fake() as server:
        one = machine(server.address, key)
        one.run()
        one.run(lambda x, y: torch.tanh(x) - y)
        assert not server.requests and len(one.made) == 2
        assert len(one.said) == 1 and "FUSER_REMOTE_CACHE_KEY" in one.said[0] and "hidden" not in one.said[0]


def test_wrong_addresses_are_named_once(machine):
    for address in ("memcached://localhost", "localhost:6379", "redis://host:port"):
        notices._said.clear()
        settings = machine(address).settings
        with config.override(**settings), pytest.warns(RuntimeWarning, match="redis://host:6379/0") as said:
            assert [remote.fetch(pathlib.Path(f"{n}.plan")) for n in range(3)] == [None] * 3
        assert len(said) == 1


def test_without_the_package_its_name_is_said(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    one = machine("redis://127.0.0.1:1/0")
    one.run()
    assert len(one.said) == 1 and "pip install fuser[redis]" in one.said[0]


# -- it costs little ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", [w for w in redis_servers.WAYS if w != "well"])
def test_a_server_that_misbehaves_is_left_alone(way, machine, monkeypatch):
    monkeypatch.setattr(remote, "_WRITE_SECONDS", 0.1)
    with redis_servers.fake(way) as server, config.override(**machine(server.address, seconds=SECONDS).settings):
        spent = []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            pytest.importorskip("redis")  # an import is no part of what a request may cost
            for n in range(6):
                began = own_seconds()
                assert remote.fetch(pathlib.Path(f"{n}.plan")) is None
                remote.offer(pathlib.Path(f"{n}.plan"), b"data")
                spent.append(own_seconds() - began)
            assert remote.wait(10)
        # Two failures, then nothing is asked.
        assert max(spent) < SECONDS + SLACK and sum(spent[2:]) < SLACK, spent
        assert 1 <= len(server.asked(b"GET")) <= 2 and len(server.asked(b"SET")) <= 2
        assert server.sent < (64 << 20)
        assert 1 <= len(said) <= 2 and "hidden" not in "".join(str(w.message) for w in said)  # of reads, and of writes


@pytest.mark.parametrize("way", ["silent", "a large value"])
def test_kernels_are_made_while_it_misbehaves(way, machine, monkeypatch):
    monkeypatch.setattr(remote, "_WRITE_SECONDS", 0.1)
    with redis_servers.fake(way) as server:
        one = machine(server.address, seconds=SECONDS)
        one.run()
        assert len(one.made) == 1 and 1 <= len(one.said) <= 2, one.said


def test_a_dead_server_costs_nothing(machine):
    one = machine(f"redis://127.0.0.1:{redis_servers.free_port()}/0")
    one.run()
    assert len(one.made) == 1 and len(one.said) == 1 and "refused" in one.said[0], one.said


def test_a_host_name_that_is_looked_up_for_long(machine, monkeypatch):
    monkeypatch.setattr(redis_client.Client, "get", lambda *a: time.sleep(3))
    monkeypatch.setattr(redis_client.Client, "set", lambda *a: None)
    settings = machine("redis://far.away:6379/0", seconds=SECONDS).settings
    with config.override(**settings), pytest.warns(RuntimeWarning, match="did not answer within 0.25 s"):
        began = own_seconds()
        found = [remote.fetch(pathlib.Path(f"{n}.plan")) for n in range(5)]
        took = own_seconds() - began
    assert found == [None] * 5 and took < 2 * SECONDS + SLACK


def test_large_entries_stay_here(machine):
    with redis_servers.fake() as server, config.override(**machine(server.address, seconds=SECONDS).settings):
        remote.offer(pathlib.Path("large.so"), bytes(remote.MOST_BYTES + 1))
        remote.offer(pathlib.Path("small.so"), b"small")
        assert remote.wait(10) and [k[-8:] for k in server.data] == [b"small.so"]
        assert remote.fetch(pathlib.Path("small.so")) == b"small"


@pytest.mark.filterwarnings("ignore:fuser. the remote cache")
def test_what_waits_to_be_written_is_bounded(machine):
    with redis_servers.fake("silent") as server, config.override(**machine(server.address, seconds=SECONDS).settings):
        for n in range(3 * remote._QUEUE):
            remote.offer(pathlib.Path(f"{n}.plan"), b"x")
        store = remote._configured()
        assert len(store._todo) <= remote._QUEUE
        store._todo.clear()
        server.over.set()
        server.drop_connections()
        assert remote.wait(10)


def test_the_breaker_tries_again(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: clock[0])
    breaker = remote._Breaker()
    assert breaker.allows() and (breaker.failed(), breaker.allows())[1]
    breaker.failed()
    assert not breaker.allows()
    clock[0] += remote._PAUSE
    assert breaker.allows() and not breaker.allows()  # one tries, the others go on
    breaker.failed()
    clock[0] += remote._PAUSE
    assert not breaker.allows()  # twice as long
    clock[0] += remote._PAUSE
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()


# -- it is seen --------------------------------------------------------------------------------------------------------
def test_the_doctor_says_how_it_is(machine, address):
    with config.override(**machine(address).settings):
        found = doctor._remote()
        assert not found.cure and "written and read in" in found.found and "hidden" not in found.found
    with config.override(**machine(address, "").settings):
        assert "FUSER_REMOTE_CACHE_KEY" in doctor._remote().cure
    with config.override(**machine(f"redis://127.0.0.1:{redis_servers.free_port()}").settings):
        assert "refused" in doctor._remote().found and doctor._remote().cure
    assert doctor._remote().found.startswith("none")
