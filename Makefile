# On a fresh machine with python3, make and g++:
#   make demo    a real model through torch.compile(backend="fuser"), checked against eager
#   make test    the test suite
# Each target makes the virtual environment it needs; a second run starts at once. Settings:
#   PYTHON=python3.12   the interpreter that makes it        VENV=.venv   where it lies
#   ARGS="-k softmax"   more arguments for the command       JOBS=2       pytest's worker processes

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
N ?= 100000
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := setup.py pyproject.toml constraints.txt $(wildcard fuser/runtime/*.cpp fuser/runtime/native/*.h)

# The tests start a few hundred processes: where no bytecode is written, each of them compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test machines test-cuda cubins opinfo modes strides fuzz exactness peers zoo told spellings aliases scripts nnsmith packages vision sweeps stress lint types imports pages site bench report-page clean

help:
	@sed -n '2,6p' Makefile | cut -c3-
	@echo 'Also: make machines, make test-cuda (on a GPU), make cubins, make opinfo, make modes, make fuzz N=100000 (ARGS=--checked or --asan), make exactness, make peers, make zoo, make told, make spellings N=100000, make aliases N=2000, make scripts N=2000, make nnsmith N=1000, make packages, make vision, make sweeps, make stress, make lint, make types, make imports, make pages, make site, make bench, make report-page (with npm), make clean'

demo: $(VENV)/.has-base
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.has-test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

machines: $(VENV)/.has-test
	for isa in avx2 sse4.2 scalar; do \
	  FUSER_ISA=$$isa FUSER_TEST_COMPILER_SECONDS=15 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
	    tests/backend tests/unit/test_ops_table.py $(ARGS) || exit 1; \
	done
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest -n $(JOBS) tests/backend/test_machines.py $(ARGS)

test-cuda: $(VENV)/.has-test
	$(BIN)/python -m pytest -n $(JOBS) tests/cuda $(ARGS)

cubins: $(VENV)/.has-test
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest -n $(JOBS) tests/cuda/test_cubins.py $(ARGS)

opinfo: $(VENV)/.has-test
	$(BIN)/python -m tests.opinfo --workers $(JOBS) --write docs/operators.md $(ARGS)

modes: $(VENV)/.has-test
	for m in dynamic dynamic+grad+layouts grad+autocast inference+dynamic+layouts; do $(BIN)/python -m tests.opinfo.modes $$m $(ARGS) || exit 1; done

strides: $(VENV)/.has-test
	FUSER_STRIDES=full $(BIN)/python -m pytest -q tests/unit/test_strides.py tests/unit/test_strides_everywhere.py $(ARGS)

fuzz: $(VENV)/.has-test
	$(BIN)/python -m tests.fuzz $(N) --workers $(JOBS) $(ARGS)

exactness: $(VENV)/.has-test
	$(BIN)/python -m tests.models.exactness $(ARGS)

spellings: $(VENV)/.has-test
	$(BIN)/python -m tests.fuzz.spellings $(N) --workers $(JOBS) $(ARGS)

aliases: $(VENV)/.has-test
	$(BIN)/python -m tests.fuzz.aliases $(N) --workers $(JOBS) $(ARGS)

scripts: $(VENV)/.has-test
	$(BIN)/python -m tests.fuzz.scripts $(N) $(ARGS)

nnsmith: $(VENV)/.has-test $(VENV)/.has-nnsmith
	$(BIN)/python -m tests.nnsmith $(N) --workers $(JOBS) $(ARGS)

peers: $(VENV)/.has-test
	$(BIN)/python -m tests.peers --workers $(JOBS) $(ARGS)

zoo: $(VENV)/.has-test $(VENV)/.has-zoo
	$(BIN)/python -m tests.zoo --workers $(JOBS) --write docs/zoo.md $(ARGS)

told: $(VENV)/.has-test $(VENV)/.has-zoo
	$(BIN)/python tools/operators_told.py --zoo --random 200 $(ARGS)

packages: $(VENV)/.has-test $(VENV)/.has-packages
	$(BIN)/python -m tests.packages $(ARGS)

vision: $(VENV)/.has-test $(VENV)/.has-vision
	$(BIN)/python -m tests.vision $(ARGS)

# What takes a part of torch's operators, of pairs, or of a test's cases (the mark `sampled`) in `make test`, with all.
sweeps: $(VENV)/.has-test
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/opinfo tests/backend tests/unit/test_transforms.py \
	  tests/unit/test_flex_attention.py tests/unit/test_view_results.py tests/unit/test_ops_table.py tests/unit/test_mutation.py \
	  tests/unit/test_result_dtypes.py \
	  tests/cuda/test_interpreted.py $(ARGS)
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m sampled tests $(ARGS)

stress: $(VENV)/.has-test
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest -s tests/unit/test_runtime_reentry.py tests/unit/test_runtime_sanitizers.py
	FUSER_TEST_ALL=1 $(BIN)/python -m pytest tests/unit/test_damage.py
	FUSER_STRESS=1 $(BIN)/python -m pytest -v tests/models/test_long_training.py tests/unit/test_leaving.py tests/unit/test_killed.py $(ARGS)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check $(ARGS) .

types: $(VENV)/.has-dev
	$(BIN)/mypy $(ARGS)

imports: $(VENV)/.has-dev
	$(BIN)/python tools/check_imports.py $(ARGS)

pages: $(VENV)/.has-dev
	$(BIN)/python tools/check_pages.py
	$(BIN)/codespell README.md docs fuser tools benchmarks examples tests

site: $(VENV)/.has-docs
	$(BIN)/python -m mkdocs build --quiet $(ARGS)

bench: $(VENV)/.has-bench
	$(BIN)/python -m benchmarks $(ARGS)

# The script of `python -m fuser report`'s page, from tools/report_page and the packages that its lock file pins.
report-page:
	cd tools/report_page && npm ci --silent && node build.mjs

# Setuptools comes first, and the builds are not isolated: an isolated one would fetch its own copy of everything.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'fuser needs Python 3.10 or newer: make PYTHON=<a newer one> $(MAKECMDGOALS)'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo 'no virtual environment could be made: Debian and Ubuntu keep that part in the package python3-venv'; exit 1; }
	$(PIP) install 'setuptools>=70.1'
	@touch $@

$(VENV)/.has-base: $(VENV)/.made $(SOURCES)
	$(PIP) install -c constraints.txt --no-build-isolation -e .
	@ls fuser/runtime/_launcher*.so >/dev/null 2>&1 || \
	  echo 'note: no native launcher was built (it needs a C++ compiler and Python.h): the slower Python one runs'
	@touch $@

# Of the package that is installed: -e would compile the launcher again for each.
$(VENV)/.has-%: $(VENV)/.has-base
	$(PIP) install -c constraints.txt --no-build-isolation 'fuser[$*]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info fuser/runtime/_launcher*.so
