"""Files about the project: each is what its reader's program takes, and says what the package says."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest
import setuptools

import fuser

ROOT = pathlib.Path(__file__).parents[2]


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", text, re.MULTILINE)[1] == fuser.__version__
    assert f"\n## {fuser.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^license: (.+)$", text, re.MULTILINE)[1] == "BSD-3-Clause"


def test_forms_and_hooks_can_be_read():
    yaml = pytest.importorskip("yaml", reason="there is no PyYAML")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [h["entry"].split()[1] for h in hooks if h["entry"].startswith("make ")]
    assert made == ["lint", "types", "imports"] and set(made) <= set(targets)
    (form,) = (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    fields = yaml.safe_load(form.read_text())["body"]
    assert all(f["attributes"]["label"] for f in fields) and len({f["id"] for f in fields}) == len(fields)
    yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_names_that_the_form_asks_for_exist():
    import fuser.debug

    (form,) = (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    for name in re.findall(r"fuser\.debug\.(\w+)", form.read_text()):
        assert hasattr(fuser.debug, name), name


def test_the_package_index_has_no_dead_links(monkeypatch):
    """Links to files become text, or lead to the repository that CITATION.cff names."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.setenv("CXX", "g++")  # which setup.py sets otherwise
    monkeypatch.setenv("CC", "g++")
    made = runpy.run_path(str(ROOT / "setup.py"))
    dead = r"\]\((?![a-z]+:|#)"
    assert re.search(dead, (ROOT / "README.md").read_text()) and not re.search(dead, given["long_description"])
    text = made["description"]("[a](docs/a.md#b) and [web](https://pytorch.org)", "https://example.org/f")
    assert text == "[a](https://example.org/f/blob/main/docs/a.md#b) and [web](https://pytorch.org)"
    assert made["urls"]("") == {} and made["urls"]("https://example.org/f")["Issues"].endswith("/f/issues")
    assert given["project_urls"] == made["urls"](made["repository"]())


def test_every_target_that_is_no_file_is_phony():
    """A folder of a target's name, as `make site` leaves one, would make the next call do nothing."""
    text = (ROOT / "Makefile").read_text()
    phony = {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.M) for name in line.split()}
    targets = set(re.findall(r"^([a-z][a-z-]*):", text, re.M))
    assert {"test", "site"} <= targets
    assert targets - phony == set()
