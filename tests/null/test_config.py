"""Settings: what may be set, from where, and what is said about what may not."""

from __future__ import annotations

import warnings

import pytest

from fuser import config
from fuser.errors import ConfigError


@pytest.fixture(autouse=True)
def as_before():
    before = dict(config._values)
    yield
    config._values.update(before)


def read(monkeypatch, name, text):
    monkeypatch.setenv(f"FUSER_{name.upper()}", text)
    (setting,) = (s for s in config.SETTINGS if s.name == name)
    return config._from_environment(setting)


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("enabled", "off", False),
        ("enabled", "TRUE", True),
        ("check_ir", "0", False),
        ("pool_limit_bytes", "4096", 4096),
        ("pool_idle_seconds", "2", 2.0),
        ("verify", "first_3", 3),
        ("slowest", "1.05", 1.05),
        ("numerics", "eager", "eager"),
        ("cache_dir", "", ""),
    ],
)
def test_from_the_environment(monkeypatch, name, text, value):
    got = read(monkeypatch, name, text)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("enabled", "maybe", "FUSER_ENABLED='maybe': expected one of 1, true, yes, on, 0, false, no, off"),
        ("pool_limit_bytes", "1G", "FUSER_POOL_LIMIT_BYTES='1G': expected int, such as 268435456"),
        ("pool_limit_bytes", "-1", "FUSER_POOL_LIMIT_BYTES: pool_limit_bytes=-1: expected int of at least 0"),
        ("numerics", "exact", "FUSER_NUMERICS: numerics='exact': expected one of 'fast', 'eager'"),
        ("verify", "some", "FUSER_VERIFY: verify='some': expected a number of calls"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch, name, text, says):
    with pytest.raises(ConfigError) as error:
        read(monkeypatch, name, text)
    assert f"environment variable {says}" in str(error.value)


def test_a_variable_that_is_no_setting_is_told(monkeypatch):
    monkeypatch.setenv("FUSER_NUMERIC", "eager")
    sentence = "FUSER_NUMERIC is no setting and is not read; did you mean FUSER_NUMERICS?"
    with pytest.warns(RuntimeWarning, match=sentence):
        config._warn_of_unknown()
    monkeypatch.delenv("FUSER_NUMERIC")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config._warn_of_unknown()


@pytest.mark.parametrize(
    "values, says",
    [
        ({"compile_workers": -1}, "compile_workers=-1: expected int of at least 0"),
        ({"compile_timeout_seconds": 0}, "compile_timeout_seconds=0.0: expected float of at least 0.001"),
        ({"pool_idle_seconds": float("nan")}, "pool_idle_seconds=nan: expected float of at least 0"),
        ({"max_body_rows": 0}, "max_body_rows=0: expected int of at least 1"),
        ({"pass_limit": -2}, "pass_limit=-2: expected int of at least -1"),
        ({"pool_limit_bytes": True}, "pool_limit_bytes=True: expected int, such as"),
        ({"numerics": "eager", "speed": 1}, "unknown setting 'speed'"),
    ],
)
def test_what_a_setting_does_not_take(values, says):
    before = dict(config._values)
    with pytest.raises(ConfigError) as error:
        config.set(**values)
    assert says in str(error.value) and config._values == before


def test_an_assignment_sets():
    config.numerics = "eager"
    assert config.numerics == "eager" and config._values["numerics"] == "eager"
    assert dict(config.key())["numerics"] == "eager"
    with config.override(numerics="fast"):
        assert config.numerics == "fast"
    with pytest.raises(ConfigError, match="numerics='exact'"):
        config.numerics = "exact"
    with pytest.raises(ConfigError, match="unknown setting 'numeric'"):
        config.numeric = "eager"
    assert config.numerics == "eager"


def test_a_snapshot_has_what_a_thread_overrides():
    before = config.snapshot()
    assert before == {s.name: getattr(config, s.name) for s in config.SETTINGS}
    with config.override(slowest=3.0), config.override(compile_workers=7, slowest=4.0):
        assert config.snapshot() == {**before, "slowest": 4.0, "compile_workers": 7}
    assert config.snapshot() == before
