"""Build and metadata of `fuser`. The native launcher is optional: without a compiler the Python one runs instead."""

import os
import pathlib
import re
import shutil

from setuptools import Extension, find_packages, setup

HERE = pathlib.Path(__file__).resolve().parent
LAUNCHER = "fuser/runtime/launcher.cpp"


def version() -> str:
    """The version that `fuser/__init__.py` states, read without importing it (that would need torch)."""
    found = re.search(r'^__version__ = "([^"]+)"', (HERE / "fuser/__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError('fuser/__init__.py: expected a line `__version__ = "X.Y.Z"`')
    return found.group(1)


def repository() -> str:
    """The address that CITATION.cff states as `repository-code`; "" while there is none."""
    citation = HERE / "CITATION.cff"
    text = citation.read_text() if citation.exists() else ""  # a source distribution may leave it out
    found = re.search(r'^repository-code: "?([^"\n]+)', text, re.MULTILINE)
    return found.group(1).rstrip("/") if found else ""


def description(text: str, home: str) -> str:
    """The README for a package index, where links to files lead nowhere: to `home`, or without one only their text."""
    to = rf"[\1]({home}/blob/main/\2)" if home else r"\1"
    return re.sub(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", to, text)


def urls(home: str) -> dict[str, str]:
    """The links that a package index shows beside the description."""
    paths = {"Source": "", "Issues": "/issues", "Documentation": "/tree/main/docs"}
    return {name: home + path for name, path in paths.items()} if home else {}


def choose_compiler() -> None:
    """`$CXX`, else g++, else clang++, as the kernels' own toolchain does.

    Setuptools would take the compiler that Python itself was built with, which a fresh machine may not have.
    """
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if cxx:
        os.environ.setdefault("CC", cxx)
        os.environ["CXX"] = cxx


def extensions() -> list[Extension]:
    """The native launcher, where its source is part of this tree."""
    if not (HERE / LAUNCHER).exists():
        return []
    choose_compiler()
    flags = ["-O2", "-std=c++17", "-fvisibility=hidden"]
    parts = sorted(str(p.relative_to(HERE)) for p in (HERE / LAUNCHER).parent.glob("native/*.h"))
    native = {"depends": parts, "extra_compile_args": flags, "language": "c++", "optional": True}
    return [Extension("fuser.runtime._launcher", [LAUNCHER], **native)]


TRITON = "triton>=3.4,<3.8; platform_system == 'Linux'"
REDIS = "redis>=5,<9"
SPANS = "opentelemetry-sdk>=1.20"
# pytest 9.2 no longer lets xdist keep the tests of a group together: each worker would interpret every Triton kernel.
TEST = ["pytest>=8,<9.2", "pytest-xdist>=3", "expecttest", REDIS, SPANS, TRITON]
# A generator of models; what a seed gives depends on its solver, so constraints.txt pins both.
NNSMITH = ["nnsmith", "z3-solver"]
# Rivals on the CPU that the benchmarks run where they are installed; zentorch needs a release for torch's version.
RIVALS = ["openvino>=2025", "onnxruntime>=1.20", "onnx>=1.17", "zentorch; platform_machine == 'x86_64'"]
PACKAGES = [
    "kornia", "torchmetrics", "torchvision", "torch_geometric", "monai", "vit-pytorch", "x-transformers", "scipy",
]  # fmt: skip
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=1,<2", "matplotlib>=3.8"]
BENCH = ["rich>=13", "matplotlib>=3.8"]

setup(
    name="fuser",
    version=version(),
    description="Just-in-time fusion for PyTorch: subgraphs become single kernels, in a fraction of a second",
    long_description=description((HERE / "README.md").read_text(encoding="utf-8"), repository()),
    long_description_content_type="text/markdown",
    project_urls=urls(repository()),
    author="the fuser authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["fuser", "fuser.*"]),
    py_modules=["fuser_code", "fuser_perf", "fuser_why"],  # names for TORCH_LOGS: see fuser/logs.py
    package_data={"": ["py.typed", "*.cpp", "*.h", "native/*.h"], "fuser.debug": ["page_files/*"]},
    ext_modules=extensions(),
    install_requires=["torch>=2.11", "numpy", "sympy", "cachetools"],
    extras_require={
        "cuda": [TRITON],
        "test": TEST,
        "compiler": ["ziglang"],
        "redis": [REDIS],
        "nnsmith": NNSMITH,
        "bench": BENCH,
        "docs": DOCS,
        "rivals": RIVALS,
        "zoo": ["transformers>=5", "timm>=1", "diffusers>=0.30"],
        "vision": ["torchvision"],
        "packages": PACKAGES,
        "dev": ["ruff", "mypy", "codespell", *TEST],
    },
    entry_points={"torch_dynamo_backends": ["fuser = fuser.frontends.dynamo:fuser_backend"]},
    zip_safe=False,
)
