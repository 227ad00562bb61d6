"""The check that imports point one way finds each kind of violation in a small package; `make imports` has this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "tools/check_imports.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_imports"] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_imports"]


@pytest.fixture
def package(tmp_path):
    """Makes a package `fuser` of the given files, `__init__.py` added where a folder has none."""

    def make(**files: str) -> Path:
        root = tmp_path / "fuser"
        for name, text in {"__init__": "", **files}.items():
            file = root / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for folder in (d for d in root.rglob("*") if d.is_dir() and not (d / "__init__.py").exists()):
            (folder / "__init__.py").write_text("")
        return root

    return make


@pytest.mark.parametrize(
    "files, expected",
    [
        pytest.param(
            {"ir__in__nodes": "import torch\nfrom fuser.scheduler import fuse\n", "scheduler__in__fuse": ""},
            ["nodes.py:2", "fuser.scheduler.fuse", "'ir' lies below 'scheduler'", "Cure: move"],
            id="upwards",
        ),
        pytest.param(
            {"ops__in__table": "def f():\n    from ..interface import g\n", "interface": ""},
            ["table.py:2", "fuser.interface", "'ops' lies below 'interface'"],
            id="upwards-relative-and-inside-a-function",
        ),
        pytest.param(
            {"cpu__in__codegen": "import fuser.cuda.codegen\n", "cuda__in__codegen": ""},
            ["codegen.py:1", "fuser.cuda.codegen", "cpu/ must not know cuda/", "codegen/"],
            id="neighbours",
        ),
        pytest.param(
            {"executor": "from fuser import __version__\n"},
            ["executor.py:1", "the package's front", "import the module that defines the name"],
            id="the-front",
        ),
        pytest.param(
            {"novelty": "import fuser.errors\n", "errors": ""},
            ["novelty.py:1", "'novelty' is in no layer", "LAYERS"],
            id="no-layer",
        ),
        pytest.param(
            {"ir__in__a": "from fuser.ir import b\n", "ir__in__b": "def f():\n    import fuser.ir.a\n"},
            ["a.py:1", "import each other", "fuser.ir.a, fuser.ir.b"],
            id="cycle",
        ),
        pytest.param(
            {"interface": "import fuser.debug\n", "debug__in__explain": ""},
            ["interface.py:1", "'interface' lies below 'debug'"],
            id="debug",
        ),
    ],
)
def test_layers(tool, package, files, expected):
    (finding,) = tool.check_package(package(**files))
    for part in expected:
        assert part in str(finding)


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor.config",
        "from torch import _inductor",
        "from torch._inductor import ir",
        "import torch\nx = torch._inductor.config",
        "import importlib\nx = importlib.import_module('torch._inductor')",
        "def f():\n    import torch._inductor",
    ],
)
def test_torch_inductor_is_never_imported(tool, package, text):
    findings = [str(f) for f in tool.check_package(package(executor=text))]
    assert findings and all("torch._inductor is imported nowhere" in f for f in findings)


def test_triton_is_imported_only_in_cuda(tool, package):
    root = package(cuda__in__toolchain="import triton\n", cpu__in__toolchain="def f():\n    import triton.language\n")
    (finding,) = tool.check_package(root)
    assert "cpu/toolchain.py:2" in str(finding) and "only in cuda" in str(finding)


def test_heavy_modules_are_imported_late(tool, package):
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sympy\ndef f():\n    import sympy\n"
    root = package(ir__in__sizes=late, ops__in__table="import sympy\n", frontends__in__dynamo="import torch._dynamo\n")
    (finding,) = tool.check_package(root)
    assert "ops/table.py:1" in str(finding) and "`import fuser` must not load sympy" in str(finding)


def test_what_is_allowed(tool, package):
    root = package(
        errors="",
        config="from fuser.errors import x\n",
        interface="",
        ir__in__sizes="import fuser.errors\n",
        kernel_spec="from fuser.ir.sizes import Program\n",
        ops__in__table="from fuser.ir.sizes import Program\nfrom fuser import config, errors\n",
        ir__in__nodes="from . import sizes\nfrom fuser.ops.table import OPS\n",
        passes__in__grouping="import fuser.debug.dump\nfrom fuser.interface import register_fusion\n",
        debug__in__dump="from fuser.ir import nodes\n",
        __init__="from fuser.interface import register_fusion\nfrom fuser import debug\n",
    )
    assert [str(f) for f in tool.check_package(root)] == []


def test_foreign_spelling_is_a_hint(tool, package):
    files = {"cpu__in__codegen": "x = '#include <math.h>'\n", "runtime__in__pool": "'#include'\nx = '#pragma omp'\n"}
    root = package(**files)
    (hint,) = tool.spelling_hints(root)
    assert "pool.py:2" in str(hint) and tool.check_package(root) == []


def test_the_command_fails_on_a_violation(package):
    root = package(config="import fuser.interface\n", interface="")
    done = subprocess.run([sys.executable, ROOT / "tools/check_imports.py", root], capture_output=True, text=True)
    assert done.returncode == 1 and "1 wrong imports" in done.stdout and "Cure:" in done.stdout


def test_import_fuser_loads_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import fuser; new = set(sys.modules) - before;"
        "print(sorted(m for m in new if m.split('.')[0] in ('sympy', 'triton')"
        " or m.startswith(('torch._dynamo', 'torch._inductor'))))"
    )
    done = forked.run(["-c", code], cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
